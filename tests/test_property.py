"""Random layouts and requests: the native code against the slow reference, and against memory byte by byte."""

import math
import random
import re
from collections.abc import Sequence
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import HealthCheck, event, given, note, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from nixl_fast import (
    BlockIdError,
    ConvProjection,
    Direction,
    EngineLayout,
    GeometryError,
    Group,
    GroupKind,
    MambaState,
    NixlFastError,
    Pairing,
    PairingError,
    Region,
    Side,
    TransferPlan,
)
from reference import (
    NOTHING,
    GroupResult,
    Memories,
    Placement,
    Refused,
    Request,
    Slots,
    Tokens,
    consumer_and_producer,
    count_runs,
    expected_copies,
    expected_descriptors,
    flatten,
    move,
    pages_of_block,
    reference_pairs,
    reference_placements,
    segments,
    share_memory,
    unit_tokens,
    wrong_bytes,
)
from vectors import VECTORS, layouts, numbers

MAX_TOKENS = 48
SHAPES = [(1, 1), (1, 1), (1, 2), (2, 1), (2, 3), (1, 4), (3, 1)]
"""Units per kernel block, local and remote."""

thorough = settings(deadline=None, max_examples=300, suppress_health_check=[HealthCheck.too_slow])
quick = settings(thorough, max_examples=80)


class World(NamedTuple):
    """Two ranks that can exchange blocks."""

    local: EngineLayout
    remote: EngineLayout
    direction: Direction

    @property
    def consumer(self) -> EngineLayout:
        return consumer_and_producer(self.local, self.remote, self.direction)[0]

    @property
    def producer(self) -> EngineLayout:
        return consumer_and_producer(self.local, self.remote, self.direction)[1]

    def plan(self) -> TransferPlan:
        return TransferPlan(self.local, self.remote, direction=self.direction)

    def request(
        self,
        consumer_ids: list[list[int]],
        producer_ids: list[list[int]],
        tokens: int | None,
        computed: list[int | None] | None,
    ) -> Request:
        return Request(*consumer_and_producer(consumer_ids, producer_ids, self.direction), tokens, computed)


# -- layouts


class Place(NamedTuple):
    """A region of both sides before it has an address: pages, and the groups that live there."""

    groups: tuple[int, ...]
    mamba: bool
    lengths: tuple[int, int]
    counts: tuple[int, int]
    replicated: bool


