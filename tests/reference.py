"""A slow, obvious second answer to what the native code computes, written from the rules and not from the code.

`reference_pairs` answers a request with dictionaries from position to block, `expected_descriptors` says which
descriptors that makes. The rest is a model of memory in which every byte knows where it came from: `expected_copies`
says, token by token, which byte has to end up where, and `move` does what NIXL would do with a plan's descriptor lists.

Words: the *consumer* is the side whose blocks are filled, the *producer* the one whose blocks are read.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from nixl_fast import Direction, EngineLayout, Region

T = TypeVar("T")

Address = tuple[int, int]
"""Device and address of one byte."""

Regions = tuple[Region, Region]
"""A region of the local side and its counterpart."""


class Refused(Exception):  # noqa: N818
    """The request makes no certain pairing; says why."""


# -- part one: which unit goes where


class GroupResult(NamedTuple):
    """What one group of a request moves, in the order of the consumer's list, and what it does not."""

    pairs: list[tuple[int, int]]
    """``(remote_unit, local_unit)``"""
    untransferred: list[int]


class Request(NamedTuple):
    """What `TransferPlan.pair` takes."""

    local_ids: Sequence[Sequence[int]]
    remote_ids: Sequence[Sequence[int]]
    num_tokens: int | None = None
    num_computed_blocks: Sequence[int | None] | None = None


TOKENS_END = 2**48
"""Tokens are counted below this, as `TransferPlan.pair` says."""


@dataclass(frozen=True)
class Tokens:
    """Where the blocks of an attention group lie in the token sequence.

    Attributes:
        consumer: ``(index, block id)`` in list order, without placeholders; block ``index`` holds the tokens from
            ``index * block_size``.
        consumer_from: Consumer blocks of a lower index are clipped: before what the window needs.
        producer: Block id at each index, without placeholders and clipped blocks.
        data: Tokens that there are.
        must_from: Consumer units with a token at or after this one, inside the data, have to be covered.
    """

    consumer: list[tuple[int, int]]
    consumer_from: int
    producer: dict[int, int]
    data: int
    must_from: int


@dataclass(frozen=True)
class Slots:
    """State slots of a Mamba group: paired ``(producer slot, consumer slot)``, and consumer slots without a partner."""

    pairs: list[tuple[int, int]]
    recomputed: list[int]


Placement = Tokens | Slots
NOTHING = Slots([], [])


def consumer_and_producer(local: T, remote: T, direction: Direction) -> tuple[T, T]:
    """A read fills the local side, a write fills the remote one."""
    return (local, remote) if direction is Direction.READ else (remote, local)


def unit_tokens(local: EngineLayout, remote: EngineLayout, group: int) -> int:
    """Tokens per unit of an attention group."""
    return math.gcd(local.groups[group].kernel_block_size, remote.groups[group].kernel_block_size)


def reference_pairs(
    local: EngineLayout,
    remote: EngineLayout,
    direction: Direction,
    local_ids: Sequence[Sequence[int]],
    remote_ids: Sequence[Sequence[int]],
    num_tokens: int | None = None,
    num_computed_blocks: Sequence[int | None] | None = None,
) -> list[GroupResult]:
    """What a request moves, group by group, or `Refused`."""
    request = Request(local_ids, remote_ids, num_tokens, num_computed_blocks)
    placements = reference_placements(local, remote, direction, request)
    return [pair_placed(local, remote, direction, group, placed) for group, placed in enumerate(placements)]


