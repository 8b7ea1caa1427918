"""The bodies of vLLM's methods that each feature was verified against, by fingerprint.

``nixl-fast doctor`` names the fingerprint of a body that is not here.
"""

from __future__ import annotations

from typing import NamedTuple


class Feature(NamedTuple):
    """One thing that this package changes in one of vLLM's classes."""

    name: str
    relies_on: tuple[str, ...]
    """Methods that it replaces, or whose steps it counts on."""

    without: str
    """What it means when the feature is left out."""


_AGENT = Feature(
    "agent",
    ("_pop_done_transfers", "shutdown", "unregister_kv_caches"),
    "Transfers are made and posted on the engine's thread.",
)
_DESCRIPTORS = Feature("descriptor ids", ("_compute_desc_ids",), "vLLM computes descriptor ids, without range checks.")
_EXPANSION = Feature(
    "expansion", ("get_mapped_blocks", "_logical_to_kernel_block_ids"), "vLLM expands block ids, without range checks."
)
_PAIRED = ("_map_block_ids_for_block_size_ratio", "_apply_prefix_caching", "get_transfer_results")
_GUESSED = "vLLM pairs blocks by counting; with different block sizes or ratios on P and D that can move wrong blocks."

PULL_WORKER = (
    _AGENT,
    Feature("pull pairing", (*_PAIRED, "_read_blocks_for_req", "_read_blocks"), _GUESSED),
    _DESCRIPTORS,
    _EXPANSION,
    Feature(
        "polling",
        (
            "get_transfer_results",
            "_pop_done_transfers",
            "_get_new_notifs",
            "_cleanup_remote_engines",
            "_reap_expired_send_leases",
            "start_load_kv",
        ),
        "Every step goes through the books of all transfers.",
    ),
)
PUSH_WORKER = (
    _AGENT,
    Feature(
        "push pairing",
        (*_PAIRED, "start_load_kv", "_do_start_push_kv", "_xfer_blocks_for_req", "_xfer_blocks"),
        _GUESSED,
    ),
    _DESCRIPTORS,
    _EXPANSION,
)
_POSITIONS = Feature(
    "positions",
    ("get_num_new_matched_tokens", "update_state_after_alloc", "request_finished", "build_connector_meta"),
    "The worker has only vLLM's own metadata to place blocks by; requests that it cannot place fail and are recomputed.",
)
PULL_SCHEDULER = (_POSITIONS,)
PUSH_SCHEDULER = (_POSITIONS,)

