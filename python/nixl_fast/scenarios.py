"""Scenarios of the demo, as data: two engines, each a list of ranks, and one request between them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from nixl_fast.errors import GeometryError
from nixl_fast.layout import BlockOrder, ConvProjection, Group, GroupKind
from nixl_fast.plan import Direction

WORD = 8
"""Bytes whose content tells where they come from; everything in memory is a multiple of it."""


class Role(StrEnum):
    """What an engine does in a request."""

    PRODUCER = "producer"
    CONSUMER = "consumer"


@dataclass(frozen=True)
class Area:
    """Memory of one layer: evenly spaced pages (kernel blocks) that the given groups share.

    Args:
        page_bytes: Bytes of a page that hold data, a multiple of 8 for every token.
        num_pages: Number of pages.
        groups: Indices of the groups whose blocks live here.
        padding: Bytes between one page and the next, a multiple of 8.

    Raises:
        GeometryError: Bytes that are not a multiple of 8.
    """

    page_bytes: int
    num_pages: int
    groups: tuple[int, ...] = (0,)
    padding: int = 0

    def __post_init__(self) -> None:
        for field in ("page_bytes", "padding"):
            if getattr(self, field) % WORD:
                raise GeometryError(f"Area.{field} is {getattr(self, field)}, it must be a multiple of {WORD}")

    @property
    def stride(self) -> int:
        """Bytes between the starts of two pages."""
        return self.page_bytes + self.padding


@dataclass(frozen=True)
class RankMemory:
    """What one rank of an engine allocates.

    Args:
        areas: One per layer (or per K and V of a layer); the same index is the same layer on both sides.
        conv: Convolution projections at the start of every state slot.
        state_bytes: Bytes of temporal state that follow them.
    """

    areas: tuple[Area, ...]
    conv: tuple[ConvProjection, ...] = ()
    state_bytes: int = 0


@dataclass(frozen=True)
class Engine:
    """One side of a scenario.

    Args:
        groups: KV-cache groups, the same on every rank.
        ranks: Tensor-parallel ranks; each becomes a process with a layout of its own.
        block_ids: Logical block ids of the request, one list per group.
        null_block_id: Placeholder id.
        num_kv_heads: KV heads of the whole model.
        order: How tokens and heads follow each other in a page.
    """

    groups: tuple[Group, ...]
    ranks: tuple[RankMemory, ...]
    block_ids: tuple[tuple[int, ...], ...]
    null_block_id: int | None = None
    num_kv_heads: int = 1
    order: BlockOrder = BlockOrder.HEAD_MAJOR

    @property
    def num_blocks(self) -> int:
        """Logical blocks listed, placeholders left out."""
        return sum(block != self.null_block_id for blocks in self.block_ids for block in blocks)

    def heads(self, group: int, rank: int) -> tuple[range, int]:
        """The KV heads of a group that a rank holds, counted over the whole model, and how many the model has."""
        if self.groups[group].kind is GroupKind.MLA:
            return range(1), 1
        first = rank * self.num_kv_heads // len(self.ranks)
        return range(first, first + max(1, self.num_kv_heads // len(self.ranks))), self.num_kv_heads


@dataclass(frozen=True)
class Scenario:
    """One request between two engines.

    Args:
        name: What ``--scenario`` takes.
        description: One sentence for people.
        producer: The engine that has the data. It lists the whole sequence; a sliding-window group may list its tail.
        consumer: The engine that gets it.
        num_tokens: Tokens whose KV the producer holds.
        num_computed_blocks: Per group the logical index, in the sequence, of the consumer's first listed block.
        direction: READ if the consumer pulls, WRITE if the producer pushes.
    """

    name: str
    description: str
    producer: Engine
    consumer: Engine
    num_tokens: int
    num_computed_blocks: tuple[int | None, ...] | None = None
    direction: Direction = Direction.READ

    @property
    def initiator(self) -> Role:
        """The side that makes the plan and posts the transfer."""
        return Role.CONSUMER if self.direction is Direction.READ else Role.PRODUCER

    def engine(self, role: Role) -> Engine:
        """One of the two engines."""
        return self.producer if role is Role.PRODUCER else self.consumer

    def first_block(self, role: Role, group: int) -> int:
        """Logical index, in the sequence, of an engine's first listed block; attention groups only."""
        engine = self.engine(role)
        shape = engine.groups[group]
        if role is Role.CONSUMER and self.num_computed_blocks is not None:
            first = self.num_computed_blocks[group]
            if first is not None:
                return first
        if role is Role.PRODUCER and shape.kind is not GroupKind.SLIDING_WINDOW:
            return 0
        return math.ceil(self.num_tokens / shape.block_size) - len(engine.block_ids[group])


