"""What two ranks can exchange: routing decided once per peer, then one native call per request.

`TransferPlan` reads both layouts, decides for every group kind how its ids travel, checks that the memories agree, and
hands the native side a table of numbers. No group kind is looked at again when a request comes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from enum import StrEnum
from itertools import pairwise
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from nixl_fast import _native
from nixl_fast._native import Pairing
from nixl_fast.errors import BlockIdError, GeometryError
from nixl_fast.geometry import (
    ROUTES,
    Route,
    Segment,
    Share,
    common_heads,
    compare,
    group_rows,
    kv_heads,
    segments,
    sharing,
    unit_tokens,
)
from nixl_fast.layout import EngineLayout, GroupKind, as_index, describe

BlockIds = Sequence[int] | NDArray[np.integer]
"""Logical block ids of one group: a list or tuple of ints, or a 1-D integer array of any width."""


class Direction(StrEnum):
    """Who moves the bytes: READ, the local rank is the consumer and pulls; WRITE, it is the producer and pushes."""

    READ = "read"
    WRITE = "write"


class Side(StrEnum):
    """Which of the two ranks of a plan."""

    LOCAL = "local"
    REMOTE = "remote"


def expand_block_ids(block_ids: BlockIds, ratio: int, *, width: int | None = None) -> NDArray[np.int32]:
    """Kernel block ids of logical block ids: ``b`` becomes ``b*ratio .. b*ratio + width - 1``.

    Args:
        block_ids: Logical block ids.
        ratio: Kernel blocks per logical block, 1 or more.
        width: Leading kernel blocks wanted of each logical block, 1 to ``ratio``; default all of them.

    Returns:
        int32 array of ``len(block_ids) * width`` ids, in list order.

    Raises:
        BlockIdError: An id that is no integer, negative, or too large for int32 once expanded.
        GeometryError: A ratio or width out of range.
        MemoryError: There is no room for the answer.
    """
    ratio = _count("ratio", ratio)
    return _native.expand(block_ids, ratio, ratio if width is None else _count("width", width))


def expand_groups(
    block_ids: Sequence[BlockIds],
    kinds: Sequence[GroupKind],
    ratio: int | Sequence[int],
    *,
    width: int | None = None,
) -> list[NDArray[np.int32]]:
    """Kernel block ids per group: Mamba groups pass through unchanged, every other kind is expanded.

    Args:
        block_ids: One list of logical block ids per group.
        kinds: The kind of each group.
        ratio: Kernel blocks per logical block *of the side being expanded*; one for all groups or one per group.
        width: As for `expand_block_ids`; a Mamba group has no kernel blocks and ignores it.

    Returns:
        One int32 array per group.

    Raises:
        BlockIdError: As `expand_block_ids`, naming the group; or lists and kinds that differ in number.
        GeometryError: A ratio or width out of range, or a kind that is unknown.
    """
    if not isinstance(block_ids, list | tuple):
        raise BlockIdError(
            f"block_ids must be a list or tuple with one list of ids per group, got {describe(block_ids)}"
        )
    if len(block_ids) != len(kinds):
        raise BlockIdError(f"block_ids has {len(block_ids)} groups, kinds has {len(kinds)}")
    ratios = list(ratio) if isinstance(ratio, Sequence) else [ratio] * len(kinds)
    if len(ratios) != len(kinds):
        raise GeometryError(f"ratio has {len(ratios)} entries for {len(kinds)} groups")
    out = []
    for index, (ids, kind, each) in enumerate(zip(block_ids, kinds, ratios, strict=True)):
        if kind not in list(GroupKind):
            raise GeometryError(f"kinds[{index}] is {describe(kind)}, it must be one of {', '.join(GroupKind)}")
        count = _count("ratio", each)
        if ROUTES[GroupKind(kind)] is Route.SLOTS:
            out.append(_native.expand(ids, 1, 1, index))
        else:
            out.append(_native.expand(ids, count, count if width is None else _count("width", width), index))
    return out


class ExpandRule(StrEnum):
    """How many kernel blocks of a remote logical block a request names."""

    FULL = "full"
    """All of them: the rule."""

    LOCAL_WIDTH = "local_width"
    """Models with Mamba groups take only the first ``local_ratio``: what vLLM 0.20 and 0.21 did. It loses data where
    the ratios differ and is here to talk to, and to compare with, those versions."""


class RemoteBlocks(msgspec.Struct, frozen=True):
    """What a request's metadata says about the peer's blocks.

    Args:
        kinds: Kind of each group.
        block_ids: The peer's logical block ids, one list per group.
        local_ratio: Kernel blocks per logical block of this engine.
        remote_ratio: Kernel blocks per logical block of the peer.
    """

    kinds: Sequence[GroupKind]
    block_ids: Sequence[BlockIds]
    local_ratio: int
    remote_ratio: int

    @property
    def has_mamba(self) -> bool:
        """Whether any group holds state slots."""
        return GroupKind.MAMBA in self.kinds

    def kernel_ids(self, rule: ExpandRule = ExpandRule.FULL) -> list[NDArray[np.int32]]:
        """The peer's kernel block ids per group, expanded by the peer's ratio; Mamba groups pass through unchanged.

        Raises:
            BlockIdError: Ids that are no block ids, naming group, position, value and limit.
            GeometryError: A ratio out of range, or LOCAL_WIDTH with a local ratio above the remote one.
        """
        width = self.local_ratio if rule is ExpandRule.LOCAL_WIDTH and self.has_mamba else None
        return expand_groups(self.block_ids, self.kinds, self.remote_ratio, width=width)


class Lane(NamedTuple):
    """The part of a plan's lists that has one memory type on each side; NIXL prepares one list per memory type."""

    local_mem_type: str
    remote_mem_type: str
    local_table: NDArray[np.uint64]
    """``uint64[N, 5]`` rows of this lane: addr, len, device, stride, count."""
    remote_table: NDArray[np.uint64]
    local_start: int
    """Descriptor id of the lane's first descriptor in the plan's index space."""
    remote_start: int


