"""How the memory of two ranks is cut into segments that both can address; runs once per peer.

A segment is (a part of) one region on each side, with units of equal length: a kernel block, a piece of it, a slice of
its heads, or a part of a Mamba state slot. The native side numbers the descriptors of a list of segments.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from enum import Enum
from typing import NamedTuple

from nixl_fast.errors import GeometryError
from nixl_fast.layout import BlockOrder, EngineLayout, Group, GroupKind, Region, describe

MAX_SPLIT = 256
"""Units that one kernel block may be cut into; beyond it the block sizes of the two sides are called incompatible."""


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


class Share(NamedTuple):
    """What a plan takes of what its two ranks have in common."""

    heads: range
    """KV heads, counted over the whole model."""

    replicated: bool
    """Whether also what every producer rank holds: replicated regions, unsharded convolution projections."""


class Span(NamedTuple):
    """One side of a segment: unit ``i`` is at ``base + (i // split) * stride + (i % split) * len``."""

    base: int
    stride: int
    blocks: int
    split: int
    device: int


class Segment(NamedTuple):
    """A row of the native table; the fields from ``region`` on are for people and for the coverage check."""

    name: str
    len: int
    local: Span
    remote: Span
    groups: list[int]
    whole: int
    region: str
    lane: tuple[str, str]
    local_bytes: range
    remote_bytes: range
    assumes: str = ""
    """What blocks of several heads are taken to keep together, where `Region.order` does not say."""


class Positions(NamedTuple):
    """One side of a group in the native table."""

    block_tokens: int
    units: int
    limit: int
    null: int | None
    pages: int
    ranks: int
    rank: int


class GroupRow(NamedTuple):
    """A group in the native table."""

    slots: bool
    window: int | None
    unit_tokens: int
    local: Positions
    remote: Positions


class Match(NamedTuple):
    """A region of this rank and its counterpart."""

    name: str
    local: Region
    remote: Region
    groups: tuple[int, ...]


def kv_heads(layout: EngineLayout) -> range:
    """The KV heads on a rank, counted over the whole model; ranks beyond the number of heads hold one, again.

    Raises:
        GeometryError: Heads and ranks of which neither divides the other.
    """
    heads, ranks = layout.num_kv_heads, layout.tp_size
    if max(heads, ranks) % min(heads, ranks):
        raise GeometryError(
            f"{layout.engine_id}: num_kv_heads {heads} and tp_size {ranks}: neither divides the other, heads have no "
            "certain place"
        )
    first = layout.tp_rank * heads // ranks
    return range(first, first + max(1, heads // ranks))


def common_heads(local: EngineLayout, remote: EngineLayout) -> range:
    """The KV heads that both ranks hold."""
    ours, theirs = kv_heads(local), kv_heads(remote)
    return range(max(ours.start, theirs.start), min(ours.stop, theirs.stop))


def pairs_of(local: EngineLayout, remote: EngineLayout) -> Iterator[tuple[Group, Group]]:
    """Both sides of every group."""
    return zip(local.groups, remote.groups, strict=True)


def compare(local: EngineLayout, remote: EngineLayout) -> None:
    """Refuses two layouts that differ where both sides have to agree.

    Raises:
        GeometryError: Names the field and both values.
    """
    for side, layout in (("local", local), ("remote", remote)):
        if not isinstance(layout, EngineLayout):
            raise GeometryError(f"{side} must be an EngineLayout, got {describe(layout)}")
    _same("number of groups", len(local.groups), len(remote.groups))
    for index, (ours, theirs) in enumerate(pairs_of(local, remote)):
        _same(f"groups[{index}].kind", ours.kind, theirs.kind)
        _same(f"groups[{index}].sliding_window", ours.sliding_window, theirs.sliding_window)
    _same("num_kv_heads", local.num_kv_heads, remote.num_kv_heads)
    _same("mamba", local.mamba is not None, remote.mamba is not None)
    if local.mamba and remote.mamba:
        _same("number of mamba conv projections", len(local.mamba.conv), len(remote.mamba.conv))
    sizes = local.dcp_size, remote.dcp_size
    if max(sizes) == 1:
        return
    if max(sizes) % min(sizes):
        raise GeometryError(f"dcp_size: local {sizes[0]}, remote {sizes[1]}; one has to divide the other")
    if local.dcp_rank % min(sizes) != remote.dcp_rank % min(sizes):
        raise GeometryError(
            f"context-parallel rank {local.dcp_rank} of {sizes[0]} (local) and {remote.dcp_rank} of {sizes[1]} (remote) "
            "hold no common block"
        )
    for index, (ours, theirs) in enumerate(pairs_of(local, remote)):
        if ours.kind is not GroupKind.MLA:
            raise GeometryError(
                f"groups[{index}]: context parallelism (dcp_size {max(sizes)}) needs mla, not {ours.kind}"
            )
        _same(f"groups[{index}].block_size (dealt out by context parallelism)", ours.block_size, theirs.block_size)


def unit_tokens(local: EngineLayout, remote: EngineLayout) -> tuple[int, ...]:
    """Tokens per unit of each group: the greatest common divisor of both kernel blocks; 0 for state slots.

    Raises:
        GeometryError: A kernel block would be cut into more than `MAX_SPLIT` units.
    """
    units = []
    for index, (ours, theirs) in enumerate(pairs_of(local, remote)):
        if ROUTES[ours.kind] is Route.SLOTS:
            units.append(0)
            continue
        sizes = ours.kernel_block_size, theirs.kernel_block_size
        units.append(math.gcd(*sizes))
        if (split := max(sizes) // units[-1]) > MAX_SPLIT:
            raise GeometryError(
                f"groups[{index}]: kernel blocks of {sizes[0]} tokens (local) and {sizes[1]} (remote) have only "
                f"{units[-1]} tokens in common; a kernel block would be cut into {split} units, at most {MAX_SPLIT} are "
                "allowed"
            )
    return tuple(units)


def group_rows(local: EngineLayout, remote: EngineLayout, units: Sequence[int]) -> list[GroupRow]:
    """The native table's groups."""
    rows = []
    for index, groups in enumerate(pairs_of(local, remote)):
        slots = ROUTES[groups[0].kind] is Route.SLOTS
        sides = [
            Positions(
                block_tokens=group.block_size,
                units=1 if slots else group.block_size // units[index],
                limit=layout.num_blocks(index),
                null=layout.null_block_id,
                pages=group.blocks_per_logical,
                ranks=layout.dcp_size,
                rank=layout.dcp_rank,
            )
            for layout, group in zip((local, remote), groups, strict=True)
        ]
        rows.append(GroupRow(slots, groups[0].sliding_window, units[index] or 1, *sides))
    return rows


def sharing(layout: EngineLayout) -> list[list[int]]:
    """Sets of groups whose blocks lie in the same memory, page for page: an id can be in use by only one of them."""
    found = {frozenset(groups) for _, _, groups in layout.places()}
    found |= {frozenset(groups) | frozenset(others) for (_, _, groups), (_, _, others) in layout.overlapping()}
    return sorted(sorted(each) for each in found if not any(each < other for other in found))


def segments(local: EngineLayout, remote: EngineLayout, units: Sequence[int], share: Share) -> list[Segment]:
    """The native table's segments: attention regions, then Mamba regions, of one pair of memory types after the other.

    Raises:
        GeometryError: Memory that cannot be cut into equally long units on both sides.
    """
    cut = [*_attention(local, remote, units, share), *_state(local, remote, share)]
    lanes = list(dict.fromkeys(segment.lane for segment in cut))
    return sorted(cut, key=lambda segment: lanes.index(segment.lane))


def _same(field: str, ours: object, theirs: object) -> None:
    if ours != theirs:
        raise GeometryError(f"{field}: local {describe(ours)}, remote {describe(theirs)}")


def matches(local: EngineLayout, remote: EngineLayout, *, mamba: bool) -> Iterator[Match]:
    """Regions with their counterparts: by name where both sides name them, else by index."""
    sides = [
        layout.regions if not mamba else layout.mamba.regions if layout.mamba else () for layout in (local, remote)
    ]
    kind = "mamba region" if mamba else "region"
    if all(region.layer is not None for side in sides for region in side):
        named = {region.layer: region for region in sides[1]}
        ours = {region.layer for region in sides[0]}
        # A side of one stage holds every layer, so the other side can have no layer of its own.
        missing = {
            "remote": [name for name in ours if name not in named] if remote.pp_size == 1 else [],
            "local": [name for name in named if name not in ours] if local.pp_size == 1 else [],
        }
        for side, names in missing.items():
            if names:
                raise GeometryError(f"layer {min(map(str, names))!r} has no {side} {kind}")
        matched = [
            (index, region, named[region.layer]) for index, region in enumerate(sides[0]) if region.layer in named
        ]
    elif max(local.pp_size, remote.pp_size) > 1:
        raise GeometryError(f"pipeline stages are matched by layer name, but not every {kind} has one on both sides")
    else:
        _same(f"number of {kind}s", len(sides[0]), len(sides[1]))
        matched = [(index, *both) for index, both in enumerate(zip(*sides, strict=True))]
    for index, ours_, theirs in matched:
        name = ("mamba " if mamba else "") + ours_.title(index)
        groups = local.residents(ours_, mamba=mamba)
        _same(f"{name}: groups", groups, remote.residents(theirs, mamba=mamba))
        yield Match(name, ours_, theirs, groups)


def _attention(local: EngineLayout, remote: EngineLayout, units: Sequence[int], share: Share) -> Iterator[Segment]:
    for match in matches(local, remote, mamba=False):
        replicated = local.is_replicated(match.local)
        _same(f"{match.name}: replicated", replicated, remote.is_replicated(match.remote))
        if replicated and not share.replicated:
            continue
        heads = _heads(local, remote, share, match, replicated=replicated)
        kinds = {local.groups[group].kind for group in match.groups}
        if not replicated and GroupKind.MLA in kinds and not heads.whole:
            raise GeometryError(
                f"{match.name} holds mla blocks, which every rank has whole, and blocks of heads, which unequal tensor "
                "parallelism cuts; give them regions of their own"
            )
        # Groups of a region may cut its blocks differently; each way of cutting makes its own segments.
        ways: dict[tuple[tuple[int, int], tuple[int, int]], list[int]] = {}
        for group in match.groups:
            both = local.groups[group], remote.groups[group]
            splits = (both[0].kernel_block_size // units[group], both[1].kernel_block_size // units[group])
            ratios = (both[0].blocks_per_logical, both[1].blocks_per_logical)
            ways.setdefault((splits, ratios), []).append(group)
        for (splits, ratios), groups in ways.items():
            yield from _cut(match, groups, splits, ratios, heads)


class _Heads(NamedTuple):
    """Heads of a block on each side, and which of them a plan moves."""

    counts: tuple[int, int]
    first: tuple[int, int]
    moved: int

    @property
    def whole(self) -> bool:
        return self.counts == (self.moved, self.moved)


def _heads(local: EngineLayout, remote: EngineLayout, share: Share, match: Match, *, replicated: bool) -> _Heads:
    if replicated:  # MLA has no heads to tell apart, another replicated region has all of them on every rank
        mla = all(local.groups[group].kind is GroupKind.MLA for group in match.groups)
        count = 1 if mla else local.num_kv_heads
        return _Heads((count, count), (0, 0), count)
    ours, theirs = kv_heads(local), kv_heads(remote)
    first = (share.heads.start - ours.start, share.heads.start - theirs.start)
    return _Heads((len(ours), len(theirs)), first, len(share.heads))


def _cut(
    match: Match, groups: list[int], splits: tuple[int, int], ratios: tuple[int, int], heads: _Heads
) -> Iterator[Segment]:
    """Segments of one region: whole units, a slice of heads, or (where both have to be cut) one per head."""
    name, regions = match.name, (match.local, match.remote)
    if not heads.moved:
        return
    by_tokens = splits != (1, 1)
    orders = {region.order for region, count in zip(regions, heads.counts, strict=True) if region.order and count > 1}
    if len(orders) > 1:
        raise GeometryError(f"{name}: order: local {match.local.order}, remote {match.remote.order}")
    order = next(iter(orders), None)
    if not heads.whole and order is BlockOrder.TOKEN_MAJOR:
        raise GeometryError(
            f"{name}: {heads.moved} of {heads.counts[0]} (local) and {heads.counts[1]} (remote) heads have to be cut out of "
            "token_major blocks, one piece per token; use head_major blocks or equal tensor parallelism"
        )
    if not heads.whole and by_tokens and order is None:
        raise GeometryError(
            f"{name}: blocks of {heads.counts[0]} (local) and {heads.counts[1]} (remote) heads have to be cut by heads and "
            "by tokens (unequal tensor parallelism and kernel blocks); that is possible in head_major blocks only, set "
            "Region.order on both sides if they are"
        )
    per_head = by_tokens and order is BlockOrder.HEAD_MAJOR
    stated = [region.order is not None or count == 1 for region, count in zip(regions, heads.counts, strict=True)]
    if per_head and not all(stated):
        raise GeometryError(
            f"{name}: order: local {match.local.order}, remote {match.remote.order}; blocks that are cut by tokens need it on "
            "both sides, or on neither where they are token_major"
        )
    pieces = heads.counts if per_head or not heads.whole else (1, 1)
    lengths = []
    for side, region, split, count in zip(("local", "remote"), regions, splits, pieces, strict=True):
        if region.block_len % (split * count):
            raise GeometryError(
                f"{name} ({side}): block_len {region.block_len} cannot be cut into {split} units of {count} heads"
                if count > 1
                else f"{name} ({side}): block_len {region.block_len} cannot be cut into {split} units"
            )
        lengths.append(region.block_len // (split * count))
    if lengths[0] != lengths[1]:
        raise GeometryError(
            f"{name}: bytes per unit{' and head' if pieces != (1, 1) else ''}: local {lengths[0]} (block_len "
            f"{match.local.block_len}), remote {lengths[1]} (block_len {match.remote.block_len})"
        )
    dense = all(region.stride == region.block_len for region in regions)
    if heads.whole and not by_tokens and ratios[0] == ratios[1] > 1 and dense:
        yield from _logical(match, groups, ratios[0])
        return
    assumes = "" if order or max(heads.counts) == 1 else "a token" if by_tokens else "" if heads.whole else "a head"
    merged = 1 if per_head or heads.whole else heads.moved  # heads that follow each other on both sides
    for head in range(heads.moved if per_head else 1):
        spans, covered = [], []
        for region, split, first, count in zip(regions, splits, heads.first, pieces, strict=True):
            size = region.block_len // count
            offset = (first + head) * size if count > 1 else 0
            spans.append(_span(region, offset, split))
            covered.append(range(offset, offset + size * merged))
        label = f"{name} head {head}" if per_head else name
        segment = _segment(label, lengths[0] * merged, spans, groups, match, covered)
        yield segment._replace(assumes=assumes)


def _logical(match: Match, groups: list[int], ratio: int) -> Iterator[Segment]:
    """Dense equal blocks of equal ratio: one descriptor per logical block, and fine ones for a block that is not full."""
    regions = (match.local, match.remote)
    length = match.local.block_len
    whole = [Span(r.base_addr, r.stride * ratio, r.num_blocks // ratio, 1, r.device_id) for r in regions]
    covered = [range(length)] * 2
    yield _segment(match.name, length * ratio, whole, groups, match, covered, whole=ratio)
    rest = [_span(region, 0, 1) for region in regions]
    yield _segment(f"{match.name} rest", length, rest, groups, match, covered, whole=0)


def _start(region: Region, offset: int) -> int:
    return region.base_addr + offset if region.num_blocks else 0  # no block, no address


def _span(region: Region, offset: int, split: int) -> Span:
    return Span(_start(region, offset), region.stride, region.num_blocks, split, region.device_id)


def _segment(
    name: str,
    length: int,
    spans: Sequence[Span],
    groups: list[int],
    match: Match,
    covered: Sequence[range],
    whole: int = 1,
) -> Segment:
    lane = match.local.mem_type, match.remote.mem_type
    for side, span in zip(("local", "remote"), spans, strict=True):
        for field, value in (("bytes per unit", length), ("base", span.base), ("stride", span.stride)):
            if value >= 2**64:
                raise GeometryError(f"{name} ({side}): {field} is {value}, it must be below 2^64")
    return Segment(name, length, spans[0], spans[1], groups, whole, match.name, lane, covered[0], covered[1])


def _state(local: EngineLayout, remote: EngineLayout, share: Share) -> Iterator[Segment]:
    """Per Mamba region the convolution projections, then the temporal state; a slot spans the pages of its ratio."""
    parts = list(_state_parts(local, remote, share))
    for match in matches(local, remote, mamba=True):
        ways: dict[tuple[int, int], list[int]] = {}
        for group in match.groups:
            both = local.groups[group], remote.groups[group]
            ways.setdefault((both[0].blocks_per_logical, both[1].blocks_per_logical), []).append(group)
        for ratios, groups in ways.items():
            for part, length, offsets in parts:
                spans = [
                    Span(
                        _start(region, offset),
                        region.stride * ratio,
                        region.num_blocks // ratio,
                        1,
                        region.device_id,
                    )
                    for region, ratio, offset in zip((match.local, match.remote), ratios, offsets, strict=True)
                ]
                covered = [range(offset, offset + length) for offset in offsets]
                yield _segment(f"{match.name} {part}", length, spans, groups, match, covered)


def _state_parts(local: EngineLayout, remote: EngineLayout, share: Share) -> Iterator[tuple[str, int, tuple[int, int]]]:
    """What of a state slot this pair moves: part, bytes, and where it starts in the slot of each side."""
    if local.mamba is None or remote.mamba is None:
        return
    sides = (local.mamba, remote.mamba)
    parts = [
        (f"conv {index}", (ours.size_bytes, theirs.size_bytes), (ours.sharded, theirs.sharded))
        for index, (ours, theirs) in enumerate(zip(sides[0].conv, sides[1].conv, strict=True))
    ]
    parts.append(("state", (sides[0].state_bytes, sides[1].state_bytes), (True, True)))
    starts = [0, 0]
    for part, sizes, sharded in parts:
        _same(f"mamba {part}: sharded", *sharded)
        ranks = (local.tp_size, remote.tp_size) if sharded[0] else (1, 1)
        if sizes[0] * ranks[0] != sizes[1] * ranks[1]:
            raise GeometryError(
                f"mamba {part} of every region: local {sizes[0]} bytes on each of {ranks[0]} ranks, remote {sizes[1]} on "
                f"each of {ranks[1]}; the sums differ"
            )
        first = [
            layout.tp_rank * size if sharded[0] else 0 for layout, size in zip((local, remote), sizes, strict=True)
        ]
        common = range(max(first), min(first[0] + sizes[0], first[1] + sizes[1]))
        if common and (sharded[0] or share.replicated):
            yield part, len(common), (starts[0] + common.start - first[0], starts[1] + common.start - first[1])
        starts = [start + size for start, size in zip(starts, sizes, strict=True)]
