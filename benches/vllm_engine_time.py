"""Engine-thread time per request in vLLM's NIXL connector: stock and ours, in one run, with real NIXL.

Run in the environment of the vLLM tests::

    uv run --project tests/vllm python benches/vllm_engine_time.py

A producer process registers its memory; this process is the consumer. Per case and per connector, in turn, so that a busy
machine is busy for both: ``start_load_kv`` of one request, then ``get_transfer_results`` every ten milliseconds until it
is over, as an engine would between its steps. Reported: the thread's own time in those calls, per request, and the time
from the start to the completion.
"""

# ruff: noqa: PLC0415 - vLLM, torch and NIXL are imported when they are needed
from __future__ import annotations

import argparse
import contextlib
import json
import logging
import multiprocessing
import os
import random
import statistics
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

BLOCK_BYTES = 1024
CASES = {
    # name: (regions, blocks per region, blocks of a request)
    "16 blocks x 32 regions": (32, 4096, 16),
    "128 blocks x 32 regions": (32, 4096, 128),
    "512 blocks x 64 regions": (64, 4096, 512),
    "1600 blocks x 64 regions": (64, 4096, 1600),
}
STEP_SECONDS = 0.01
"""How long the engine is busy between two polls, without the interpreter lock, as a model's step is; ``--step`` changes it."""


def _memory(regions: int, blocks: int, value: int) -> list[np.ndarray]:
    return [np.full((blocks, BLOCK_BYTES), value, np.uint8) for _ in range(regions)]


def _agent(name: str) -> Any:
    from nixl._api import nixl_agent, nixl_agent_config

    logging.getLogger("nixl").setLevel(logging.WARNING)  # it greets on standard output
    return nixl_agent(name, nixl_agent_config(num_threads=4, capture_telemetry=True))


def _register(agent: Any, memory: list[np.ndarray]) -> None:
    agent.register_memory([(each.ctypes.data, each.nbytes, 0, "") for each in memory], "DRAM")


def _producer(regions: int, blocks: int, pipe: Any) -> None:
    agent = _agent("producer")
    memory = _memory(regions, blocks, 7)
    _register(agent, memory)
    pipe.send((agent.get_agent_metadata(), [each.ctypes.data for each in memory]))
    while not pipe.poll(0.01):  # UCX needs the owner to look after its side of a copy between processes
        agent.get_new_notifs()


def _rows(bases: list[int], blocks: int) -> np.ndarray:
    return np.array([[base, BLOCK_BYTES, 0, BLOCK_BYTES, blocks] for base in bases], np.uint64)


