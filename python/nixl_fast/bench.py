"""How long planning a request takes on this machine: ours, numpy as connectors write it, and the floor of memory.

Everything runs on the same inputs in the same process, in turns. The geometries are those of public models; block ids
come fresh from a pool (contiguous) or from one that has served traffic for a while (fragmented).
"""

from __future__ import annotations

import contextlib
import mmap
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from nixl_fast.layout import ConvProjection, EngineLayout, Group, GroupKind, MambaState, Region
from nixl_fast.plan import TransferPlan, plan_peer

_FULL, _WINDOW, _MLA, _MAMBA = GroupKind.FULL_ATTENTION, GroupKind.SLIDING_WINDOW, GroupKind.MLA, GroupKind.MAMBA
_TURNS = 10
_HUGE = 4 << 20  # bytes from which on numpy asks for huge pages
_POOL = 20_000  # logical blocks of an engine


class BlockPool:
    """A free list of block ids, as a scheduler keeps one."""

    def __init__(self, blocks: int, seed: int) -> None:
        self._random = np.random.default_rng(seed)
        self._blocks = blocks
        self._free = list(range(1, blocks))
        self._used: list[list[int]] = []

    def take(self, count: int) -> list[int]:
        """The next blocks of the free list."""
        taken, self._free = self._free[:count], self._free[count:]
        return taken

    def serve(self, requests: int) -> BlockPool:
        """Lets requests of mixed lengths come and go, so that the free list becomes what hours of traffic make it."""
        for _ in range(requests):
            self._used.append(self.take(int(self._random.integers(8, 160))))
            while len(self._free) < self._blocks // 2 or len(self._used) > 64:
                # freed blocks go to the end of the list, last block first
                self._free += self._used.pop(int(self._random.integers(len(self._used))))[::-1]
        for blocks in self._used:
            self._free += blocks[::-1]
        return self


class Shape(NamedTuple):
    """One geometry and request."""

    name: str
    plans: tuple[TransferPlan, ...]
    local_ids: list[list[int]]
    remote_ids: list[list[int]]
    num_tokens: int | None
    num_computed_blocks: list[int | None] | None = None

    def pair(self) -> None:
        """What an engine calls per request."""
        for plan in self.plans:
            plan.pair(
                self.local_ids,
                self.remote_ids,
                num_tokens=self.num_tokens,
                num_computed_blocks=self.num_computed_blocks,
            )


class Row(msgspec.Struct, frozen=True):
    """One line of the table; times are medians in microseconds."""

    name: str
    fragmented: bool
    ids_per_side: int
    ours_us: float
    numpy_us: float
    fresh_fill_us: float
    warm_fill_us: float

    @property
    def speedup(self) -> float:
        """How many times faster than numpy."""
        return self.numpy_us / self.ours_us


