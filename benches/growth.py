"""Time and memory of planning one request against its size, from 1k to 10M ids a side: ours, numpy, and the floor.

    uv run --group plot python benches/growth.py [--json] [--plot FILE.svg] [--seconds S]

160 regions, block ids fragmented by traffic. Prints the exponent of time against ids as fitted on a log-log scale (1 is
a straight line through the origin), and the peak of memory while a request is planned against the bytes of its two arrays.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from nixl_fast import EngineLayout, Group, GroupKind, Region, TransferPlan
from nixl_fast.bench import BlockPool, NumpyPath, Shape, fill_fresh, machine, time_us

REGIONS = 160
BLOCKS = (6, 20, 64, 200, 640, 2_000, 6_400, 20_000, 62_500)
POOL = 131_072


def shapes() -> list[Shape]:
    """One request per size."""
    regions = tuple(Region((region + 1) << 40, 4096, POOL) for region in range(REGIONS))
    local, remote = (EngineLayout(name, (Group(GroupKind.FULL_ATTENTION, 16),), regions) for name in "dp")
    plan = TransferPlan(local, remote)
    sides = [BlockPool(POOL, seed).serve(6_000).take(max(BLOCKS)) for seed in (1, 2)]
    return [Shape("", (plan,), [sides[0][:count]], [sides[1][:count]], 16 * count) for count in BLOCKS]


def peak_bytes(function: Callable[[], Any]) -> int:
    """How far a call raises the process's resident memory above what it was before."""
    status = Path("/proc/self/status")

    def read(field: str) -> int:
        return 1024 * int(next(line for line in status.read_text().splitlines() if line.startswith(field)).split()[1])

    function()  # what stays for good, such as code that is loaded
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = read("VmRSS:")
    kept = function()
    peak = read("VmHWM:") - before
    del kept
    return peak


def measure(seconds: float) -> dict[str, Any]:
    """Rows of times in microseconds, and what follows from them."""
    rows = []
    made = shapes()
    for shape in made:
        ids = REGIONS * len(shape.local_ids[0])
        path = NumpyPath(shape.plans[0], shape)
        warm = np.empty((2, ids), np.int32)
        rows.append(
            {
                "ids": ids,
                "ours": time_us(shape.pair, seconds),
                "numpy": time_us(path, seconds),
                "fill fresh memory": time_us(lambda ids=ids: fill_fresh(ids), seconds),
                "fill warm memory": time_us(lambda warm=warm: warm.fill(1), seconds),
            }
        )
        print(f"{ids} ids", file=sys.stderr)
    last = made[-1]
    arrays = 2 * 4 * rows[-1]["ids"]
    large = [row for row in rows if row["ids"] >= 1_000]
    return {
        "machine": machine(),
        "rows": rows,
        "exponent": {
            name: fit([row["ids"] for row in large], [row[name] for row in large]) for name in ("ours", "numpy")
        },
        "peak_over_arrays": {
            "ours": peak_bytes(lambda: last.plans[0].pair(last.local_ids, last.remote_ids, num_tokens=last.num_tokens))
            / arrays,
            "numpy": peak_bytes(NumpyPath(last.plans[0], last)) / arrays,
        },
    }


def fit(sizes: list[int], times: list[float]) -> float:
    """The exponent of a power law through the points."""
    return float(np.polyfit(np.log(sizes), np.log(times), 1)[0])


def plot(result: dict[str, Any], file: str) -> None:
    """Time against ids a side, both logarithmic."""
    from matplotlib import pyplot  # noqa: PLC0415 - only who plots needs it

    figure, axes = pyplot.subplots(figsize=(7, 4.2), layout="constrained")
    ids = [row["ids"] for row in result["rows"]]
    for name, style in (("numpy", "o-"), ("ours", "o-"), ("fill fresh memory", "--"), ("fill warm memory", ":")):
        axes.loglog(ids, [row[name] for row in result["rows"]], style, label=name, markersize=4)
    axes.set(
        xlabel="descriptor indices a side", ylabel="microseconds a request", title="Planning one request, 160 regions"
    )
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(file, metadata={"Date": None})


def main() -> None:
    """Prints the table, or JSON, and draws the plot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--plot", metavar="FILE")
    parser.add_argument("--seconds", type=float, default=1.0, help="per measurement")
    options = parser.parse_args()
    result = measure(options.seconds)
    if options.plot:
        plot(result, options.plot)
    if options.json:
        json.dump(result, sys.stdout, indent=2)
        return
    print(result["machine"])
    names = list(result["rows"][0])
    print("  ".join(f"{name:>18}" for name in names))
    for row in result["rows"]:
        print(
            "  ".join(f"{row[name]:>18.1f}" if isinstance(row[name], float) else f"{row[name]:>18}" for name in names)
        )
    for what in ("exponent", "peak_over_arrays"):
        print(what, "  ".join(f"{name} {value:.3f}" for name, value in result[what].items()))


if __name__ == "__main__":
    main()