@st.composite
def worlds(draw: st.DrawFn) -> World:
    kinds = draw(st.lists(st.sampled_from(GroupKind), min_size=1, max_size=3))
    twins = draw(st.integers(0, 2)) == 0  # the two sides are alike, as they mostly are; whole blocks move at once
    usual = draw(st.sampled_from(SHAPES))
    shapes = [(1, 1) if twins else draw(st.sampled_from([usual, usual, *SHAPES])) for _ in kinds]
    pairs = [draw(group_pairs(kind, shape, twins=twins)) for kind, shape in zip(kinds, shapes, strict=True)]
    attention = [index for index, kind in enumerate(kinds) if kind is not GroupKind.MAMBA]
    states = [index for index, kind in enumerate(kinds) if kind is GroupKind.MAMBA]
    places = []
    for shape in dict.fromkeys(shapes[index] for index in attention):
        # Only groups whose kernel blocks have one ratio between the sides can share a region.
        alike = [index for index in attention if shapes[index] == shape]
        for groups in draw(resident_groups(alike)):
            length = draw(st.integers(1, 5))
            lengths = (length * shape[0], length * shape[1])
            places.append(Place(groups, False, lengths, draw(page_counts(pairs, groups)), draw(st.booleans())))
    places = draw(st.permutations(places))
    parts = draw(st.lists(st.builds(ConvProjection, st.integers(1, 4), st.booleans()), max_size=3))
    state_bytes = draw(st.integers(1, 6))
    slot = state_bytes + sum(part.size_bytes for part in parts)
    for groups in draw(resident_groups(states)) if states else ():
        ratios = [min(pairs[group][side].blocks_per_logical for group in groups) for side in (0, 1)]
        room = draw(st.integers(0, 2))
        lengths = (-(-slot // ratios[0]) + room, -(-slot // ratios[1]) + room)
        places.append(Place(groups, True, lengths, draw(page_counts(pairs, groups)), False))
    tp_size, tp_rank = draw(st.sampled_from([(1, 0), (2, 1)]))
    made = []
    for side, engine in enumerate(("L", "R")):
        mem_type = draw(st.sampled_from(["DRAM", "VRAM"]))
        how = "dense" if twins else draw(st.sampled_from(["dense", "padded", "pages of one size"]))
        regions = draw(placed_regions(places, side, how, mem_type, {True: states, False: attention}))
        in_order = [[r for r, p in zip(regions, places, strict=True) if p.mamba == mamba] for mamba in (False, True)]
        made.append(
            EngineLayout(
                engine,
                tuple(pair[side] for pair in pairs),
                tuple(in_order[0]),
                MambaState(tuple(in_order[1]), tuple(parts), state_bytes) if states else None,
                tp_rank=tp_rank,
                tp_size=tp_size,
                num_kv_heads=4,
                null_block_id=draw(st.sampled_from([None, 0, 0, 3, 10**6])),
            )
        )
    return World(made[0], made[1], draw(st.sampled_from(Direction)))


@st.composite
def group_pairs(draw: st.DrawFn, kind: GroupKind, shape: tuple[int, int], *, twins: bool) -> tuple[Group, Group]:
    """A group as both sides have it; ``shape`` is the number of units in their kernel blocks."""
    if kind is GroupKind.MAMBA:
        local, remote = (Group(kind, draw(st.integers(1, 8)), draw(st.integers(1, 3))) for _ in range(2))
        return local, remote
    unit = draw(st.integers(1, 4))
    if twins or draw(st.booleans()):  # one logical block size
        more = draw(st.integers(1, 3))
        ratios = (shape[1] * more, shape[0] * more)
    else:
        ratios = (draw(st.integers(1, 3)), draw(st.integers(1, 3)))
    window = draw(st.integers(1, 20)) if kind is GroupKind.SLIDING_WINDOW else None
    local, remote = (Group(kind, unit * shape[side] * ratios[side], ratios[side], window) for side in (0, 1))
    return local, remote


@st.composite
def resident_groups(draw: st.DrawFn, groups: list[int]) -> list[tuple[int, ...]]:
    """The groups of one region each, so that every group lives somewhere."""
    subsets = st.lists(st.sampled_from(groups), min_size=1, unique=True).map(lambda some: tuple(sorted(some)))
    out = draw(st.lists(subsets, max_size=2))
    homeless = tuple(index for index in groups if not any(index in each for each in out))
    together = draw(st.booleans())
    if homeless and together:
        return [*out, homeless]
    return [*out, *((index,) for index in homeless)]


@st.composite
def page_counts(draw: st.DrawFn, pairs: Sequence[tuple[Group, Group]], groups: tuple[int, ...]) -> tuple[int, int]:
    """Kernel pages of a region on both sides, which the ratio of every resident has to divide."""
    counts = [
        math.lcm(*(pairs[group][side].blocks_per_logical for group in groups)) * draw(st.integers(2, 12))
        for side in (0, 1)
    ]
    if draw(st.integers(0, 40)) == 40:
        counts[draw(st.integers(0, 1))] = 0
    return counts[0], counts[1]


@st.composite
def placed_regions(
    draw: st.DrawFn, places: Sequence[Place], side: int, how: str, mem_type: str, residents: dict[bool, list[int]]
) -> list[Region]:
    """Addresses for one side; regions that have no group in common may be the same memory."""
    homes: list[list[int]] = []
    for index, place in enumerate(places):
        free = [home for home in homes if not any(set(places[other].groups) & set(place.groups) for other in home)]
        share = draw(st.booleans())
        if free and share:
            draw(st.sampled_from(free)).append(index)
        else:
            homes.append([index])
    strides: dict[int, int] = {}
    offsets: dict[int, int] = {}
    devices: dict[int, int] = {}
    ends = {0: 0, 1: 0}
    least = max(place.lengths[side] for place in places) if how == "pages of one size" else 1
    for home in draw(st.permutations(homes)):
        device = draw(st.integers(0, 1))
        padding = draw(st.sampled_from([0, 1, 5])) if how == "padded" else 0
        stride = max([least, *(places[index].lengths[side] for index in home)]) + padding
        offset = ends[device] + draw(st.sampled_from([0, 0, 1, 7]))
        for index in home:
            strides[index], offsets[index], devices[index] = stride, offset, device
            count, length = places[index].counts[side], places[index].lengths[side]
            ends[device] = max(ends[device], offset + (max(count, 1) - 1) * stride + length)
    origins = [draw(st.sampled_from([0, 0, 2**40, 2**64 - max(ends[device], 1)])) for device in (0, 1)]
    out = []
    for index, place in enumerate(places):
        everyone = list(place.groups) == residents[place.mamba]
        dense = strides[index] == place.lengths[side]
        out.append(
            Region(
                origins[devices[index]] + offsets[index],
                place.lengths[side],
                place.counts[side],
                None if dense and draw(st.booleans()) else strides[index],
                None if everyone and draw(st.booleans()) else place.groups,
                device_id=devices[index],
                mem_type=mem_type,
                replicated=place.replicated,
            )
        )
    return out


# -- requests that an engine could make


class Case(NamedTuple):
    """A request together with the truth: where its blocks really are in the sequence."""

    world: World
    request: Request
    truth: list[Placement]
    certain: list[bool]
    """Whether the positions are absolute; otherwise only the distance from the end can be known."""


Entries = list[int | None]
"""What each entry of a list stands for: the index of a block in the sequence, None for a placeholder."""


class Lists(NamedTuple):
    """Both lists of one group before they have ids."""

    consumer: Entries
    producer: Entries
    computed: int | None
    data: int = 0


@st.composite
def cases(draw: st.DrawFn) -> Case:
    world = draw(worlds())
    consumer, producer = world.consumer, world.producer
    groups = range(len(consumer.groups))
    attention = [index for index in groups if not consumer.is_mamba(index)]
    room = [usable(consumer, index) * consumer.groups[index].block_size for index in attention]
    tokens = draw(st.integers(1, min([MAX_TOKENS, *(each for each in room if each)])))
    if not all(usable(producer, index) for index in attention) or draw(st.integers(0, 19)) == 19:
        tokens = 0
    known = not all(may_leave_tokens_out(world, index) for index in attention) or draw(st.integers(0, 3)) > 0
    lists = []
    for index in groups:
        if consumer.is_mamba(index):
            lists.append(draw(slot_lists(world, index)))
        elif known:
            lists.append(draw(lists_with_tokens(world, index, tokens)))
        else:
            lists.append(draw(lists_without_tokens(world, index, tokens)))
    consumer_ids = draw(consumer_block_ids(consumer, [each.consumer for each in lists]))
    producer_ids = [draw(producer_block_ids(producer, index, lists[index].producer)) for index in groups]
    ids = zip(consumer_ids, producer_ids, strict=True)
    truth = [true_placement(consumer, index, lists[index], *pair) for index, pair in enumerate(ids)]
    computed: list[int | None] | None = [each.computed for each in lists]
    if all(each.computed is None for each in lists) and draw(st.booleans()):
        computed = None
    request = world.request(consumer_ids, producer_ids, tokens if known else None, computed)
    return Case(world, request, truth, [known or each.computed is not None for each in lists])


def usable(layout: EngineLayout, index: int) -> int:
    """Blocks of a group that are not the placeholder."""
    limit = layout.num_blocks(index)
    return limit - (layout.null_block_id is not None and layout.null_block_id < limit)


def may_leave_tokens_out(world: World, index: int) -> bool:
    local, remote = world.local.groups[index], world.remote.groups[index]
    return local.block_size == remote.block_size or local.sliding_window is None


@st.composite
def lists_with_tokens(draw: st.DrawFn, world: World, index: int, tokens: int) -> Lists:
    """The number of tokens is passed: some blocks are cached, some are listed for tokens to come."""
    group, theirs = world.consumer.groups[index], world.producer.groups[index]
    last, end = -(-tokens // group.block_size), -(-tokens // theirs.block_size)
    first = draw(st.sampled_from([0, draw(st.integers(0, last))]))
    ahead = draw(st.sampled_from([0, 0, 0, 1, 2]))
    wanted: Entries = list(range(first, last + ahead))
    if group.sliding_window is None:
        more = draw(st.sampled_from([0, 0, 0, 1, 3])) if usable(world.producer, index) else 0
        listed: Entries = list(range(end + more))
    else:
        needed = max(tokens - group.sliding_window, first * group.block_size, 0)
        wanted = draw(with_gaps(wanted, needed // group.block_size, world.consumer))
        needed = min(needed // theirs.block_size, end)
        listed = draw(with_gaps(list(range(draw(st.integers(0, needed)), end)), needed, world.producer))
    return Lists(wanted, listed, first if ahead or draw(st.booleans()) else None, tokens)


@st.composite
def lists_without_tokens(draw: st.DrawFn, world: World, index: int, tokens: int) -> Lists:
    """The number of tokens is not passed: whole blocks of one size, or whole sequences."""
    group, theirs = world.consumer.groups[index], world.producer.groups[index]
    last, end = -(-tokens // group.block_size), -(-tokens // theirs.block_size)
    if group.block_size != theirs.block_size:
        return Lists(list(range(last)), list(range(end)), 0, min(last * group.block_size, end * theirs.block_size))
    first = draw(st.sampled_from([0, draw(st.integers(0, last))]))
    wanted: Entries = list(range(first, last))
    listed: Entries = list(range(end))
    if group.sliding_window is not None:
        needed = max(end - (-(-group.sliding_window // group.block_size) + 1), first)
        wanted = draw(with_gaps(wanted, draw(st.sampled_from([needed, last])), world.consumer))
        needed = max(needed, wanted.count(None) + first)
        listed = draw(with_gaps(listed[draw(st.integers(0, needed)) :], needed, world.producer))
    return Lists(wanted, listed, draw(st.sampled_from([None, first])), last * group.block_size)


@st.composite
def with_gaps(draw: st.DrawFn, entries: Entries, needed: int, layout: EngineLayout) -> Entries:
    """With placeholders before block ``needed``, if the engine has them."""
    if layout.null_block_id is None:
        return entries
    start = draw(st.sampled_from([0, needed, draw(st.integers(0, needed))]))
    return [None if entry is None or entry < start else entry for entry in entries]


@st.composite
def slot_lists(draw: st.DrawFn, world: World, index: int) -> Lists:
    """State slots, numbered: the consumer lists the last ones of the producer's, and maybe one to be recomputed."""
    gaps = world.consumer.null_block_id is not None
    slots = min(draw(st.sampled_from([2, 1, 3, 0])), usable(world.producer, index))
    wanted: Entries = list(range(slots))
    listed: Entries = list(range(slots))
    if slots > 1 and gaps and draw(st.integers(0, 3)) == 0:
        wanted[draw(st.integers(1, slots - 1))] = None
    if slots and draw(st.integers(0, 3)) == 0:
        wanted.append(None if gaps and draw(st.booleans()) else slots)
    elif usable(world.producer, index):
        older = st.sampled_from([-1] if world.producer.null_block_id is None else [-1, None])
        listed = draw(st.lists(older, max_size=3)) + listed
    if gaps:
        wanted = [*[None] * draw(st.sampled_from([0, 0, 1, 3])), *wanted]
    return Lists(wanted, listed, draw(st.sampled_from([None, 0, 7])))


@st.composite
def consumer_block_ids(draw: st.DrawFn, layout: EngineLayout, lists: list[Entries]) -> list[list[int]]:
    """Blocks that nobody else has; a group for which there is no memory left lists nothing."""
    used: list[set[int]] = [set() for _ in lists]
    out: list[list[int]] = [[] for _ in lists]
    for index in sorted(range(len(lists)), key=lambda index: -layout.groups[index].blocks_per_logical):
        taken: set[int] = set()
        for other in range(len(lists)):
            if share_memory(layout, index, other):
                taken |= used[other]
        free = [block for block in draw(order(layout, index)) if not pages_of_block(layout, index, block) & taken]
        if sum(entry is not None for entry in lists[index]) > len(free):
            continue
        for entry in lists[index]:
            if entry is not None:
                used[index] |= pages_of_block(layout, index, free[0])
            out[index].append(free.pop(0) if entry is not None else null_of(layout))
    return out


@st.composite
def producer_block_ids(draw: st.DrawFn, layout: EngineLayout, index: int, entries: Entries) -> list[int]:
    """Blocks of the producer, which may list one twice."""
    free = draw(order(layout, index))
    if len(free) < len(entries) or draw(st.integers(0, 9)) == 0:
        free = [free[draw(st.integers(0, len(free) - 1))] for _ in entries if free]
    return [null_of(layout) if entry is None else free.pop(0) for entry in entries]


def null_of(layout: EngineLayout) -> int:
    assert layout.null_block_id is not None
    return layout.null_block_id


@st.composite
def order(draw: st.DrawFn, layout: EngineLayout, index: int) -> list[int]:
    """Every usable id of a group: ascending from somewhere, descending, or scattered."""
    ids = [block for block in range(layout.num_blocks(index)) if block != layout.null_block_id]
    how = draw(st.sampled_from(["ascending", "descending", "scattered", "in pairs"]))
    if how == "descending":
        ids.reverse()
    elif how != "ascending":
        size = 1 if how == "scattered" else 2
        runs = [ids[first : first + size] for first in range(0, len(ids), size)]
        random.Random(draw(st.integers(0, 2**16))).shuffle(runs)
        ids = [block for run in runs for block in run]
    first = draw(st.integers(0, len(ids) // 2))
    return ids[first:] + ids[:first]


def true_placement(
    consumer: EngineLayout, index: int, lists: Lists, consumer_ids: list[int], producer_ids: list[int]
) -> Placement:
    """Where the blocks are, not from the rules but from how the lists were made."""
    if not consumer_ids:
        return NOTHING
    ours = [(e, block) for e, block in zip(lists.consumer, consumer_ids, strict=True) if e is not None]
    theirs = {e: block for e, block in zip(lists.producer, producer_ids, strict=True) if e is not None}
    if consumer.is_mamba(index):
        pairs = [(theirs[entry], block) for entry, block in ours if entry in theirs]
        return Slots(pairs, [block for entry, block in ours if entry not in theirs])
    return Tokens(ours, 0, theirs, lists.data, 0)


# -- requests that an engine should not make


@st.composite
def mutated_cases(draw: st.DrawFn) -> tuple[World, list[Request]]:
    """Requests in which something small went wrong, or not wrong enough to matter."""
    world, request, _, _ = draw(cases())
    return world, draw(st.lists(mutated(world, request), min_size=1, max_size=10))


@st.composite
def mutated(draw: st.DrawFn, world: World, request: Request) -> Request:
    ids = [[list(each) for each in lists] for lists in (request.local_ids, request.remote_ids)]
    groups = len(world.local.groups)
    tokens = request.num_tokens
    computed = None if request.num_computed_blocks is None else list(request.num_computed_blocks)
    for what in draw(st.lists(st.sampled_from(["ids", "ids", "ids", "tokens", "computed"]), min_size=1, max_size=2)):
        index = draw(st.integers(0, groups - 1))
        if what == "ids":
            side = draw(st.integers(0, 1))
            ids[side][index] = draw(damaged(ids[side], (world.local, world.remote)[side], index))
        elif what == "tokens":
            bounds = (0, MAX_TOKENS) if tokens is None else (max(0, tokens - 9), tokens + 9)
            tokens = draw(st.one_of(st.integers(*bounds), st.sampled_from([None, 0, 2**40, 2**48 - 1])))
        else:
            computed = computed or [None] * groups
            before = computed[index] or 0
            near = st.integers(max(before - 2, 0), min(before + 2, 2**32 - 1))
            computed[index] = draw(st.one_of(near, near, st.sampled_from([None, 0, 2**31, 2**32 - 1])))
    if draw(st.integers(0, 19)) == 19:  # a wrong number of groups
        where = draw(st.integers(0, 2))
        if where < 2:
            ids[where] = draw(st.sampled_from([ids[where][:-1], [*ids[where], []]]))
        elif computed is not None:
            computed = draw(st.sampled_from([computed[:-1], [*computed, None]]))
    return Request(ids[0], ids[1], tokens, computed)


DAMAGES = [
    "drop", "cut", "behead", "reverse", "insert", "replace", "bad id", "placeholder", "twice", "more", "others", "stolen"
]  # fmt: skip


@st.composite
def damaged(  # noqa: PLR0911 - one per damage
    draw: st.DrawFn, lists: list[list[int]], layout: EngineLayout, index: int
) -> list[int]:
    """The list of one group with something changed."""
    ids = lists[index]
    at = draw(st.integers(0, max(len(ids) - 1, 0)))
    first, old, rest = ids[:at], ids[at : at + 1], ids[at + 1 :]
    match draw(st.sampled_from(DAMAGES)):
        case "drop":
            return first + rest
        case "cut":
            return first
        case "behead":
            return rest
        case "reverse":
            return first + rest[::-1] + old
        case "insert":
            return [*first, draw(any_id(layout, index)), *old, *rest]
        case "replace":
            return [*first, draw(any_id(layout, index)), *rest]
        case "bad id":
            return [*first, draw(bad_ids(layout, index)), *rest]
        case "placeholder":
            return ids if layout.null_block_id is None else [*first, layout.null_block_id, *rest]
        case "twice":
            return [*first, draw(st.sampled_from(ids or [0])), *rest]
        case "more":
            new = [block for block in draw(order(layout, index)) if block not in ids]
            return ids + new[: draw(st.integers(1, 3))]
        case "others":
            return [block for block in draw(order(layout, index)) if block not in ids][: len(ids)]
        case _:
            return draw(st.sampled_from(lists))[: len(ids)]


@st.composite
def any_cases(draw: st.DrawFn) -> tuple[World, list[Request]]:
    """Lists that have nothing to do with each other."""
    world = draw(worlds())
    return world, draw(st.lists(any_requests(world), min_size=1, max_size=5))


@st.composite
def any_requests(draw: st.DrawFn, world: World) -> Request:
    tokens = draw(st.one_of(st.none(), st.integers(0, MAX_TOKENS)))
    ids = []
    for layout in (world.local, world.remote):
        lists = []
        for index, group in enumerate(layout.groups):
            whole = -(-(tokens or 12) // group.block_size)
            valid = draw(order(layout, index))[: draw(st.sampled_from([whole, whole, draw(st.integers(0, 6))]))]
            odd = st.lists(any_id(layout, index), max_size=4)
            lists.append(draw(odd) if draw(st.integers(0, 9)) == 9 else valid)
        ids.append(lists)
    counts = st.one_of(st.none(), st.integers(0, 5))
    groups = len(world.local.groups)
    computed = draw(st.one_of(st.none(), st.just([0] * groups), st.tuples(*[counts] * groups).map(list)))
    return Request(ids[0], ids[1], tokens, computed)


def bad_ids(layout: EngineLayout, index: int) -> st.SearchStrategy[int]:
    return st.sampled_from([-1, layout.num_blocks(index), 2**31, 2**32, 2**32 + 1, -(2**40)])


def any_id(layout: EngineLayout, index: int) -> st.SearchStrategy[int]:
    """Mostly ids of the group, now and then a placeholder or a bad one."""
    good = st.integers(0, max(layout.num_blocks(index) - 1, 0))
    null = good if layout.null_block_id is None else st.just(layout.null_block_id)
    return st.one_of(good, good, good, good, null, bad_ids(layout, index))


# -- properties


@pytest.mark.parametrize("case", [pytest.param(case, id=case["id"]) for case in VECTORS["pair"]])
def test_the_reference_knows_the_golden_vectors(case: dict[str, Any]) -> None:
    local, remote = layouts(case)
    ids = [[numbers(items) for items in case[f"{side}_ids"]] for side in ("local", "remote")]
    direction = Direction(case.get("direction", "read"))

    def reference() -> list[GroupResult]:
        return reference_pairs(local, remote, direction, ids[0], ids[1], case.get("num_tokens"), case.get("computed"))

    if "error" in case:
        with pytest.raises(Refused):
            reference()
        return
    for (pairs, untransferred), expect in zip(reference(), case["expect"], strict=True):
        assert pairs == list(zip(numbers(expect["remote"]), numbers(expect["local"]), strict=True))
        assert untransferred == numbers(expect["rest"])


def answer(world: World, plan: TransferPlan, request: Request) -> Pairing | None:
    """The native answer after it was compared with the reference; None if both refuse."""
    before = repr(request)
    reason = None
    try:
        expected = reference_pairs(
            *world, request.local_ids, request.remote_ids, request.num_tokens, request.num_computed_blocks
        )
    except Refused as refused:
        reason = str(refused)
    error = None
    try:
        pairing = pair(plan, request)
    except (BlockIdError, PairingError, GeometryError) as refused:
        error = repr(refused)
    assert repr(request) == before
    assert (error is None) == (reason is None), f"only one of the two refuses: native {error}, reference {reason}"
    if error is not None:
        return None
    for group, (pairs, untransferred) in enumerate(expected):
        remote_units, local_units = pairing.kernel_pairs(group)
        assert list(zip(remote_units.tolist(), local_units.tolist(), strict=True)) == pairs
        assert pairing.untransferred(group).tolist() == untransferred
    descriptors = expected_descriptors(*world, expected)
    assert pairing.local_desc_ids.tolist() == [each.local_id for each in descriptors]
    assert pairing.remote_desc_ids.tolist() == [each.remote_id for each in descriptors]
    for array in (pairing.local_desc_ids, pairing.remote_desc_ids):
        assert array.dtype == np.int32
        assert array.ndim == 1
        assert array.flags.c_contiguous
        assert len(array) == pairing.num_descs
    assert pairing.notify_only == (not descriptors)
    assert pairing.num_bytes == sum(each.length for each in descriptors)
    assert pairing.num_runs == count_runs(descriptors)
    return pairing


def pair(plan: TransferPlan, request: Request) -> Pairing:
    local_ids, remote_ids, tokens, computed = request
    return plan.pair(local_ids, remote_ids, num_tokens=tokens, num_computed_blocks=computed)


def moves_the_right_bytes(world: World, request: Request, plan: TransferPlan, pairing: Pairing) -> None:
    """Every byte that has to be written is written once, with the right one, and no other byte changes."""
    copies = expected_copies(*world, reference_placements(*world, request))
    before, memories = (Memories.of(world.local, world.remote) for _ in range(2))
    move(plan, world.direction, pairing, memories)
    assert not wrong_bytes(memories, before, world.direction, copies)
    assert len(copies) == pairing.num_bytes


def describe(world: World, request: Request | None = None) -> None:
    note(f"{world.direction}; local = {world.local}")
    note(f"remote = {world.remote}")
    if request is not None:
        note(f"request = {request}")


@thorough
@given(cases())
def test_a_right_request_moves_every_byte_to_its_token(case: Case) -> None:
    world, request, truth, certain = case
    describe(world, request)
    plan = world.plan()
    pairing = answer(world, plan, request)
    assert pairing is not None, "the request is right and was refused"
    event("moves nothing" if pairing.notify_only else "moves bytes")
    placements = reference_placements(*world, request)
    for placed, true, absolute in zip(placements, truth, certain, strict=True):
        if isinstance(true, Slots) or isinstance(placed, Slots):
            assert placed == true
            continue
        shifts = {ours[0] - theirs[0] for ours, theirs in zip(placed.consumer, true.consumer, strict=True)}
        shift = shifts.pop() if shifts else 0
        assert not shifts
        assert not (shift and absolute)
        assert placed.consumer == [(index + shift, block) for index, block in true.consumer]
        assert placed.producer.items() <= {(index + shift, block) for index, block in true.producer.items()}
    moves_the_right_bytes(world, request, plan, pairing)


@thorough
@given(mutated_cases())
def test_a_damaged_request_is_refused_or_moves_the_right_bytes(case: tuple[World, list[Request]]) -> None:
    refused_or_right(*case)


@thorough
@given(any_cases())
def test_any_request_is_refused_or_moves_the_right_bytes(case: tuple[World, list[Request]]) -> None:
    refused_or_right(*case)


def refused_or_right(world: World, requests: list[Request]) -> None:
    plan = world.plan()
    for request in requests:
        describe(world, request)
        pairing = answer(world, plan, request)
        event("refused" if pairing is None else "moves nothing" if pairing.notify_only else "moves bytes")
        if pairing is not None:
            moves_the_right_bytes(world, request, plan, pairing)


SHORT = list(
    product(
        [None, 0, 1, 3, 4, 5, 8, 9],  # tokens
        [None, 0, 1, 2],  # computed
        [[5], [5, 4], [0, 4], [5, 6, 4], [0, 0, 7, 8]],  # consumer
        [[], [3], [0, 2], [4, 3], [3, 4, 5], [0, 4, 3, 6]],  # producer
    )
)


@pytest.mark.parametrize("window", [None, 1, 3, 5])
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [((4, 1), (4, 1)), ((4, 2), (4, 2)), ((4, 2), (4, 1)), ((2, 1), (4, 1)), ((4, 1), (2, 1)), ((6, 1), (4, 1))],
)
def test_every_short_request(ours: tuple[int, int], theirs: tuple[int, int], window: int | None) -> None:
    kind = GroupKind.SLIDING_WINDOW if window else GroupKind.FULL_ATTENTION
    sides = []
    for size, ratio in (ours, theirs):
        region = Region(4096, 12 * size // ratio, 10 * ratio)
        sides.append(EngineLayout("E", (Group(kind, size, ratio, window),), (region,), null_block_id=0))
    world = World(sides[0], sides[1], Direction.READ)
    plan = world.plan()
    for tokens, computed, local_ids, remote_ids in SHORT:
        answer(world, plan, Request([local_ids], [remote_ids], tokens, [computed]))


@pytest.mark.parametrize("run", [1, 2, 7, 10**6])
@pytest.mark.parametrize(
    ("ours", "theirs", "direction"),
    [
        ((16, 1), (16, 1), Direction.READ),
        ((16, 4), (16, 4), Direction.READ),
        ((32, 2), (16, 1), Direction.WRITE),
        ((48, 3), (64, 2), Direction.READ),
        ((16, 1), (128, 1), Direction.WRITE),
    ],
)
def test_a_long_request(ours: tuple[int, int], theirs: tuple[int, int], direction: Direction, run: int) -> None:
    tokens, regions = 20_011, 3
    sides, ids = [], []
    for side, (size, ratio) in enumerate((ours, theirs)):
        length, count = 2 * size // ratio, -(-tokens // size)
        places = [Region(10**9 * index, length, 2 * count * ratio) for index in range(regions)]
        sides.append(EngineLayout("E", (Group(GroupKind.FULL_ATTENTION, size, ratio),), tuple(places)))
        runs = [list(range(2 * count))[first : first + run] for first in range(0, 2 * count, run)]
        random.Random(side).shuffle(runs)
        ids.append([block for each in runs for block in each][:count])
    world = World(sides[0], sides[1], direction)
    pairing = answer(world, world.plan(), Request([ids[0]], [ids[1]], tokens))
    assert pairing is not None
    assert pairing.num_descs >= regions * tokens // max(ours[0], theirs[0])


@quick
@given(worlds())
def test_tables_list_every_unit(world: World) -> None:
    describe(world)
    plan = world.plan()
    for side, table in ((Side.LOCAL, plan.local_table), (Side.REMOTE, plan.remote_table)):
        expected: list[tuple[int, int, int]] = []
        for segment in segments(world.local, world.remote):
            span = segment.local if side is Side.LOCAL else segment.remote
            assert span.start == len(expected)
            expected += [(span.address(unit, segment.length), segment.length, span.device) for unit in range(span.size)]
        for array in (table, plan.expanded(side)):
            assert array.dtype == np.uint64
            assert array.flags.c_contiguous
        assert flatten(table) == expected
        assert list(map(tuple, plan.expanded(side).tolist())) == expected
        assert all(count >= 1 and stride >= length >= 1 for _, length, _, stride, count in table.tolist())
    units = [
        0 if world.local.is_mamba(group) else unit_tokens(world.local, world.remote, group)
        for group in range(len(world.local.groups))
    ]
    assert plan.group_unit_tokens == tuple(units)
    assert plan.unit_tokens == math.gcd(*units)


FORMS = ["list", "tuple", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"]


def as_form(ids: Sequence[int], form: str, layout: str) -> Any:
    """The same ids as another object, where they fit."""
    if form == "list":
        return list(ids)
    if form == "tuple":
        return tuple(ids)
    dtype = np.dtype(form)
    if any(not np.iinfo(dtype).min <= each <= np.iinfo(dtype).max for each in ids):
        return list(ids)
    array: NDArray[Any] = np.array(ids, dtype)
    if layout == "strided":
        array = np.repeat(array, 2)[::2]
    elif layout == "reversed":
        array = array[::-1].copy()[::-1]
    elif layout == "read-only":
        array.flags.writeable = False
    return array


@quick
@given(mutated_cases(), st.data())
def test_every_form_of_ids_gives_the_same_answer(case: tuple[World, list[Request]], data: st.DataObject) -> None:
    world, request = case[0], case[1][0]
    describe(world, request)
    plan = world.plan()
    local, remote = (
        [
            as_form(
                ids,
                data.draw(st.sampled_from(FORMS)),
                data.draw(st.sampled_from(["plain", "strided", "reversed", "read-only"])),
            )
            for ids in lists
        ]
        for lists in (request.local_ids, request.remote_ids)
    )
    outer: Any = tuple if data.draw(st.booleans()) else list
    other = Request(outer(local), outer(remote), request.num_tokens, request.num_computed_blocks)
    before = repr(other)
    error = None
    try:
        expected = pair(plan, request)
    except NixlFastError as refused:
        error = refused
    if error is not None:
        with pytest.raises(type(error), match=f"^{re.escape(str(error))}$"):
            pair(plan, other)
        return
    pairing = pair(plan, other)
    assert repr(other) == before
    assert repr(pairing) == repr(expected)
    assert np.array_equal(pairing.local_desc_ids, expected.local_desc_ids)
    assert np.array_equal(pairing.remote_desc_ids, expected.remote_desc_ids)
    for group in range(len(world.local.groups)):
        assert np.array_equal(pairing.kernel_pairs(group), expected.kernel_pairs(group))
        assert np.array_equal(pairing.untransferred(group), expected.untransferred(group))


def test_a_chain_of_shared_regions_is_no_shared_memory() -> None:
    groups = tuple(Group(GroupKind.FULL_ATTENTION, 1) for _ in range(3))
    regions = (Region(0, 1, 8, groups=(0, 1)), Region(64, 1, 8, groups=(1, 2)))
    world = World(EngineLayout("L", groups, regions), EngineLayout("R", groups, regions), Direction.READ)
    request = Request([[5], [4], [5]], [[1], [2], [3]])
    pairs = reference_pairs(*world, request.local_ids, request.remote_ids)
    assert pairs == [([(1, 5)], []), ([(2, 4)], []), ([(3, 5)], [])]
    plan = world.plan()
    moves_the_right_bytes(world, request, plan, pair(plan, request))


def test_an_empty_region_may_be_at_the_end_of_memory() -> None:
    groups = (Group(GroupKind.MAMBA, 1),)
    state = MambaState((Region(2**64 - 1, 2, 0),), (ConvProjection(1),), 1)
    plan = TransferPlan(EngineLayout("L", groups, (), state), EngineLayout("R", groups, (), state))
    assert plan.local_table.shape == (0, 5)


def test_a_placeholder_needs_no_source() -> None:
    groups = (Group(GroupKind.SLIDING_WINDOW, 4, sliding_window=8),)
    local, remote = (EngineLayout(name, groups, (Region(0, 4, 9),), null_block_id=0) for name in ("L", "R"))
    assert reference_pairs(local, remote, Direction.READ, [[0, 0, 7, 8]], [[5, 6]]) == [([(5, 7), (6, 8)], [])]
    pairing = TransferPlan(local, remote).pair([[0, 0, 7, 8]], [[5, 6]])
    assert pairing.local_desc_ids.tolist() == [7, 8]


def test_a_run_may_cross_groups() -> None:
    groups = (Group(GroupKind.FULL_ATTENTION, 1), Group(GroupKind.FULL_ATTENTION, 1))
    local, remote = (EngineLayout(name, groups, (Region(0, 4, 9),)) for name in ("L", "R"))
    pairing = TransferPlan(local, remote).pair([[1], [2]], [[3], [4]])
    assert (pairing.local_desc_ids.tolist(), pairing.remote_desc_ids.tolist()) == ([1, 2], [3, 4])
    assert pairing.num_runs == 1
