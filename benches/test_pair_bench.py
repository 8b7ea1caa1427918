"""Planning one request: ours, the numpy path it replaces, and the floor of memory, on the same inputs in the same run.

uv run pytest benches/test_pair_bench.py
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from nixl_fast import expand_block_ids
from nixl_fast.bench import BlockPool, NumpyPath, Shape, fill_fresh, shapes

CASES = [
    pytest.param(shape, id=f"{shape.name}, {'fragmented' if fragmented else 'contiguous'}")
    for fragmented in (False, True)
    for shape in shapes(fragmented=fragmented)
]

Contestants = dict[str, Callable[[Shape], Callable[[], Any]]]


def _numpy(shape: Shape) -> Callable[[], Any]:
    paths = [NumpyPath(plan, shape) for plan in shape.plans]
    return lambda: [path() for path in paths]


def _count(shape: Shape) -> int:
    return sum(len(NumpyPath(plan, shape)()[0]) for plan in shape.plans)


def _warm(shape: Shape) -> Callable[[], Any]:
    memory = np.empty((2, _count(shape)), np.int32)
    return lambda: memory.fill(1)


CONTESTANTS: Contestants = {
    "ours": lambda shape: shape.pair,
    "numpy": _numpy,
    "fill fresh memory": lambda shape: partial(fill_fresh, _count(shape)),
    "fill warm memory": _warm,
}


@pytest.mark.parametrize("contestant", CONTESTANTS)
@pytest.mark.parametrize("shape", CASES)
def test_pair(benchmark: Any, shape: Shape, contestant: str, request: pytest.FixtureRequest) -> None:
    benchmark.group = request.node.callspec.id.removesuffix(f"-{contestant}").removeprefix(f"{contestant}-")
    benchmark(CONTESTANTS[contestant](shape))


@pytest.mark.parametrize("shape", CASES)
def test_the_contestants_do_the_same_work(shape: Shape) -> None:
    for plan in shape.plans:
        pairing = plan.pair(
            shape.local_ids,
            shape.remote_ids,
            num_tokens=shape.num_tokens,
            num_computed_blocks=shape.num_computed_blocks,
        )
        local, remote = NumpyPath(plan, shape)()
        if len(plan.local.groups) == 1:
            assert pairing.num_bytes == len(local) * min(segment.len for segment in plan.segments)
        if len(plan.local.groups) == 1 and all(segment.whole == 1 for segment in plan.segments):
            assert np.array_equal(local, pairing.local_desc_ids)
            assert np.array_equal(remote, pairing.remote_desc_ids)


READERS: dict[str, Callable[[list[int]], Any]] = {
    "ours, checked": lambda ids: expand_block_ids(ids, 1),
    "numpy.asarray": lambda ids: np.asarray(ids, np.int32),
    "numpy.asarray and a range check": lambda ids: (array := np.asarray(ids)).min() >= 0 and array.max() < 2**31,
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("count", [1_024, 8_192, 65_536])
def test_reading_a_list(benchmark: Any, count: int, reader: str) -> None:
    ids = BlockPool(2 * count, 1).serve(500).take(count)
    benchmark.group = f"a list of {count} ids"
    benchmark(READERS[reader], ids)
