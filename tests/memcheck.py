"""Runs the binding under valgrind: ``uv run python tests/memcheck.py``. Exits 1 if it uses memory that it must not.

Python and numpy have findings of their own; those count that have a frame of the native module.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from nixl_fast import EngineLayout, Group, GroupKind, NixlFastError, Region, TransferPlan, expand_block_ids

GOOD: list[Any] = [
    [1, 2, 3],
    (4, 5, 6),
    np.arange(3),
    np.arange(9000)[::-1],
    [np.int64(7)],
    list(range(9000)),
    np.arange(9, dtype="u1"),
]
BAD: list[Any] = [[10**30], [-1], ["x"], np.array([-1]), [1, 1], [1.5], None, [True], [10**5000]]


def work() -> None:
    """Every way in and out of the native module."""
    regions = [Region(index << 40, 64, 20_000) for index in range(1, 4)]
    layout = EngineLayout("E", [Group(GroupKind.FULL_ATTENTION, 16, 2)], regions)
    plan = TransferPlan(layout, layout)
    for ids in GOOD:
        pairing = plan.pair([ids], [ids])
        arrays = [pairing.local_desc_ids, pairing.remote_desc_ids, *pairing.kernel_pairs(0), pairing.untransferred(0)]
        assert all(array.min(initial=0) >= 0 for array in arrays)
        expand_block_ids(ids, 3)
    for ids in BAD:
        try:
            plan.pair([ids], [ids])
        except NixlFastError:
            continue
        raise AssertionError(ids)
    assert len(plan.expanded("local")) == 3 * (10_000 + 20_000)
    assert plan.local_table.shape == plan.remote_table.shape


def main() -> int:
    """Runs `work` in a process of its own and reads what valgrind says."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        command = ["valgrind", "--error-limit=no", f"--log-file={log}", sys.executable, __file__, "work"]
        subprocess.run(command, env={**os.environ, "PYTHONMALLOC": "malloc"}, check=True)
        findings = [each for each in log.read_text().split("\n==") if "_native" in each]
    print(*findings, f"{len(findings)} findings in the native module", sep="\n")
    return 1 if findings else 0


if __name__ == "__main__":
    if sys.argv[1:] == ["work"]:
        work()
    else:
        sys.exit(main())
