"""The worker side: mixins that stand before vLLM's NIXL workers, one per thing that they change.

Each mixin calls on to stock through ``super()``; `nixl_fast.vllm.build` puts together those whose upstream bodies are
known. vLLM's tests call some of these methods on objects made without a constructor, so nothing here needs one.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.utils import get_representative_spec_type
from vllm.v1.kv_cache_interface import (
    CircularBufferSpec,
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from nixl_fast.errors import GeometryError, NixlFastError, PairingError
from nixl_fast.layout import GroupKind
from nixl_fast.plan import Direction, expand_block_ids
from nixl_fast.vllm import shadow
from nixl_fast.vllm.agent import SETTLE_SECONDS, AgentFront
from nixl_fast.vllm.descriptors import Ids, IndexSpace, LazyIds, Part
from nixl_fast.vllm.fingerprint import fingerprint
from nixl_fast.vllm.known import HEADS_TAKEN_FOR_TOKENS
from nixl_fast.vllm.pairing import GroupPairs, GroupPlan, GroupRule, SideRule
from nixl_fast.vllm.switches import Switches, read_switches

_log = logging.getLogger("vllm.nixl_fast")

_NULL_BLOCK = 0
"""vLLM's placeholder block, where a group has no block for a position."""

_SHARED_REGION = -1
"""The group id of a region that holds every group's blocks."""

_KINDS = {
    FullAttentionSpec: GroupKind.FULL_ATTENTION,
    MLAAttentionSpec: GroupKind.MLA,
    SlidingWindowSpec: GroupKind.SLIDING_WINDOW,
    MambaSpec: GroupKind.MAMBA,
}
"""Exactly these classes; a subclass may lay its blocks out differently and is left to stock."""

FAILURE_PREFIX = b"nixl-fast-failed:"
"""Starts the message by which a producer tells a consumer that a push will not come; the request id follows."""

_HEARTBEAT = b"HB:"
"""Starts vLLM's message that extends leases."""

BlockIds = Sequence[Sequence[int]]

_MOST_SKIPPED = 63
"""Polls in a row that may be answered without a look at the books."""


class Note(NamedTuple):
    """What the scheduler's side knows about the positions of one request; travels with vLLM's own metadata."""

    consumer_first: tuple[int | None, ...]
    """Per transferred group the index, in the sequence, of the first listed block."""

    end: int | None
    """Tokens that the consumer wants."""

    producer_first: tuple[int | None, ...] | None = None
    """The same of the producer, from a peer that says so."""


def group_kind(group: Any) -> GroupKind | None:
    """The kind of one of vLLM's KV-cache groups, None for one that this package leaves alone."""
    spec = group.kv_cache_spec
    return (
        None if getattr(spec, "compress_ratio", 1) not in (1, None) else _KINDS.get(get_representative_spec_type(spec))
    )


class Expand:
    """Logical to kernel block ids."""

    def get_mapped_blocks(self, block_ids: np.ndarray, block_size_ratio: int) -> np.ndarray:
        """Each id cut into ``block_size_ratio``; int64, 1-D."""
        if block_ids.size == 0:
            return np.empty(0, np.int64)
        return expand_block_ids(block_ids, int(block_size_ratio)).astype(np.int64)

    def _logical_to_kernel_block_ids(self, block_ids: Any, ratio: int) -> Any:
        if ratio == 1:
            return block_ids
        groups = self.kv_cache_config.transfer_groups  # type: ignore[attr-defined]
        out = [
            ids
            if issubclass(get_representative_spec_type(groups[index].kv_cache_spec), MambaSpec)
            else expand_block_ids(ids, int(ratio)).tolist()
            for index, ids in enumerate(block_ids)
        ]
        if _switches(self).shadow:
            stock = super()._logical_to_kernel_block_ids  # type: ignore[misc]
            shadow.compare(
                "_logical_to_kernel_block_ids", out, lambda: stock(block_ids, ratio), ids=block_ids, ratio=ratio
            )
        return out


