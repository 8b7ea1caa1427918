"""The demo: processes with real NIXL agents move requests between them, and every destination byte is checked.

A `Scenario` is data: two engines, each a list of ranks, and one request. `run_demo` starts one process per rank and
talks to them over loopback sockets; a rank allocates host memory, plans, moves, and compares what arrived with what the
rules of pairing say. That comparison knows tokens and state slots only: it never looks at a plan or a pairing, so a
wrong pairing shows as wrong bytes.
"""

from __future__ import annotations

import math
import os
import secrets
import selectors
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from typing import IO, Any, NamedTuple, Self, TypeVar

import msgspec
import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from nixl_fast._native import Pairing
from nixl_fast.errors import GeometryError, NixlFastError, TransferError
from nixl_fast.layout import BlockOrder, ConvProjection, EngineLayout, Group, GroupKind, MambaState, Region
from nixl_fast.plan import Direction, Side, TransferPlan, plan_peer

START_S = 30.0
"""Seconds within which every rank has to connect, and then to have an agent. One that ends is noticed at once."""

SILENCE_S = 8.0
"""Seconds without a sign of life after which a rank at work is given up; slow ones still send signs of life."""

STEP_S = 60.0
"""Seconds within which every rank has to answer a request."""

TRANSFER_S = 30.0
"""Seconds within which a transfer has to complete, or a notification to arrive."""

PAIR_REPEATS = 5
"""Calls of ``plan.pair`` whose median is reported."""

AGENT_THREADS = 4
"""UCX threads of an agent, as vLLM sets them; without, moving many descriptors takes twice as long and more."""

_WORD = 8
_GUARD = 64
_PART_WORDS = 1 << 20
_SLOT_WORDS = 1 << 24
_MAX_FRAME = 64 << 20
_POLL_S = 5e-5
_GRACE_S = 0.5
_BEAT_S = 0.5

Words = NDArray[np.uint64]
Indices = NDArray[np.int64]


# --- Scenarios -------------------------------------------------------------------------------------------------------


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
            if getattr(self, field) % _WORD:
                raise GeometryError(f"Area.{field} is {getattr(self, field)}, it must be a multiple of {_WORD}")

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


def _one_rank(layers: int, area: Area) -> tuple[RankMemory, ...]:
    return (RankMemory((area,) * layers),)


def _full_attention() -> Scenario:
    def engine(seed: int) -> Engine:
        return Engine((_full(16),), _one_rank(8, Area(1024, 128)), (_ids(63, 128, seed, run=4),))

    return Scenario("full-attention", "One full-attention group, equal blocks.", engine(1), engine(2), num_tokens=1000)


def _sliding_window() -> Scenario:
    def engine(seed: int, placeholders: int, padding: int) -> Engine:
        ids = _ids(41, 96, seed, run=3, first=1)
        groups = (_full(16), Group(GroupKind.SLIDING_WINDOW, 16, sliding_window=128))
        area = Area(512, 96, groups=(0, 1), padding=padding)
        return Engine(groups, _one_rank(4, area), (ids[:32], (0,) * placeholders + ids[32:]), null_block_id=0)

    return Scenario(
        "sliding-window",
        "Full attention and a window of 128 tokens in one pool; the producer has placeholders before the window.",
        engine(3, placeholders=23, padding=0),
        engine(4, placeholders=0, padding=64),
        num_tokens=500,
    )


def _ratio_4() -> Scenario:
    def engine(seed: int) -> Engine:
        return Engine((_full(64, 4),), _one_rank(4, Area(512, 128)), (_ids(11, 32, seed),))

    return Scenario(
        "ratio-4", "Four kernel blocks per logical block on both sides.", engine(5), engine(6), num_tokens=660
    )


def _ratios_cached_prefix() -> Scenario:
    return Scenario(
        "ratios-cached-prefix",
        "Kernel blocks of 16 tokens, 4 per logical block on the producer and 6 on the consumer, which has one cached.",
        Engine((_full(64, 4),), _one_rank(4, Area(512, 128)), (_ids(16, 32, 7, run=2),)),
        Engine((_full(96, 6),), _one_rank(4, Area(512, 120)), (_ids(10, 20, 8),)),
        num_tokens=1000,
        num_computed_blocks=(1,),
    )


def _kernel_4_to_16() -> Scenario:
    return Scenario(
        "kernel-4-to-16",
        "Kernel blocks of 4 tokens fill padded ones of 16; the consumer has two cached.",
        Engine((_full(4),), _one_rank(4, Area(128, 400)), (_ids(250, 400, 9, run=5),)),
        Engine((_full(16),), _one_rank(4, Area(512, 100, padding=128)), (_ids(61, 100, 10),)),
        num_tokens=1000,
        num_computed_blocks=(2,),
    )


def _kernel_16_to_4() -> Scenario:
    return Scenario(
        "kernel-16-to-4",
        "Kernel blocks of 16 tokens fill ones of 4; the consumer has six cached.",
        Engine((_full(16),), _one_rank(4, Area(512, 100)), (_ids(63, 100, 11),)),
        Engine((_full(4),), _one_rank(4, Area(128, 400)), (_ids(244, 400, 12, run=4),)),
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
        Engine((_full(16),), _one_rank(4, Area(512, 64)), (_ids(32, 64, 15),)),
        Engine((_full(4),), _one_rank(4, Area(128, 256)), (_ids(25, 256, 16, run=2),)),
        num_tokens=500,
        num_computed_blocks=(100,),
        direction=Direction.WRITE,
    )


