"""Random engines of several ranks against what every byte has to be: tensor parallelism, GQA, MLA, Mamba, stages.

The model under test holds, per layer, ``tb`` bytes for each token and KV head (or for each token, where a layer is
replicated), and per Mamba slot the bytes of the unsliced state. A rank's memory is a slice of that. The plans only see
layouts and block ids; what the consumer has to hold afterwards is written down here from token positions and heads.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
from hypothesis import given, note, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from nixl_fast import (
    BlockOrder,
    ConvProjection,
    Direction,
    EngineLayout,
    Group,
    GroupKind,
    MambaState,
    Pairing,
    Region,
    TransferPlan,
    plan_peer,
)

FULL, WINDOW, MLA, MAMBA = GroupKind.FULL_ATTENTION, GroupKind.SLIDING_WINDOW, GroupKind.MLA, GroupKind.MAMBA
TOKEN_BYTES = 2
CONV = ((16, True), (4, False), (8, True))
"""Bytes of the unsliced convolution projections, and whether tensor parallelism slices them."""
STATE = 32
Bytes = NDArray[np.uint8]


@dataclass
class Layer:
    """One region of every rank, and what the model holds in it by position."""

    name: str
    group: int
    data: Bytes
    """Attention: token x head x byte (one head where replicated). Mamba: slot of the sequence x byte."""


@dataclass
class Side:
    """One engine: how it blocks the sequence, and which blocks it gave the request."""

    tp: int
    stages: int
    ratios: list[int]
    kernels: list[int]
    pads: list[int]
    blocks: list[list[int]]
    firsts: list[int]
    """Index, in the sequence, of each group's first listed block."""
    pool: int = 12
    memory: dict[tuple[int, int], Bytes] = field(default_factory=dict)


