"""Puts the classes together: stock with those mixins before it whose upstream bodies are known."""

from __future__ import annotations

import inspect
import logging
from typing import Any, NamedTuple

from nixl_fast.errors import NixlFastError
from nixl_fast.vllm.fingerprint import fingerprint
from nixl_fast.vllm.known import KNOWN, Feature
from nixl_fast.vllm.switches import Switches, read_switches

_log = logging.getLogger("vllm.nixl_fast")


class UnknownBodyError(NixlFastError, RuntimeError):
    """With ``NIXL_FAST_STRICT=1``: a method of vLLM that this release was not verified against."""


class FeatureState(NamedTuple):
    """Whether a feature is active, and if not, why."""

    feature: Feature
    active: bool
    reason: str = ""


_warned: set[str] = set()


def examine(stock: type, feature: Feature) -> FeatureState:
    """Compares the bodies that a feature replaces or relies on with those it was verified against."""
    unknown = []
    for name in feature.relies_on:
        owners = [cls for cls in stock.__mro__ if name in vars(cls)]
        if not owners and not any("" in marks for key, marks in KNOWN.items() if key.endswith(f".{name}")):
            unknown.append(f"{stock.__name__}.{name} (missing)")
        for owner in owners:
            mark = fingerprint(inspect.unwrap(vars(owner)[name]))
            if mark not in KNOWN.get(f"{owner.__name__}.{name}", {}):
                unknown.append(f"{owner.__name__}.{name} ({mark or 'no source'})")
    if not unknown:
        return FeatureState(feature, True)
    return FeatureState(feature, False, f"not verified against: {', '.join(unknown)}")


def features_of(stock: type, features: tuple[Feature, ...], switches: Switches | None = None) -> list[FeatureState]:
    """The state of each feature for one of vLLM's classes.

    Raises:
        UnknownBodyError: With ``NIXL_FAST_STRICT=1``, for the first feature that is not active.
    """
    switches = switches or read_switches()
    if switches.disable:
        return [FeatureState(feature, False, "NIXL_FAST_DISABLE is set") for feature in features]
    states = [examine(stock, feature) for feature in features]
    for state in states:
        if state.active:
            continue
        text = f"nixl-fast leaves {stock.__name__} alone in one respect, {state.reason}. {state.feature.without}"
        if switches.strict:
            raise UnknownBodyError(text)
        if text not in _warned:
            _warned.add(text)
            _log.warning("%s", text)
    return states


def build(name: str, stock: type, features: tuple[Feature, ...], mixins: dict[str, type]) -> type[Any]:
    """A subclass of a vLLM class.

    Args:
        name: Name of the result.
        stock: vLLM's class.
        features: What may stand before it.
        mixins: The class of each feature, by the feature's name.

    Raises:
        UnknownBodyError: As `features_of`.
    """
    active = [mixins[state.feature.name] for state in features_of(stock, features) if state.active]
    return type(name, (*active, stock), {"__module__": __name__, "__doc__": stock.__doc__})