def _fragmented() -> Scenario:
    def engine(seed: int) -> Engine:
        return Engine((_full(16),), _one_rank(8, Area(512, 13_000)), (_ids(12_800, 13_000, seed),))

    return Scenario(
        "fragmented",
        "A long request whose blocks lie scattered: 102,400 descriptors.",
        engine(17),
        engine(18),
        num_tokens=204_800,
    )


def _fully_cached() -> Scenario:
    memory = _one_rank(2, Area(512, 16))
    return Scenario(
        "fully-cached",
        "The consumer has everything; it only notifies the producer.",
        Engine((_full(16),), memory, (_ids(10, 16, 19),)),
        Engine((_full(16),), memory, ((),)),
        num_tokens=160,
        num_computed_blocks=(10,),
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
        _mamba(),
        _push_suffix(),
        _fragmented(),
        _fully_cached(),
    )
}
"""Every scenario by its name, in the order in which they run."""


# --- Memory and what must be in it -----------------------------------------------------------------------------------


class _Fill(IntEnum):
    """What a word of memory was written with; the same position of different fills has different bytes."""

    SENTINEL = 1
    NOISE = 2
    TOKEN = 3
    SLOT = 4


def _pattern(fill: _Fill, area: int, group: int, positions: Indices, words: Indices, num_words: int) -> Words:
    """The given words, of ``num_words``, of each position: ``uint64[len(positions), len(words)]``, all different."""
    first = np.uint64((fill << 60) | (group << 52) | (area << 44))
    out = positions.astype(np.uint64)[:, None] * np.uint64(num_words) + (words.astype(np.uint64) + first)
    # splitmix64: neighbouring words get unrelated bytes, so that data moved by one byte or one token does not fit.
    out ^= out >> np.uint64(30)
    out *= np.uint64(0xBF58476D1CE4E5B9)
    out ^= out >> np.uint64(27)
    out *= np.uint64(0x94D049BB133111EB)
    out ^= out >> np.uint64(31)
    return out


