"""The golden vectors (``vectors.json``), read for Python tests; ``rust/core/tests/vectors.rs`` reads the same file."""

import json
from pathlib import Path
from typing import Any

from nixl_fast import EngineLayout, Group, GroupKind, MambaState, Region

UNIT_BYTES = 16
VECTORS: dict[str, list[dict[str, Any]]] = json.loads(Path(__file__).with_name("vectors.json").read_text())


def numbers(items: list[int | str]) -> list[int]:
    """``[1, "4..6"]`` is 1, 4, 5."""
    out: list[int] = []
    for item in items:
        if isinstance(item, str):
            first, end = item.split("..")
            out.extend(range(int(first), int(end)))
        else:
            out.append(item)
    return out


def layouts(case: dict[str, Any]) -> tuple[EngineLayout, EngineLayout]:
    """Both sides of a case: one region per group, `UNIT_BYTES` per unit, 64 logical blocks by default."""
    made = []
    for side, other in (("local", "remote"), ("remote", "local")):
        spec, groups, regions, states = case[side], [], [], []
        for index, (group, theirs) in enumerate(zip(spec["groups"], case[other]["groups"], strict=True)):
            kind, ratio = GroupKind(group["kind"]), group.get("ratio", 1)
            groups.append(Group(kind, group["block"], ratio, group.get("window")))
            blocks = spec.get("blocks", 64) * ratio
            base = 0x1000 + (index << 32)
            if kind is GroupKind.MAMBA:
                states.append(Region(base, UNIT_BYTES, blocks, groups=(index,)))
                continue
            kernel, peer = group["block"] // ratio, theirs["block"] // theirs.get("ratio", 1)
            unit = max(size for size in range(1, kernel + 1) if kernel % size == 0 and peer % size == 0)
            regions.append(Region(base, UNIT_BYTES * (kernel // unit), blocks, groups=(index,)))
        mamba = MambaState(tuple(states), (), UNIT_BYTES) if states else None
        made.append(EngineLayout(side, tuple(groups), tuple(regions), mamba, null_block_id=spec.get("null")))
    return made[0], made[1]