class Descriptors:
    """Kernel block ids to descriptor indices."""

    _nixl_fast_request: Request | None = None

    def _compute_desc_ids(
        self,
        block_ids: Any,
        dst_num_blocks: int,
        block_size_ratio: float | None,
        physical_blocks_per_logical: int,
        region_num_blocks: list[int] | None = None,
        region_group_ids: list[int] | None = None,
        uses_region_group_mapping: bool | None = None,
    ) -> Any:
        arguments = (
            dst_num_blocks,
            block_size_ratio,
            physical_blocks_per_logical,
            region_num_blocks,
            region_group_ids,
            uses_region_group_mapping,
        )
        space = self._nixl_fast_space(len(block_ids), *arguments)
        stock = super()._compute_desc_ids  # type: ignore[misc]
        if space is None:
            return stock(_lists(block_ids), *arguments)
        if _switches(self).shadow:
            ours = space.indices(block_ids)
            inputs = {"ids": _lists(block_ids), "arguments": arguments}
            shadow.compare("_compute_desc_ids", ours, lambda: stock(_lists(block_ids), *arguments), **inputs)
        request = self._nixl_fast_request
        return LazyIds(space, block_ids) if request is not None and request.lazy else space.indices(block_ids)

    def _nixl_fast_space(self, num_groups: int, *arguments: Any) -> IndexSpace | None:
        """The numbering that these arguments mean; remembered once the worker is complete."""
        spaces: dict[Any, IndexSpace | None] | None = self.__dict__.get("_nixl_fast_spaces")
        if spaces is None:
            return self._nixl_fast_make_space(num_groups, *arguments)
        key = (num_groups, *(tuple(each) if isinstance(each, list) else each for each in arguments))
        if key not in spaces:
            spaces[key] = self._nixl_fast_make_space(num_groups, *arguments)
        return spaces[key]

    def _nixl_fast_make_space(
        self,
        num_groups: int,
        num_blocks: int,
        block_size_ratio: float | None,
        ratio: int,
        region_blocks: list[int] | None,
        region_groups: list[int] | None,
        mapped: bool | None,
    ) -> IndexSpace | None:
        """None for what is left to stock."""
        worker: Any = self
        split = 1 if block_size_ratio is None else block_size_ratio
        routing = getattr(worker, "_transfer_layer_group_ids", ())  # from 0.31 on
        count = len(routing) if routing else worker.num_regions or len(worker.block_len_per_layer)
        blocks = [int(num_blocks * split)] * count
        if region_blocks is not None:
            blocks = [int(each * split) for each in region_blocks]
        if not routing and blocks:
            count = len(blocks)
        if len(blocks) != count:
            return None
        everywhere = tuple(range(count))
        if routing:
            return IndexSpace(blocks, [Part((group,), (region,)) for region, group in enumerate(routing)])
        if worker._has_mamba:
            return self._nixl_fast_hybrid_space(num_groups, num_blocks, int(num_blocks * split), ratio, blocks)
        if region_groups is None:
            region_groups = worker.region_group_ids
            if mapped is None:
                mapped = worker._uses_region_group_mapping
        if not region_groups and count == 1:
            region_groups = [0]
        if region_groups is None or len(region_groups) != count:
            return None
        if mapped is None:
            mapped = len(set(region_groups)) > 1
        if not mapped:
            return IndexSpace(blocks, [Part(tuple(range(num_groups)), everywhere)])
        homes = [
            tuple(region for region, home in enumerate(region_groups) if home in (group, _SHARED_REGION))
            for group in range(num_groups)
        ]
        return IndexSpace(blocks, [Part((group,), home) for group, home in enumerate(homes)])

    def _nixl_fast_hybrid_space(
        self, num_groups: int, num_blocks: int, kernel_blocks: int, ratio: int, blocks: list[int]
    ) -> IndexSpace | None:
        """Group by group; attention regions first, then per Mamba region the convolution's parts and the state."""
        worker: Any = self
        if worker._conv_decomp is None or blocks != [kernel_blocks] * worker.num_regions:
            return None
        slots = num_blocks // ratio
        parts = len(worker._conv_decomp.local_conv_offsets) + 1
        states = len(worker._ssm_region_indices or worker.block_len_per_layer) * parts
        extra = worker._ple_group_index is not None
        first = len(blocks)
        listed = []
        for group, kind in enumerate(worker._group_spec_types[:num_groups]):
            if issubclass(kind, MambaSpec):
                alone = extra and group == worker._ple_group_index
                homes = range(first + states, first + states + 1) if alone else range(first, first + states)
            elif kind is CircularBufferSpec:
                homes = worker._scratch_region_indices
            elif kind in _KINDS:
                homes = range(first)
            else:
                return None
            listed.append(Part((group,), tuple(homes)))
        return IndexSpace([*blocks, *[slots] * (states + extra)], listed) if len(listed) == num_groups else None


