"""Descriptor tables, made once per peer: ours, a Python list of tuples, numpy, and the floor of memory.

uv run pytest benches/test_table_bench.py
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from nixl_fast import EngineLayout, Group, GroupKind, Region, TransferPlan

REGIONS = 32
LENGTH = 4096
COUNTS = (1_000, 100_000)


def _plan(blocks: int) -> TransferPlan:
    regions = tuple(Region((region + 1) << 40, LENGTH, blocks) for region in range(REGIONS))
    local, remote = (EngineLayout(name, (Group(GroupKind.FULL_ATTENTION, 16),), regions) for name in "dp")
    return TransferPlan(local, remote)


def _tuples(blocks: int) -> list[tuple[int, int, int]]:
    """As connectors wrote it first."""
    return [((region + 1 << 40) + block * LENGTH, LENGTH, 0) for region in range(REGIONS) for block in range(blocks)]


def _numpy(blocks: int) -> np.ndarray[Any, Any]:
    """As connectors write it since: one array of three columns, by broadcasting."""
    bases = (np.arange(1, REGIONS + 1, dtype=np.uint64) << np.uint64(40))[:, None]
    out = np.empty((REGIONS * blocks, 3), np.uint64)
    out[:, 0] = (bases + np.arange(blocks, dtype=np.uint64)[None, :] * np.uint64(LENGTH)).ravel()
    out[:, 1] = LENGTH
    out[:, 2] = 0
    return out


def _fill(blocks: int) -> None:
    """Writes the same number of bytes."""
    np.empty((REGIONS * blocks, 3), np.uint64).fill(1)


CONTESTANTS: dict[str, Callable[[int], Callable[[], Any]]] = {
    "ours, N x 3": lambda blocks: partial(_plan(blocks).expanded, "local"),
    "ours, N x 5": lambda blocks: partial(getattr, _plan(blocks), "local_table"),
    "numpy, N x 3": lambda blocks: partial(_numpy, blocks),
    "list of tuples, N x 3": lambda blocks: partial(_tuples, blocks),
    "fill": lambda blocks: partial(_fill, blocks),
}


@pytest.mark.parametrize("contestant", CONTESTANTS)
@pytest.mark.parametrize("blocks", COUNTS)
def test_table(benchmark: Any, blocks: int, contestant: str) -> None:
    benchmark.group = f"{REGIONS} regions x {blocks} blocks"
    benchmark.pedantic(CONTESTANTS[contestant](blocks), rounds=10, warmup_rounds=1)


@pytest.mark.parametrize("blocks", COUNTS)
def test_the_contestants_make_the_same_table(blocks: int) -> None:
    plan = _plan(blocks)
    assert np.array_equal(plan.expanded("local"), _numpy(blocks))
    assert np.array_equal(_numpy(1_000), np.array(_tuples(1_000), np.uint64))
    addr, length, device, stride, count = (plan.local_table[:, column][:, None] for column in range(5))
    steps = np.arange(blocks, dtype=np.uint64)[None, :]
    assert np.array_equal((addr + steps * stride).ravel(), _numpy(blocks)[:, 0])
    assert (length == LENGTH).all()
    assert (device == 0).all()
    assert (count == blocks).all()