def _worker(cls: type, agent: Any, regions: int, blocks: int, lists: tuple[Any, Any], name: str) -> Any:
    """A worker after its handshake, without the model and the configuration that led there."""
    import queue
    from collections import defaultdict

    import torch
    from vllm.distributed.kv_transfer.kv_connector.utils import EngineTransferInfo
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.stats import NixlKVConnectorStats
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    spec = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=64, dtype=torch.float32)
    group = SimpleNamespace(kv_cache_spec=spec, layer_names=[])
    info = EngineTransferInfo(
        remote_tp_size=1, remote_block_len=BLOCK_BYTES, remote_block_size=16, remote_physical_blocks_per_logical=1
    )
    topology = SimpleNamespace(
        get_engine_info=lambda engine: info, tp_ratio=lambda size: 1, block_size_ratio=lambda size: 1
    )
    mapping = SimpleNamespace(all_source_ranks=(0,), source_ranks_per_group=((0,),), local_consumers=1)
    made = object.__new__(cls)
    made.__dict__.update(
        nixl_wrapper=agent,
        engine_id="consumer",
        tp_rank=0,
        world_size=1,
        pp_size=1,
        pcp_rank=0,
        dcp_size=1,
        pcp_size=1,
        pcp_dcp_sharded=False,
        use_mla=False,
        use_host_buffer=False,
        block_size=16,
        num_regions=regions,
        block_len_per_layer=[BLOCK_BYTES] * regions,
        region_group_ids=[0] * regions,
        region_num_blocks=[blocks] * regions,
        kv_cache_config=SimpleNamespace(transfer_groups=[group], transfer_group_ids=(0,)),
        transfer_topo=topology,
        tp_mappings={"producer": mapping},
        dst_num_blocks={"consumer": blocks, "producer": blocks},
        dst_region_num_blocks={"consumer": [blocks] * regions, "producer": [blocks] * regions},
        dst_region_group_ids={"producer": [0] * regions},
        dst_uses_region_group_mapping={"producer": False},
        src_xfer_handles_by_block_size={16: lists[0]},
        dst_xfer_side_handles={"producer": {0: lists[1]}},
        xfer_stats=NixlKVConnectorStats(),
        enable_permute_local_kv=False,
        enable_heterogeneous_attn_post_process=False,
        device_kv_caches={},
        _remote_agents={"producer": {(0, 0): name}},
        _engine_last_active={},
        _engine_by_address={("", 0): "producer"},
        _engine_clock_offset={},
        _handshake_lock=contextlib.nullcontext(),
        _handshake_futures={},
        _invalid_remote_engines=set(),
        _failed_remote_engines=set(),
        _invalid_engine_backoff={},
        _bidirectional_kv_xfer_enabled=False,
        _has_mamba=False,
        _is_hma_required=False,
        _mixed_mem_types=False,
        _uses_region_group_mapping=False,
        _transfer_layer_group_ids=(),
        _group_spec_types=(FullAttentionSpec,),
        _physical_blocks_per_logical_kv_block=1,
        _recving_metadata={},
        _recving_transfers=defaultdict(list),
        _recv_failures=set(),
        _failed_recv_reqs=queue.Queue(),
        _invalid_block_ids=queue.Queue(),
        _ready_requests=queue.Queue(),
        _pending_recv_notifs={},
        _reqs_to_process=set(),
        _reqs_to_send={},
        _replicated_pcp_done_sending=set(),
        _remote_registration_generations={},
        consumer_notification_counts_by_req={},
        expected_consumer_notifications_by_req={},
    )
    return made


class Figures(NamedTuple):
    """One request, in seconds."""

    start: float
    """In ``start_load_kv``."""
    spent: float
    """In the connector's calls, all together."""
    longest: float
    """In the longest of them."""
    total: float
    """From the start to the completion."""
    worked: float
    """Processor time of the calling thread in them: what a busy machine does not add to."""


def _request(worker: Any, req_id: str, local: list[int], remote: list[int], step: float) -> Figures:
    """Engine-thread seconds and seconds to completion of one request."""
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlConnectorMetadata

    metadata = NixlConnectorMetadata()
    params = {
        "remote_block_ids": ([*remote],),
        "remote_engine_id": "producer",
        "remote_request_id": req_id,
        "remote_host": "",
        "remote_port": 0,
        "remote_num_tokens": len(remote) * 16,
    }
    metadata.add_new_req_to_recv(req_id, ([*local],), params, local_num_computed_blocks=(0,), awaiting_kvs=True)
    begin, worked = time.perf_counter(), time.thread_time()
    worker.start_load_kv(metadata)
    start = spent = longest = time.perf_counter() - begin
    worked = time.thread_time() - worked
    while True:
        time.sleep(step)
        at, before = time.perf_counter(), time.thread_time()
        results = worker.get_transfer_results()
        took = time.perf_counter() - at
        worked += time.thread_time() - before
        spent += took
        longest = max(longest, took)
        if req_id in results.finished_recving:
            assert req_id not in results.failed_recving
            return Figures(start, spent, longest, time.perf_counter() - begin, worked)


def _summary(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {
        "median_us": round(statistics.median(ordered) * 1e6, 1),
        "p99_us": round(ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))] * 1e6, 1),
    }


@contextlib.contextmanager
def _first_in_line() -> Iterator[None]:
    """Lets the calling thread run whenever it can, as one does that has a core of its own."""
    os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    try:
        yield
    finally:
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