class TransferPlan:
    """Everything about this rank and that remote rank which does not depend on a request.

    A plan cuts both memories into *units* of ``unit_tokens`` tokens: kernel blocks, or pieces of them where the two sides'
    kernel blocks differ. Each of the two lists (`local_table`, `remote_table`) numbers its descriptors, and `pair` says
    which of them belong together.

    Made directly, a plan moves what the two ranks have in common, which is only a part where tensor parallelism differs;
    `plan_peer` makes the plans of all remote ranks such that together they move everything exactly once.

    Args:
        local: This rank.
        remote: The peer's rank.
        direction: READ if this rank is the consumer and pulls, WRITE if it is the producer and pushes.

    Raises:
        GeometryError: The two cannot exchange blocks, or not certainly the right ones; names the field and both values.
    """

    __slots__ = ("_lanes", "_native", "_segments", "_units", "direction", "heads", "local", "remote")

    heads: range
    """KV heads that this plan moves, counted over the whole model; empty where only replicated bytes or state move."""

    def __init__(self, local: EngineLayout, remote: EngineLayout, *, direction: Direction = Direction.READ) -> None:
        compare(local, remote)
        self._make(local, remote, direction, _everything(local, remote))
        if not self._segments:
            raise GeometryError(
                f"rank {local.tp_rank} of {local.tp_size} of {local.engine_id} and rank {remote.tp_rank} of "
                f"{remote.tp_size} of {remote.engine_id} have nothing in common; plan_peer picks the ranks that do"
            )

    @classmethod
    def _of(cls, local: EngineLayout, remote: EngineLayout, direction: Direction, share: Share) -> TransferPlan:
        plan = cls.__new__(cls)
        plan._make(local, remote, direction, share)
        return plan

    def _make(self, local: EngineLayout, remote: EngineLayout, direction: Direction, share: Share) -> None:
        compare(local, remote)
        self._lanes: tuple[Lane, ...] | None = None
        self.local = local
        self.remote = remote
        self.direction = _direction(direction)
        self.heads = share.heads
        self._units = unit_tokens(local, remote)
        self._segments = segments(local, remote, self._units, share)
        groups = group_rows(local, remote, self._units)
        reading = self.direction is Direction.READ
        shared = sharing(local if reading else remote)
        self._native = _native.NativePlan(reading, groups, self._segments, shared)

    @property
    def unit_tokens(self) -> int:
        """Tokens per unit: what both sides' kernel blocks have in common, over all attention groups; 0 without one."""
        return math.gcd(*self._units)

    @property
    def group_unit_tokens(self) -> tuple[int, ...]:
        """Tokens per unit of each group; 0 for a Mamba group, whose unit is a slot."""
        return self._units

    @property
    def local_table(self) -> NDArray[np.uint64]:
        """This rank's descriptor list for ``prep_xfer_dlist``, ``uint64[N, 5]``: addr, len, device, stride, count."""
        return self._native.table(True)

    @property
    def remote_table(self) -> NDArray[np.uint64]:
        """The peer's descriptor list, ``uint64[N, 5]``: addr, len, device, stride, count."""
        return self._native.table(False)

    def expanded(self, side: Side | str) -> NDArray[np.uint64]:
        """The list of one side with one row per descriptor, ``uint64[N, 3]``: addr, len, device.

        For NIXL below 1.5, which takes no strided rows. The index space is the same.

        Args:
            side: ``"local"`` or ``"remote"``.

        Raises:
            MemoryError: There is no room for 24 bytes per descriptor.
        """
        if side not in list(Side):
            raise GeometryError(f"side is {describe(side)}, it must be one of {', '.join(Side)}")
        return self._native.expanded(side == Side.LOCAL)

    def pair(
        self,
        local_block_ids: Sequence[BlockIds],
        remote_block_ids: Sequence[BlockIds],
        *,
        num_tokens: int | None = None,
        num_computed_blocks: Sequence[int | None] | None = None,
    ) -> Pairing:
        """Pairs one request's blocks, by token position; one native call.

        The consumer is the local side of a READ and the remote side of a WRITE. Positions that are not given are taken
        from these rules, and a request that contradicts them is refused:

        - Without ``num_computed_blocks`` the consumer's last block holds the last of ``num_tokens`` tokens.
        - Without ``num_tokens`` both lists end with the block that holds the last token; only for equal block sizes, or
          for a consumer that has nothing cached (``num_computed_blocks`` of 0).

        Args:
            local_block_ids: This rank's logical block ids, one list per group. Inputs are never changed.
            remote_block_ids: The peer's logical block ids, one list per group. The producer lists the whole sequence
                (a sliding-window group may list its tail).
            num_tokens: Tokens whose KV the producer holds for the request, below 2^48.
            num_computed_blocks: Per group the logical index, in the sequence, of the consumer's first listed block: how
                many of *its* blocks it has cached (under context parallelism, on its rank). None where unknown; ignored
                for Mamba groups.

        Returns:
            The descriptor indices of both sides and what is not moved.

        Raises:
            BlockIdError: An id that is no integer, negative, not below its group's block count, or listed twice by the
                consumer; or a wrong number of groups.
            PairingError: Positions that contradict each other or are not certain; the message says what to pass.
            MemoryError: There is no room for the answer.
        """
        return self._native.pair(local_block_ids, remote_block_ids, num_tokens, num_computed_blocks)

    @property
    def segments(self) -> tuple[Segment, ...]:
        """How the regions are cut, in descriptor order."""
        return tuple(self._segments)

    @property
    def lanes(self) -> tuple[Lane, ...]:
        """The lists by memory type; one lane unless a layout mixes DRAM and VRAM."""
        if self._lanes is not None:
            return self._lanes
        names = list(dict.fromkeys(segment.lane for segment in self._segments))
        made, starts, tables = [], [0, 0], [self.local_table, self.remote_table]
        for name in names:
            parts = []
            for side, table in enumerate(tables):
                spans = [
                    segment.local if side == 0 else segment.remote for segment in self._segments if segment.lane == name
                ]
                end = starts[side] + sum(span.blocks * span.split for span in spans)
                first, last = np.searchsorted(np.cumsum(table[:, 4]), [starts[side], end - 1], side="right")
                parts.append((table[first : last + 1] if end > starts[side] else table[:0], starts[side]))
                starts[side] = end
            made.append(Lane(*name, parts[0][0], parts[1][0], parts[0][1], parts[1][1]))
        self._lanes = tuple(made)
        return self._lanes

    def split(self, pairing: Pairing) -> tuple[tuple[NDArray[np.int32], NDArray[np.int32]], ...]:
        """A pairing's indices by lane, each counted from its lane's start: ``(local, remote)`` per lane of `lanes`."""
        lanes = self.lanes
        if len(lanes) == 1:
            return ((pairing.local_desc_ids, pairing.remote_desc_ids),)
        # Indices ascend by lane, so a lane is one slice, equally long on both sides.
        ids = pairing.local_desc_ids
        bounds = [int(np.count_nonzero(ids < lane.local_start)) for lane in lanes] + [len(ids)]
        return tuple(
            (ids[first:end] - lane.local_start, pairing.remote_desc_ids[first:end] - lane.remote_start)
            for lane, (first, end) in zip(lanes, pairwise(bounds), strict=True)
        )

    def explain(self) -> str:
        """What each group and region does, for people; ``nixl-fast explain`` shows the same with a request."""
        from nixl_fast.explain import render, report  # noqa: PLC0415 - explain is built on plans

        return render(report(self))

    def __repr__(self) -> str:
        local, remote = (f"{side.engine_id!r} rank {side.tp_rank}/{side.tp_size}" for side in (self.local, self.remote))
        return f"TransferPlan({local}, {remote}, direction={self.direction.value!r})"


