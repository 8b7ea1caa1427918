"""What the environment says: one place that reads the ``NIXL_FAST_*`` variables."""

from __future__ import annotations

import os
from typing import NamedTuple

_OFF = ("", "0", "false", "no", "off")


class Switches(NamedTuple):
    """The switches of one process, read when a connector is made."""

    disable: bool
    """``NIXL_FAST_DISABLE``: stock behaviour throughout, the connector is a name only."""

    strict: bool
    """``NIXL_FAST_STRICT``: an unknown body of vLLM is an error instead of a warning."""

    shadow: bool
    """``NIXL_FAST_SHADOW``: run stock as well and report every difference."""

    sync: bool
    """``NIXL_FAST_SYNC``: make and post on the calling thread, as stock does."""


def read_switches() -> Switches:
    """The switches as the environment has them now; unset, empty, 0, false, no and off mean off."""
    return Switches(*(os.environ.get(f"NIXL_FAST_{name.upper()}", "").lower() not in _OFF for name in Switches._fields))