def reference_placements(
    local: EngineLayout, remote: EngineLayout, direction: Direction, request: Request
) -> list[Placement]:
    """Where every group's blocks lie in the sequence, or `Refused`."""
    local_ids, remote_ids, num_tokens, num_computed_blocks = request
    count = len(local.groups)
    for name, per_group in (("local ids", local_ids), ("remote ids", remote_ids), ("computed", num_computed_blocks)):
        if per_group is not None and len(per_group) != count:
            raise Refused(f"{name}: {len(per_group)} groups, not {count}")
    check_ids("local", local, local_ids)
    check_ids("remote", remote, remote_ids)
    consumer, producer = consumer_and_producer(local, remote, direction)
    consumer_ids, producer_ids = consumer_and_producer(local_ids, remote_ids, direction)
    check_one_writer_per_page(consumer, consumer_ids)
    computed = num_computed_blocks or [None] * count
    placements: list[Placement] = []
    for group in range(count):
        to, source = (
            _Listed(layout, group, list(ids[group]))
            for layout, ids in ((consumer, consumer_ids), (producer, producer_ids))
        )
        if not to.ids:
            placements.append(NOTHING)
        elif consumer.is_mamba(group):
            placements.append(_pair_slots(to, source))
        elif (computed[group] or 0) * to.block_size >= TOKENS_END or (num_tokens or 0) >= TOKENS_END:
            raise Refused(f"group {group}: tokens are counted below 2^48")
        elif num_tokens is not None:
            placements.append(_place_known(to, source, num_tokens, computed[group]))
        elif to.block_size == source.block_size:
            placements.append(_place_common_end(to, source, computed[group]))
        else:
            placements.append(_place_common_start(to, source, computed[group]))
    return placements


def check_ids(side: str, layout: EngineLayout, lists: Sequence[Sequence[int]]) -> None:
    """Every id names a block, except the placeholder."""
    for group, ids in enumerate(lists):
        for position, block in enumerate(ids):
            if block != layout.null_block_id and not 0 <= block < layout.num_blocks(group):
                raise Refused(f"{side} group {group}: id {block} at {position} is not below {layout.num_blocks(group)}")


def check_one_writer_per_page(layout: EngineLayout, lists: Sequence[Sequence[int]]) -> None:
    """No kernel page is named twice, by one group or by two that share memory."""
    pages_of: list[set[int]] = []
    for group, ids in enumerate(lists):
        pages: set[int] = set()
        for block in ids:
            if block == layout.null_block_id:
                continue
            block_pages = pages_of_block(layout, group, block)
            if pages & block_pages:
                raise Refused(f"group {group}: id {block} is listed twice")
            pages |= block_pages
        for other, other_pages in enumerate(pages_of):
            if share_memory(layout, group, other) and pages & other_pages:
                raise Refused(f"groups {other} and {group}: both write pages {sorted(pages & other_pages)}")
        pages_of.append(pages)


def pages_of_block(layout: EngineLayout, group: int, block: int) -> set[int]:
    """Kernel pages of one logical block, or of one state slot."""
    ratio = layout.groups[group].blocks_per_logical
    return {block * ratio + page for page in range(ratio)}


def share_memory(layout: EngineLayout, one: int, other: int) -> bool:
    """Whether a page of one group is, in some region, the same memory as the equally numbered page of the other."""
    return bool(_homes(layout, one) & _homes(layout, other))


def _homes(layout: EngineLayout, group: int) -> set[tuple[int, int, int, str]]:
    return {
        (region.base_addr, region.stride, region.device_id, region.mem_type)
        for _, region, groups in layout.places()
        if group in groups
    }


class _Listed(NamedTuple):
    """The list of one side for one group."""

    layout: EngineLayout
    group: int
    ids: list[int]

    @property
    def block_size(self) -> int:
        return self.layout.groups[self.group].block_size

    @property
    def window(self) -> int | None:
        return self.layout.groups[self.group].sliding_window

    def is_null(self, block: int) -> bool:
        return block == self.layout.null_block_id

    def placed(self, first: int) -> list[tuple[int, int]]:
        """``(index, block id)`` of the list that starts at block ``first``, without placeholders."""
        return [(first + offset, block) for offset, block in enumerate(self.ids) if not self.is_null(block)]

    def keep_from(self, end: int) -> int:
        """First block that is not clipped if the last one needed is ``end - 1``."""
        return 0 if self.window is None else end - (_ceil(self.window, self.block_size) + 1)