class PeerPlans(tuple[TransferPlan, ...]):
    """The plans of one rank with a peer's ranks, and who else has to hear of a finished request.

    Attributes:
        notify_only: Ranks that this rank moves nothing from or to, but which wait for its notification.
    """

    notify_only: tuple[EngineLayout, ...]

    def __new__(cls, plans: Iterable[TransferPlan], notify_only: Iterable[EngineLayout] = ()) -> PeerPlans:
        """Plans with the ranks that only have to be notified."""
        made = super().__new__(cls, plans)
        made.notify_only = tuple(notify_only)
        return made


def plan_peer(
    local: EngineLayout, remote_ranks: Sequence[EngineLayout], *, direction: Direction = Direction.READ
) -> PeerPlans:
    """One plan per remote rank that this rank exchanges bytes with.

    For a READ the plans fill every byte of this rank's blocks exactly once: each KV head is read from one rank that has
    it, replicated regions whole from one rank, state projections from every rank that holds a slice, and layers from
    their pipeline stage. For a WRITE they are this rank's part of the same, seen from the producer.

    Args:
        local: This rank.
        remote_ranks: The layouts of the peer's ranks, all of them: every tensor-parallel rank of every stage.
        direction: READ if this rank is the consumer, WRITE if it is the producer.

    Returns:
        The plans, in order of stage and rank, with the ranks that only need a notification.

    Raises:
        GeometryError: Ranks that contradict each other, a pair that no plan can be made for, or bytes that would be left
            unwritten or written twice, with their number.
    """
    direction = _direction(direction)
    if isinstance(remote_ranks, EngineLayout):
        raise GeometryError("remote_ranks is one layout; pass a list with the layouts of all the peer's ranks")
    ranks = sorted(remote_ranks, key=lambda rank: (rank.pp_rank, rank.tp_rank))
    _check_ranks(ranks)
    plans, notify_only = [], []
    for remote in ranks:
        consumer, producer = (local, remote) if direction is Direction.READ else (remote, local)
        share = _share(consumer, producer)
        if share is None:
            continue
        plan = TransferPlan._of(local, remote, direction, share)
        if plan._segments:
            plans.append(plan)
        else:
            notify_only.append(remote)
    if direction is Direction.READ:
        _check_coverage(local, plans, ranks)
    else:
        _check_complete(local, ranks)
    return PeerPlans(plans, notify_only)