def run(name: str, rounds: int, *, own_core: bool = False, step: float = STEP_SECONDS) -> dict[str, Any]:
    """Measures one case.

    Args:
        name: Key of `CASES`.
        rounds: Requests per connector.
        own_core: Whether the engine's thread, stock's and ours alike, goes before all others of the machine.
        step: Seconds between two polls.
    """
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker import NixlPullConnectorWorker

    from nixl_fast.vllm import connector
    from nixl_fast.vllm.agent import AgentFront

    regions, blocks, count = CASES[name]
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_producer, args=(regions, blocks, theirs), daemon=True)
    process.start()
    metadata, bases = ours.recv()
    workers, memories = {}, {}
    for kind in ("stock", "ours"):
        agent: Any = _agent(f"consumer-{kind}")
        memories[kind] = memory = _memory(regions, blocks, 0)
        _register(agent, memory)
        remote_name = agent.add_remote_agent(metadata)
        lists = (
            agent.prep_xfer_dlist(
                "NIXL_INIT_AGENT", _rows([each.ctypes.data for each in memory], blocks), mem_type="DRAM"
            ),
            agent.prep_xfer_dlist(remote_name, _rows(bases, blocks), mem_type="DRAM"),
        )
        cls = NixlPullConnectorWorker if kind == "stock" else connector.pull_worker_class()
        front = agent if kind == "stock" else AgentFront(agent)
        workers[kind] = _worker(cls, front, regions, blocks, lists, remote_name)
        if kind == "ours":
            workers[kind]._nixl_fast_spaces = {}
    rng = random.Random(0)
    figures: dict[str, dict[str, list[float]]] = {kind: {field: [] for field in Figures._fields} for kind in workers}
    for number in range(rounds + 3):
        local, remote = rng.sample(range(blocks), count), rng.sample(range(blocks), count)
        for kind in rng.sample(sorted(workers), 2):
            for memory in memories[kind]:
                memory[local] = 0
            with _first_in_line() if own_core else contextlib.nullcontext():
                took = _request(workers[kind], f"{kind}-{number}", local, remote, step)
            assert all((memory[local] == 7).all() for memory in memories[kind]), "wrong bytes"
            if number >= 3:  # the first ones connect
                for key, value in took._asdict().items():
                    figures[kind][key].append(value)
    ours.send(None)
    process.join(10)
    workers["ours"].nixl_wrapper.close()
    for worker in workers.values():
        worker.__dict__.clear()
    out: dict[str, Any] = {"case": name, "descriptors": regions * count, "rounds": rounds}
    for kind, figure in figures.items():
        out[kind] = {key: _summary(values) for key, values in figure.items()}
    pairs = zip(figures["stock"]["spent"], figures["ours"]["spent"], strict=True)
    out["engine_time_stock_over_ours"] = round(statistics.median(a / b for a, b in pairs), 1)
    pairs = zip(figures["ours"]["total"], figures["stock"]["total"], strict=True)
    out["completion_ours_over_stock"] = round(statistics.median(a / b for a, b in pairs), 3)
    return out


def main() -> None:
    """Runs the cases and prints a table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--case", action="append", choices=CASES)
    parser.add_argument("--step", type=float, default=STEP_SECONDS * 1000, help="milliseconds between two polls")
    parser.add_argument("--json", action="store_true")
    parser.add_argument(
        "--own-core",
        action="store_true",
        help="real-time priority for the engine's thread, stock's and ours alike: without it a machine with few cores "
        "measures its scheduler (needs the privilege to)",
    )
    options = parser.parse_args()
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    results = [
        run(name, options.rounds, own_core=options.own_core, step=options.step / 1000) for name in options.case or CASES
    ]
    if options.json:
        print(json.dumps(results, indent=1))
        return
    print(
        "engine thread, microseconds per request: median / p99; start: ours in start_load_kv; longest: p99 of one call"
    )
    heads = {
        "stock": 16,
        "ours": 16,
        "start": 9,
        "longest": 9,
        "stock cpu": 11,
        "ours cpu": 10,
        "x": 7,
        "completion": 12,
    }
    print(f"{'case':26}{'descs':>8}" + "".join(f"{head:>{width}}" for head, width in heads.items()))
    for row in results:
        stock, mine = row["stock"], row["ours"]
        both = [f"{each['spent']['median_us']:.0f} / {each['spent']['p99_us']:.0f}" for each in (stock, mine)]
        print(
            f"{row['case']:26}{row['descriptors']:>8}{both[0]:>16}{both[1]:>16}{mine['start']['median_us']:>9.0f}{mine['longest']['p99_us']:>9.0f}"
            f"{stock['worked']['median_us']:>11.0f}{mine['worked']['median_us']:>10.0f}"
            f"{row['engine_time_stock_over_ours']:>7.1f}{row['completion_ours_over_stock']:>12.3f}"
        )


if __name__ == "__main__":
    main()
