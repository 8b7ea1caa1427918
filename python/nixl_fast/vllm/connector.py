"""The connectors that vLLM loads: stock's, with this package's workers and schedulers."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import connector as stock
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_scheduler import NixlPullConnectorScheduler
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker import NixlPullConnectorWorker
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.push_scheduler import NixlPushConnectorScheduler
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.push_worker import NixlPushConnectorWorker

from nixl_fast.vllm import known, plugin, scheduler, worker
from nixl_fast.vllm.build import build

SIDES = (
    ("pull worker", NixlPullConnectorWorker, known.PULL_WORKER),
    ("pull scheduler", NixlPullConnectorScheduler, known.PULL_SCHEDULER),
    ("push worker", NixlPushConnectorWorker, known.PUSH_WORKER),
    ("push scheduler", NixlPushConnectorScheduler, known.PUSH_SCHEDULER),
)
"""Each of vLLM's classes that is built upon, with what may be put before it."""

_WORKER: dict[str, type] = {
    "agent": worker.Agent,
    "pull pairing": worker.PullPairing,
    "push pairing": worker.PushPairing,
    "descriptor ids": worker.Descriptors,
    "expansion": worker.Expand,
    "polling": worker.Polling,
}
_SCHEDULER: dict[str, type] = {"positions": scheduler.Positions}


def pull_worker_class() -> type[Any]:
    """The pull connector's worker, as the environment's switches and vLLM's bodies allow."""
    return build("NixlFastPullWorker", NixlPullConnectorWorker, known.PULL_WORKER, _WORKER)


def push_worker_class() -> type[Any]:
    """The push connector's worker."""
    return build("NixlFastPushWorker", NixlPushConnectorWorker, known.PUSH_WORKER, _WORKER)


def pull_scheduler_class() -> type[Any]:
    """The pull connector's scheduler."""
    return build("NixlFastPullScheduler", NixlPullConnectorScheduler, known.PULL_SCHEDULER, _SCHEDULER)


def push_scheduler_class() -> type[Any]:
    """The push connector's scheduler."""
    return build("NixlFastPushScheduler", NixlPushConnectorScheduler, known.PUSH_SCHEDULER, _SCHEDULER)


class NixlFastConnector(stock.NixlPullConnector):  # type: ignore[misc]
    """vLLM's NIXL pull connector with checked pairing and without NIXL on the engine's thread."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        stock.NixlBaseConnector.__init__(self, vllm_config, role, kv_cache_config)
        made_with = (vllm_config, self.engine_id, kv_cache_config)
        if role == KVConnectorRole.SCHEDULER:
            self.connector_scheduler = pull_scheduler_class()(*made_with)
        elif role == KVConnectorRole.WORKER:
            self.connector_worker = pull_worker_class()(*made_with)


class NixlFastPushConnector(stock.NixlPushConnector):  # type: ignore[misc]
    """vLLM's NIXL push connector with checked pairing."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        if vllm_config.parallel_config.decode_context_parallel_size > 1:
            raise ValueError("NixlFastPushConnector does not support decode_context_parallel_size above 1")
        stock.NixlBaseConnector.__init__(self, vllm_config, role, kv_cache_config)
        made_with = (vllm_config, self.engine_id, kv_cache_config)
        if role == KVConnectorRole.SCHEDULER:
            self.connector_scheduler = push_scheduler_class()(*made_with)
        elif role == KVConnectorRole.WORKER:
            self.connector_worker = push_worker_class()(*made_with)


class NixlPullConnector(NixlFastConnector):
    """`NixlFastConnector` under vLLM's own name, which vLLM looks at in places and MultiConnector looks up."""


class NixlPushConnector(NixlFastPushConnector):
    """`NixlFastPushConnector` under vLLM's own name."""


NixlConnector = NixlPullConnector

plugin.register()
