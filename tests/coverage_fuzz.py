"""Coverage-guided fuzzing of the doors that take bytes, with atheris, which looks for input that reaches new code.

Run by hand; an input that makes an exception of another kind than this package's ends the run and lies in a file
``crash-...``. What is found becomes a test in `test_fuzz.py`::

    uv run --with atheris python tests/coverage_fuzz.py -max_total_time=600
"""

from __future__ import annotations

import math
import sys
import tempfile
from pathlib import Path

import atheris  # type: ignore[import-not-found,import-untyped,unused-ignore]
import msgspec
import numpy as np

with atheris.instrument_imports(include=["nixl_fast"]):
    from nixl_fast import (
        EngineLayout,
        Group,
        GroupKind,
        MambaState,
        NixlFastError,
        Region,
        TransferPlan,
        wire,
    )
    from nixl_fast.layout import ConvProjection
    from nixl_fast.plan import Direction

MANY = 1 << 20
"""Blocks and ids of a request above which it is only slow to look at."""


class Request(msgspec.Struct, array_like=True):
    """Two layouts and one request between them, as JSON."""

    local: EngineLayout
    remote: EngineLayout
    local_ids: list[list[int]]
    remote_ids: list[list[int]]
    num_tokens: int | None = None
    num_computed_blocks: list[int] | None = None


def message(data: bytes) -> None:
    decoded = wire.decode(data)
    assert repr(wire.decode(wire.encode(decoded))) == repr(decoded)


def layout(data: bytes) -> None:
    decoded = EngineLayout.from_bytes(data)
    assert EngineLayout.from_bytes(decoded.to_bytes()) == decoded


def request(data: bytes) -> None:
    """What a request moves that is not refused lies in the blocks it lists, and no unit is written twice."""
    try:
        asked = msgspec.json.decode(data, type=Request)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return
    plan = TransferPlan(asked.local, asked.remote, direction=Direction.READ)
    if sum(map(len, asked.local_ids)) * sum(each.num_blocks for each in asked.local.regions) > MANY:
        return
    pairing = plan.pair(
        asked.local_ids,
        asked.remote_ids,
        num_tokens=asked.num_tokens,
        num_computed_blocks=asked.num_computed_blocks,
    )
    for group in range(len(asked.local.groups)):
        remote, local = pairing.kernel_pairs(group)
        assert len(remote) == len(local)
        assert len(np.unique(local)) == len(local)
        sides = (asked.local.groups[group], asked.remote.groups[group])
        unit = math.gcd(*(side.kernel_block_size for side in sides))
        for units, ids, side in zip((local, remote), (asked.local_ids, asked.remote_ids), sides, strict=True):
            cut = 1 if side.kind is GroupKind.MAMBA else side.block_size // unit
            assert set((units // cut).tolist()) <= set(ids[group])


DOORS = (message, layout, request)


def one_input(data: bytes) -> None:
    if not data:
        return
    try:
        DOORS[data[0] % len(DOORS)](data[1:])
    except NixlFastError:
        return


def seeds(folder: Path) -> None:
    """Right inputs for every door."""
    full, window = Group(GroupKind.FULL_ATTENTION, 16, 2), Group(GroupKind.SLIDING_WINDOW, 16, 1, 64)
    state = MambaState((Region(1 << 20, 64, 9),), (ConvProjection(8),), 24)
    layouts = [
        EngineLayout("D", (full,), (Region(4096, 64, 200), Region(1 << 16, 64, 200))),
        EngineLayout("P", (Group(GroupKind.FULL_ATTENTION, 32, 4),), (Region(4096, 64, 200), Region(1 << 16, 64, 200))),
        EngineLayout("W", (full, window), (Region(4096, 64, 200, groups=(0,)), Region(1 << 16, 128, 99, groups=(1,)))),
        EngineLayout("M", (full, Group(GroupKind.MAMBA, 1)), (Region(4096, 64, 200),), mamba=state, tp_size=2),
    ]
    inputs = [(layout, each.to_bytes()) for each in layouts]
    inputs += [
        (message, wire.encode(each))
        for each in (
            wire.Hello("i", layouts[0]),
            wire.Welcome("i", layouts[3], "agent", b"metadata", 30.0),
            wire.Refused("no"),
            wire.Begin(1.0, Direction.READ, ["a", "b"]),
            wire.Held(1.0, 1, ["a"], [7]),
            wire.Gone(1.0, ["a"]),
            wire.Ping(),
            wire.Pong("i", 1),
            wire.Done("a", "D", 0, 0, 7, True),
        )
    ]
    for local, remote in ((0, 0), (0, 1), (1, 0), (2, 2), (3, 3)):
        ours, theirs = ([[1, 2, 3]] * len(layouts[each].groups) for each in (local, remote))
        for tokens, computed in ((None, None), (40, None), (40, [1] * len(layouts[local].groups))):
            asked = Request(layouts[local], layouts[remote], ours, theirs, tokens, computed)
            inputs.append((request, msgspec.json.encode(asked)))
    for number, (door, data) in enumerate(inputs):
        (folder / f"{number:02}").write_bytes(bytes([DOORS.index(door)]) + data)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        seeds(Path(folder))
        atheris.Setup([*sys.argv, folder], one_input)
        atheris.Fuzz()