def _place(to: _Listed, source: _Listed, firsts: tuple[int, int], ends: tuple[int, int], data: int) -> Tokens:
    keep_from = source.keep_from(ends[1])
    window = to.window
    return Tokens(
        consumer=to.placed(firsts[0]),
        consumer_from=to.keep_from(ends[0]),
        producer={index: block for index, block in source.placed(firsts[1]) if index >= keep_from},
        data=data,
        must_from=0 if window is None else data - window,
    )


def _place_known(to: _Listed, source: _Listed, tokens: int, computed: int | None) -> Tokens:
    """The number of tokens says where both lists end."""
    ends = (_ceil(tokens, to.block_size), _ceil(tokens, source.block_size))
    first = ends[0] - len(to.ids) if computed is None else computed
    if first < 0:
        raise Refused(f"group {to.group}: {len(to.ids)} consumer blocks, the sequence has {ends[0]}")
    if source.window is not None:
        source_first = ends[1] - len(source.ids)
        if source_first < 0:
            raise Refused(f"group {to.group}: {len(source.ids)} producer blocks, the sequence has {ends[1]}")
    else:
        source_first = 0
        if len(source.ids) < ends[1]:
            raise Refused(f"group {to.group}: {len(source.ids)} producer blocks, the sequence has {ends[1]}")
    return _place(to, source, (first, source_first), ends, tokens)


def _place_common_end(to: _Listed, source: _Listed, computed: int | None) -> Tokens:
    """Blocks of one size and no number of tokens: both lists end with the same block, which is taken to be full."""
    if computed is None:
        end = max(len(to.ids), len(source.ids))
        firsts = (end - len(to.ids), end - len(source.ids))
    else:
        end = computed + len(to.ids)
        firsts = (computed, end - len(source.ids))
        if firsts[1] < 0 or (firsts[1] > 0 and source.window is None):
            raise Refused(f"group {to.group}: {len(source.ids)} producer blocks, {end} consumer blocks with the cached")
    placed = _place(to, source, firsts, (end, end), end * to.block_size)
    # The window's first token is unknown, so everything that was not clipped is needed.
    return Tokens(placed.consumer, placed.consumer_from, placed.producer, placed.data, must_from=0)


def _place_common_start(to: _Listed, source: _Listed, computed: int | None) -> Tokens:
    """Blocks of two sizes and no number of tokens: only whole sequences whose ends lie within one block."""
    if to.window is not None or computed != 0:
        raise Refused(f"group {to.group}: block sizes differ and the number of tokens is not known")
    counts = (len(to.ids), len(source.ids))
    extents = (counts[0] * to.block_size, counts[1] * source.block_size)
    if (counts[0] - 1) * to.block_size >= extents[1] or (counts[1] - 1) * source.block_size >= extents[0]:
        raise Refused(f"group {to.group}: {extents[0]} and {extents[1]} tokens are not one sequence")
    return _place(to, source, (0, 0), (0, 0), min(extents))


def _pair_slots(to: _Listed, source: _Listed) -> Slots:
    slots = list(to.ids)
    while slots and to.is_null(slots[0]):
        slots.pop(0)
    recomputed: list[int] = []
    if len(source.ids) >= len(slots):
        sources = source.ids[len(source.ids) - len(slots) :]
    elif len(source.ids) == len(slots) - 1 and source.ids:
        sources = source.ids
        if not to.is_null(slots[-1]):
            recomputed = [slots[-1]]
        slots.pop()
    else:
        raise Refused(f"group {to.group}: {len(slots)} consumer slots, {len(source.ids)} producer slots")
    pairs = [(theirs, ours) for theirs, ours in zip(sources, slots, strict=True) if not to.is_null(ours)]
    for theirs, ours in pairs:
        if source.is_null(theirs):
            raise Refused(f"group {to.group}: consumer slot {ours} would be filled from a placeholder")
    return Slots(pairs, recomputed)