def _ids(count: int, pool: int, seed: int, *, run: int = 1, first: int = 0) -> tuple[int, ...]:
    """Different ids from ``first`` up to below ``pool``, in shuffled runs of ``run`` consecutive ones."""
    starts = np.random.default_rng(seed).permutation((pool - first) // run) * run + first
    return tuple((starts[:, None] + np.arange(run)).ravel()[:count].tolist())


def _full(block_size: int, ratio: int = 1) -> Group:
    return Group(GroupKind.FULL_ATTENTION, block_size, ratio)


def _ranks(layers: int, area: Area, count: int = 1) -> tuple[RankMemory, ...]:
    return (RankMemory((area,) * layers),) * count


def _full_attention() -> Scenario:
    def engine(seed: int) -> Engine:
        return Engine((_full(16),), _ranks(8, Area(1024, 128)), (_ids(63, 128, seed, run=4),))

    return Scenario("full-attention", "One full-attention group, equal blocks.", engine(1), engine(2), num_tokens=1000)


def _sliding_window() -> Scenario:
    def engine(seed: int, placeholders: int, padding: int) -> Engine:
        ids = _ids(41, 96, seed, run=3, first=1)
        groups = (_full(16), Group(GroupKind.SLIDING_WINDOW, 16, sliding_window=128))
        area = Area(512, 96, groups=(0, 1), padding=padding)
        return Engine(groups, _ranks(4, area), (ids[:32], (0,) * placeholders + ids[32:]), null_block_id=0)

    return Scenario(
        "sliding-window",
        "Full attention and a window of 128 tokens in one pool; the producer has placeholders before the window.",
        engine(3, placeholders=23, padding=0),
        engine(4, placeholders=0, padding=64),
        num_tokens=500,
    )


def _ratio_4() -> Scenario:
    def engine(seed: int) -> Engine:
        return Engine((_full(64, 4),), _ranks(4, Area(512, 128)), (_ids(11, 32, seed),))

    return Scenario(
        "ratio-4", "Four kernel blocks per logical block on both sides.", engine(5), engine(6), num_tokens=660
    )


def _ratios_cached_prefix() -> Scenario:
    return Scenario(
        "ratios-cached-prefix",
        "Kernel blocks of 16 tokens, 4 per logical block on the producer and 6 on the consumer, which has one cached.",
        Engine((_full(64, 4),), _ranks(4, Area(512, 128)), (_ids(16, 32, 7, run=2),)),
        Engine((_full(96, 6),), _ranks(4, Area(512, 120)), (_ids(10, 20, 8),)),
        num_tokens=1000,
        num_computed_blocks=(1,),
    )


def _kernel_4_to_16() -> Scenario:
    return Scenario(
        "kernel-4-to-16",
        "Kernel blocks of 4 tokens fill padded ones of 16; the consumer has two cached.",
        Engine((_full(4),), _ranks(4, Area(128, 400)), (_ids(250, 400, 9, run=5),)),
        Engine((_full(16),), _ranks(4, Area(512, 100, padding=128)), (_ids(61, 100, 10),)),
        num_tokens=1000,
        num_computed_blocks=(2,),
    )


def _kernel_16_to_4() -> Scenario:
    return Scenario(
        "kernel-16-to-4",
        "Kernel blocks of 16 tokens fill ones of 4; the consumer has six cached.",
        Engine((_full(16),), _ranks(4, Area(512, 100)), (_ids(63, 100, 11),)),
        Engine((_full(4),), _ranks(4, Area(128, 400)), (_ids(244, 400, 12, run=4),)),
        num_tokens=1000,
        num_computed_blocks=(6,),
    )


def _mamba() -> Scenario:
    conv = (ConvProjection(192), ConvProjection(64), ConvProjection(64))
    state = Group(GroupKind.MAMBA, 48, 3)

    def engine(attention: tuple[int, ...], *slots: tuple[int, ...]) -> Engine:
        areas = (Area(512, 96, groups=(0, 1, 2)),) * 3
        memory = RankMemory(areas, conv, state_bytes=1024)
        return Engine((_full(48, 3), state, state), (memory,), (attention, *slots), null_block_id=0)

    producer, consumer = _ids(12, 32, 13, first=1), _ids(13, 32, 14, first=1)
    return Scenario(
        "mamba",
        "Full attention and two groups of state slots in one pool; one takes a tail, one recomputes a slot.",
        engine(producer[:9], (0, 0, *producer[9:11]), producer[11:]),
        engine(consumer[:9], consumer[9:11], consumer[11:]),
        num_tokens=400,
    )


def _push_suffix() -> Scenario:
    return Scenario(
        "push-suffix",
        "The producer (blocks of 16) writes what the consumer (blocks of 4, 100 of them cached) lacks.",
        Engine((_full(16),), _ranks(4, Area(512, 64)), (_ids(32, 64, 15),)),
        Engine((_full(4),), _ranks(4, Area(128, 256)), (_ids(25, 256, 16, run=2),)),
        num_tokens=500,
        num_computed_blocks=(100,),
        direction=Direction.WRITE,
    )


def _fragmented() -> Scenario:
    def engine(seed: int) -> Engine:
        return Engine((_full(16),), _ranks(8, Area(512, 13_000)), (_ids(12_800, 13_000, seed),))

    return Scenario(
        "fragmented",
        "A long request whose blocks lie scattered: 102,400 descriptors.",
        engine(17),
        engine(18),
        num_tokens=204_800,
    )


def _fully_cached() -> Scenario:
    memory = _ranks(2, Area(512, 16))
    return Scenario(
        "fully-cached",
        "The consumer has everything; it only notifies the producer.",
        Engine((_full(16),), memory, (_ids(10, 16, 19),)),
        Engine((_full(16),), memory, ((),)),
        num_tokens=160,
        num_computed_blocks=(10,),
    )


def _tensor_parallel(name: str, description: str, producers: int, consumers: int, heads: int) -> Scenario:
    def engine(ranks: int, seed: int) -> Engine:
        area = Area(512 * max(1, heads // ranks), 64)
        return Engine((_full(16),), _ranks(4, area, ranks), (_ids(40, 64, seed, run=2),), num_kv_heads=heads)

    return Scenario(name, description, engine(producers, 21), engine(consumers, 22), num_tokens=630)


def _mla_and_heads() -> Scenario:
    def engine(ranks: int, seed: int) -> Engine:
        groups = (_full(16), Group(GroupKind.MLA, 32))
        memory = RankMemory((Area(512, 64, groups=(0,)),) * 3 + (Area(1024, 32, groups=(1,)),) * 2)
        ids = (_ids(32, 64, seed), _ids(16, 32, seed, run=2))
        return Engine(groups, (memory,) * ranks, ids, num_kv_heads=2)

    return Scenario(
        "mla-and-heads",
        "MLA next to 2 KV heads on 4 -> 2 ranks; every second producer has only copies and is only notified.",
        engine(4, 23),
        engine(2, 24),
        num_tokens=500,
    )


def _mamba_tensor_parallel(producers: int, consumers: int) -> Scenario:
    def engine(ranks: int, seed: int) -> Engine:
        conv = (ConvProjection(192 // ranks), ConvProjection(64, sharded=False), ConvProjection(64, sharded=False))
        memory = RankMemory((Area(512 // ranks, 96, groups=(0, 1)),) * 3, conv, state_bytes=1024 // ranks)
        groups = (_full(48, 3), Group(GroupKind.MAMBA, 48, 3))
        ids = _ids(11, 32, seed)
        return Engine(groups, (memory,) * ranks, (ids[:9], ids[9:]), num_kv_heads=2)

    return Scenario(
        f"mamba-tp-{producers}-to-{consumers}",
        "Attention and state slots on unequal ranks: x and the state are split, B and C are on every rank.",
        engine(producers, 25),
        engine(consumers, 26),
        num_tokens=400,
    )


def _padded_pages() -> Scenario:
    def engine(seed: int, padding: int) -> Engine:
        return Engine((_full(32, 2),), _ranks(4, Area(512, 64, padding=padding)), (_ids(15, 32, seed),))

    return Scenario(
        "padded-pages",
        "Pages with 64 bytes between them on the producer and 448 on the consumer.",
        engine(27, 64),
        engine(28, 448),
        num_tokens=460,
    )


def _kernel_48_to_32() -> Scenario:
    return Scenario(
        "kernel-48-to-32",
        "Kernel blocks of 48 and 32 tokens have units of 16 in common; the consumer has three blocks cached.",
        Engine((_full(48),), _ranks(4, Area(1536, 40)), (_ids(21, 40, 29),)),
        Engine((_full(32),), _ranks(4, Area(1024, 64)), (_ids(29, 64, 30, run=2),)),
        num_tokens=1000,
        num_computed_blocks=(3,),
    )


SCENARIOS: Mapping[str, Scenario] = {
    scenario.name: scenario
    for scenario in (
        _full_attention(),
        _sliding_window(),
        _ratio_4(),
        _ratios_cached_prefix(),
        _kernel_4_to_16(),
        _kernel_16_to_4(),
        _kernel_48_to_32(),
        _padded_pages(),
        _mamba(),
        _push_suffix(),
        _fragmented(),
        _fully_cached(),
        _tensor_parallel("tp-4-to-1", "8 KV heads on 4 producers, gathered by one consumer.", 4, 1, heads=8),
        _tensor_parallel("tp-1-to-4", "8 KV heads of one producer, dealt out to 4 consumers.", 1, 4, heads=8),
        _tensor_parallel("gqa-2-to-4", "2 KV heads on 4 consumers: each head is read twice.", 2, 4, heads=2),
        _mla_and_heads(),
        _mamba_tensor_parallel(1, 2),
        _mamba_tensor_parallel(2, 1),
    )
}
"""Every scenario by its name, in the order in which they run."""
