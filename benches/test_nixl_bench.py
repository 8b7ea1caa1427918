"""From a request's ids to a NIXL handle that can be posted: ours and the numpy path, with real agents on host memory.

    uv run pytest benches/test_nixl_bench.py

NIXL copies a descriptor per index and merges neighbours, so its share grows with the indices and not with the bytes; the
coarse unit (one descriptor per logical block, where both sides allow it) is what helps it.
"""

import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")

from nixl_fast import EngineLayout, Group, GroupKind, Region, TransferPlan
from nixl_fast.agent import Endpoint, Prepared
from nixl_fast.bench import BlockPool, NumpyPath, Shape

REGIONS, BLOCKS, BLOCK = 32, 16_384, 256
"""Kernel blocks of 256 bytes: 128 MiB a side."""
RATIO = 4
SIZES = (64, 1_024, 16_384, 98_304)
"""Kernel descriptors a side."""
Ids = tuple[NDArray[Any], NDArray[Any]]


class Pair:
    """Two agents of this process, and one plan between them."""

    def __init__(self, *, coarse: bool) -> None:
        self.ends, layouts, self._memory = [], [], []
        for name in ("d", "p"):
            pad = 0 if coarse else 64  # padded blocks are named one by one
            memory = np.zeros((REGIONS, BLOCKS, BLOCK + pad), np.uint8)
            regions = tuple(
                Region(memory[region].ctypes.data, BLOCK, BLOCKS, block_stride=BLOCK + pad) for region in range(REGIONS)
            )
            layouts.append(EngineLayout(name, (Group(GroupKind.FULL_ATTENTION, 16 * RATIO, RATIO),), regions))
            self.ends.append(Endpoint(f"bench-{name}-{coarse}"))
            self.ends[-1].register(layouts[-1], [])
            self._memory.append(memory)
        self.ends[0].add_peer(f"bench-p-{coarse}", self.ends[1].metadata())
        self.plan = TransferPlan(*layouts)
        self.prepared: Prepared = self.ends[0].prepare(self.plan, f"bench-p-{coarse}")

    def make(self, ids: Ids) -> None:
        """A handle, and its end."""
        for posted in self.ends[0].make(self.prepared, [ids], b"done"):
            self.ends[0].release(posted)

    def close(self) -> None:
        """Gives everything back."""
        self.ends[0].unprepare(self.prepared)
        for end in self.ends:
            end.deregister()


@pytest.fixture(scope="module")
def pairs() -> Iterator[dict[str, Pair]]:
    made = {"fine": Pair(coarse=False), "coarse": Pair(coarse=True)}
    yield made
    for pair in made.values():
        pair.close()


def _shape(plan: TransferPlan, size: int, *, fragmented: bool) -> Shape:
    count = max(1, size // REGIONS // RATIO)
    pools = [BlockPool(BLOCKS // RATIO, seed).serve(2_000 if fragmented else 0) for seed in (1, 2)]
    local, remote = ([pool.take(count)] for pool in pools)
    return Shape("", (plan,), local, remote, count * 16 * RATIO)


def _ours(pair: Pair, shape: Shape) -> Callable[[], Ids]:
    def ids() -> Ids:
        pairing = pair.plan.pair(shape.local_ids, shape.remote_ids, num_tokens=shape.num_tokens)
        return pairing.local_desc_ids, pairing.remote_desc_ids

    return ids


def _numpy(pair: Pair, shape: Shape) -> Callable[[], Ids]:
    path = NumpyPath(pair.plan, shape)

    def ids() -> Ids:
        local, remote = path()
        return local, remote

    return ids


CONTESTANTS = {"numpy": ("fine", _numpy), "ours": ("fine", _ours), "ours, coarse unit": ("coarse", _ours)}


@pytest.mark.parametrize("contestant", CONTESTANTS)
@pytest.mark.parametrize("fragmented", [False, True], ids=["contiguous", "fragmented"])
@pytest.mark.parametrize("size", SIZES)
def test_handle(benchmark: Any, pairs: dict[str, Pair], size: int, fragmented: bool, contestant: str) -> None:
    unit, way = CONTESTANTS[contestant]
    pair = pairs[unit]
    shape = _shape(pair.plan, size, fragmented=fragmented)
    ids = way(pair, shape)
    pairing = pair.plan.pair(shape.local_ids, shape.remote_ids, num_tokens=shape.num_tokens)
    benchmark.group = f"{size:>6} kernel descriptors, {'fragmented' if fragmented else 'contiguous'}"
    benchmark.extra_info |= {"descriptors": pairing.num_descs, "merged": pairing.num_runs}
    benchmark(lambda: pair.make(ids()))


@pytest.mark.parametrize("size", SIZES)
def test_the_contestants_name_the_same_blocks(pairs: dict[str, Pair], size: int) -> None:
    shape = _shape(pairs["fine"].plan, size, fragmented=True)
    for mine, theirs in zip(_ours(pairs["fine"], shape)(), _numpy(pairs["fine"], shape)(), strict=True):
        assert np.array_equal(mine, theirs)