class NumpyPath:
    """Both sides' indices as connectors compute them in Python: expand to lists, trim, broadcast, int64.

    What does not depend on the request is worked out here, once, as they do at the handshake.
    """

    def __init__(self, plan: TransferPlan, shape: Shape) -> None:
        self.groups = []
        for index in range(len(plan.local.groups)):
            mamba = plan.local.is_mamba(index)
            unit = plan.group_unit_tokens[index]
            ratios = [1 if mamba else layout.groups[index].block_size // unit for layout in (plan.local, plan.remote)]
            parts = len(plan.local.mamba.conv) + 1 if mamba and plan.local.mamba else 1
            regions = parts * sum(index in groups for _, _, groups in plan.local.places())
            blocks = [
                layout.num_blocks(index) * ratio
                for layout, ratio in zip((plan.local, plan.remote), ratios, strict=True)
            ]
            starts = [np.arange(regions)[:, None] * count for count in blocks]
            end = None if mamba or shape.num_tokens is None else -(-shape.num_tokens // unit)
            first = ((shape.num_computed_blocks or [0] * len(plan.local.groups))[index] or 0) * ratios[0]
            self.groups.append((ratios, starts, end, first))
        self.ids = (shape.local_ids, shape.remote_ids)

    def __call__(self) -> list[NDArray[Any]]:
        """The index arrays of both sides."""
        out: tuple[list[NDArray[Any]], list[NDArray[Any]]] = ([], [])
        for index, (ratios, starts, end, first) in enumerate(self.groups):
            sides = [
                [block * ratio + part for block in ids[index] for part in range(ratio)] if ratio > 1 else ids[index]
                for ids, ratio in zip(self.ids, ratios, strict=True)
            ]
            if end is not None:  # what is past the data goes, then both lists are aligned at their ends
                sides = [sides[0][: end - first], sides[1][:end]]
            count = min(map(len, sides))
            for made, side, start in zip(out, sides, starts, strict=True):
                made.append((start + np.asarray(side[len(side) - count :])[None, :]).ravel())
        return [made[0] if len(made) == 1 else np.concatenate(made) for made in out]


def _engine(name: str, groups: Sequence[Group], regions: int, length: int, **fields: Any) -> EngineLayout:
    blocks = _POOL * max(group.blocks_per_logical for group in groups)
    memory = tuple(Region((region + 1) << 40, length, blocks) for region in range(regions))
    return EngineLayout(name, tuple(groups), memory, **fields)


def _shape(
    name: str, engine: Callable[[str], EngineLayout], blocks: Sequence[int], tokens: int | None, old: bool
) -> Shape:
    pools = [BlockPool(_POOL, seed).serve(2_000 if old else 0) for seed in (1, 2)]
    ids = [[pool.take(count) for count in blocks] for pool in pools]
    return Shape(name, (TransferPlan(engine("d"), engine("p")),), ids[0], ids[1], tokens)


def shapes(*, fragmented: bool, quick: bool = False) -> Iterator[Shape]:
    """The geometries: Llama-3.1-70B TP 8, the same with ratio 4, gpt-oss-120b, Nemotron-H, DeepSeek-V3, unequal TP."""

    def llama(ratio: int) -> Callable[[str], EngineLayout]:
        return lambda name: _engine(name, [Group(_FULL, 16 * ratio, ratio)], 160, 4096)

    yield _shape("one group, 16 blocks", lambda name: _engine(name, [Group(_FULL, 16)], 1, 4096), [16], 256, fragmented)
    yield _shape(
        "32 regions, 64 blocks", lambda name: _engine(name, [Group(_FULL, 16)], 32, 4096), [64], 1024, fragmented
    )
    for tokens in (1024, 8192) if quick else (1024, 8192, 32_768, 131_072):
        label = f"Llama-3.1-70B TP8, {tokens // 1024}k tokens"
        yield _shape(label, llama(1), [tokens // 16], tokens, fragmented)
        yield _shape(f"{label}, ratio 4", _padded(llama(4)), [tokens // 64], tokens, fragmented)
        yield _shape(f"{label}, ratio 4, whole blocks", llama(4), [tokens // 64], tokens, fragmented)

    def gpt_oss(name: str) -> EngineLayout:
        return _engine(name, [Group(_FULL, 16), Group(_WINDOW, 16, sliding_window=128)], 36, 8192)

    yield _shape("gpt-oss-120b, 32k tokens", gpt_oss, [2048, 9], 32_768, fragmented)
    for ratio in (34, 261):

        def nemotron(name: str, ratio: int = ratio) -> EngineLayout:
            groups = [Group(_FULL, 16 * ratio, ratio), *(Group(_MAMBA, 16 * ratio, ratio) for _ in range(3))]
            pages = tuple(Region((region + 1) << 40, 4096, 400 * ratio, groups=(0,)) for region in range(8))
            slots = tuple(Region((region + 1) << 40, 4096, 400 * ratio, groups=(1, 2, 3)) for region in range(8))
            conv = (ConvProjection(1024), ConvProjection(256), ConvProjection(256))
            return EngineLayout(name, tuple(groups), pages, MambaState(slots, conv, 65_536))

        tokens = 16 * ratio * 60
        pools = [BlockPool(400, seed) for seed in (1, 2)]
        ids = [[pool.take(count) for count in (60, 1, 1, 1)] for pool in pools]
        yield Shape(f"Nemotron-H, ratio {ratio}", (TransferPlan(nemotron("d"), nemotron("p")),), ids[0], ids[1], tokens)
    mla = _shape(
        "DeepSeek-V3 MLA, 32k tokens", lambda n: _engine(n, [Group(_MLA, 64)], 61, 73_728), [512], 32_768, fragmented
    )
    yield mla
    local = _engine("d", [Group(_FULL, 16)], 160, 4096 * 4, num_kv_heads=4)
    ranks = [_engine("p", [Group(_FULL, 16)], 160, 4096, num_kv_heads=4, tp_rank=rank, tp_size=4) for rank in range(4)]
    one = _shape("", llama(1), [512], 8192, fragmented)
    yield one._replace(name="P_TP 4 -> D_TP 1, 8k tokens", plans=tuple(plan_peer(local, ranks)))
    big, small = (_engine(name, [Group(_FULL, size)], 160, 256 * size) for name, size in (("d", 64), ("p", 16)))
    pools = [BlockPool(_POOL, seed).serve(2_000 if fragmented else 0) for seed in (1, 2)]
    yield Shape(
        "blocks of 64 and 16, 2k of 8k tokens cached",
        (TransferPlan(big, small),),
        [pools[0].take(96)],
        [pools[1].take(512)],
        8192,
        [32],
    )


def _padded(engine: Callable[[str], EngineLayout]) -> Callable[[str], EngineLayout]:
    """The same engine with pages that are not dense, so that kernel blocks are named one by one."""

    def padded(name: str) -> EngineLayout:
        layout = engine(name)
        regions = tuple(
            msgspec.structs.replace(region, block_stride=region.block_len + 64) for region in layout.regions
        )
        return msgspec.structs.replace(layout, regions=regions)

    return padded


def fill_fresh(count: int) -> None:
    """Writes two int32 arrays of ``count`` into memory that the process has never had."""
    for _ in range(2):
        with mmap.mmap(-1, max(4 * count, 1)) as memory:
            if 4 * count >= _HUGE:
                with contextlib.suppress(OSError):  # a kernel without huge pages
                    memory.madvise(mmap.MADV_HUGEPAGE)
            np.frombuffer(memory, np.int32, count).fill(1)


def time_us(function: Callable[[], object], seconds: float) -> float:
    """The median time of a call over about ``seconds``, in microseconds."""
    return 1e6 * statistics.median(_times(function, seconds))


def _times(function: Callable[[], object], seconds: float) -> list[float]:
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < 5 or time.perf_counter() < end:
        started = time.perf_counter()
        function()
        times.append(time.perf_counter() - started)
    return times


def measure(shape: Shape, *, fragmented: bool, seconds: float) -> Row:
    """One row; every contestant gets ``seconds``, in turns, so that a busy machine is busy for all of them."""
    replaced = [NumpyPath(plan, shape) for plan in shape.plans]
    count = sum(len(path()[0]) for path in replaced)
    warm = np.empty((2, count), np.int32)
    contestants: list[Callable[[], object]] = [
        shape.pair,
        lambda: [path() for path in replaced],
        lambda: fill_fresh(count),
        lambda: warm.fill(1),
    ]
    times: list[list[float]] = [[] for _ in contestants]
    for _ in range(_TURNS):
        for contestant, taken in zip(contestants, times, strict=True):
            taken.extend(_times(contestant, seconds / _TURNS))
    ours, numpy, fresh, filled = (1e6 * statistics.median(taken) for taken in times)
    return Row(
        name=shape.name,
        fragmented=fragmented,
        ids_per_side=count,
        ours_us=ours,
        numpy_us=numpy,
        fresh_fill_us=fresh,
        warm_fill_us=filled,
    )


def count(*, quick: bool) -> int:
    """How many rows `run` measures."""
    return 2 * (8 + 3 * (2 if quick else 4))


def machine() -> str:
    """The machine that the numbers are of."""
    processor = platform.machine()
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        processor = next((line.split(": ", 1)[1] for line in lines if line.startswith("model name")), processor)
    return f"{processor}, {os.cpu_count()} cores, Python {platform.python_version()}, numpy {np.__version__}"


def run(*, quick: bool = False, on_row: Callable[[Row], None] = lambda row: None) -> list[Row]:
    """Measures every shape, contiguous and fragmented.

    Args:
        quick: Fewer and shorter measurements, under a minute.
        on_row: Called with each row as soon as it is measured.
    """
    rows = []
    for fragmented in (False, True):
        for shape in shapes(fragmented=fragmented, quick=quick):
            rows.append(measure(shape, fragmented=fragmented, seconds=0.2 if quick else 1.0))
            on_row(rows[-1])
    return rows