def pair_placed(
    local: EngineLayout, remote: EngineLayout, direction: Direction, group: int, placed: Placement
) -> GroupResult:
    """Units of one group whose blocks have been placed; `Refused` if a unit that is needed has no source."""
    if isinstance(placed, Slots):
        return GroupResult([_remote_local(pair, direction) for pair in placed.pairs], placed.recomputed)
    consumer, producer = consumer_and_producer(local, remote, direction)
    unit = unit_tokens(local, remote, group)
    source_at: dict[int, int] = {}
    for index, block in placed.producer.items():
        for position, number in _units(producer, group, unit, index, block):
            source_at[position] = number
    result = GroupResult([], [])
    for index, block in placed.consumer:
        for position, number in _units(consumer, group, unit, index, block):
            wanted = index >= placed.consumer_from and position < _ceil(placed.data, unit)
            if wanted and position in source_at:
                result.pairs.append(_remote_local((source_at[position], number), direction))
            elif wanted and (position + 1) * unit > placed.must_from:
                raise Refused(f"group {group}: no producer block holds unit {position} ({unit} tokens)")
            else:
                result.untransferred.append(number)
    return result


def _units(layout: EngineLayout, group: int, unit: int, index: int, block: int) -> Iterator[tuple[int, int]]:
    """``(position in the sequence, number in memory)`` of every unit of one block."""
    per_block = layout.groups[group].block_size // unit
    for part in range(per_block):
        yield index * per_block + part, block * per_block + part


def _remote_local(pair: tuple[int, int], direction: Direction) -> tuple[int, int]:
    """``(producer, consumer)`` as ``(remote, local)``."""
    return pair if direction is Direction.READ else (pair[1], pair[0])


