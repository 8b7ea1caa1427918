"""The scheduler side: where a request's blocks lie in its sequence, noted for the worker that pairs them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nixl_fast.layout import GroupKind
from nixl_fast.vllm.worker import Note, group_kind

FIRST_BLOCKS = "nixl_fast_first_blocks"
"""Key in ``kv_transfer_params``: per group, the index in the sequence of the first block that the producer lists. Only
there if a list begins later than the sequence, or may end later than the last token; a stock consumer ignores it."""


class Positions:
    """Notes positions when blocks are allotted and when a prefill is over; stands before either scheduler."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._nixl_fast_computed: dict[str, int] = {}
        self._nixl_fast_notes: dict[str, Note] = {}
        self._nixl_fast_finished: dict[str, tuple[int | None, tuple[int | None, ...]]] = {}

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
        """As stock's."""
        result = super().get_num_new_matched_tokens(request, num_computed_tokens)  # type: ignore[misc]
        if result[0]:
            self._nixl_fast_computed[request.request_id] = num_computed_tokens
        return result

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """As stock's."""
        worker: Any = self
        req_id = request.request_id
        before = worker._reqs_need_recv.get(req_id)
        super().update_state_after_alloc(request, blocks, num_external_tokens)  # type: ignore[misc]
        computed = self._nixl_fast_computed.pop(req_id, None)
        end = None if computed is None else computed + num_external_tokens
        entry = worker._reqs_need_recv.get(req_id)
        if entry is None or entry is before or num_external_tokens <= 0:
            return
        listed = entry[1]
        groups = [blocks.blocks[group] for group in worker.kv_cache_config.transfer_group_ids]
        if len(listed) != len(groups):
            return
        first = tuple(
            _first([block.block_id for block in group], ids) for group, ids in zip(groups, listed, strict=True)
        )
        said = (request.kv_transfer_params or {}).get(FIRST_BLOCKS)
        producer = tuple(said) if isinstance(said, list | tuple) and len(said) == len(groups) else None
        self._nixl_fast_notes[req_id] = Note(first, end, producer)
        registration = getattr(worker, "_push_pending_registrations", {}).get(req_id)
        if registration is not None:
            registration["nixl_fast"] = {"first": list(first), "end": end}

    def request_finished(self, request: Any, block_ids: Any) -> Any:
        """As stock's; tells the consumer where clipped lists begin."""
        worker: Any = self
        delay, params = super().request_finished(request, block_ids)  # type: ignore[misc]
        self._nixl_fast_computed.pop(request.request_id, None)
        if not delay or not params:
            return delay, params
        listed = params.get("remote_block_ids") or ()
        groups = [block_ids[group] for group in worker.kv_cache_config.transfer_group_ids]
        if len(listed) == len(groups):
            first = tuple(_first(list(group), ids) for group, ids in zip(groups, listed, strict=True))
            windows = any(
                group_kind(group) is GroupKind.SLIDING_WINDOW for group in worker.kv_cache_config.transfer_groups
            )
            if any(first) or windows:
                params[FIRST_BLOCKS] = list(first)
            if request.request_id in getattr(worker, "_newly_finished_push_blocks", ()):
                self._nixl_fast_finished[request.request_id] = (params.get("remote_num_tokens") or None, first)
        return delay, params

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        """As stock's, with the notes."""
        meta = super().build_connector_meta(scheduler_output)  # type: ignore[misc]
        for req_id, req_meta in meta.reqs_to_recv.items():
            if (note := self._nixl_fast_notes.pop(req_id, None)) is not None:
                req_meta.nixl_fast = note
        if self._nixl_fast_finished:
            meta.nixl_fast_push, self._nixl_fast_finished = self._nixl_fast_finished, {}
        return meta


def _first(held: Sequence[int], listed: Sequence[int]) -> int | None:
    """Where a list begins that is the tail of all blocks held; None if it is not their tail."""
    first = len(held) - len(listed)
    return first if first >= 0 and list(held[first:]) == list(listed) else None
