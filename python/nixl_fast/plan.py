"""What two ranks can exchange: routing decided once per peer, then one native call per request.

`TransferPlan` reads both layouts, decides for every group kind how its ids travel, checks that the memories agree, and
hands the native side a table of numbers. No group kind is looked at again when a request comes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from enum import Enum, StrEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from nixl_fast import _native
from nixl_fast._native import Pairing
from nixl_fast.errors import BlockIdError, GeometryError
from nixl_fast.layout import EngineLayout, Group, GroupKind, MambaState, Region, describe

BlockIds = Sequence[int] | NDArray[np.integer]
"""Logical block ids of one group: a list or tuple of ints, or a 1-D integer array of any width."""

MAX_SPLIT = 256
"""Units that one kernel block may be cut into; beyond it the block sizes of the two sides are called incompatible."""


class Direction(StrEnum):
    """Who moves the bytes: READ, the local rank is the consumer and pulls; WRITE, it is the producer and pushes."""

    READ = "read"
    WRITE = "write"


class Route(Enum):
    """How the block ids of a group become units, and how two lists of them are laid side by side."""

    SEQUENCE = "expanded to kernel blocks, paired by token position from the start of the sequence"
    WINDOW = "clipped to the window, expanded to kernel blocks, paired by token position"
    SLOTS = "state slots: never expanded, paired from the end of both lists"


ROUTES = {
    GroupKind.FULL_ATTENTION: Route.SEQUENCE,
    GroupKind.MLA: Route.SEQUENCE,
    GroupKind.SLIDING_WINDOW: Route.WINDOW,
    GroupKind.MAMBA: Route.SLOTS,
}
"""What happens to a group of each kind. This is the only place that decides it."""


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
        raise BlockIdError(f"block_ids must be a list or tuple with one list of ids per group, got {block_ids!r}")
    if len(block_ids) != len(kinds):
        raise BlockIdError(f"block_ids has {len(block_ids)} groups, kinds has {len(kinds)}")
    ratios = [ratio] * len(kinds) if isinstance(ratio, int) else list(ratio)
    if len(ratios) != len(kinds):
        raise GeometryError(f"ratio has {len(ratios)} entries for {len(kinds)} groups")
    out = []
    for index, (ids, kind, each) in enumerate(zip(block_ids, kinds, ratios, strict=True)):
        if kind not in ROUTES:
            raise GeometryError(f"kinds[{index}] is {kind!r}, it must be one of {', '.join(GroupKind)}")
        count = _count("ratio", each)
        if ROUTES[GroupKind(kind)] is Route.SLOTS:
            out.append(_native.expand(ids, 1, 1, index))
        else:
            out.append(_native.expand(ids, count, count if width is None else _count("width", width), index))
    return out


class TransferPlan:
    """Everything about this rank and that remote rank which does not depend on a request.

    Args:
        local: This rank.
        remote: The peer's rank.
        direction: READ if this rank is the consumer and pulls, WRITE if it is the producer and pushes.

    Raises:
        GeometryError: The two cannot exchange blocks, or not certainly the right ones; names the field and both values.
    """

    __slots__ = ("_native", "_units", "direction", "local", "remote")

    def __init__(self, local: EngineLayout, remote: EngineLayout, *, direction: Direction = Direction.READ) -> None:
        self.local = local
        self.remote = remote
        self.direction = Direction(direction)
        _compare(local, remote)
        self._units = tuple(_unit_tokens(index, pair) for index, pair in enumerate(_group_pairs(local, remote)))
        groups = _group_rows(local, remote, self._units)
        segments = [*_attention_segments(local, remote, self._units), *_mamba_segments(local, remote)]
        self._native = _native.NativePlan(self.direction is Direction.READ, groups, segments)

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

    def expanded(self, side: Side) -> NDArray[np.uint64]:
        """The list of one side with one row per descriptor, ``uint64[N, 3]``: addr, len, device.

        For NIXL below 1.5, which takes no strided rows. The index space is the same.

        Args:
            side: ``"local"`` or ``"remote"``.
        """
        return self._native.expanded(Side(side) is Side.LOCAL)

    def pair(
        self,
        local_block_ids: Sequence[BlockIds],
        remote_block_ids: Sequence[BlockIds],
        *,
        num_tokens: int | None = None,
        num_computed_blocks: Sequence[int | None] | None = None,
    ) -> Pairing:
        """Pairs one request's blocks; one native call.

        Args:
            local_block_ids: This rank's logical block ids, one list per group. Inputs are never changed.
            remote_block_ids: The peer's logical block ids, one list per group. The producer lists the whole sequence
                (a sliding-window group may list its tail).
            num_tokens: Tokens whose KV the producer holds for the request.
            num_computed_blocks: Per group the logical index, in the sequence, of the consumer's first listed block:
                the number of blocks that it has cached. None where unknown; ignored for Mamba groups.

        Returns:
            The descriptor indices of both sides and what is not moved.

        Raises:
            BlockIdError: An id that is no integer, negative, not below its group's block count, or listed twice by the
                consumer; or a wrong number of groups.
            PairingError: Positions that contradict each other or are not certain; the message says what to pass.
        """
        return self._native.pair(local_block_ids, remote_block_ids, num_tokens, num_computed_blocks)

    def explain(self) -> str:
        """What each group and region does, for people."""
        lines = [
            f"{self.local.engine_id} rank {self.local.tp_rank} {'<-' if self.direction is Direction.READ else '->'} "
            f"{self.remote.engine_id} rank {self.remote.tp_rank}: {self.direction}, unit {self.unit_tokens} tokens"
        ]
        for index, (local, remote) in enumerate(_group_pairs(self.local, self.remote)):
            lines.append(
                f"group {index} {local.kind}: {ROUTES[local.kind].value}; "
                f"local {_shape(local)}, remote {_shape(remote)}"
            )
        for side, table in (("local", self.local_table), ("remote", self.remote_table)):
            lines.append(f"{side}: {int(table[:, 4].sum())} descriptors in {len(table)} rows")
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"TransferPlan({self.local.engine_id!r}, {self.remote.engine_id!r}, direction={self.direction.value!r})"


class Side(StrEnum):
    """Which of the two ranks of a plan."""

    LOCAL = "local"
    REMOTE = "remote"


class _Positions(NamedTuple):
    block_tokens: int
    units: int
    limit: int
    null: int | None
    pages: int
    pool: int


class _GroupRow(NamedTuple):
    slots: bool
    window: int | None
    unit_tokens: int
    local: _Positions
    remote: _Positions


class _Span(NamedTuple):
    base: int
    stride: int
    blocks: int
    split: int
    device: int


class _SegmentRow(NamedTuple):
    name: str
    len: int
    local: _Span
    remote: _Span
    groups: list[int]


def _group_pairs(local: EngineLayout, remote: EngineLayout) -> Iterator[tuple[Group, Group]]:
    return zip(local.groups, remote.groups, strict=True)


def _shape(group: Group) -> str:
    return f"{group.block_size} tokens a block, ratio {group.blocks_per_logical}"


def _compare(local: EngineLayout, remote: EngineLayout) -> None:
    """Refuses two layouts that differ where both sides have to agree."""

    def same(field: str, ours: object, theirs: object, hint: str = "") -> None:
        if ours != theirs:
            raise GeometryError(f"{field}: local {describe(ours)}, remote {describe(theirs)}{hint}")

    same("tp_size", local.tp_size, remote.tp_size, "; unequal tensor parallelism is not supported yet")
    same("tp_rank", local.tp_rank, remote.tp_rank)
    same("num_kv_heads", local.num_kv_heads, remote.num_kv_heads)
    same("number of groups", len(local.groups), len(remote.groups))
    for index, (ours, theirs) in enumerate(_group_pairs(local, remote)):
        same(f"groups[{index}].kind", ours.kind, theirs.kind)
        same(f"groups[{index}].sliding_window", ours.sliding_window, theirs.sliding_window)
    same("number of regions", len(local.regions), len(remote.regions))
    same("mamba", local.mamba is not None, remote.mamba is not None)
    if local.mamba and remote.mamba:
        same("number of mamba regions", len(local.mamba.regions), len(remote.mamba.regions))
        same("mamba.conv", _conv_sizes(local.mamba), _conv_sizes(remote.mamba))
        same("mamba.state_bytes", local.mamba.state_bytes, remote.mamba.state_bytes)
    for (name, region, groups), (_, other, other_groups) in zip(local.places(), remote.places(), strict=True):
        same(f"{name}: groups", groups, other_groups)
        same(f"{name}: replicated", region.replicated, other.replicated)
        same(f"{name}: mem_type", region.mem_type, other.mem_type, "; one list per memory type is not supported yet")


def _conv_sizes(state: MambaState) -> tuple[tuple[int, bool], ...]:
    return tuple((projection.size_bytes, projection.sharded) for projection in state.conv)


def _unit_tokens(index: int, pair: tuple[Group, Group]) -> int:
    """The unit of one group: the greatest common divisor of both kernel blocks."""
    local, remote = pair
    if ROUTES[local.kind] is Route.SLOTS:
        return 0
    unit = math.gcd(local.kernel_block_size, remote.kernel_block_size)
    split = max(local.kernel_block_size, remote.kernel_block_size) // unit
    if split > MAX_SPLIT:
        raise GeometryError(
            f"groups[{index}]: kernel blocks of {local.kernel_block_size} tokens (local) and "
            f"{remote.kernel_block_size} (remote) have only {unit} tokens in common; a kernel block would be cut into "
            f"{split} units, at most {MAX_SPLIT} are allowed"
        )
    return unit


def _group_rows(local: EngineLayout, remote: EngineLayout, units: Sequence[int]) -> list[_GroupRow]:
    pools = (_pools(local), _pools(remote))
    rows = []
    for index, (ours, theirs) in enumerate(_group_pairs(local, remote)):
        slots = ROUTES[ours.kind] is Route.SLOTS
        sides = [
            _Positions(
                block_tokens=group.block_size,
                units=1 if slots else group.block_size // units[index],
                limit=layout.num_blocks(index),
                null=layout.null_block_id,
                pages=group.blocks_per_logical,
                pool=pool[index],
            )
            for layout, group, pool in zip((local, remote), (ours, theirs), pools, strict=True)
        ]
        rows.append(_GroupRow(slots, ours.sliding_window, units[index] or 1, *sides))
    return rows


def _pools(layout: EngineLayout) -> list[int]:
    """For each group the first group that shares memory with it, page by page."""
    pool = list(range(len(layout.groups)))
    homes: dict[tuple[int, int, int, str], int] = {}
    for _, region, groups in layout.places():
        key = (region.base_addr, region.stride, region.device_id, region.mem_type)
        for group in groups:
            first, second = sorted((pool[homes.setdefault(key, group)], pool[group]))
            pool = [first if each == second else each for each in pool]
    return pool


def _attention_segments(local: EngineLayout, remote: EngineLayout, units: Sequence[int]) -> Iterator[_SegmentRow]:
    """One segment per region, or several where its groups cut a block into different numbers of units."""
    for index, (ours, theirs) in enumerate(zip(local.regions, remote.regions, strict=True)):
        by_split: dict[tuple[int, int], list[int]] = {}
        for group in local.residents(ours):
            sizes = (local.groups[group].kernel_block_size, remote.groups[group].kernel_block_size)
            by_split.setdefault((sizes[0] // units[group], sizes[1] // units[group]), []).append(group)
        for splits, groups in by_split.items():
            lengths = []
            for side, region, split in zip(Side, (ours, theirs), splits, strict=True):
                if region.block_len % split:
                    raise GeometryError(
                        f"region {index} ({side}): block_len {region.block_len} cannot be cut into {split} units"
                    )
                lengths.append(region.block_len // split)
            if lengths[0] != lengths[1]:
                raise GeometryError(
                    f"region {index}: bytes per unit of {units[groups[0]]} tokens: local {lengths[0]} (block_len "
                    f"{ours.block_len}), remote {lengths[1]} (block_len {theirs.block_len})"
                )
            spans = [_span(region, split) for region, split in zip((ours, theirs), splits, strict=True)]
            yield _SegmentRow(f"region {index}", lengths[0], spans[0], spans[1], groups)


def _span(region: Region, split: int) -> _Span:
    return _Span(region.base_addr, region.stride, region.num_blocks, split, region.device_id)


def _mamba_segments(local: EngineLayout, remote: EngineLayout) -> Iterator[_SegmentRow]:
    """Per region the convolution projections, then the temporal state; a block is a slot, spaced by its pages."""
    if local.mamba is None or remote.mamba is None:
        return
    parts = [(f"conv {index}", projection.size_bytes) for index, projection in enumerate(local.mamba.conv)]
    parts.append(("state", local.mamba.state_bytes))
    for index, regions in enumerate(zip(local.mamba.regions, remote.mamba.regions, strict=True)):
        by_ratio: dict[tuple[int, int], list[int]] = {}
        for group in local.residents(regions[0], mamba=True):
            ratios = (local.groups[group].blocks_per_logical, remote.groups[group].blocks_per_logical)
            by_ratio.setdefault(ratios, []).append(group)
        for ratios, groups in by_ratio.items():
            offset = 0
            for part, length in parts:
                spans = [
                    _Span(
                        region.base_addr + offset,
                        region.stride * ratio,
                        region.num_blocks // ratio,
                        1,
                        region.device_id,
                    )
                    for region, ratio in zip(regions, ratios, strict=True)
                ]
                yield _SegmentRow(f"mamba region {index} {part}", length, spans[0], spans[1], groups)
                offset += length


def _count(name: str, value: int) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__") or not 1 <= int(value) < 2**31:
        raise GeometryError(f"{name} is {value!r}, it must be an integer of 1 or more")
    return int(value)