KNOWN: dict[str, dict[str, str]] = {
    "NixlBaseConnectorWorker.get_mapped_blocks": {"b1ae355020fcc065": "0.30, 0.31, 0.32, 0.33"},
    "NixlBaseConnectorWorker._logical_to_kernel_block_ids": {
        "527fd4973bb3e29f": "0.30, 0.31",
        "28e8925450cf833c": "0.32, 0.33",
    },
    "NixlBaseConnectorWorker._compute_desc_ids": {"30a18d78edb6fad5": "0.30", "2a833ea72019d2e4": "0.31, 0.32, 0.33"},
    "NixlBaseConnectorWorker._map_block_ids_for_block_size_ratio": {"364065cf907b90e3": "0.30, 0.31, 0.32, 0.33"},
    "NixlBaseConnectorWorker._apply_prefix_caching": {"7fd6daff42da4781": "0.30, 0.31, 0.32, 0.33"},
    "NixlBaseConnectorWorker.get_transfer_results": {
        "870cdaca1f8594ec": "0.30",
        "167a2e42a5a96c1e": "0.31",
        "2580174c8ce83718": "0.32, 0.33",
    },
    "NixlBaseConnectorWorker._pop_done_transfers": {"09d368659d61a5e8": "0.30, 0.31, 0.32, 0.33"},
    "NixlBaseConnectorWorker._get_new_notifs": {"1d98e780702f3aeb": "0.30, 0.31, 0.32, 0.33"},
    "NixlBaseConnectorWorker._cleanup_remote_engines": {"": "0.30, 0.31", "2590ddda918b0ce9": "0.32, 0.33"},
    "NixlBaseConnectorWorker._reap_expired_send_leases": {"": "0.30", "0154e510918bb557": "0.31, 0.32, 0.33"},
    "NixlBaseConnectorWorker.unregister_kv_caches": {"": "0.30, 0.31, 0.32", "ad6e2d091ee4cc1b": "0.33"},
    "NixlBaseConnectorWorker.shutdown": {"d38e2570551dfc84": "0.30, 0.31, 0.32, 0.33"},
    "NixlPullConnectorWorker._get_new_notifs": {"000c29c66a9c569b": "0.30, 0.31", "fa77533d9f0a7960": "0.32, 0.33"},
    "NixlPullConnectorWorker.start_load_kv": {
        "a2b78668e00009c2": "0.30",
        "359e0966ef44e86a": "0.31",
        "e5a206c2183a5a0f": "0.32, 0.33",
    },
    "NixlPullConnectorWorker._read_blocks_for_req": {
        "99d9d5d912fe203d": "0.30",
        "9644ba885bc333b1": "0.31",
        "241ad1d3672c12f3": "0.32",
        "e0483871250f574d": "0.33",
    },
    "NixlPullConnectorWorker._read_blocks": {"3b6997de29c8ae57": "0.30, 0.31, 0.32, 0.33"},
    "NixlPushConnectorWorker.start_load_kv": {"8339ff265ceb3c2e": "0.30", "54ef1c02e1beb072": "0.31, 0.32, 0.33"},
    "NixlPushConnectorWorker._do_start_push_kv": {"20f9370b914de829": "0.30, 0.31, 0.32, 0.33"},
    "NixlPushConnectorWorker._xfer_blocks_for_req": {
        "986f6be51f111dcd": "0.30",
        "8ef9bbc1108b558a": "0.31, 0.32, 0.33",
    },
    "NixlPushConnectorWorker._xfer_blocks": {"1e39ab2d024bcacb": "0.30", "5ce0b98a00cba2bf": "0.31, 0.32, 0.33"},
    "NixlPushConnectorWorker.get_transfer_results": {
        "7f5a936f7c939d63": "0.30",
        "225d4fcb7d3abb8c": "0.31, 0.32",
        "e0f1f706193f463b": "0.33",
    },
    "NixlPushConnectorWorker.shutdown": {"4566d62078eb12a8": "0.30", "0d31c0a893229aa4": "0.31, 0.32, 0.33"},
    "NixlBaseConnectorScheduler.get_num_new_matched_tokens": {"11b119910e3034f5": "0.30, 0.31, 0.32, 0.33"},
    "NixlBaseConnectorScheduler.update_state_after_alloc": {"8f6f88ae78c6fa79": "0.30, 0.31, 0.32, 0.33"},
    "NixlBaseConnectorScheduler.request_finished": {"ab85fc213d010780": "0.30, 0.31, 0.32, 0.33"},
    "NixlBaseConnectorScheduler.build_connector_meta": {"56145e6fd930d5dc": "0.30, 0.31, 0.32, 0.33"},
    "NixlPullConnectorScheduler.get_num_new_matched_tokens": {"82d94e656b4b85ac": "0.30, 0.31, 0.32, 0.33"},
    "NixlPullConnectorScheduler.update_state_after_alloc": {"effefc89d5bbfe0a": "0.30, 0.31, 0.32, 0.33"},
    "NixlPullConnectorScheduler.request_finished": {"0374a97f16019d1e": "0.30, 0.31, 0.32", "2c7e5ae709520e67": "0.33"},
    "NixlPushConnectorScheduler.get_num_new_matched_tokens": {"e3adbfecb41cfc2f": "0.30, 0.31, 0.32, 0.33"},
    "NixlPushConnectorScheduler.update_state_after_alloc": {"91a5988996aee5d6": "0.30, 0.31, 0.32, 0.33"},
    "NixlPushConnectorScheduler.request_finished": {"de61a74c9ad43172": "0.30, 0.31, 0.32, 0.33"},
    "NixlPushConnectorScheduler.build_connector_meta": {"39ee00b7046a65eb": "0.30, 0.31, 0.32, 0.33"},
}
"""``Class.method``: fingerprint and the releases that have this body, "" where there is no such method; every definition in
the line of classes."""

HEADS_TAKEN_FOR_TOKENS = {"c8d73964b075d4c6": "0.30 and 0.31"}
"""Bodies of ``post_process_device_kv_on_receive`` that spoil blocks of a peer with smaller kernel blocks (MLA has one head
and is not touched by them), and the releases that have them."""
