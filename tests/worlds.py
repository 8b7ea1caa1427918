"""Random engines of several ranks, and what every byte of them has to be after a request.

Kinds, ratios, block sizes, tensor, pipeline and context parallelism, GQA, MLA, Mamba, strides, windows, prefixes.

The model under test holds, per layer, ``tb`` bytes for each token and KV head (or for each token, where a layer is
replicated), and per Mamba slot the bytes of the unsliced state. A rank's memory is a slice of that. The plans only see
layouts and block ids; what the consumer has to hold afterwards is written down here from token positions and heads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
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
GAP = 8
"""Bytes between two regions, which nobody may touch."""
CONV = ((16, True), (4, False), (8, True))
"""Bytes of the unsliced convolution projections, and whether tensor parallelism slices them."""
STATE = 32
POSITIONS = 60
"""Tokens (or slots) that the model holds: more than any request of these has."""
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
    dcp: int = 1
    memory: dict[tuple[int, int], Bytes] = field(default_factory=dict)

    @property
    def ranks(self) -> list[tuple[int, int]]:
        """Stage and rank of each."""
        return [(stage, rank) for stage in range(self.stages) for rank in range(self.tp)]


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
    order: BlockOrder = BlockOrder.HEAD_MAJOR

    @property
    def computed(self) -> list[int | None]:
        """What the request passes as `num_computed_blocks`."""
        return [None if kind is MAMBA else first for kind, first in zip(self.kinds, self.consumer.firsts, strict=True)]

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

    def layout(self, name: str, side: Side, stage: int, rank: int, origin: int = 0) -> EngineLayout:
        """A rank's layout; its memory begins at ``origin``."""
        groups: list[Group] = []
        regions: list[Region] = []
        states: list[Region] = []
        for index, kind in enumerate(self.kinds):
            ratio = side.ratios[index]
            groups.append(Group(kind, side.kernels[index] * ratio, ratio, self.windows[index]))
        for layer in self.layers:
            if self.stage_of(side, layer) != stage:
                continue
            ratio, length = side.ratios[layer.group], self.block_len(side, layer, rank)
            stride = length + side.pads[layer.group]
            blocks = side.pool * ratio
            region = Region(origin, length, blocks, stride, (layer.group,), layer=layer.name, order=self.order)
            (states if self.kinds[layer.group] is MAMBA else regions).append(region)
            origin += blocks * stride + GAP
        mamba = None
        if states:
            parts = self.state_parts(side.tp, rank)
            conv = tuple(ConvProjection(len(part), sharded) for part, (_, sharded) in zip(parts, CONV, strict=False))
            mamba = MambaState(tuple(states), conv, len(parts[-1]))
        return EngineLayout(
            name,
            tuple(groups),
            tuple(regions),
            mamba,
            tp_rank=rank,
            tp_size=side.tp,
            num_kv_heads=self.heads,
            dcp_size=side.dcp,
            pp_rank=stage,
            pp_size=side.stages,
        )

    def engine(self, name: str, side: Side, memory_of: Callable[[str, int], Bytes]) -> list[EngineLayout]:
        """The layouts of all ranks of a side, in memory that is asked for by the side's name and a size."""
        layouts = []
        for stage, rank in side.ranks:
            places = self.layout(name, side, stage, rank).places()
            end = max(region.base_addr + region.num_blocks * region.stride for _, region, _ in places)
            memory = side.memory[stage, rank] = memory_of(name, end + GAP)
            layouts.append(self.layout(name, side, stage, rank, memory.ctypes.data))
        return layouts

    def put(self, side: Side, layout: EngineLayout, memory: Bytes, layer: Layer, positions: range) -> None:
        """Writes the model's bytes of a layer into a rank's memory (or a copy of it), for token (or slot) positions of
        listed blocks.
        """
        group, rank = layer.group, layout.tp_rank
        ratio, kernel, ids = side.ratios[group], side.kernels[group], side.blocks[group]
        region = next(region for _, region, _ in layout.places() if region.layer == layer.name)
        base = region.base_addr - side.memory[layout.pp_rank, rank].ctypes.data
        heads = self.heads_of(layer, side.tp, rank)
        for position in positions:
            if self.kinds[group] is MAMBA:
                index = position - side.firsts[group]
                if not 0 <= index < len(ids):
                    continue
                start = base + ids[index] * ratio * region.stride
                for part in self.state_parts(side.tp, rank):
                    memory[start : start + len(part)] = layer.data[position, part.start : part.stop]
                    start += len(part)
                continue
            block, offset = divmod(position, kernel * ratio)
            turn, holder = divmod(block, side.dcp)  # context parallelism deals blocks out in turn
            index = turn - side.firsts[group]
            if holder != rank % side.dcp or not 0 <= index < len(ids):
                continue
            page, token = divmod(offset, kernel)
            for place, head in enumerate(heads):
                in_page = place * kernel + token if self.order is BlockOrder.HEAD_MAJOR else token * len(heads) + place
                start = base + (ids[index] * ratio + page) * region.stride + in_page * TOKEN_BYTES
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
        if max(side.dcp for side in sides) > 1:
            first = 0  # which of these blocks a rank lists differs from rank to rank
        return range(first, -(-self.tokens // unit) * unit)


def model_bytes(random: np.random.Generator, kind: GroupKind, heads: int) -> Bytes:
    """What a model holds in a layer."""
    if kind is MAMBA:
        return random.integers(0, 256, (POSITIONS, STATE + sum(size for size, _ in CONV)), np.uint8)
    return random.integers(0, 256, (POSITIONS, 1 if kind is MLA else heads, TOKEN_BYTES), np.uint8)


Mover = Callable[[TransferPlan, Pairing, Bytes, Bytes], None]
"""Moves a pairing between the memories of the local and the remote rank."""


def move(plan: TransferPlan, pairing: Pairing, local: Bytes, remote: Bytes) -> None:
    """What NIXL does, one descriptor at a time."""
    tables = plan.expanded("local"), plan.expanded("remote")
    for ids in zip(pairing.local_desc_ids, pairing.remote_desc_ids, strict=True):
        pieces = []
        for table, number, memory in zip(tables, ids, (local, remote), strict=True):
            address, size, _ = table[number].tolist()
            first = address - memory.ctypes.data
            assert 0 <= first <= first + size <= len(memory)
            pieces.append(memory[first : first + size])
        assert len(pieces[0]) == len(pieces[1])
        to, source = pieces if plan.direction is Direction.READ else reversed(pieces)
        to[:] = source


def own_memory(name: str, size: int) -> Bytes:
    """Memory of a rank's own."""
    return np.random.default_rng([size, *name.encode()]).integers(0, 256, size, np.uint8)


def wrong_ranks(world: World, memory_of: Callable[[str, int], Bytes], mover: Mover) -> Iterator[str]:
    """Carries the request out on every rank and yields what is not as it has to be."""
    sides = {"p": world.producer, "d": world.consumer}
    engines = {name: world.engine(name, side, memory_of) for name, side in sides.items()}
    for layout in engines["p"]:
        rank = layout.pp_rank, layout.tp_rank
        for layer in world.layers:
            if world.stage_of(world.producer, layer) == layout.pp_rank:
                world.put(world.producer, layout, world.producer.memory[rank], layer, range(POSITIONS))
    expected = {(name, rank): side.memory[rank].copy() for name, side in sides.items() for rank in side.ranks}
    for layout in engines["d"]:
        rank = layout.pp_rank, layout.tp_rank
        for layer in world.layers:
            if world.stage_of(world.consumer, layer) == layout.pp_rank:
                world.put(world.consumer, layout, expected["d", rank], layer, world.wanted(layer.group))
    locals_, remotes = ("d", "p") if world.direction is Direction.READ else ("p", "d")
    heard: dict[tuple[int, int], set[tuple[int, int]]] = {}
    for local in engines[locals_]:
        plans = plan_peer(local, engines[remotes], direction=world.direction)
        mine = local.pp_rank, local.tp_rank
        for remote in [*(plan.remote for plan in plans), *plans.notify_only]:
            heard.setdefault((remote.pp_rank, remote.tp_rank), set()).add(mine)
        for plan in plans:
            ids = [sides[locals_].blocks, sides[remotes].blocks]
            pairing = plan.pair(*ids, num_tokens=world.tokens, num_computed_blocks=world.computed)
            theirs = plan.remote.pp_rank, plan.remote.tp_rank
            mover(plan, pairing, sides[locals_].memory[mine], sides[remotes].memory[theirs])
    for (name, rank), right in expected.items():
        if wrong := int(np.count_nonzero(sides[name].memory[rank] != right)):
            yield f"{name} rank {rank}: {wrong} bytes are wrong"
    # Every rank of the other side hears from somebody, so that no blocks stay held.
    if unheard := {*sides[remotes].ranks} - heard.keys():
        yield f"nobody notifies {unheard}"


@st.composite
def worlds(draw: st.DrawFn) -> World:
    dealt = draw(st.integers(0, 7)) == 0  # context parallelism is for MLA and equal blocks
    kinds = draw(
        st.lists(st.just(MLA) if dealt else st.sampled_from([FULL, WINDOW, MLA, MAMBA]), min_size=1, max_size=3)
    )
    tokens = draw(st.integers(1, 30))
    windows = [draw(st.integers(1, 12)) if kind is WINDOW else None for kind in kinds]
    heads = draw(st.sampled_from([1, 2, 4, 8]))
    stages = [draw(st.sampled_from([1, 1, 2])) for _ in range(2)]
    random = np.random.default_rng(draw(st.integers(0, 99)))
    layers = []
    for group, kind in enumerate(kinds):
        for number in range(max(stages) * draw(st.integers(1, 2))):
            layers.append(Layer(f"{group}.{number}", group, model_bytes(random, kind, heads)))
    sides: list[Side] = []
    for consumes in (False, True):
        tp = draw(st.sampled_from([1, 2, 4, 8]))
        dcp = draw(st.sampled_from([size for size in (1, 2, 4) if size <= tp])) if dealt else 1
        if consumes and (dealt or draw(st.booleans())):  # blocks like the producer's
            ratios, kernels, pads = sides[0].ratios, sides[0].kernels, sides[0].pads
        else:
            ratios = [draw(st.integers(1, 3)) for _ in kinds]
            kernels = [draw(st.sampled_from([2, 3, 4])) for _ in kinds]
            pads = [draw(st.sampled_from([0, 0, 5])) for _ in kinds]
        blocks, firsts = [], []
        for group, kind in enumerate(kinds):
            size = kernels[group] * ratios[group]
            needed = -(-tokens // (size * dcp))
            first = 0
            if kind is MAMBA:
                needed = draw(st.integers(1, 3)) if not consumes else len(sides[0].blocks[group])
                first = draw(st.integers(0, needed - 1)) if consumes else 0
            elif consumes:
                first = draw(st.integers(0, needed))
            elif (window := windows[group]) is not None and draw(st.booleans()):
                first = max(0, needed - (-(-window // size) + 1))  # the producer lists only the tail
            lookahead = draw(st.integers(0, 2)) if consumes and kind is not MAMBA and first < needed else 0
            count = needed - first + lookahead
            blocks.append(draw(st.permutations(range(34)))[:count])
            firsts.append(first)
        sides.append(Side(tp, stages[consumes], ratios, kernels, pads, blocks, firsts, pool=34, dcp=dcp))
    orders = [BlockOrder.HEAD_MAJOR]
    if len({min(side.tp, heads) for side in sides}) == 1:
        orders.append(BlockOrder.TOKEN_MAJOR)  # no heads have to be cut out
    direction, order = draw(st.sampled_from(Direction)), draw(st.sampled_from(orders))
    return World(kinds, windows, layers, heads, tokens, sides[0], sides[1], direction, order)