def check_pair(local: EngineLayout, remote: EngineLayout) -> None:
    """Refuses two ranks that can never exchange blocks; two that merely have none in common pass.

    Raises:
        GeometryError: As `TransferPlan`.
    """
    common = min(local.dcp_size, remote.dcp_size)
    if local.dcp_rank % common == remote.dcp_rank % common:
        TransferPlan._of(local, remote, Direction.READ, _everything(local, remote))


def readers(consumer: EngineLayout, producer: EngineLayout) -> frozenset[tuple[int, int]]:
    """Stage and rank of those of the consumer's engine that look after a producer rank: read from it or only notify."""
    ranks = (msgspec.structs.replace(consumer, tp_rank=rank) for rank in range(consumer.tp_size))
    found = [rank.tp_rank for rank in ranks if _share(rank, producer) is not None]
    return frozenset((stage, rank) for stage in range(consumer.pp_size) for rank in found)


def sources(consumer: EngineLayout, producer: EngineLayout) -> frozenset[tuple[int, int]]:
    """Stage and rank of those of the producer's engine that a consumer rank hears from."""
    ranks = (msgspec.structs.replace(producer, tp_rank=rank) for rank in range(producer.tp_size))
    found = [rank.tp_rank for rank in ranks if _share(consumer, rank) is not None]
    return frozenset((stage, rank) for stage in range(producer.pp_size) for rank in found)


def _everything(local: EngineLayout, remote: EngineLayout) -> Share:
    sliced = any(not local.is_replicated(region) for region in local.regions)
    return Share(common_heads(local, remote) if sliced else range(0), True)


