"""What one request costs on vLLM's engine thread without NIXL: stock, ours, and the bare library on the same ids.

    uv run --project tests/vllm pytest -c tests/vllm/pyproject.toml benches/test_vllm_bench.py

``start_load_kv`` of one request, on worker objects alike but for their class, with NIXL stubbed out. "ours, all of it" does
on the caller's thread (`NIXL_FAST_SYNC`) what "ours" leaves to the transfer thread. `benches/vllm_engine_time.py` is the
same with real NIXL.
"""

# ruff: noqa: PLC0415 - vLLM and torch are imported when they are needed
from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

from nixl_fast import EngineLayout, Group, GroupKind, Region, TransferPlan
from nixl_fast.bench import BlockPool
from vllm_engine_time import _worker

BLOCKS = 20_000
CASES = {
    # name: (regions, blocks of a request)
    "16 blocks x 32 regions": (32, 16),
    "64 blocks x 32 regions": (32, 64),
    "512 blocks x 64 regions": (64, 512),
    "8192 blocks x 80 regions": (80, 8192),
}


class StubAgent:
    """NIXL that takes everything at once."""

    def make_prepped_xfer(self, *args: Any, **kwargs: Any) -> int:
        return 1

    def transfer(self, handle: int, notif_msg: bytes = b"") -> str:
        return "DONE"

    def check_xfer_state(self, handle: int) -> str:
        return "DONE"

    def get_new_notifs(self) -> dict[str, list[bytes]]:
        return {}

    def get_xfer_telemetry(self, handle: int) -> None:
        raise RuntimeError("no telemetry")

    def release_xfer_handle(self, handle: int) -> None:
        pass


def _loader(worker: Any, local: list[int], remote: list[int]) -> Callable[[], None]:
    """One request through a worker, whose books are cleared after it."""
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlConnectorMetadata

    params = {
        "remote_block_ids": (remote,),
        "remote_engine_id": "producer",
        "remote_request_id": "r",
        "remote_host": "",
        "remote_port": 0,
        "remote_num_tokens": len(remote) * 16,
    }

    def load() -> None:
        metadata = NixlConnectorMetadata()
        metadata.add_new_req_to_recv("r", (local,), params, local_num_computed_blocks=(0,), awaiting_kvs=True)
        worker.start_load_kv(metadata)
        worker._recving_transfers.clear()
        worker._recving_metadata.clear()

    load()
    if not worker._failed_recv_reqs.empty() or worker._recv_failures:
        raise RuntimeError("the request failed; the log says why")
    return load


@pytest.fixture
def contestants(request: pytest.FixtureRequest) -> Iterator[dict[str, Callable[[], Any]]]:
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker import NixlPullConnectorWorker

    from nixl_fast.vllm import connector
    from nixl_fast.vllm.agent import AgentFront
    from nixl_fast.vllm.switches import read_switches

    regions, count = CASES[request.param]
    local, remote = (BlockPool(BLOCKS, seed).serve(2_000).take(count) for seed in (1, 2))
    memory = tuple(Region((region + 1) << 40, 4096, BLOCKS) for region in range(regions))
    layouts = [EngineLayout(name, (Group(GroupKind.FULL_ATTENTION, 16),), memory) for name in "dp"]
    plan = TransferPlan(*layouts)
    fronts = {sync: AgentFront(StubAgent(), sync=sync) for sync in (False, True)}
    workers = {
        "stock": _worker(NixlPullConnectorWorker, StubAgent(), regions, BLOCKS, (1, 2), "producer"),
        "ours": _worker(connector.pull_worker_class(), fronts[False], regions, BLOCKS, (1, 2), "producer"),
        "ours, all of it": _worker(connector.pull_worker_class(), fronts[True], regions, BLOCKS, (1, 2), "producer"),
    }
    for name, sync in (("ours", False), ("ours, all of it", True)):
        workers[name]._nixl_fast_spaces = {}
        workers[name]._nixl_fast_switches = read_switches()._replace(sync=sync)
    yield {name: _loader(worker, local, remote) for name, worker in workers.items()} | {
        "library": lambda: plan.pair([local], [remote], num_tokens=count * 16)
    }
    for front in fronts.values():
        front.close()
    for worker in workers.values():
        worker.__dict__.clear()


@pytest.mark.parametrize("who", ["stock", "ours", "ours, all of it", "library"])
@pytest.mark.parametrize("contestants", CASES, indirect=True)
def test_start_load_kv(
    benchmark: Any, contestants: dict[str, Callable[[], Any]], who: str, request: pytest.FixtureRequest
) -> None:
    benchmark.group = request.node.callspec.params["contestants"]
    benchmark(contestants[who])
