"""Memory of answers: used again once nobody refers to it, never before, and an ordinary error where there is none."""

import gc
import random
import subprocess
import sys
import threading

import numpy as np
import pytest
from numpy.typing import NDArray

from nixl_fast import EngineLayout, Group, GroupKind, Pairing, Region, TransferPlan

REGIONS, BLOCKS = 40, 8_192
LAYOUT = EngineLayout(
    "e", (Group(GroupKind.FULL_ATTENTION, 16),), tuple(Region(region << 40, 64, BLOCKS) for region in range(REGIONS))
)
PLAN = TransferPlan(LAYOUT, LAYOUT)


def ask(pick: random.Random) -> tuple[Pairing, list[int]]:
    blocks = pick.sample(range(BLOCKS), pick.choice([5, 300, 700, 1_200, 8_000]))
    return PLAN.pair([blocks], [blocks[::-1]], num_tokens=16 * len(blocks)), blocks


def is_whole(ids: NDArray[np.int32], blocks: list[int]) -> bool:
    expected = np.arange(REGIONS)[:, None] * BLOCKS + np.array(blocks)[None, :]
    return np.array_equal(ids, expected.ravel())


def test_answers_that_are_kept_do_not_change_when_others_are_made() -> None:
    """Some are kept whole, some as a view of one side only, the rest is dropped, in four threads at once."""
    wrong = []

    def work(seed: int) -> None:
        pick = random.Random(seed)
        kept: list[tuple[NDArray[np.int32], list[int]]] = []
        for _ in range(150):
            pairing, blocks = ask(pick)
            half = len(blocks) // 2
            kept.append((pairing.local_desc_ids, blocks))
            kept.append((pairing.remote_desc_ids[: len(blocks)][half:], blocks[::-1][half:]))
            del pairing
            while len(kept) > 12:
                ids, blocks = kept.pop(pick.randrange(len(kept)))
                good = is_whole(ids, blocks) if len(ids) > len(blocks) else np.array_equal(ids, blocks)
                wrong.extend([] if good else [(seed, len(ids))])

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_memory_is_used_again_and_does_not_grow() -> None:
    pick = random.Random(1)
    bases = set()
    for _ in range(50):
        pairing, blocks = ask(pick)
        if len(blocks) > 1_000:
            bases.add(pairing.local_desc_ids.ctypes.data)
        del pairing
        gc.collect()
    assert len(bases) < 10


@pytest.mark.parametrize(
    "asked",
    [
        "plan.pair([ids], [ids], num_tokens=16 * 2**29)",
        "plan.expanded('local')",
        "nixl_fast.expand_block_ids(ids, 512)",
    ],
)
def test_too_little_memory_is_an_ordinary_error(asked: str) -> None:
    """The answer would take gigabytes and the process may have half of one more: no panic, no abort, and the next call works."""
    program = f"""
import resource
import nixl_fast
from nixl_fast import EngineLayout, Group, GroupKind, Region, TransferPlan

region = Region(0, 4096, 2**29, block_stride=4160)
layout = EngineLayout("e", (Group(GroupKind.FULL_ATTENTION, 16 * 512, 512),), (region,))
plan = TransferPlan(layout, layout)
ids = list(range(2**20))
with open("/proc/self/statm") as statm:
    limit = int(statm.read().split()[0]) * resource.getpagesize() + 2**29
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
try:
    {asked}
except MemoryError as error:
    print('MemoryError:', error)
assert plan.pair([[1]], [[1]], num_tokens=16).num_descs == 1
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("MemoryError"), done.stdout
