"""Time that the engine's thread spends on a transfer, and time to completion: the worker against a synchronous one.

    uv run python benches/worker.py [--json] [--repeat N]

Producer and consumer are two processes with real NIXL agents on UCX and host memory; blocks of 1 KiB are scattered on
both sides, so nothing merges. The synchronous worker makes the same calls on the engine's own thread, as connectors do
today, with the same agent settings (`num_threads=4`). Both take turns in the same run.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import time
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")

from nixl_fast import EngineLayout, Group, GroupKind, Region, TransferPlan
from nixl_fast.agent import Endpoint
from nixl_fast.worker import Request, TransferWorker

SIZES = (64, 1_024, 16_384, 102_400)
BLOCK = 1_024
REGIONS = 32
BLOCKS = 4_096


def rank(name: str) -> tuple[EngineLayout, np.ndarray]:
    """A rank with scattered-friendly memory: 32 regions of 4,096 blocks of 1 KiB."""
    memory = np.zeros((REGIONS, BLOCKS, BLOCK), np.uint8)
    regions = tuple(Region(memory[region].ctypes.data, BLOCK, BLOCKS) for region in range(REGIONS))
    return EngineLayout(name, (Group(GroupKind.FULL_ATTENTION, 16),), regions), memory


def produce(pipe: Connection) -> None:
    """Serves both consumers: a worker that holds whatever it is told to, and a bare agent."""
    layout, memory = rank("producer")
    memory[:] = 7
    worker = TransferWorker()
    worker.register(layout, [memory])
    bare = Endpoint("bare-producer")
    bare.register(layout, [])
    with worker:
        pipe.send((worker.address, layout, bare.metadata()))
        while True:
            if pipe.poll(0.0005):
                if (request := pipe.recv()) is None:
                    return
                worker.hold(request)
                pipe.send(request)
            worker.poll()


def percentile(times: list[float], share: float) -> float:
    """The value below which ``share`` of the times lie."""
    return sorted(times)[min(len(times) - 1, int(share * len(times)))]


class Consumer:
    """Both consumers of one process, on the same memory."""

    def __init__(self, pipe: Connection) -> None:
        self.pipe = pipe
        self.address, remote, metadata = pipe.recv()
        layout, self.memory = rank("consumer")
        self.worker = TransferWorker()
        self.worker.register(layout, [self.memory])
        self.bare = Endpoint("bare-consumer")
        self.bare.register(layout, [])
        self.bare.add_peer("bare-producer", metadata)
        self.prepared = self.bare.prepare(TransferPlan(layout, remote), "bare-producer")

    def ours(self, name: str, local: list[int], remote: list[int]) -> tuple[list[float], float]:
        """Seconds of each engine-facing call, and to completion; between polls an engine does its step, here it naps."""
        self.pipe.send(name)
        self.pipe.recv()
        request = Request(
            request_id=name,
            peer="producer",
            remote_request_id=name,
            local_block_ids=[local],
            remote_block_ids=[remote],
            num_tokens=len(local) * 16,
            addresses=(self.address,),
        )
        started = time.perf_counter()
        self.worker.read(request)
        calls = [time.perf_counter() - started]
        results = []
        while not results:
            time.sleep(20e-6)
            polled = time.perf_counter()
            results = self.worker.poll()
            calls.append(time.perf_counter() - polled)
        if not results[0].ok:
            raise SystemExit(f"read failed: {results[0].error}")
        return calls, time.perf_counter() - started

    def synchronous(self, local: list[int], remote: list[int]) -> tuple[list[float], float]:
        """The same transfer with every NIXL call on this thread."""
        started = time.perf_counter()
        pairing = self.prepared.plan.pair([local], [remote], num_tokens=len(local) * 16)
        (posted,) = self.bare.make(self.prepared, [(pairing.local_desc_ids, pairing.remote_desc_ids)], b"done")
        done = self.bare.post(posted)
        calls = [time.perf_counter() - started]
        while not done:
            time.sleep(20e-6)
            polled = time.perf_counter()
            done = self.bare.is_done(posted)
            calls.append(time.perf_counter() - polled)
        finished = time.perf_counter() - started
        self.bare.release(posted)
        return calls, finished


def measure(repeat: int) -> list[dict[str, Any]]:
    """One row per size; times in microseconds."""
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(target=produce, args=(theirs,), daemon=True)
    process.start()
    consumer = Consumer(pipe)
    random = np.random.default_rng(0)
    rows = []
    with consumer.worker:
        for size in SIZES:
            blocks = size // REGIONS
            sides: dict[str, list[tuple[list[float], float]]] = {"ours": [], "sync": []}
            for turn in range(repeat + 3):
                ids = [random.permutation(BLOCKS)[:blocks].tolist() for _ in range(2)]
                made = {"ours": consumer.ours(f"{size}-{turn}", *ids), "sync": consumer.synchronous(*ids)}
                for side, times in made.items() if turn >= 3 else ():  # the first ones connect and warm up
                    sides[side].append(times)
            row: dict[str, Any] = {"descriptors": blocks * REGIONS}
            for side, times in sides.items():
                # An engine sees the call that hands over and the one that brings the result; p99 is over every call.
                row[f"{side}_engine_median"] = 1e6 * statistics.median(calls[0] + calls[-1] for calls, _ in times)
                row[f"{side}_call_p99"] = 1e6 * percentile([call for calls, _ in times for call in calls], 0.99)
                row[f"{side}_call_max"] = 1e6 * max(max(calls) for calls, _ in times)
                row[f"{side}_done_median"] = 1e6 * statistics.median(done for _, done in times)
            row["done_ratio"] = row["ours_done_median"] / row["sync_done_median"]
            rows.append(row)
    pipe.send(None)
    process.join()
    return rows


def main() -> None:
    """Prints the table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--repeat", type=int, default=40)
    options = parser.parse_args()
    rows = measure(options.repeat)
    if options.json:
        json.dump(rows, sys.stdout, indent=2)
        return
    names = list(rows[0])
    print("  ".join(f"{name:>18}" for name in names))
    for row in rows:
        print(
            "  ".join(f"{row[name]:>18.2f}" if isinstance(row[name], float) else f"{row[name]:>18}" for name in names)
        )


if __name__ == "__main__":
    main()