def _ceil(value: int, size: int) -> int:
    return -(-value // size)


# -- part two: which descriptors that makes


class Span(NamedTuple):
    """One side of a segment: ``size`` descriptors from id ``start`` on, in blocks of ``split`` units back to back."""

    start: int
    size: int
    device: int
    base: int
    stride: int
    split: int

    def address(self, unit: int, length: int) -> int:
        """Address of the first byte of a unit."""
        return self.base + unit // self.split * self.stride + unit % self.split * length


class Takes(Enum):
    """Which units of its groups a segment has descriptors for."""

    EVERY_UNIT = "one descriptor per unit"
    WHOLE_BLOCKS = "one descriptor per logical block that moves as a whole"
    OTHER_UNITS = "one descriptor per unit of the other blocks"


class Segment(NamedTuple):
    """Memory that both sides cut into equally long pieces."""

    length: int
    local: Span
    remote: Span
    groups: tuple[int, ...]
    takes: Takes
    ratio: int
    """Units per logical block, where blocks are told apart from units."""


class Cut(NamedTuple):
    """How groups cut the pages of a region: units per page and pages per logical block, local and remote."""

    splits: tuple[int, int]
    ratios: tuple[int, int]


class Descriptor(NamedTuple):
    """One copy: where it is on both sides."""

    segment: int
    length: int
    local_id: int
    remote_id: int
    local: Address
    remote: Address


def segments(local: EngineLayout, remote: EngineLayout) -> list[Segment]:
    """Every region cut into pieces, attention first, then per Mamba region the convolution parts and the state."""
    out: list[Segment] = []
    ends = [0, 0]

    def add(regions: Regions, offset: int, length: int, cut: Cut, groups: list[int], takes: Takes) -> None:
        """A page is cut into ``splits`` pieces of ``length`` bytes; ``ratios`` pages make what is counted."""
        spans = []
        for side, (region, split, ratio) in enumerate(zip(regions, cut.splits, cut.ratios, strict=True)):
            size = region.num_blocks // ratio * split
            spans.append(
                Span(ends[side], size, region.device_id, region.base_addr + offset, region.stride * ratio, split)
            )
            ends[side] += size
        out.append(Segment(length, spans[0], spans[1], tuple(groups), takes, cut.ratios[0]))

    for regions in zip(local.regions, remote.regions, strict=True):
        dense = all(region.stride == region.block_len for region in regions)
        for cut, groups in _cuts(local, remote, local.residents(regions[0])).items():
            length = regions[0].block_len // cut.splits[0]
            if dense and cut.splits == (1, 1) and cut.ratios[0] == cut.ratios[1] > 1:
                add(regions, 0, length * cut.ratios[0], cut, groups, Takes.WHOLE_BLOCKS)
                add(regions, 0, length, Cut((1, 1), (1, 1)), groups, Takes.OTHER_UNITS)
                out[-1] = out[-1]._replace(ratio=cut.ratios[0])
            else:
                add(regions, 0, length, Cut(cut.splits, (1, 1)), groups, Takes.EVERY_UNIT)
    if local.mamba is not None and remote.mamba is not None:
        lengths = [projection.size_bytes for projection in local.mamba.conv] + [local.mamba.state_bytes]
        for regions in zip(local.mamba.regions, remote.mamba.regions, strict=True):
            for cut, groups in _cuts(local, remote, local.residents(regions[0], mamba=True)).items():
                for part, length in enumerate(lengths):
                    add(regions, sum(lengths[:part]), length, cut, groups, Takes.EVERY_UNIT)
    return out


def _cuts(local: EngineLayout, remote: EngineLayout, residents: Sequence[int]) -> dict[Cut, list[int]]:
    """The groups of a region by the way they cut it; a Mamba slot is never cut."""
    cuts: dict[Cut, list[int]] = {}
    for group in residents:
        ours, theirs = local.groups[group], remote.groups[group]
        splits = (1, 1)
        if not local.is_mamba(group):
            unit = unit_tokens(local, remote, group)
            splits = (ours.kernel_block_size // unit, theirs.kernel_block_size // unit)
        cuts.setdefault(Cut(splits, (ours.blocks_per_logical, theirs.blocks_per_logical)), []).append(group)
    return cuts


def expected_descriptors(
    local: EngineLayout, remote: EngineLayout, direction: Direction, results: Sequence[GroupResult]
) -> list[Descriptor]:
    """The copies in the order in which they have to be listed."""
    out = []
    for number, segment in enumerate(segments(local, remote)):
        for group in sorted(segment.groups):
            for remote_piece, local_piece in _pieces(segment, direction, results[group].pairs):
                ends = ((segment.local, local_piece), (segment.remote, remote_piece))
                at = [(span.device, span.address(piece, segment.length)) for span, piece in ends]
                ids = [span.start + piece for span, piece in ends]
                out.append(Descriptor(number, segment.length, ids[0], ids[1], at[0], at[1]))
    return out


def _pieces(segment: Segment, direction: Direction, pairs: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """What a segment moves of the paired units of a group, in its own pieces."""
    if segment.takes is Takes.EVERY_UNIT:
        return pairs
    ratio = segment.ratio
    blocks: dict[int, list[tuple[int, int]]] = {}
    for pair in pairs:
        consumer_unit, _ = consumer_and_producer(pair[1], pair[0], direction)
        blocks.setdefault(consumer_unit // ratio, []).append(pair)
    if segment.takes is Takes.WHOLE_BLOCKS:
        return [(units[0][0] // ratio, units[0][1] // ratio) for units in blocks.values() if len(units) == ratio]
    return [pair for units in blocks.values() if len(units) < ratio for pair in units]


def count_runs(descriptors: Sequence[Descriptor]) -> int:
    """Copies left if neighbours that touch on both sides, inside a segment, become one."""
    return sum(not touches for touches in _touching(descriptors))


def _touching(descriptors: Sequence[Descriptor]) -> Iterator[bool]:
    """For every copy, whether it continues the one before it."""
    previous: Descriptor | None = None
    for each in descriptors:
        if previous is None or previous.segment != each.segment:
            yield False
        else:
            both = ((previous.local, each.local), (previous.remote, each.remote))
            yield all((device, address + previous.length) == after for (device, address), after in both)
        previous = each


# -- part three: bytes


class Memory:
    """The memory of one side: a cell stands for a byte and holds a name, its own until another is copied over it."""

    def __init__(self, layout: EngineLayout, first_name: int) -> None:
        extents: dict[int, list[int]] = {}
        for _, region, _ in layout.places():
            if region.num_blocks:
                extents.setdefault(region.device_id, []).extend((region.base_addr, region.end_addr))
        self.starts = {device: min(ends) for device, ends in extents.items()}
        self.names: dict[int, NDArray[np.int64]] = {}
        self.writes: dict[int, NDArray[np.int64]] = {}
        for device, ends in extents.items():
            size = max(ends) - min(ends)
            self.names[device] = np.arange(first_name, first_name + size, dtype=np.int64)
            self.writes[device] = np.zeros(size, dtype=np.int64)
            first_name += size

    def read(self, at: Address, length: int) -> NDArray[np.int64]:
        """Names of the bytes from an address on."""
        return self.names[at[0]][self._cells(at, length)].copy()

    def write(self, at: Address, names: NDArray[np.int64]) -> None:
        """Overwrites bytes and counts it."""
        cells = self._cells(at, len(names))
        self.names[at[0]][cells] = names
        self.writes[at[0]][cells] += 1

    def name(self, at: Address) -> int:
        """Name of one byte."""
        return int(self.read(at, 1)[0])

    def _cells(self, at: Address, length: int) -> slice:
        device, address = at
        first = address - self.starts[device]
        if first < 0 or first + length > len(self.names[device]):
            raise IndexError(f"device {device}: {length} bytes at {address} are not registered")
        return slice(first, first + length)


class Memories(NamedTuple):
    """Both sides."""

    local: Memory
    remote: Memory

    @classmethod
    def of(cls, local: EngineLayout, remote: EngineLayout) -> Memories:
        """Memory for two layouts in which no two bytes have the same name."""
        return cls(Memory(local, 0), Memory(remote, 10**12))


class PlanLike(Protocol):
    """What `move` needs of a plan."""

    @property
    def local_table(self) -> NDArray[np.uint64]: ...
    @property
    def remote_table(self) -> NDArray[np.uint64]: ...


class PairingLike(Protocol):
    """What `move` needs of a pairing."""

    @property
    def local_desc_ids(self) -> NDArray[np.int32]: ...
    @property
    def remote_desc_ids(self) -> NDArray[np.int32]: ...


def flatten(table: NDArray[np.uint64]) -> list[tuple[int, int, int]]:
    """Strided rows as one ``(addr, len, device)`` per descriptor."""
    return [
        (address + number * stride, length, device)
        for address, length, device, stride, count in table.tolist()
        for number in range(count)
    ]


def move(plan: PlanLike, direction: Direction, pairing: PairingLike, memories: Memories) -> None:
    """What NIXL does with a prepared transfer: one copy per pair of indices."""
    lists = (flatten(plan.local_table), flatten(plan.remote_table))
    for ids in zip(pairing.local_desc_ids.tolist(), pairing.remote_desc_ids.tolist(), strict=True):
        ends = []
        for memory, descriptors, number in zip(memories, lists, ids, strict=True):
            if number < 0:
                raise IndexError(f"descriptor id {number} is negative")
            address, length, device = descriptors[number]
            ends.append((memory, (device, address), length))
        (to, to_at, to_length), (source, source_at, source_length) = consumer_and_producer(ends[0], ends[1], direction)
        if to_length != source_length:
            raise ValueError(f"descriptors {ids} are {to_length} and {source_length} bytes long")
        to.write(to_at, source.read(source_at, source_length))


def expected_copies(
    local: EngineLayout, remote: EngineLayout, direction: Direction, placements: Sequence[Placement]
) -> dict[Address, Address]:
    """For every byte of the consumer that has to change, the byte of the producer that has to be there.

    Every byte of a block is given its coordinate: which byte of which token of which layer it is. A byte goes where its
    coordinate is. With unequal tensor parallelism the coordinate gains the head and a rank lists the heads it has;
    nothing else changes here.
    """
    consumer, producer = consumer_and_producer(local, remote, direction)
    copies: dict[Address, Address] = {}

    def copy(to: Address, source: Address) -> None:
        if to in copies:
            raise AssertionError(f"the request writes {to} twice")
        copies[to] = source

    for group, placed in enumerate(placements):
        if isinstance(placed, Slots):
            for theirs, ours in placed.pairs:
                sources = dict(_slot_bytes(producer, group, theirs))
                for coordinate, at in _slot_bytes(consumer, group, ours):
                    copy(at, sources[coordinate])
            continue
        unit = unit_tokens(local, remote, group)
        end = _ceil(placed.data, unit) * unit
        sources_at: dict[Coordinate, Address] = {}
        for index, block in placed.producer.items():
            for coordinate, at in _block_bytes(producer, group, index, block):
                sources_at[coordinate] = at
        for index, block in placed.consumer:
            for coordinate, at in _block_bytes(consumer, group, index, block):
                if index >= placed.consumer_from and coordinate.token < end and coordinate in sources_at:
                    copy(at, sources_at[coordinate])
    return copies


class Coordinate(NamedTuple):
    """Which byte of the model's state a byte of memory is, whoever holds it."""

    layer: int
    token: int
    offset: int


def _block_bytes(layout: EngineLayout, group: int, index: int, block: int) -> Iterator[tuple[Coordinate, Address]]:
    """Every byte of the block that holds the tokens from ``index * block_size``, in every layer.

    A kernel block of ``n`` bytes holds its tokens one after the other. Where ``n`` is no multiple of the tokens, a byte
    belongs to the token in which it begins; its offset counts from the start of the sequence.
    """
    ratio, tokens = layout.groups[group].blocks_per_logical, layout.groups[group].kernel_block_size
    for layer, region in enumerate(layout.regions):
        if group not in layout.residents(region):
            continue
        for page in range(ratio):
            for byte in range(region.block_len):
                offset = (index * ratio + page) * region.block_len + byte
                coordinate = Coordinate(layer, offset * tokens // region.block_len, offset)
                yield coordinate, (region.device_id, region.base_addr + (block * ratio + page) * region.stride + byte)


def _slot_bytes(layout: EngineLayout, group: int, slot: int) -> Iterator[tuple[Coordinate, Address]]:
    """Every byte of a state slot in every layer; a state has no tokens."""
    if layout.mamba is None:
        return
    ratio = layout.groups[group].blocks_per_logical
    for layer, region in enumerate(layout.mamba.regions):
        if group in layout.residents(region, mamba=True):
            first = region.base_addr + slot * ratio * region.stride
            for offset in range(layout.mamba.slot_bytes):
                yield Coordinate(layer, 0, offset), (region.device_id, first + offset)


def wrong_bytes(
    memories: Memories, before: Memories, direction: Direction, copies: Mapping[Address, Address]
) -> list[str]:
    """Every byte that is not what it has to be; ``before`` is untouched memory of the same layouts."""
    to, source = consumer_and_producer(memories.local, memories.remote, direction)
    old_to, old_source = consumer_and_producer(before.local, before.remote, direction)
    names = {device: cells.copy() for device, cells in old_to.names.items()}
    writes = {device: np.zeros_like(cells) for device, cells in old_to.names.items()}
    for (device, address), source_at in copies.items():
        names[device][address - to.starts[device]] = old_source.name(source_at)
        writes[device][address - to.starts[device]] = 1
    wrong = []
    for device, expected in names.items():
        for cell in np.flatnonzero((to.names[device] != expected) | (to.writes[device] != writes[device])).tolist():
            wrong.append(
                f"device {device}, address {to.starts[device] + cell}: byte {to.names[device][cell]} after "
                f"{to.writes[device][cell]} writes, expected {expected[cell]} after {writes[device][cell]}"
            )
    for device, unchanged in old_source.names.items():
        if not np.array_equal(source.names[device], unchanged):
            wrong.append(f"device {device}: the producer's memory changed")
    return wrong
