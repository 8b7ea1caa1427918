"""Claims of SECURITY.md that no other test shows."""

import re
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nixl_fast import NixlFastError, plan_peer, wire
from nixl_fast.agent import Endpoint, Memory
from nixl_fast.worker import Status
from test_fuzz import changed, paths, scalars
from test_worker_faults import D, Impostor, P, pair, welcome
from worker_rig import Fabric, request, until

HERE = Path(__file__).parent
MINE = D.layout(D.memory())
THEIRS = msgspec.to_builtins(P.layout(P.memory()))


def test_every_test_that_is_named_exists() -> None:
    rows = re.findall(r"((?:`test_\w+`,? ?)+)[^|]*?`(tests/\w+\.py)`", (HERE.parent / "SECURITY.md").read_text())
    named = [(name, path) for names, path in rows for name in re.findall(r"test_\w+", names)]
    assert len(named) >= 12
    for name, path in named:
        assert f"def {name}(" in (HERE.parent / path).read_text(), (name, path)


@settings(deadline=None, max_examples=400, database=None)
@given(
    st.lists(st.tuples(paths, scalars | st.integers(1, 99)), min_size=1, max_size=3),
    st.lists(st.integers(0, 63), min_size=1, max_size=6, unique=True),
    st.lists(st.integers(0, 2**31), min_size=1, max_size=6),
    st.integers(1, 100),
)
def test_a_read_writes_only_its_own_blocks_whatever_the_peer_says(
    changes: list[tuple[list[int], Any]], mine: list[int], theirs: list[int], tokens: int
) -> None:
    tree = THEIRS
    for path, value in changes:
        tree = changed(tree, path, value)
    try:
        layout = msgspec.convert(tree, type(MINE))
        plans = plan_peer(MINE, [layout])
        pairings = [plan.pair([mine], [theirs], num_tokens=tokens) for plan in plans]
    except (msgspec.ValidationError, NixlFastError):
        return
    for plan, pairing in zip(plans, pairings, strict=True):
        rows = plan.expanded("local")[pairing.local_desc_ids]
        for address, size, _ in rows.tolist():
            region = next(region for region in MINE.regions if region.base_addr <= address < region.end_addr)
            block, offset = divmod(address - region.base_addr, region.stride)
            assert block in mine
            assert offset + size <= region.block_len


def test_layouts_that_reach_outside_registered_memory_are_refused_by_nixl() -> None:
    memories = [np.zeros(64 * 64, np.uint8), np.zeros(64 * 64, np.uint8)]
    ends = [Endpoint(f"security-{number}") for number in range(2)]
    specs = [msgspec.structs.replace(MINE, regions=MINE.regions[:1]) for _ in range(2)]
    layouts = [
        msgspec.structs.replace(
            spec,
            regions=(
                msgspec.structs.replace(spec.regions[0], base_addr=memory.ctypes.data, block_len=64, num_blocks=64),
            ),
        )
        for spec, memory in zip(specs, memories, strict=True)
    ]
    for end, layout, memory in zip(ends, layouts, memories, strict=True):
        end.register(layout, [Memory(memory.ctypes.data, memory.nbytes)])
    ends[0].add_peer(ends[1].name, ends[1].metadata())
    ends[0].unprepare(ends[0].prepare(plan_peer(layouts[0], [layouts[1]])[0], ends[1].name))
    for wrong in ({"num_blocks": 65}, {"base_addr": memories[1].ctypes.data + 1}, {"base_addr": 4096}):
        region = msgspec.structs.replace(layouts[1].regions[0], **wrong)
        for mine, theirs in ((layouts[0], region), (region, layouts[1])):
            sides = [
                each if each in layouts else msgspec.structs.replace(layouts[0], regions=(each,))
                for each in (mine, theirs)
            ]
            with pytest.raises(NixlFastError):
                ends[0].prepare(plan_peer(sides[0], [sides[1]])[0], ends[1].name)
    ends[0].remove_peer(ends[1].name)
    for end in ends:
        end.deregister()


def test_whoever_says_an_engine_id_first_is_believed() -> None:
    """No authentication: that this passes is the reason for the warning."""
    fabric = Fabric()
    with pair(fabric) as (_, consumer):
        name = fabric.of("p").name
        with Impostor(lambda _: [welcome(agent=name, metadata=name.encode())]) as impostor:
            consumer.worker.connect(*impostor.address)
            consumer.worker.read(request("a", "p", [[1]], [[2]], tokens=16))
            until(lambda: any(isinstance(each, wire.Begin) for each in impostor.heard))
            assert not consumer.inbox.collect()  # it talks on and promises nothing: only the engine ends that
            consumer.worker.cancel("a")
            assert consumer.inbox.wait("a")[0].status is Status.CANCELLED
    fabric.assert_clean()
