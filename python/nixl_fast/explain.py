"""A plan in words and numbers: what each group and region does, what a request costs, what is not moved and why."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from nixl_fast._native import Pairing
from nixl_fast.errors import GeometryError
from nixl_fast.geometry import ROUTES, Route, Segment
from nixl_fast.layout import BlockOrder, ConvProjection, EngineLayout, Group, GroupKind, MambaState, Region
from nixl_fast.plan import Direction, PeerPlans, TransferPlan, plan_peer


class RequestIds(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One request, as ``TransferPlan.pair`` takes it."""

    local_block_ids: list[list[int]]
    remote_block_ids: list[list[int]]
    num_tokens: int | None = None
    num_computed_blocks: list[int | None] | None = None


class Deployment(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One rank, the ranks of its peer, and a request: what ``nixl-fast explain`` explains."""

    local: EngineLayout
    remote: list[EngineLayout]
    direction: Direction = Direction.READ
    request: RequestIds | None = None

    def plans(self) -> PeerPlans:
        """The plans of this rank with its peer's ranks.

        Raises:
            GeometryError: As `plan_peer`.
        """
        return plan_peer(self.local, self.remote, direction=self.direction)


def load(local: Path, remote: Path | None, request: Path | None, direction: Direction | None) -> Deployment:
    """A deployment from files: one of its own, or a layout and the layouts of the peer's ranks.

    Raises:
        GeometryError: A file that cannot be read, or is none of these; names it.
    """
    if remote is None:
        deployment: Deployment = _decode(
            local, Deployment, "a deployment, as --example prints one; or REMOTE.json is missing"
        )
    else:
        ranks = _decode(remote, EngineLayout | list[EngineLayout])
        deployment = Deployment(_decode(local, EngineLayout), ranks if isinstance(ranks, list) else [ranks])
    if request is not None:
        deployment = msgspec.structs.replace(deployment, request=_decode(request, RequestIds))
    return msgspec.structs.replace(deployment, direction=direction) if direction else deployment


def _decode(path: Path, kind: Any, what: str = "what it should be") -> Any:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except OSError as error:
        raise GeometryError(f"{path}: {error.strerror}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise GeometryError(f"{path} is not {what}: {error}") from None


def report(plan: TransferPlan, request: RequestIds | None = None) -> dict[str, Any]:
    """A plan, and what a request moves, as plain data.

    Raises:
        BlockIdError, PairingError: The request is refused.
    """
    made: dict[str, Any] = {
        "direction": plan.direction.value,
        "local": _rank(plan.local),
        "remote": _rank(plan.remote),
        "unit_tokens": plan.unit_tokens,
        "heads": list(plan.heads),
        "groups": [_group(plan, index) for index in range(len(plan.local.groups))],
        "segments": [_segment(plan, segment) for segment in plan.segments],
        "lanes": [
            {
                "mem_types": [lane.local_mem_type, lane.remote_mem_type],
                "local": {"rows": len(lane.local_table), "descriptors": int(lane.local_table[:, 4].sum())},
                "remote": {"rows": len(lane.remote_table), "descriptors": int(lane.remote_table[:, 4].sum())},
            }
            for lane in plan.lanes
        ],
        "notes": list(_notes(plan)),
    }
    if request is not None:
        pairing = plan.pair(
            request.local_block_ids,
            request.remote_block_ids,
            num_tokens=request.num_tokens,
            num_computed_blocks=request.num_computed_blocks,
        )
        made["request"] = {
            "descriptors": pairing.num_descs,
            "merged_descriptors": pairing.num_runs,
            "bytes": pairing.num_bytes,
            "notify_only": pairing.notify_only,
            "groups": [_moved(plan, pairing, request, index) for index in range(len(plan.local.groups))],
        }
    return made


def render(made: dict[str, Any]) -> str:
    """`report`'s data as text."""
    local, remote = made["local"], made["remote"]
    arrow = "<-" if made["direction"] == "read" else "->"
    lines = [f"{_name(local)} {arrow} {_name(remote)}: {made['direction']}, unit {made['unit_tokens']} tokens"]
    if made["heads"]:
        lines[0] += f", heads {made['heads'][0]} .. {made['heads'][-1]} of {local['num_kv_heads']}"
    for group in made["groups"]:
        sides = ", ".join(
            f"{side} {group[side]['blocks']} blocks of {group[side]['block_size']} tokens (ratio {group[side]['ratio']})"
            for side in ("local", "remote")
        )
        lines.append(f"  group {group['group']} {group['kind']}: {group['route']}")
        lines.append(f"    {sides}" + (f", unit {group['unit_tokens']} tokens" if group["unit_tokens"] else ""))
    alike: dict[str, list[dict[str, Any]]] = {}
    for segment in made["segments"]:
        alike.setdefault(f"groups {segment['groups']}, {segment['what']}", []).append(segment)
    for what, segments in alike.items():
        names = [segment["name"] for segment in segments]
        lines.append(f"  {names[0]}" + (f" .. {names[-1]} ({len(names)})" if len(names) > 1 else "") + f": {what}")
    for lane in made["lanes"]:
        sides = ", ".join(
            f"{side} {lane[side]['descriptors']} descriptors in {lane[side]['rows']} rows"
            for side in ("local", "remote")
        )
        lines.append(f"  lists {' / '.join(lane['mem_types'])}: {sides}")
    lines.extend(f"  note: {note}" for note in made["notes"])
    if request := made.get("request"):
        lines.append(
            f"  request: {request['descriptors']} descriptors ({request['merged_descriptors']} merged), "
            f"{request['bytes']} bytes" + (", only a notification" if request["notify_only"] else "")
        )
        for group in request["groups"]:
            lines.append(
                f"    group {group['group']}: {group['moved']} units moved" + "".join(map(_left, group["left"]))
            )
    return "\n".join(lines)


def _name(rank: dict[str, Any]) -> str:
    return f"{rank['engine_id']} rank {rank['tp_rank']}/{rank['tp_size']}" + (
        f" stage {rank['pp_rank']}/{rank['pp_size']}" if rank["pp_size"] > 1 else ""
    )


def _rank(layout: EngineLayout) -> dict[str, Any]:
    fields = ("engine_id", "tp_rank", "tp_size", "pp_rank", "pp_size", "dcp_size", "num_kv_heads", "generation")
    return {field: getattr(layout, field) for field in fields}


def _group(plan: TransferPlan, index: int) -> dict[str, Any]:
    sides = {
        name: {"block_size": group.block_size, "ratio": group.blocks_per_logical, "blocks": layout.num_blocks(index)}
        for name, layout, group in (
            ("local", plan.local, plan.local.groups[index]),
            ("remote", plan.remote, plan.remote.groups[index]),
        )
    }
    kind = plan.local.groups[index].kind
    return {
        "group": index,
        "kind": kind.value,
        "route": ROUTES[kind].value,
        "unit_tokens": plan.group_unit_tokens[index],
        **sides,
    }


def _segment(plan: TransferPlan, segment: Segment) -> dict[str, Any]:
    slots = any(plan.local.is_mamba(group) for group in segment.groups)
    if segment.whole > 1:
        what = f"whole logical blocks of {segment.whole} kernel blocks, {segment.len} bytes each"
    elif segment.whole == 0:
        what = f"kernel blocks of a logical block that the data does not fill, {segment.len} bytes each"
    elif slots:
        what = f"{segment.len} bytes of every state slot"
    else:
        what = f"{segment.len} bytes a unit"
    for side, part, span in (
        ("local", segment.local_bytes, segment.local),
        ("remote", segment.remote_bytes, segment.remote),
    ):
        what += f"; {side} bytes {part.start} .. {part.stop} of a {'slot' if slots else 'kernel block'}"
        what += f" in {span.split} units" if span.split > 1 else ""
    return {
        "name": segment.name,
        "region": segment.region,
        "groups": segment.groups,
        "len": segment.len,
        "units_per_descriptor": segment.whole or 1,
        "local": {"offset": segment.local_bytes.start, **_span(segment.local)},
        "remote": {"offset": segment.remote_bytes.start, **_span(segment.remote)},
        "what": what,
    }


def _span(span: Any) -> dict[str, int]:
    return {"blocks": span.blocks, "units_per_block": span.split, "block_stride": span.stride}


def _notes(plan: TransferPlan) -> list[str]:
    """What a reader should know before trusting the deployment."""
    notes = []
    housed = {group for segment in plan.segments for group in segment.groups}
    for index in range(len(plan.local.groups)):
        if index not in housed:
            notes.append(f"group {index}: nothing is moved with this rank, another rank of the peer supplies it")
    if plan.direction is Direction.READ:
        notes += _partial(plan)
    for assumed in dict.fromkeys(segment.assumes for segment in plan.segments if segment.assumes):
        regions = list(dict.fromkeys(segment.region for segment in plan.segments if segment.assumes == assumed))
        names = regions[0] + (f" .. {regions[-1]} ({len(regions)})" if len(regions) > 1 else "")
        notes.append(
            f"blocks of {names} hold several heads and are taken to keep the bytes of {assumed} together; "
            "Region.order does not say so"
        )
    return notes


def _partial(plan: TransferPlan) -> list[str]:
    """Says so if this rank's blocks are filled only in part by this one remote rank."""
    moved: dict[str, set[range]] = {}
    for segment in plan.segments:
        moved.setdefault(segment.region, set()).add(segment.local_bytes)
    partial = [
        (name, size, region.block_len)
        for name, region, _ in plan.local.places()
        if name in moved and not name.startswith("mamba") and (size := sum(map(len, moved[name]))) < region.block_len
    ]
    if not partial:
        return []
    name, size, whole = partial[0]
    more = f" (and {len(partial) - 1} more)" if len(partial) > 1 else ""
    return [
        f"{name}{more}: {size} of {whole} bytes of every block; other ranks of the peer supply the rest, see plan_peer"
    ]


def _moved(plan: TransferPlan, pairing: Pairing, request: RequestIds, index: int) -> dict[str, Any]:
    moved = pairing.kernel_pairs(index)[0 if plan.direction is Direction.WRITE else 1]
    left = pairing.untransferred(index)
    reading = plan.direction is Direction.READ
    group = (plan.local if reading else plan.remote).groups[index]
    listed = (request.local_block_ids if reading else request.remote_block_ids)[index]
    slots = ROUTES[group.kind] is Route.SLOTS
    per_block = 1 if slots else group.block_size // plan.group_unit_tokens[index]
    # Where a consumer unit stands in the consumer's list decides why it was left.
    place = {block * per_block + part: (at, part) for at, block in enumerate(listed) for part in range(per_block)}
    last = max((place[unit] for unit in moved.tolist()), default=(-1, 0))
    reasons: dict[str, list[int]] = {}
    for unit in left.tolist():
        if slots:
            reason = "state that the consumer computes itself"
        elif place[unit] > last:
            reason = "past the last token"
        else:
            reason = "before the sliding window"
        reasons.setdefault(reason, []).append(unit)
    if not listed:
        reasons["the consumer lists no block, it has them all"] = []
    return {
        "group": index,
        "moved": len(moved),
        "left": [{"why": why, "units": units} for why, units in reasons.items()],
    }


def _left(part: dict[str, Any]) -> str:
    units = part["units"]
    shown = ", ".join(map(str, units[:8])) + (f" and {len(units) - 8} more" if len(units) > 8 else "")
    return f"; not moved, {part['why']}" + (f": {shown}" if units else "")


def _regions(
    count: int, block_len: int, blocks: int, groups: tuple[int, ...] | None = None, **fields: Any
) -> tuple[Region, ...]:
    """Regions one after the other in an address space of their own; addresses only matter to a running engine."""
    step = -(-block_len * blocks // 2**21) * 2**21
    first = fields.pop("first", 0)
    return tuple(Region(2**32 + (first + i) * step, block_len, blocks, groups=groups, **fields) for i in range(count))


def _dense(size: int, engine: str) -> list[EngineLayout]:
    regions = _regions(8, 16 * 8 // size * 128 * 2, 1024, order=BlockOrder.HEAD_MAJOR)
    return [
        EngineLayout(engine, (Group(GroupKind.FULL_ATTENTION, 16),), regions, None, rank, size, 8)
        for rank in range(size)
    ]


def _one(
    engine: str, groups: Sequence[Group], regions: Sequence[Region], mamba: MambaState | None = None
) -> EngineLayout:
    return EngineLayout(engine, tuple(groups), tuple(regions), mamba, null_block_id=0)


def _sliding(engine: str) -> EngineLayout:
    groups = Group(GroupKind.FULL_ATTENTION, 32, 2), Group(GroupKind.SLIDING_WINDOW, 32, 2, sliding_window=128)
    return _one(engine, groups, _regions(4, 4096, 2048))


def _hybrid(engine: str, ratio: int) -> EngineLayout:
    groups = Group(GroupKind.FULL_ATTENTION, 32 * ratio, ratio), Group(GroupKind.MAMBA, 32 * ratio, ratio)
    pages = _regions(4, 8192, 64 * ratio)
    conv = ConvProjection(8192), ConvProjection(1024), ConvProjection(1024)
    return _one(engine, groups, pages, MambaState(pages, conv, 65536))


def _mla(size: int, engine: str) -> list[EngineLayout]:
    group = Group(GroupKind.MLA, 64)
    return [EngineLayout(engine, (group,), _regions(4, 64 * 576 * 2, 512), None, rank, size) for rank in range(size)]


def _block_sizes(engine: str, block_size: int) -> EngineLayout:
    return _one(
        engine, (Group(GroupKind.FULL_ATTENTION, block_size),), _regions(4, block_size * 256, 8192 // block_size)
    )


def examples() -> dict[str, Deployment]:
    """Deployments to look at and to start from, by name."""
    return {
        "dense-gqa-tp4-to-tp1": Deployment(
            _dense(1, "decode")[0], _dense(4, "prefill"), request=RequestIds([[5, 6, 7]], [[40, 41, 42]], num_tokens=48)
        ),
        "full-sliding": Deployment(
            _sliding("decode"),
            [_sliding("prefill")],
            request=RequestIds(
                [list(range(1, 13)), list(range(20, 32))], [list(range(50, 62)), list(range(70, 82))], num_tokens=370
            ),
        ),
        "mamba-hybrid": Deployment(
            _hybrid("decode", 16),
            [_hybrid("prefill", 12)],
            request=RequestIds([[1, 2], [3]], [[5, 6, 7], [0, 0, 8]], num_tokens=1000),
        ),
        "mla-tp8-to-tp2": Deployment(
            _mla(2, "decode")[1], _mla(8, "prefill"), request=RequestIds([[1, 2]], [[7, 9]], num_tokens=100)
        ),
        "block-sizes-16-and-128": Deployment(
            _block_sizes("decode", 128),
            [_block_sizes("prefill", 16)],
            request=RequestIds([[3]], [list(range(10, 20))], num_tokens=160, num_computed_blocks=[1]),
        ),
    }
