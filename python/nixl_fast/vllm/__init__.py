"""nixl-fast as a vLLM connector: ``kv_connector_module_path="nixl_fast.vllm"``.

vLLM is imported when one of the connectors is asked for, not before.
"""

from __future__ import annotations

from typing import Any

__all__ = [
    "NixlConnector",
    "NixlFastConnector",
    "NixlFastPushConnector",
    "NixlPullConnector",
    "NixlPushConnector",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from nixl_fast.vllm import connector  # noqa: PLC0415 - see above

    return getattr(connector, name)