@dataclass
class World:
    kinds: list[GroupKind]
    windows: list[int | None]
    layers: list[Layer]
    heads: int
    tokens: int
    producer: Side
    consumer: Side
    direction: Direction

    def shard(self, size: int, tp: int, rank: int) -> range:
        return range(size // tp * rank, size // tp * (rank + 1))

    def held(self, tp: int, rank: int) -> range:
        """KV heads of a rank."""
        if tp <= self.heads:
            return self.shard(self.heads, tp, rank)
        head = rank // (tp // self.heads)
        return range(head, head + 1)

    def heads_of(self, layer: Layer, tp: int, rank: int) -> range:
        return range(1) if self.kinds[layer.group] is MLA else self.held(tp, rank)

    def state_parts(self, tp: int, rank: int) -> list[range]:
        """Bytes of the unsliced slot that a rank holds, part by part."""
        parts, start = [], 0
        for size, sharded in (*CONV, (STATE, True)):
            part = self.shard(size, tp, rank) if sharded else range(size)
            parts.append(range(start + part.start, start + part.stop))
            start += size
        return parts

    def block_len(self, side: Side, layer: Layer, rank: int) -> int:
        if self.kinds[layer.group] is MAMBA:  # pages that together hold a slot
            slot = sum(map(len, self.state_parts(side.tp, rank)))
            return -(-slot // side.ratios[layer.group])
        return len(self.heads_of(layer, side.tp, rank)) * side.kernels[layer.group] * TOKEN_BYTES

    def stage_of(self, side: Side, layer: Layer) -> int:
        of_group = [each for each in self.layers if each.group == layer.group]
        return of_group.index(layer) % side.stages

    def layout(self, name: str, side: Side, stage: int, rank: int) -> EngineLayout:
        """A rank's layout; addresses are offsets in its memory, which is made here."""
        groups: list[Group] = []
        regions: list[Region] = []
        states: list[Region] = []
        end = 0
        for index, kind in enumerate(self.kinds):
            ratio = side.ratios[index]
            groups.append(Group(kind, side.kernels[index] * ratio, ratio, self.windows[index]))
        for layer in self.layers:
            if self.stage_of(side, layer) != stage:
                continue
            ratio, length = side.ratios[layer.group], self.block_len(side, layer, rank)
            stride = length + side.pads[layer.group]
            blocks = side.pool * ratio
            region = Region(end, length, blocks, stride, (layer.group,), layer=layer.name, order=BlockOrder.HEAD_MAJOR)
            (states if self.kinds[layer.group] is MAMBA else regions).append(region)
            end += blocks * stride + 8
        mamba = None
        if states:
            parts = self.state_parts(side.tp, rank)
            conv = tuple(ConvProjection(len(part), sharded) for part, (_, sharded) in zip(parts, CONV, strict=False))
            mamba = MambaState(tuple(states), conv, len(parts[-1]))
        side.memory[stage, rank] = np.random.default_rng(rank + 10 * stage).integers(0, 256, end + 1, np.uint8)
        return EngineLayout(
            name,
            tuple(groups),
            tuple(regions),
            mamba,
            tp_rank=rank,
            tp_size=side.tp,
            num_kv_heads=self.heads,
            pp_rank=stage,
            pp_size=side.stages,
        )

    def put(self, side: Side, layout: EngineLayout, memory: Bytes, layer: Layer, positions: range) -> None:
        """Writes the model's bytes of a layer into a rank's memory, for token (or slot) positions of listed blocks."""
        group, rank = layer.group, layout.tp_rank
        ratio, kernel, ids = side.ratios[group], side.kernels[group], side.blocks[group]
        places = [*layout.regions, *(layout.mamba.regions if layout.mamba else ())]
        region = next(region for region in places if region.layer == layer.name)
        for position in positions:
            if self.kinds[group] is MAMBA:
                index = position - side.firsts[group]
                if not 0 <= index < len(ids):
                    continue
                start = region.base_addr + ids[index] * ratio * region.stride
                for part in self.state_parts(side.tp, rank):
                    memory[start : start + len(part)] = layer.data[position, part.start : part.stop]
                    start += len(part)
                continue
            index, offset = divmod(position - side.firsts[group] * kernel * ratio, kernel * ratio)
            if not 0 <= index < len(ids):
                continue
            page, token = divmod(offset, kernel)
            for place, head in enumerate(self.heads_of(layer, side.tp, rank)):
                start = region.base_addr + (ids[index] * ratio + page) * region.stride
                start += (place * kernel + token) * TOKEN_BYTES
                memory[start : start + TOKEN_BYTES] = layer.data[position, head]

    def wanted(self, group: int) -> range:
        """Token (or slot) positions that the consumer has to hold afterwards."""
        kind, sides = self.kinds[group], (self.producer, self.consumer)
        if kind is MAMBA:
            slots = [side.firsts[group] + len(side.blocks[group]) for side in sides]
            return range(max(side.firsts[group] for side in sides), min(slots))
        unit = math.gcd(*(side.kernels[group] for side in sides))
        sizes = [side.kernels[group] * side.ratios[group] for side in sides]
        first = max(side.firsts[group] * size for side, size in zip(sides, sizes, strict=True))
        if (window := self.windows[group]) is not None:
            kept = [-(-self.tokens // size) - (-(-window // size) + 1) for size in sizes]
            first = max(first, *(max(0, keep) * size for keep, size in zip(kept, sizes, strict=True)))
        if not self.consumer.blocks[group]:
            return range(0)
        return range(first, -(-self.tokens // unit) * unit)


def move(plan: TransferPlan, pairing: Pairing, local: Bytes, remote: Bytes) -> None:
    """What NIXL does, one descriptor at a time; a byte that is written twice is noticed by the caller's count."""
    tables = plan.expanded("local"), plan.expanded("remote")
    for ours, theirs in zip(pairing.local_desc_ids, pairing.remote_desc_ids, strict=True):
        (to, size, _), (source, other, _) = tables[0][ours].tolist(), tables[1][theirs].tolist()
        assert size == other
        if plan.direction is Direction.READ:
            local[to : to + size] = remote[source : source + size]
        else:
            remote[source : source + size] = local[to : to + size]


@st.composite
def worlds(draw: st.DrawFn) -> World:
    kinds = draw(st.lists(st.sampled_from([FULL, WINDOW, MLA, MAMBA]), min_size=1, max_size=3))
    tokens = draw(st.integers(1, 30))
    windows = [draw(st.integers(1, 12)) if kind is WINDOW else None for kind in kinds]
    sizes = st.sampled_from([1, 2, 4])
    heads = draw(st.sampled_from([1, 2, 4, 8]))
    stages = [draw(st.sampled_from([1, 1, 2])) for _ in range(2)]
    random = np.random.default_rng(draw(st.integers(0, 99)))
    layers = []
    for group, kind in enumerate(kinds):
        for number in range(max(stages) * draw(st.integers(1, 2))):
            shape: tuple[int, ...] = (60, 1 if kind is MLA else heads, TOKEN_BYTES)
            shape = (60, STATE + sum(size for size, _ in CONV)) if kind is MAMBA else shape
            layers.append(Layer(f"{group}.{number}", group, random.integers(0, 256, shape, np.uint8)))
    sides: list[Side] = []
    for consumes in (False, True):
        ratios = [draw(st.integers(1, 3)) for _ in kinds]
        kernels = [draw(st.sampled_from([2, 3, 4])) for _ in kinds]
        blocks, firsts = [], []
        for group, kind in enumerate(kinds):
            size = kernels[group] * ratios[group]
            needed = -(-tokens // size)
            first = 0
            if kind is MAMBA:
                needed = draw(st.integers(1, 3)) if not consumes else len(sides[0].blocks[group])
                first = draw(st.integers(0, needed - 1)) if consumes else 0
            elif consumes:
                first = draw(st.integers(0, needed))
            elif (window := windows[group]) is not None and draw(st.booleans()):
                first = max(0, needed - (-(-window // size) + 1))  # the producer lists only the tail
            lookahead = draw(st.integers(0, 1)) if consumes and kind is not MAMBA and first < needed else 0
            count = needed - first + lookahead
            blocks.append(draw(st.permutations(range(34)))[:count])
            firsts.append(first)
        pads = [draw(st.sampled_from([0, 0, 5])) for _ in kinds]
        made = Side(draw(sizes), stages[consumes], ratios, kernels, pads, blocks, firsts, pool=34)
        if consumes and draw(st.booleans()):
            made.ratios, made.kernels, made.pads = list(ratios), list(kernels), pads
        sides.append(made)
    return World(kinds, windows, layers, heads, tokens, sides[0], sides[1], draw(st.sampled_from(list(Direction))))


@settings(max_examples=400, deadline=None, derandomize=True)
@given(worlds())
def test_every_byte_of_every_rank(world: World) -> None:
    note(repr([world.kinds, world.windows, world.heads, world.tokens, world.direction]))
    note(repr(world.producer))
    note(repr(world.consumer))
    engines = {}
    for name, side in (("p", world.producer), ("d", world.consumer)):
        engines[name] = [
            world.layout(name, side, stage, rank) for stage in range(side.stages) for rank in range(side.tp)
        ]
    for layout in engines["p"]:
        memory = world.producer.memory[layout.pp_rank, layout.tp_rank]
        for layer in world.layers:
            if world.stage_of(world.producer, layer) == layout.pp_rank:
                world.put(world.producer, layout, memory, layer, range(60))
    expected = {}
    for layout in engines["d"]:
        memory = world.consumer.memory[layout.pp_rank, layout.tp_rank].copy()
        for layer in world.layers:
            if world.stage_of(world.consumer, layer) == layout.pp_rank:
                world.put(world.consumer, layout, memory, layer, world.wanted(layer.group))
        expected[layout.pp_rank, layout.tp_rank] = memory
    locals_, remotes = ("d", "p") if world.direction is Direction.READ else ("p", "d")
    sides = {"p": world.producer, "d": world.consumer}
    computed = [
        None if kind is MAMBA else first for kind, first in zip(world.kinds, world.consumer.firsts, strict=True)
    ]
    heard: dict[tuple[int, int], set[tuple[int, int]]] = {}
    for local in engines[locals_]:
        plans = plan_peer(local, engines[remotes], direction=world.direction)
        mine = local.pp_rank, local.tp_rank
        for remote in [*(plan.remote for plan in plans), *plans.notify_only]:
            heard.setdefault((remote.pp_rank, remote.tp_rank), set()).add(mine)
        for plan in plans:
            ids = [sides[locals_].blocks, sides[remotes].blocks]
            pairing = plan.pair(*ids, num_tokens=world.tokens, num_computed_blocks=computed)
            theirs = plan.remote.pp_rank, plan.remote.tp_rank
            move(plan, pairing, sides[locals_].memory[mine], sides[remotes].memory[theirs])
    for layout in engines["d"]:
        rank = layout.pp_rank, layout.tp_rank
        assert np.array_equal(world.consumer.memory[rank], expected[rank]), f"consumer rank {rank}"
    # Every rank of the other side hears from somebody, so that no blocks stay held.
    assert set(heard) == {(layout.pp_rank, layout.tp_rank) for layout in engines[remotes]}