def _check_ranks(ranks: Sequence[EngineLayout]) -> None:
    if not ranks:
        raise GeometryError("remote_ranks is empty")
    for rank in ranks[1:]:
        for field in ("engine_id", "tp_size", "dcp_size", "pp_size", "num_kv_heads"):
            if getattr(rank, field) != getattr(ranks[0], field):
                raise GeometryError(
                    f"remote ranks differ in {field}: {getattr(ranks[0], field)!r} of rank {ranks[0].tp_rank}, "
                    f"{getattr(rank, field)!r} of rank {rank.tp_rank}"
                )
    for first, second in pairwise(ranks):
        if (first.pp_rank, first.tp_rank) == (second.pp_rank, second.tp_rank):
            raise GeometryError(f"remote rank {first.tp_rank} of stage {first.pp_rank} is given twice")


def _share(consumer: EngineLayout, producer: EngineLayout) -> Share | None:
    """What a consumer rank takes from a producer rank; None if another consumer rank looks after that producer rank."""
    common = min(consumer.dcp_size, producer.dcp_size)
    if consumer.dcp_rank % common != producer.dcp_rank % common:
        return None
    # Ranks that hold the same blocks stand in a row on each side; a consumer looks after the producers next to it.
    place, places = consumer.tp_rank // consumer.dcp_size, consumer.tp_size // consumer.dcp_size
    other, others = producer.tp_rank // producer.dcp_size, producer.tp_size // producer.dcp_size
    nearest = place * others // places
    if not nearest <= other < -(-(place + 1) * others // places):
        return None
    if all(consumer.is_replicated(region) for region in consumer.regions):
        return Share(range(0), other == nearest)
    wanted, held = kv_heads(consumer), kv_heads(producer)
    # Where ranks outnumber heads, a head is read from the nearest of the ranks that hold it.
    copies = max(1, producer.tp_size // producer.num_kv_heads)
    readers = max(1, consumer.tp_size // consumer.num_kv_heads)
    if producer.tp_rank % copies != consumer.tp_rank % readers * copies // readers:
        return Share(range(0), other == nearest)
    return Share(range(max(wanted.start, held.start), min(wanted.stop, held.stop)), other == nearest)


def _check_complete(producer: EngineLayout, ranks: Sequence[EngineLayout]) -> None:
    """Refuses to push to some of the ranks that wait for this producer."""
    given = {(rank.pp_rank, rank.tp_rank) for rank in ranks}
    for stage in range(ranks[0].pp_size):
        for tp_rank in range(ranks[0].tp_size):
            absent = msgspec.structs.replace(ranks[0], tp_rank=tp_rank) if (stage, tp_rank) not in given else None
            if absent is not None and _share(absent, producer) is not None:
                raise GeometryError(
                    f"remote rank {tp_rank} of stage {stage} waits for this rank but is not among those given"
                )


def _check_coverage(local: EngineLayout, plans: Sequence[TransferPlan], ranks: Sequence[EngineLayout]) -> None:
    """Refuses plans that together leave a byte of a local block unwritten or write one twice."""
    covered: dict[tuple[str, int, int], list[range]] = {}
    for plan in plans:
        for segment in plan._segments:
            for group in segment.groups if segment.whole else ():
                covered.setdefault((segment.region, group, plan.remote.dcp_rank), []).append(segment.local_bytes)
    common = min(local.dcp_size, ranks[0].dcp_size)
    residues = [rank for rank in range(ranks[0].dcp_size) if rank % common == local.dcp_rank % common]
    for name, region, groups in local.places():
        size = local.mamba.slot_bytes if local.mamba and name.startswith("mamba") else region.block_len
        for group in groups:
            for residue in residues:
                parts = sorted(covered.get((name, group, residue), []), key=lambda part: part.start)
                written = sum(map(len, parts))
                end, distinct = 0, 0
                for part in parts:
                    distinct += max(0, part.stop - max(part.start, end))
                    end = max(end, part.stop)
                if distinct < size or written > distinct:
                    given = ", ".join(f"{rank.pp_rank}.{rank.tp_rank}" for rank in ranks)
                    raise GeometryError(
                        f"{name}, group {group}: of {size} bytes of every block {size - distinct} would stay unwritten "
                        f"and {written - distinct} be written twice by the remote ranks given (stage.rank: {given}); "
                        f"the peer has {ranks[0].pp_size} stages of {ranks[0].tp_size} ranks"
                    )


def _direction(value: Direction) -> Direction:
    try:
        return Direction(value)
    except Exception:  # Enum shows the value in its own error, and a class writes what it likes
        raise GeometryError(f"direction is {describe(value)}, it must be one of {', '.join(Direction)}") from None


def _count(name: str, value: int) -> int:
    number = None if isinstance(value, bool) else as_index(value)
    if number is None or not 1 <= number < 2**31:
        raise GeometryError(f"{name} is {describe(value)}, it must be an integer in 1 .. {2**31 - 1}")
    return number
