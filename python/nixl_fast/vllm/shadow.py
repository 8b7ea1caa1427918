"""Shadow mode: stock's answer next to ours, counted and logged with the inputs needed to reproduce a difference."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from typing import Any

_log = logging.getLogger("vllm.nixl_fast")

_LOGGED = 20
"""Differences written out per place; the rest is only counted."""

counts: Counter[str] = Counter()
"""``"<place> same"``, ``"<place> different"`` and ``"<place> stock raised"``, since the process started."""


def compare(place: str, ours: Any, stock: Callable[[], Any], **inputs: Any) -> None:
    """Runs stock and compares; ours is what is used, whatever comes out.

    Args:
        place: Name of the overridden method.
        ours: Our answer; nested lists, tuples or arrays of ints.
        stock: Runs stock on inputs of its own.
        inputs: What both were given, for the log.
    """
    try:
        theirs = _plain(stock())
    except Exception as error:
        counts[f"{place} stock raised"] += 1
        _report(f"{place} stock raised", "%s: stock raised %r, ours %s; inputs %s", place, error, _plain(ours), inputs)
        return
    if theirs == _plain(ours):
        counts[f"{place} same"] += 1
        return
    counts[f"{place} different"] += 1
    _report(f"{place} different", "%s: stock %s, ours %s; inputs %s", place, theirs, _plain(ours), inputs)


def _report(kind: str, text: str, *values: Any) -> None:
    if counts[kind] <= _LOGGED:
        _log.warning("nixl-fast shadow: " + text, *values)


def _plain(value: Any) -> Any:
    if hasattr(value, "resolve"):
        value = value.resolve()
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
