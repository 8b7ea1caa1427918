"""What vLLM runs in each of its processes (``vllm.general_plugins``): makes the connectors known by name."""

from __future__ import annotations

NAMES = ("NixlFastConnector", "NixlFastPushConnector")


def register() -> None:
    """Registers the connectors under their own names, so that MultiConnector finds them; again is harmless."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory  # noqa: PLC0415 - vLLM loads first

    for name in NAMES:
        if name not in KVConnectorFactory._registry:
            KVConnectorFactory.register_connector(name, "nixl_fast.vllm", name)