class Memory:
    """Host buffers of one rank, one per area, each between two guards of 64 bytes.

    Args:
        engine: The rank's engine.
        rank: Its tensor-parallel rank.
    """

    def __init__(self, engine: Engine, rank: int) -> None:
        self.engine = engine
        self.rank = rank
        self.spec = engine.ranks[rank]
        self.buffers = [
            np.empty((area.num_pages * area.stride + 2 * _GUARD) // _WORD, np.uint64) for area in self.spec.areas
        ]

    def spans(self) -> list[tuple[int, int]]:
        """Address and bytes of every area, without the guards."""
        return [(int(buffer.ctypes.data) + _GUARD, buffer.nbytes - 2 * _GUARD) for buffer in self.buffers]

    def layout(self, engine_id: str) -> EngineLayout:
        """What the peers have to know."""
        groups = self.engine.groups
        attention: list[Region] = []
        slots: list[Region] = []
        for area, (address, _) in zip(self.spec.areas, self.spans(), strict=True):
            for regions, mamba in ((attention, False), (slots, True)):
                residents = tuple(group for group in area.groups if (groups[group].kind is GroupKind.MAMBA) == mamba)
                if residents:
                    regions.append(
                        Region(
                            address, area.page_bytes, area.num_pages, area.stride, residents, order=self.engine.order
                        )
                    )
        return EngineLayout(
            engine_id,
            groups,
            tuple(attention),
            MambaState(tuple(slots), self.spec.conv, self.spec.state_bytes) if slots else None,
            tp_rank=self.rank,
            tp_size=len(self.engine.ranks),
            num_kv_heads=self.engine.num_kv_heads,
            null_block_id=self.engine.null_block_id,
        )

    def fill(self, fill: _Fill) -> None:
        """Overwrites every byte, guards and padding too."""
        for index, buffer in enumerate(self.buffers):
            buffer[:] = _pattern(fill, index, 0, np.arange(len(buffer)), np.arange(1), 1)[:, 0]

    def put_tokens(self, group: int, tokens: Tokens) -> int:
        """Writes a group's tokens in every area where it lives; returns the bytes written."""
        size = self.engine.groups[group].kernel_block_size
        heads, num_heads = self.engine.heads(group, self.rank)
        written = 0
        for index, area, pages in self._homes(group):
            words = area.page_bytes // _WORD // size // len(heads)
            row = words * _WORD
            steps = (row, size * row) if self.engine.order is BlockOrder.HEAD_MAJOR else (len(heads) * row, row)
            places = as_strided(pages, (area.num_pages, size, len(heads), words), (area.stride, *steps, _WORD))
            held = np.arange(heads.start * words, heads.stop * words)
            data = _pattern(_Fill.TOKEN, index, group, tokens.positions, held, num_heads * words)
            places[tokens.pages, tokens.offsets] = data.reshape(-1, len(heads), words)
            written += data.nbytes
        return written

    def put_slots(self, group: int, slots: Indices, positions: Indices) -> int:
        """Writes a group's state slots in every area where it lives; returns the bytes written."""
        ratio = self.engine.groups[group].blocks_per_logical
        words = self._slot_words()
        written = 0
        for index, area, pages in self._homes(group):
            places = as_strided(pages, (area.num_pages // ratio, len(words)), (area.stride * ratio, _WORD))
            data = _pattern(_Fill.SLOT, index, group, positions, words, _SLOT_WORDS)
            places[slots] = data
            written += data.nbytes
        return written

    def _slot_words(self) -> Indices:
        """Number of each word of a slot over the whole model: which part it belongs to, and where in all ranks' it is."""
        parts = [(projection.size_bytes, projection.sharded) for projection in self.spec.conv]
        parts.append((self.spec.state_bytes, True))
        words = []
        for part, (size, sharded) in enumerate(parts):
            first = self.rank * size // _WORD if sharded else 0
            words.append(np.arange(first, first + size // _WORD) + part * _PART_WORDS)
        return np.concatenate(words)

    def _homes(self, group: int) -> Iterator[tuple[int, Area, Words]]:
        for index, (area, buffer) in enumerate(zip(self.spec.areas, self.buffers, strict=True)):
            if group in area.groups:
                yield index, area, buffer[_GUARD // _WORD :]


class Tokens(NamedTuple):
    """Tokens of one group: the page each lies in, its place in that page, and its position in the sequence."""

    pages: Indices
    offsets: Indices
    positions: Indices

    def where(self, mask: NDArray[np.bool_]) -> Tokens:
        """Some of the tokens."""
        return Tokens(self.pages[mask], self.offsets[mask], self.positions[mask])


def _listed_tokens(scenario: Scenario, role: Role, group: int) -> Tokens:
    """Every token that an engine's blocks of a group have room for, placeholders left out."""
    engine = scenario.engine(role)
    shape = engine.groups[group]
    blocks = np.array(engine.block_ids[group], np.int64)
    inside = np.arange(shape.block_size)
    first = (scenario.first_block(role, group) + np.arange(len(blocks))) * shape.block_size
    tokens = Tokens(
        pages=(blocks[:, None] * shape.blocks_per_logical + inside // shape.kernel_block_size).ravel(),
        offsets=np.tile(inside % shape.kernel_block_size, len(blocks)),
        positions=(first[:, None] + inside).ravel(),
    )
    return tokens.where(np.repeat(blocks != _null(engine), shape.block_size))


def _null(engine: Engine) -> int:
    return -1 if engine.null_block_id is None else engine.null_block_id


def _moved_tokens(scenario: Scenario, group: int) -> Tokens:
    """Where in the consumer's memory data has to arrive.

    A token arrives if it lies in a unit that holds data, inside the window that both sides keep, and in a block of the
    producer's.
    """
    wanted = _listed_tokens(scenario, Role.CONSUMER, group)
    held = _listed_tokens(scenario, Role.PRODUCER, group)
    shapes = [scenario.engine(role).groups[group] for role in Role]
    unit = math.gcd(*(shape.kernel_block_size for shape in shapes))
    end = math.ceil(scenario.num_tokens / unit) * unit
    start = max(_window_start(shape, scenario.num_tokens) for shape in shapes)
    inside = (wanted.positions >= start) & (wanted.positions < end)
    return wanted.where(inside & np.isin(wanted.positions, held.positions))


def _window_start(shape: Group, num_tokens: int) -> int:
    """Position of the first token that a group keeps: that of its ``ceil(window / block_size) + 1`` last blocks."""
    if shape.sliding_window is None:
        return 0
    kept = math.ceil(shape.sliding_window / shape.block_size) + 1
    return max(0, math.ceil(num_tokens / shape.block_size) - kept) * shape.block_size


def producer_memory(scenario: Scenario, rank: int) -> Memory:
    """Memory that holds the request's tokens and state slots, and noise everywhere else."""
    memory = Memory(scenario.producer, rank)
    memory.fill(_Fill.NOISE)
    for index, group in enumerate(scenario.producer.groups):
        if group.kind is GroupKind.MAMBA:
            slots = np.array(scenario.producer.block_ids[index], np.int64)
            real = slots != _null(scenario.producer)
            memory.put_slots(index, slots[real], np.arange(len(slots))[real])
        else:
            memory.put_tokens(index, _listed_tokens(scenario, Role.PRODUCER, index))
    return memory


def consumer_memory(scenario: Scenario, rank: int) -> Memory:
    """Memory that holds the sentinel pattern and nothing else."""
    memory = Memory(scenario.consumer, rank)
    memory.fill(_Fill.SENTINEL)
    return memory


def expected_memory(scenario: Scenario, rank: int) -> tuple[Memory, int]:
    """What a consumer's memory must hold after the request, and how many bytes of it are data."""
    memory = consumer_memory(scenario, rank)
    moved = 0
    for index, group in enumerate(scenario.consumer.groups):
        if group.kind is GroupKind.MAMBA:
            slots = np.array(scenario.consumer.block_ids[index], np.int64)
            listed = len(scenario.producer.block_ids[index])
            # The tail of the producer's slots; a consumer with one more slot fills its last one itself.
            filled = min(len(slots), listed)
            moved += memory.put_slots(index, slots[:filled], np.arange(listed - filled, listed))
        else:
            moved += memory.put_tokens(index, _moved_tokens(scenario, index))
    return memory, moved


class Verdict(msgspec.Struct, frozen=True, tag=True):
    """A consumer's memory compared with what it must hold.

    Args:
        checked_bytes: Bytes compared: all of the rank's memory.
        data_bytes: Bytes among them that had to arrive.
        wrong_bytes: Bytes that are not what they must be.
        first_wrong: Where the first of them is; empty if there is none.
    """

    checked_bytes: int
    data_bytes: int
    wrong_bytes: int
    first_wrong: str = ""


def verify(scenario: Scenario, memory: Memory) -> Verdict:
    """Compares every byte of a consumer rank's memory with what the rules of pairing say."""
    expected, data_bytes = expected_memory(scenario, memory.rank)
    checked = wrong = 0
    first_wrong = ""
    for index, (buffer, right) in enumerate(zip(memory.buffers, expected.buffers, strict=True)):
        got, want = buffer.view(np.uint8), right.view(np.uint8)
        places = np.flatnonzero(got != want)
        checked += got.size
        wrong += places.size
        if places.size and not first_wrong:
            at = int(places[0])
            page, byte = divmod(at - _GUARD, memory.spec.areas[index].stride)
            first_wrong = f"area {index}, page {page}, byte {byte}: {got[at]:#04x}, must be {want[at]:#04x}"
    return Verdict(checked, data_bytes, wrong, first_wrong)


# --- Messages between the demo and its ranks --------------------------------------------------------------------------


class RankId(NamedTuple):
    """One process of the demo."""

    role: Role
    number: int

    @property
    def name(self) -> str:
        """What messages, and NIXL, call it."""
        return f"{self.role}-{self.number}"


class _Start(msgspec.Struct, frozen=True):
    """The first line of a rank's standard input: where to report, and proof that it may."""

    port: int
    token: str


class _Hello(msgspec.Struct, frozen=True, tag=True):
    token: str
    role: Role
    number: int


class _Ready(msgspec.Struct, frozen=True, tag=True):
    """The rank has an agent."""

    nixl: str


class _Alive(msgspec.Struct, frozen=True, tag=True):
    """A sign of life, sent unasked while the rank works or waits."""


class _Prepare(msgspec.Struct, frozen=True, tag=True):
    """Allocate, fill and register."""

    scenario: Scenario


class _Prepared(msgspec.Struct, frozen=True, tag=True):
    layout: bytes
    metadata: bytes


class _Peer(msgspec.Struct, frozen=True):
    name: str
    layout: bytes
    metadata: bytes


class _Move(msgspec.Struct, frozen=True, tag=True):
    """Plan, pair and transfer from or to those of all the other engine's ranks that matter to this rank."""

    peers: tuple[_Peer, ...]


class _Await(msgspec.Struct, frozen=True, tag=True):
    """Wait for the notification of each of these agents."""

    agents: tuple[str, ...]


class Transfer(msgspec.Struct, frozen=True):
    """What one rank moved from or to one peer.

    Args:
        initiator: The rank that posted it.
        peer: The other rank.
        descriptors: Descriptors on each side.
        runs: Descriptors that remain once neighbours are merged, as the pairing says.
        measured_runs: The same as NIXL reports it; None if it does not, or nothing was transferred.
        bytes: Bytes moved.
        untransferred: Units of the consumer that were listed but got no data.
        strided: Whether NIXL took strided descriptor lists (N x 5); None if nothing was transferred.
        planning_us: Microseconds of one ``plan.pair`` call, the median of a few.
        make_us: Microseconds of ``make_prepped_xfer``.
        post_us: Microseconds of ``transfer``.
        complete_us: Microseconds from then until NIXL reports the transfer as done.
    """

    initiator: str
    peer: str
    descriptors: int
    runs: int
    measured_runs: int | None
    bytes: int
    untransferred: int
    strided: bool | None
    planning_us: float
    make_us: float = 0.0
    post_us: float = 0.0
    complete_us: float = 0.0


class _Moved(msgspec.Struct, frozen=True, tag=True):
    """What a rank did, how long its plans took (milliseconds), and which peers will hear of it."""

    transfers: tuple[Transfer, ...]
    plan_ms: float
    notified: tuple[str, ...]


class _Arrived(msgspec.Struct, frozen=True, tag=True):
    """Every notification is there."""


class _Verify(msgspec.Struct, frozen=True, tag=True):
    """Compare all memory with what it must hold."""


class _Release(msgspec.Struct, frozen=True, tag=True):
    """Give back everything that belongs to the scenario."""


class _Released(msgspec.Struct, frozen=True, tag=True):
    pass


class _Failed(msgspec.Struct, frozen=True, tag=True):
    reason: str


_Message = (
    _Hello
    | _Ready
    | _Alive
    | _Prepare
    | _Prepared
    | _Move
    | _Await
    | _Moved
    | _Arrived
    | _Verify
    | Verdict
    | _Release
    | _Released
    | _Failed
)
_Reply = TypeVar("_Reply", bound=_Message)


class _Channel:
    """Messages over one socket, each with its length in front."""

    _decoder: msgspec.msgpack.Decoder[_Message] = msgspec.msgpack.Decoder(_Message)

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._sending = threading.Lock()

    def send(self, message: _Message) -> None:
        frame = msgspec.msgpack.encode(message)
        with self._sending:
            self.sock.sendall(len(frame).to_bytes(4, "big") + frame)

    def receive(self, deadline: float = math.inf) -> _Message:
        """The next message.

        Raises:
            EOFError: The other end has closed.
            TimeoutError: It is past the deadline (of ``time.monotonic``).
            msgspec.DecodeError: Not a message.
        """
        size = int.from_bytes(self._read(4, deadline), "big")
        if size > _MAX_FRAME:
            raise msgspec.DecodeError(f"a message of {size} bytes, at most {_MAX_FRAME} are allowed")
        return self._decoder.decode(self._read(size, deadline))

    def _read(self, size: int, deadline: float) -> bytes:
        out = bytearray()
        while len(out) < size:
            self.sock.settimeout(None if deadline == math.inf else max(deadline - time.monotonic(), 1e-3))
            try:
                part = self.sock.recv(size - len(out))
            except ConnectionError:
                part = b""
            if not part:
                raise EOFError
            out += part
        return bytes(out)


# --- A rank ----------------------------------------------------------------------------------------------------------


class _Worker:
    """One rank's part of a scenario.

    Args:
        agent: A ``nixl_agent`` on UCX.
        me: Which rank this is.
    """

    def __init__(self, agent: Any, me: RankId) -> None:
        self._agent = agent
        self._me = me
        self._held = ExitStack()

    def handle(self, request: _Message) -> _Message:
        match request:
            case _Prepare(scenario=scenario):
                return self._prepare(scenario)
            case _Move(peers=peers):
                return self._move(peers)
            case _Await(agents=agents):
                return self._await(set(agents))
            case _Verify():
                return verify(self._scenario, self._memory)
            case _Release():
                self._held.close()
                return _Released()
        raise TransferError(f"a rank does not answer {type(request).__name__}")

    def _prepare(self, scenario: Scenario) -> _Prepared:
        make = producer_memory if self._me.role is Role.PRODUCER else consumer_memory
        self._scenario = scenario
        self._memory = make(scenario, self._me.number)
        self._layout = self._memory.layout(f"demo-{self._me.role}")
        areas = [(address, size, 0, "") for address, size in self._memory.spans()]
        registered = self._agent.register_memory(areas, "DRAM")
        self._held.callback(self._agent.deregister_memory, registered)
        return _Prepared(self._layout.to_bytes(), self._agent.get_agent_metadata())

    def _move(self, peers: Sequence[_Peer]) -> _Moved:
        layouts = [EngineLayout.from_bytes(peer.layout) for peer in peers]
        by_rank = {layout.tp_rank: peer for layout, peer in zip(layouts, peers, strict=True)}
        started = time.perf_counter()
        plans = plan_peer(self._layout, layouts, direction=self._scenario.direction)
        plan_ms = (time.perf_counter() - started) * 1e3
        transfers = []
        for plan in plans:
            peer = by_rank[plan.remote.tp_rank]
            self._connect(peer)
            transfers.append(self._move_with(plan, peer.name))
        for layout in plans.notify_only:
            self._connect(by_rank[layout.tp_rank])
            self._agent.send_notif(by_rank[layout.tp_rank].name, self._notification())
        heard = [plan.remote for plan in plans] + list(plans.notify_only)
        return _Moved(tuple(transfers), plan_ms, tuple(by_rank[layout.tp_rank].name for layout in heard))

    def _connect(self, peer: _Peer) -> None:
        self._agent.add_remote_agent(peer.metadata)
        self._held.callback(self._agent.remove_remote_agent, peer.name)

    def _move_with(self, plan: TransferPlan, peer: str) -> Transfer:
        pairing, planning_us = self._pair(plan)
        planned = Transfer(
            initiator=self._me.name,
            peer=peer,
            descriptors=pairing.num_descs,
            runs=pairing.num_runs,
            measured_runs=None,
            bytes=pairing.num_bytes,
            untransferred=sum(len(pairing.untransferred(group)) for group in range(len(self._layout.groups))),
            strided=None,
            planning_us=planning_us,
        )
        if pairing.notify_only:
            self._agent.send_notif(peer, self._notification())
            return planned
        return self._transfer(plan, pairing, planned)

    def _pair(self, plan: TransferPlan) -> tuple[Pairing, float]:
        """A pairing, and the median time in microseconds of a few calls that make it."""
        scenario = self._scenario
        ids = [list(map(list, scenario.engine(role).block_ids)) for role in Role]
        ours, theirs = ids if self._me.role is Role.PRODUCER else reversed(ids)
        times = []
        for _ in range(PAIR_REPEATS):
            started = time.perf_counter()
            pairing = plan.pair(
                ours, theirs, num_tokens=scenario.num_tokens, num_computed_blocks=scenario.num_computed_blocks
            )
            times.append(time.perf_counter() - started)
        return pairing, statistics.median(times) * 1e6

    def _transfer(self, plan: TransferPlan, pairing: Pairing, planned: Transfer) -> Transfer:
        agent = self._agent
        local_list, local_strided = self._descriptor_list("NIXL_INIT_AGENT", plan, Side.LOCAL)
        remote_list, remote_strided = self._descriptor_list(planned.peer, plan, Side.REMOTE)
        operation = self._scenario.direction.upper()
        clock = [time.perf_counter()]
        handle = agent.make_prepped_xfer(
            operation, local_list, pairing.local_desc_ids, remote_list, pairing.remote_desc_ids, self._notification()
        )
        self._held.callback(agent.release_xfer_handle, handle)
        clock.append(time.perf_counter())
        deadline = clock[-1] + TRANSFER_S
        state = agent.transfer(handle)
        clock.append(time.perf_counter())
        while state == "PROC" and time.perf_counter() < deadline:
            time.sleep(_POLL_S)
            state = agent.check_xfer_state(handle)
        clock.append(time.perf_counter())
        if state != "DONE":
            what = f"is not done after {TRANSFER_S:g} s" if state == "PROC" else f"ended as {state}"
            raise TransferError(f"{operation} of {pairing.num_descs} descriptors, peer {planned.peer}, {what}")
        make, post, complete = ((end - start) * 1e6 for start, end in pairwise(clock))
        return msgspec.structs.replace(
            planned,
            measured_runs=self._measured_runs(handle),
            strided=local_strided and remote_strided,
            make_us=make,
            post_us=post,
            complete_us=complete,
        )

    def _descriptor_list(self, owner: str, plan: TransferPlan, side: Side) -> tuple[Any, bool]:
        """A prepared list, and whether NIXL took it as strided rows."""
        strided = True
        try:
            handle = self._agent.prep_xfer_dlist(
                owner, plan.local_table if side is Side.LOCAL else plan.remote_table, "DRAM"
            )
        except Exception:  # whatever an older NIXL raises for five columns; a real fault shows again below
            strided = False
            handle = self._agent.prep_xfer_dlist(owner, plan.expanded(side), "DRAM")
        self._held.callback(self._agent.release_dlist_handle, handle)
        return handle, strided

    def _measured_runs(self, handle: Any) -> int | None:
        try:
            return int(self._agent.get_xfer_telemetry(handle).descCount)
        except Exception:  # telemetry is extra: not every NIXL has it
            return None

    def _notification(self) -> bytes:
        return f"{self._scenario.name} {self._me.name}".encode()

    def _await(self, agents: set[str]) -> _Arrived:
        deadline = time.monotonic() + TRANSFER_S
        while agents:
            for agent, notifications in self._agent.get_new_notifs().items():
                if f"{self._scenario.name} {agent}".encode() in notifications:
                    agents.discard(agent)
            if time.monotonic() > deadline:
                raise TransferError(f"no notification from {', '.join(sorted(agents))} within {TRANSFER_S:g} s")
            time.sleep(_POLL_S)
        return _Arrived()


def _rank_main(role: str, number: str) -> int:
    """A rank's process: reports to the demo and answers its requests until the connection closes."""
    start = msgspec.json.decode(sys.stdin.buffer.readline(), type=_Start)
    threading.Thread(target=_end_with_demo, daemon=True).start()
    me = RankId(Role(role), int(number))
    with socket.create_connection(("127.0.0.1", start.port)) as sock:
        channel = _Channel(sock)
        channel.send(_Hello(start.token, *me))
        threading.Thread(target=_show_life, args=(channel,), daemon=True).start()
        try:
            from nixl._api import nixl_agent, nixl_agent_config  # noqa: PLC0415 - only a rank needs it
        except ImportError as error:
            channel.send(_Failed(f"nixl cannot be imported ({error}): pip install nixl-fast[nixl]"))
            return 1
        try:
            agent = nixl_agent(me.name, nixl_agent_config(capture_telemetry=True, num_threads=AGENT_THREADS))
            channel.send(_Ready(_version("nixl")))
        except Exception as error:  # the demo shows it
            channel.send(_Failed(f"no NIXL agent: {_one_line(error)}"))
            return 1
        worker = _Worker(agent, me)
        while True:
            try:
                request = channel.receive()
            except EOFError:
                return 0
            try:
                reply = worker.handle(request)
            except Exception as error:  # the demo shows it and ends this process
                reply = _Failed(_one_line(error))
            channel.send(reply)


def _show_life(channel: _Channel) -> None:
    with suppress(OSError):  # the demo has closed the connection
        while True:
            channel.send(_Alive())
            time.sleep(_BEAT_S)


def _end_with_demo() -> None:
    """Ends this process when the demo does, whatever this process is doing: standard input closes then."""
    while os.read(sys.stdin.fileno(), 1):
        pass
    os._exit(1)


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if isinstance(error, NixlFastError) else f"{type(error).__name__}: {text}"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"


# --- The demo --------------------------------------------------------------------------------------------------------


class _Process(NamedTuple):
    popen: subprocess.Popen[bytes]
    log: IO[bytes]

    def status(self) -> str:
        """How it ended, with the last line that it wrote."""
        code = self.popen.poll()
        if code is None:
            how = "closed its connection"
        elif code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
        else:
            how = f"ended with status {code}"
        self.log.seek(0)
        lines = self.log.read().decode(errors="replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        return f"{how}; its last words: {last}" if last else how


class _Fleet:
    """The processes of a demo: started on entry, gone on exit.

    Args:
        ranks: Which processes.
    """

    def __init__(self, ranks: Sequence[RankId]) -> None:
        self._ranks = tuple(ranks)
        self._processes: dict[RankId, _Process] = {}
        self._channels: dict[RankId, _Channel] = {}
        self.nixl = "unknown"

    def __enter__(self) -> Self:
        try:
            token = secrets.token_hex(16)
            with socket.create_server(("127.0.0.1", 0)) as server:
                start = msgspec.json.encode(_Start(server.getsockname()[1], token)) + b"\n"
                for rank in self._ranks:
                    self._processes[rank] = self._spawn(rank, start)
                self._accept(server, token)
            ready = self.collect(self._ranks, _Ready, START_S, START_S)  # loading NIXL lets no other thread run
            self.nixl = next((reply.nixl for reply in ready.values()), self.nixl)
        except BaseException:
            self._end(kill=True)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._end(kill=kind is not None)

    def ask(self, requests: Mapping[RankId, _Message], kind: type[_Reply]) -> dict[RankId, _Reply]:
        """Sends every rank its request and waits for all replies.

        Raises:
            TransferError: A rank failed, died, or was silent for too long.
        """
        for rank, request in requests.items():
            self._channels[rank].sock.settimeout(SILENCE_S)
            try:
                self._channels[rank].send(request)
            except TimeoutError:
                raise TransferError(f"{rank.name} takes no message") from None
            except OSError:
                raise self._gone(rank) from None
        return self.collect(requests, kind, STEP_S, SILENCE_S)

    def collect(
        self, ranks: Collection[RankId], kind: type[_Reply], seconds: float, silence: float
    ) -> dict[RankId, _Reply]:
        """Waits for one reply of each rank; notices the end of any other, too."""
        now = time.monotonic()
        deadline, heard = now + seconds, dict.fromkeys(self._channels, now)
        replies: dict[RankId, _Reply] = {}
        waiting = set(ranks)
        with selectors.DefaultSelector() as selector:
            for rank, channel in self._channels.items():
                selector.register(channel.sock, selectors.EVENT_READ, rank)
            while waiting:
                for key, _ in selector.select(_BEAT_S):
                    rank = key.data
                    reply = self._receive(rank)
                    heard[rank] = time.monotonic()
                    if isinstance(reply, kind) and rank in waiting:
                        replies[rank] = reply
                        waiting.discard(rank)
                    elif not isinstance(reply, _Alive):
                        raise TransferError(f"{rank.name} answered {type(reply).__name__} instead of {kind.__name__}")
                now = time.monotonic()
                for rank, last in heard.items():
                    if now - last > silence:
                        raise TransferError(f"{rank.name} has shown no sign of life for {silence:g} s")
                if waiting and now > deadline:
                    names = ", ".join(sorted(rank.name for rank in waiting))
                    raise TransferError(f"no answer from {names} within {seconds:g} s")
        return replies

    def _receive(self, rank: RankId) -> _Message:
        try:
            reply = self._channels[rank].receive(time.monotonic() + SILENCE_S)
        except EOFError:
            raise self._gone(rank) from None
        except (TimeoutError, msgspec.DecodeError) as error:
            raise TransferError(f"{rank.name} sent no whole message: {_one_line(error)}") from None
        if isinstance(reply, _Failed):
            raise self._crashed() or TransferError(f"{rank.name}: {reply.reason}")
        return reply

    def _crashed(self) -> TransferError | None:
        """The end of a rank that others may have failed for, and were heard first; status 1 is one that told why."""
        deadline = time.monotonic() + _GRACE_S
        while time.monotonic() < deadline:
            for rank, process in self._processes.items():
                if process.popen.poll() not in (None, 0, 1):
                    return self._gone(rank)
            time.sleep(0.01)
        return None

    def _gone(self, rank: RankId) -> TransferError:
        process = self._processes[rank]
        with suppress(subprocess.TimeoutExpired):
            process.popen.wait(timeout=_GRACE_S)
        return TransferError(f"{rank.name} {process.status()}")

    @staticmethod
    def _spawn(rank: RankId, start: bytes) -> _Process:
        # Not the working directory, but where this process finds its packages.
        paths = os.pathsep.join(os.path.abspath(path) for path in sys.path if path)
        environment = {"NIXL_LOG_LEVEL": "WARN", **os.environ, "PYTHONPATH": paths}
        log = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        command = [sys.executable, "-P", "-m", "nixl_fast.demo", rank.role.value, str(rank.number)]
        popen = subprocess.Popen(  # noqa: S603 - this interpreter and this module
            command, stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT, env=environment
        )
        if popen.stdin is not None:
            with suppress(OSError):  # it has ended already, which is noticed where its connection is awaited
                popen.stdin.write(start)
                popen.stdin.flush()
        return _Process(popen, log)

    def _accept(self, server: socket.socket, token: str) -> None:
        """Takes one connection from every rank; strangers are turned away."""
        deadline = time.monotonic() + START_S
        server.settimeout(0.05)
        while missing := [rank for rank in self._ranks if rank not in self._channels]:
            for rank in missing:
                if self._processes[rank].popen.poll() is not None:
                    raise self._gone(rank)
            if time.monotonic() > deadline:
                raise TransferError(f"{', '.join(rank.name for rank in missing)} did not start within {START_S:g} s")
            try:
                sock, _ = server.accept()
            except TimeoutError:
                continue
            channel = _Channel(sock)
            try:
                hello = channel.receive(time.monotonic() + 1)
            except (EOFError, TimeoutError, msgspec.DecodeError):
                sock.close()
                continue
            if not isinstance(hello, _Hello) or not secrets.compare_digest(hello.token, token):
                sock.close()
                continue
            self._channels[RankId(hello.role, hello.number)] = channel

    def _end(self, *, kill: bool) -> None:
        """Ends every process: asked to, by closing its connection, or killed."""
        for process in self._processes.values() if kill else ():
            process.popen.kill()
        for channel in self._channels.values():
            channel.sock.close()
        for process in self._processes.values():
            try:
                process.popen.wait(timeout=3)
            except subprocess.TimeoutExpired:
                process.popen.kill()
                process.popen.wait()
            if process.popen.stdin is not None:
                process.popen.stdin.close()
            process.log.close()


class ScenarioResult(msgspec.Struct, frozen=True):
    """What one scenario did.

    Args:
        name: The scenario.
        description: What it is about.
        direction: Who moved the bytes.
        producer_blocks: Logical blocks that the producer listed.
        consumer_blocks: Logical blocks that the consumer listed.
        descriptors: Descriptors on each side, all transfers together, as the next six.
        runs: Descriptors that remain once neighbours are merged, as the pairings say.
        measured_runs: The same as NIXL reports it; None if it does not.
        bytes: Bytes moved, as the pairings say.
        plan_ms: Milliseconds to make the plans, once per peer.
        planning_us: Microseconds of ``plan.pair``.
        nixl_us: Microseconds to make, post and complete.
        verified: Whether every byte is right and as many bytes moved as had to.
        checked_bytes: Bytes compared: all memory of all consumer ranks.
        data_bytes: Bytes among them that had to arrive.
        wrong_bytes: Bytes that are not what they must be.
        first_wrong: Where the first of them is.
        transfers: One per pair of ranks that exchanged data.
    """

    name: str
    description: str
    direction: Direction
    producer_blocks: int
    consumer_blocks: int
    descriptors: int
    runs: int
    measured_runs: int | None
    bytes: int
    plan_ms: float
    planning_us: float
    nixl_us: float
    verified: bool
    checked_bytes: int
    data_bytes: int
    wrong_bytes: int
    first_wrong: str
    transfers: tuple[Transfer, ...]


class Report(msgspec.Struct, frozen=True):
    """What the demo did.

    Args:
        nixl: Version of NIXL.
        seconds: Time the demo took, processes and all.
        verified: Whether every byte of every scenario was right.
        scenarios: One per scenario, in order.
    """

    nixl: str
    seconds: float
    verified: bool
    scenarios: tuple[ScenarioResult, ...]


def run_demo(scenarios: Sequence[Scenario], on_step: Callable[[Scenario, str], None] | None = None) -> Report:
    """Runs scenarios one after the other, in the same processes.

    Args:
        scenarios: What to run.
        on_step: Called at the start of every step with the scenario and what happens next.

    Raises:
        TransferError: NIXL cannot be imported or failed, a process died, or one was silent for too long. Wrong bytes
            are not an error but a result that is not ``verified``.
    """
    started = time.monotonic()
    ranks = [
        RankId(role, index)
        for role in Role
        for index in range(max((len(scenario.engine(role).ranks) for scenario in scenarios), default=0))
    ]
    with _Fleet(ranks) as fleet:
        results = tuple(_run(fleet, scenario, on_step or (lambda *_: None)) for scenario in scenarios)
    return Report(fleet.nixl, time.monotonic() - started, all(result.verified for result in results), results)


def _run(fleet: _Fleet, scenario: Scenario, on_step: Callable[[Scenario, str], None]) -> ScenarioResult:
    everyone = [RankId(role, index) for role in Role for index in range(len(scenario.engine(role).ranks))]
    consumers = [rank for rank in everyone if rank.role is Role.CONSUMER]
    on_step(scenario, "allocating")
    prepared = fleet.ask(dict.fromkeys(everyone, _Prepare(scenario)), _Prepared)
    on_step(scenario, "moving")
    initiators = [rank for rank in everyone if rank.role is scenario.initiator]
    targets = [rank for rank in everyone if rank.role is not scenario.initiator]
    peers = tuple(_Peer(rank.name, prepared[rank].layout, prepared[rank].metadata) for rank in targets)
    moved = fleet.ask(dict.fromkeys(initiators, _Move(peers)), _Moved)
    senders = {rank: tuple(who.name for who, did in moved.items() if rank.name in did.notified) for rank in targets}
    fleet.ask({rank: _Await(names) for rank, names in senders.items()}, _Arrived)
    on_step(scenario, "checking every byte")
    verdicts = fleet.ask(dict.fromkeys(consumers, _Verify()), Verdict).values()
    fleet.ask(dict.fromkeys(everyone, _Release()), _Released)
    transfers = tuple(transfer for rank in initiators for transfer in moved[rank].transfers)
    measured = [transfer.measured_runs for transfer in transfers if transfer.measured_runs is not None]
    data_bytes, wrong_bytes = sum(each.data_bytes for each in verdicts), sum(each.wrong_bytes for each in verdicts)
    moved_bytes = sum(each.bytes for each in transfers)
    return ScenarioResult(
        name=scenario.name,
        description=scenario.description,
        direction=scenario.direction,
        producer_blocks=scenario.producer.num_blocks,
        consumer_blocks=scenario.consumer.num_blocks,
        descriptors=sum(each.descriptors for each in transfers),
        runs=sum(each.runs for each in transfers),
        measured_runs=sum(measured) if measured else None,
        bytes=moved_bytes,
        plan_ms=sum(each.plan_ms for each in moved.values()),
        planning_us=sum(each.planning_us for each in transfers),
        nixl_us=sum(each.make_us + each.post_us + each.complete_us for each in transfers),
        verified=wrong_bytes == 0 and moved_bytes == data_bytes,
        checked_bytes=sum(each.checked_bytes for each in verdicts),
        data_bytes=data_bytes,
        wrong_bytes=wrong_bytes,
        first_wrong=next((each.first_wrong for each in verdicts if each.first_wrong), ""),
        transfers=transfers,
    )


if __name__ == "__main__":
    sys.exit(_rank_main(*sys.argv[1:]))