def _lists(block_ids: Sequence[Ids]) -> list[Ids]:
    """As stock takes them; it asks lists whether they are empty as it could not ask arrays."""
    return [ids.tolist() if isinstance(ids, np.ndarray) else ids for ids in block_ids]


def _whole(pairs: GroupPairs, units: int, reads: bool) -> GroupPairs:
    """With the rest of the last logical block, of ``units`` units on either side."""
    more = np.arange(1, -(int(pairs.local[-1]) + 1) % units + 1, dtype=np.int32)
    local, remote = (np.concatenate([side, side[-1] + more]) for side in (pairs.local, pairs.remote))
    return GroupPairs(local, remote, np.setdiff1d(pairs.unmoved, local if reads else remote))


class Request:
    """One request while vLLM's worker turns its block ids into a transfer."""

    __slots__ = ("_direction", "_mapped", "_note", "_pairs", "_tokens", "lazy", "local", "plans", "remote", "used")

    def __init__(
        self,
        plans: Sequence[GroupPlan],
        direction: Direction,
        local: BlockIds,
        remote: BlockIds,
        tokens: int | None,
        note: Note,
        lazy: bool,
    ) -> None:
        self.plans = plans
        self._direction = direction
        self.local = local
        """Logical block ids per group."""
        self.remote = remote
        self._tokens = tokens
        self._note = note
        self.lazy = lazy
        """Whether descriptor ids are worked out on the transfer thread."""
        self._pairs: dict[int, GroupPairs] = {}
        self._mapped: Any = None
        self.used = False

    @property
    def reads(self) -> bool:
        """Whether the local side is the consumer."""
        return self._direction is Direction.READ

    def pairs(self, group: int) -> GroupPairs:
        """What a group moves; worked out once.

        Raises:
            BlockIdError, PairingError: As `GroupPlan.pair`.
        """
        if group not in self._pairs:
            try:
                self._pairs[group] = self._pair(group)
            except PairingError as error:
                raise PairingError(f"group {group}: {str(error).removeprefix('group 0: ')}") from None
        return self._pairs[group]

    def _pair(self, group: int) -> GroupPairs:
        note, window = self._note, self.plans[group].rule.kind is GroupKind.SLIDING_WINDOW
        producer_first = note.producer_first[group] if note.producer_first else None
        rule, tokens = self.plans[group].rule, self._tokens
        if tokens is not None and not window and rule.local[:2] == rule.remote[:2]:
            # Equal blocks move whole, as in stock: what lies behind the last token must not be a former owner's bytes.
            block = rule.local.kernel_tokens * rule.local.ratio
            tokens = -(-tokens // block) * block
        pairs = self.plans[group].pair(
            self.local[group],
            self.remote[group],
            num_tokens=tokens,
            consumer_first=note.consumer_first[group] if note.consumer_first else None,
            producer_first=producer_first if window else None,
        )
        if window and rule.local[:2] == rule.remote[:2] and len(pairs.local):
            return _whole(pairs, self.plans[group].units[0], self.reads)  # more tokens would move the window's start
        return pairs

    def select(self, local: BlockIds, remote: BlockIds, *, kernel: bool) -> tuple[list[Ids], list[Ids]]:
        """The paired units of the groups that this rank takes part in; arrays if the request is lazy, else lists.

        Args:
            local: Kernel block ids that vLLM has for this rank, per group; empty for a group of another rank.
            remote: The peer's.
            kernel: Whether they are uncut kernel blocks rather than units.

        Raises:
            PairingError: Lists that are not those of the request, or as `pairs`.
        """
        if self._mapped is not None and local is self._mapped[0] and remote is self._mapped[1]:
            return self._mapped  # type: ignore[no-any-return]
        out: tuple[list[Ids], list[Ids]] = ([], [])
        for group, plan in enumerate(self.plans):
            lists = (local[group] if len(local) else [], remote[group] if len(remote) else [])
            if not len(lists[0 if self.reads else 1]):
                out[0].append([])
                out[1].append([])
                continue
            for listed, logical, side, units in zip(
                lists,
                (self.local[group], self.remote[group]),
                (plan.rule.local, plan.rule.remote),
                plan.units,
                strict=True,
            ):
                ratio = 1 if plan.rule.kind is GroupKind.MAMBA else side.ratio
                if len(listed) not in (len(logical) * units, len(logical) * ratio if kernel else -1):
                    raise PairingError(
                        f"group {group}: vLLM passed {len(listed)} kernel blocks for {len(logical)} logical blocks of "
                        f"{ratio}"
                    )
            pairs = self.pairs(group)
            out[0].append(pairs.local if self.lazy else pairs.local.tolist())
            out[1].append(pairs.remote if self.lazy else pairs.remote.tolist())
        self.used = True
        self._mapped = out
        return out


class Pairing:
    """Which blocks belong together: by token position, for every request whose positions are known."""

    _nixl_fast_request: Request | None = None

    def _map_block_ids_for_block_size_ratio(
        self, local_block_ids: Any, remote_block_ids: Any, block_size_ratio: int
    ) -> Any:
        stock = super()._map_block_ids_for_block_size_ratio  # type: ignore[misc]
        request = self._nixl_fast_request
        if request is not None:
            return request.select(local_block_ids, remote_block_ids, kernel=True)
        for group, remote in enumerate(remote_block_ids):
            if not len(remote) and local_block_ids and len(local_block_ids[group]):
                raise PairingError(
                    f"group {group}: {len(local_block_ids[group])} local blocks need data, the peer lists none"
                )
        return stock(local_block_ids, remote_block_ids, block_size_ratio)

    def _apply_prefix_caching(
        self,
        decode_block_ids: Any,
        prefill_block_ids: Any,
        decode_physical_per_logical: int,
        prefill_physical_per_logical: int,
    ) -> Any:
        stock = super()._apply_prefix_caching  # type: ignore[misc]
        ratios = decode_physical_per_logical, prefill_physical_per_logical
        request = self._nixl_fast_request
        if request is None:
            return stock(*self._nixl_fast_without_positions(decode_block_ids, prefill_block_ids, *ratios), *ratios)
        sides = (decode_block_ids, prefill_block_ids)
        local, remote = request.select(*(sides if request.reads else sides[::-1]), kernel=False)
        out = (local, remote) if request.reads else (remote, local)
        if _switches(self).shadow:
            shadow.compare(
                "pairing", out, lambda: self._nixl_fast_stock_pairing(request, stock), request=_shown(request)
            )
        return out

    def _nixl_fast_stock_pairing(self, request: Request, apply: Any) -> Any:
        """What stock would have paired."""
        ratios = [plan.rule for plan in request.plans if plan.rule.kind is not GroupKind.MAMBA]
        rule = ratios[0]
        to_kernel = super()._logical_to_kernel_block_ids  # type: ignore[misc]
        local = to_kernel([list(ids) for ids in request.local], rule.local.ratio)
        remote = to_kernel([list(ids) for ids in request.remote], rule.remote.ratio)
        split = rule.local.kernel_tokens // rule.remote.kernel_tokens
        if split > 1:
            local, remote = super()._map_block_ids_for_block_size_ratio(local, remote, split)  # type: ignore[misc]
        sides = [rule.local.ratio, rule.remote.ratio]
        if request.reads:
            return apply(local, remote, *sides)
        return apply(remote, local, *sides[::-1])

    def _nixl_fast_without_positions(self, decode: Any, prefill: Any, decode_ratio: int, prefill_ratio: int) -> Any:
        """What stock may be given when nothing says where the blocks lie in the sequence.

        Raises:
            PairingError: Different ratios and different counts: where to cut is a guess.
        """
        prefill = [ids if len(decode[group]) else [] for group, ids in enumerate(prefill)]
        if decode_ratio != prefill_ratio and not self._has_mamba:  # type: ignore[attr-defined]
            for group, (ours, theirs) in enumerate(zip(decode, prefill, strict=True)):
                if len(ours) != len(theirs):
                    raise PairingError(
                        f"group {group}: decode lists {len(ours)} kernel blocks ({decode_ratio} per logical block), prefill "
                        f"{len(theirs)} ({prefill_ratio}); without token positions they cannot be paired"
                    )
        return decode, prefill

    def _nixl_fast_open(self, meta: Any, direction: Direction, tokens: int | None, note: Note | None) -> Request | None:
        """The request if this package pairs it; None leaves it to stock (context parallelism, caches it does not know)."""
        worker: Any = self
        engine = meta.remote.engine_id
        info = _engine_info(worker, engine)
        if info is None or not len(meta.local_block_ids):
            return None
        if (
            worker.dcp_size > 1
            or getattr(info, "remote_dcp_size", 1) > 1
            or getattr(worker, "_transfer_layer_group_ids", ())
        ):
            return None
        theirs = worker.dst_region_group_ids.get(engine)
        if (worker.region_group_ids or theirs) != theirs:
            return None
        plans = self._nixl_fast_plans(engine, info, direction)
        if plans is None or not len(plans) == len(meta.local_block_ids) == len(meta.remote.block_ids):
            return None
        if note is None:
            note = Note(_computed(worker, meta, plans), None)
        if note.end is not None and tokens:
            # vLLM computes the last token of a prompt itself; a state is that of one token and no other.
            state = any(plan.rule.kind is GroupKind.MAMBA for plan in plans)
            if tokens != note.end if state else tokens < note.end - 1:
                raise PairingError(f"the consumer counts on {note.end} tokens, the producer holds {tokens}")
            tokens = min(tokens, note.end)
        lazy = (
            isinstance(self, Descriptors)
            and isinstance(worker.nixl_wrapper, AgentFront)
            and not _switches(self).sync
            and not worker._mixed_mem_types
        )
        return Request(plans, direction, meta.local_block_ids, meta.remote.block_ids, tokens or None, note, lazy)

    def _nixl_fast_count_refusal(self, req_id: str, error: NixlFastError, **context: Any) -> None:
        """Logs and counts a request that was refused, as vLLM does a failed transfer."""
        worker: Any = self
        worker._log_failure(
            failure_type="blocks_not_paired",
            req_id=req_id,
            msg="nixl-fast refused the request before anything was posted",
            error=error,
            **context,
        )
        worker.xfer_stats.record_failed_transfer()

    def _nixl_fast_plans(self, engine: str, info: Any, direction: Direction) -> tuple[GroupPlan, ...] | None:
        """One plan per group, made when a peer is first met and again when it has shaken hands anew."""
        worker: Any = self
        known = self.__dict__.setdefault("_nixl_fast_known", {})
        if engine in known and known[engine][0] is info:
            return known[engine][1]  # type: ignore[no-any-return]
        for gone in known.keys() - worker._remote_agents.keys():
            del known[gone]
        known[engine] = (info, _make_plans(worker, engine, info, direction))
        return known[engine][1]  # type: ignore[no-any-return]

    @contextmanager
    def _nixl_fast_during(self, request: Request | None) -> Iterator[None]:
        self._nixl_fast_request = request
        try:
            yield
        finally:
            self._nixl_fast_request = None


def _make_plans(worker: Any, engine: str, info: Any, direction: Direction) -> tuple[GroupPlan, ...] | None:
    ratios = worker._physical_blocks_per_logical_kv_block, info.remote_physical_blocks_per_logical
    sizes = worker.block_size, info.remote_block_size
    kernel_blocks = worker.dst_num_blocks[worker.engine_id], worker.dst_num_blocks[engine]
    sides = [
        SideRule(*side)
        for side in zip(sizes, ratios, [n // r for n, r in zip(kernel_blocks, ratios, strict=True)], strict=True)
    ]
    if sizes[0] != sizes[1] and not worker.use_mla:
        unequal = f"kernel block: local {sizes[0]} tokens, remote {sizes[1]}"
        if direction is Direction.WRITE:
            raise GeometryError(f"{unequal}: vLLM rearranges only what decode reads; use equal kernel blocks, or pull")
        body = fingerprint(getattr(type(worker), "post_process_device_kv_on_receive", None))
        if body in HEADS_TAKEN_FOR_TOKENS:
            raise GeometryError(
                f"{unequal}: vLLM {HEADS_TAKEN_FOR_TOKENS[body]} rearranges what arrives with heads and tokens mixed up; use "
                "equal kernel blocks, or vLLM 0.32"
            )
    plans = []
    for group in worker.kv_cache_config.transfer_groups:
        kind, spec = group_kind(group), _inner(group.kv_cache_spec)
        if kind is None or getattr(group, "host_resident", False):  # whose blocks are those of another pool
            return None
        if kind is not GroupKind.MAMBA and spec.block_size != sizes[0] * ratios[0]:
            return None  # a group with a block size of its own
        window = spec.sliding_window if kind is GroupKind.SLIDING_WINDOW else None
        null = _NULL_BLOCK if kind in (GroupKind.SLIDING_WINDOW, GroupKind.MAMBA) else None
        plans.append(GroupPlan(GroupRule(kind, window, direction, sides[0], sides[1], null)))
    return tuple(plans)


def _inner(spec: Any) -> Any:
    return next(iter(spec.kv_cache_specs.values())) if isinstance(spec, UniformTypeKVCacheSpecs) else spec


def _engine_info(worker: Any, engine: str) -> Any:
    """What the handshake with an engine said; None before it, and for an engine that stock turns away."""
    if engine not in worker._remote_agents or engine in getattr(worker, "_invalid_remote_engines", ()):
        return None
    try:
        return worker.transfer_topo.get_engine_info(engine)
    except KeyError:
        return None


def _computed(worker: Any, meta: Any, plans: Sequence[GroupPlan]) -> tuple[int | None, ...]:
    """Cached blocks per group from vLLM's own metadata; it skips placeholders, so it places no sliding window."""
    counts = getattr(meta, "local_num_computed_blocks", ())
    groups = worker.kv_cache_config.transfer_group_ids
    if not counts or len(counts) <= max(groups):
        return ()
    kinds = (plan.rule.kind for plan in plans)
    placed = (GroupKind.FULL_ATTENTION, GroupKind.MLA)
    return tuple(counts[group] if kind in placed else None for group, kind in zip(groups, kinds, strict=True))


def _shown(request: Request) -> dict[str, Any]:
    return {
        "local": [list(ids) for ids in request.local],
        "remote": [list(ids) for ids in request.remote],
        "tokens": request._tokens,
        "note": request._note,
        "rules": [plan.rule for plan in request.plans],
    }


class PullPairing(Pairing):
    """Pairing where this rank is the consumer and reads."""

    def _read_blocks_for_req(self, req_id: str, meta: Any) -> None:
        stock = super()._read_blocks_for_req  # type: ignore[misc]
        request = None
        try:
            request = self._nixl_fast_open(
                meta, Direction.READ, meta.remote.num_tokens, getattr(meta, "nixl_fast", None)
            )
            with self._nixl_fast_during(request):
                stock(req_id, meta)
        except NixlFastError as error:
            self._nixl_fast_refuse(req_id, meta, error)
            return
        if request is not None and request.used:
            self._nixl_fast_settle(request, meta)

    def _nixl_fast_refuse(self, req_id: str, meta: Any, error: NixlFastError) -> None:
        """Fails a request as vLLM does: its blocks are invalid once nothing writes to them any more."""
        worker: Any = self
        self._nixl_fast_count_refusal(req_id, error, meta=meta)
        worker._recv_failures.add(req_id)

    def _nixl_fast_settle(self, request: Request, meta: Any) -> None:
        """Leaves in ``meta`` what vLLM's own clean-up needs: it counts the blocks written from the front of a list."""
        worker: Any = self
        ratio = worker._physical_blocks_per_logical_kv_block
        rules = request.plans[0].rule
        stock_clears = (
            rules.local.kernel_tokens != rules.remote.kernel_tokens
            or worker.enable_permute_local_kv
            or any(plan.rule.remote.ratio != ratio for plan in request.plans)
        )
        moved_by = {
            group: request.pairs(group)
            for group, plan in enumerate(request.plans)
            if plan.rule.kind is not GroupKind.MAMBA and len(request.local[group])
        }
        if not stock_clears and not any(len(pairs.unmoved) for pairs in moved_by.values()):
            return
        written = list(meta.remote.block_ids)
        physical = [list(ids) for ids in meta.local_physical_block_ids]
        rest = {}
        for group, pairs in moved_by.items():
            if not len(pairs.unmoved):
                written[group] = pairs.remote.tolist()
                continue
            plan = request.plans[group]
            cut = plan.units[0] // plan.rule.local.ratio  # units per local kernel block
            moved = {unit // cut for unit in pairs.local.tolist()}
            rest[group] = [block for block in physical[group] if block not in moved]
            physical[group] = [block for block in physical[group] if block in moved] + rest[group]
            lead = int(pairs.local[0]) % cut if len(pairs.local) else 0  # before the window, in a block that is written
            written[group] = [0] * lead + pairs.remote.tolist()
        meta.remote.block_ids = written
        meta.local_physical_block_ids = physical
        if stock_clears or not any(rest.values()):
            return
        if worker.use_host_buffer:  # what lies in the buffer is copied to the device with the rest
            for group, blocks in rest.items():
                for layer in worker.kv_cache_config.transfer_groups[group].layer_names:
                    worker.host_xfer_buffers[layer][blocks] = 0
        elif (
            hasattr(meta, "region_blocks_to_zero")
            and not worker._has_mamba
            and not worker.enable_heterogeneous_attn_post_process  # which stock leaves out for such a request
        ):
            homes = worker.region_group_ids or [_SHARED_REGION] * worker.num_regions
            one = not worker._uses_region_group_mapping
            meta.region_blocks_to_zero = [
                [block for group, blocks in rest.items() if one or home in (group, _SHARED_REGION) for block in blocks]
                for home in homes
            ]


class PushPairing(Pairing):
    """Pairing where this rank is the producer and writes, and the consumer's part in it."""

    _nixl_fast_registration: dict[str, Any] | None = None

    def start_load_kv(self, metadata: Any) -> None:
        """As stock's; keeps what the scheduler said about positions."""
        worker: Any = self
        if worker.pcp_rank > 0 and not worker.pcp_dcp_sharded:  # this rank neither sends nor receives
            super().start_load_kv(metadata)  # type: ignore[misc]
            return
        notes: dict[str, tuple[int | None, tuple[int | None, ...]]] = getattr(metadata, "nixl_fast_push", {})
        if notes:
            self.__dict__.setdefault("_nixl_fast_finished", {}).update(notes)
        for req_id, meta in metadata.reqs_to_recv.items():
            if meta.remote is not None and not len(meta.remote.block_ids) and len(meta.local_block_ids):
                self.__dict__.setdefault("_nixl_fast_unknown", {})[req_id] = meta
        super().start_load_kv(metadata)  # type: ignore[misc]

    def _do_start_push_kv(self, request_id: str, local_block_ids: Any, registration_data: dict[str, Any]) -> None:
        self._nixl_fast_registration = registration_data
        try:
            super()._do_start_push_kv(request_id, local_block_ids, registration_data)  # type: ignore[misc]
        except NixlFastError as error:
            self._nixl_fast_refuse(request_id, registration_data, error)
        finally:
            self._nixl_fast_registration = None

    def _xfer_blocks_for_req(self, req_id: str, meta: Any) -> None:
        said = (self._nixl_fast_registration or {}).get("nixl_fast") or {}
        tokens, producer_first = self.__dict__.get("_nixl_fast_finished", {}).get(req_id, (None, None))
        note = Note(tuple(said.get("first") or ()), said.get("end"), producer_first)
        request = self._nixl_fast_open(meta, Direction.WRITE, tokens, note)
        with self._nixl_fast_during(request):
            super()._xfer_blocks_for_req(req_id, meta)  # type: ignore[misc]

    def _nixl_fast_refuse(self, req_id: str, registration: dict[str, Any], error: NixlFastError) -> None:
        """Fails a push: stock's own accounting here, and word to a consumer that understands it."""
        worker: Any = self
        self._nixl_fast_count_refusal(req_id, error, dst_engine_id=registration.get("decode_engine_id"))
        if not registration.get("nixl_fast"):
            return
        with worker._handshake_lock:
            agents = dict(worker._remote_agents.get(registration["decode_engine_id"]) or {})
        for agent in agents.values():
            try:
                worker.nixl_wrapper.send_notif(agent, notif_msg=FAILURE_PREFIX + registration["request_id"].encode())
            except Exception:  # the consumer is gone, or hears of it by its own time-out
                _log.warning("%s could not be told that a push will not come", agent, exc_info=True)
                worker.xfer_stats.record_failed_notification()

    def _nixl_fast_take_failure(self, message: bytes) -> bool:
        """Consumes the message that a push will not come."""
        if not message.startswith(FAILURE_PREFIX):
            return False
        self._failed_recv_reqs.put(message.removeprefix(FAILURE_PREFIX).decode())  # type: ignore[attr-defined]
        return True

    def get_transfer_results(self) -> Any:
        """As stock's; first tells it how many blocks of a push were written, which it takes from the producer's list."""
        unknown = self.__dict__.get("_nixl_fast_unknown") or {}
        for req_id in [req_id for req_id, meta in unknown.items() if self._nixl_fast_fill(meta)]:
            del unknown[req_id]
        results = super().get_transfer_results()  # type: ignore[misc]
        finished = self.__dict__.get("_nixl_fast_finished") or {}
        for req_id in results.finished_sending if finished else ():
            finished.pop(req_id, None)
        for req_id in results.finished_recving if unknown else ():
            unknown.pop(req_id, None)
        return results

    def _nixl_fast_fill(self, meta: Any) -> bool:
        """Stands in for the producer's lists, which a push does not tell the consumer."""
        worker: Any = self
        info = _engine_info(worker, meta.remote.engine_id)
        if info is None:
            return False
        note: Note | None = getattr(meta, "nixl_fast", None)
        counts = []
        for group, ids in enumerate(meta.local_physical_block_ids):
            first = note.consumer_first[group] if note is not None and note.consumer_first else None
            count = len(ids) * max(1, worker.block_size // info.remote_block_size)
            if note is not None and note.end is not None and first is not None:
                skipped = first * worker._physical_blocks_per_logical_kv_block * worker.block_size
                count = min(count, -(-max(0, note.end - skipped) // info.remote_block_size))
            counts.append(count)
        meta.remote.block_ids = tuple([0] * count for count in counts)
        return True


class Polling:
    """Goes through the worker's books when there may be something new in them, not at every step of a long transfer."""

    _nixl_fast_skipped = 0

    def get_transfer_results(self) -> KVConnectorTransferResults:
        """As stock's; "nothing new" without a look at the books while that is known, at most `_MOST_SKIPPED` times in a row."""
        worker: Any = self
        front = worker.nixl_wrapper
        if (
            isinstance(front, AgentFront)
            and front.quiet
            and self._nixl_fast_skipped < _MOST_SKIPPED
            and not (worker._reqs_to_send or worker._recv_failures or worker._replicated_pcp_done_sending)
            and not worker._failed_recv_reqs.queue  # without its lock: what comes now is seen by the next poll
            and [] not in worker._recving_transfers.values()
        ):
            self._nixl_fast_skipped += 1
            return KVConnectorTransferResults(set(), set(), set())
        self._nixl_fast_skipped = 0
        return super().get_transfer_results()  # type: ignore[misc]


class Agent:
    """NIXL off the engine's thread, and what only a complete worker has."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        worker: Any = self
        worker.nixl_wrapper = AgentFront(
            worker.nixl_wrapper,
            sync=_switches(self).sync,
            on_lost_notification=self._nixl_fast_count_lost,
            take=getattr(self, "_nixl_fast_take_failure", None),
        )
        worker._nixl_fast_spaces = {}

    def _nixl_fast_count_lost(self, message: bytes, _: Exception) -> None:
        if not message.startswith(_HEARTBEAT):  # the next one makes up for it; stock does not count them
            self.xfer_stats.record_failed_notification()  # type: ignore[attr-defined]

    def unregister_kv_caches(self) -> None:
        """As stock's before sleep (from 0.33 on), once nothing moves any more."""
        self._nixl_fast_settle_front("put to sleep")
        super().unregister_kv_caches()  # type: ignore[misc]

    def shutdown(self) -> None:
        """As stock's; nothing moves any more when it lets go of handles and memory, if the peers let it come to an end."""
        self._nixl_fast_settle_front("shut down")
        super().shutdown()  # type: ignore[misc]
        front = getattr(self, "nixl_wrapper", None)
        if isinstance(front, AgentFront):
            front.close()

    def _nixl_fast_settle_front(self, what: str) -> None:
        front = getattr(self, "nixl_wrapper", None)
        if isinstance(front, AgentFront) and not front.settle(SETTLE_SECONDS):
            _log.warning("%s while transfers are on their way", what)


def _switches(worker: Any) -> Switches:
    """The switches as they were when the worker first asked."""
    found: Switches | None = worker.__dict__.get("_nixl_fast_switches")
    if found is None:
        found = worker.__dict__["_nixl_fast_switches"] = read_switches()
    return found
