"""The native plan carried out by real NIXL agents on host memory, against what the references say byte by byte.

Two agents, each with one registered range of memory in which the ranks of a case are laid out; after every case the whole
of both ranges is compared. Hypothesis shrinks what fails.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, seed, settings

from nixl_fast import EngineLayout, Group, GroupKind, MambaState, Pairing, Region, TransferPlan
from nixl_fast.agent import Endpoint, Memory, Posted
from reference import consumer_and_producer, expected_copies, reference_placements
from test_property import Case, cases, describe
from test_property import World as TwoRanks
from test_property import pair as paired
from worlds import Bytes, World, worlds, wrong_ranks

RANGE = 1 << 19
EXAMPLES, ROUND = 500, 50
PATIENCE = 60.0
LOCAL, REMOTE = 0, 1


class Fabric:
    """Two real agents, and the memory that they have registered."""

    def __init__(self) -> None:
        self.arrays = [np.random.default_rng(side).integers(0, 256, RANGE, np.uint8) for side in (LOCAL, REMOTE)]
        self.expected = [array.copy() for array in self.arrays]
        self.ends = [0, 0]
        self.ones = [Endpoint(f"reference-{side}") for side in (LOCAL, REMOTE)]
        nothing = EngineLayout("none", (Group(GroupKind.MLA, 1),), (Region(0, 1, 0),))
        for one, array in zip(self.ones, self.arrays, strict=True):
            one.register(nothing, [Memory(array.ctypes.data, RANGE)])
        self.ones[LOCAL].add_peer(self.ones[REMOTE].name, self.ones[REMOTE].metadata())

    def clear(self) -> None:
        """Makes the whole memory free for another case, and expects that nothing changes."""
        self.ends = [0, 0]
        for expected, array in zip(self.expected, self.arrays, strict=True):
            expected[:] = array

    def take(self, side: int, size: int) -> Bytes:
        """Registered memory of one side, with a gap after it."""
        start = self.ends[side]
        self.ends[side] = start + size + 8
        assert self.ends[side] <= RANGE
        return self.arrays[side][start : start + size]

    def move(self, plan: TransferPlan, pairing: Pairing, *_: object) -> None:
        """Prepares the lists, makes the transfer and waits for it."""
        if pairing.notify_only:
            return
        one = self.ones[LOCAL]
        prepared = one.prepare(plan, self.ones[REMOTE].name)
        posted: list[Posted] = one.make(prepared, plan.split(pairing), b"")
        end = time.monotonic() + PATIENCE
        for each in posted:
            done = one.post(each)
            while not done:
                assert time.monotonic() < end
                done = one.is_done(each)
            one.release(each)
        one.unprepare(prepared)

    def close(self) -> None:
        self.ones[LOCAL].remove_peer(self.ones[REMOTE].name)
        for one in self.ones:
            one.deregister()


@pytest.fixture(scope="module")
def fabric() -> Iterator[Fabric]:
    made = Fabric()
    yield made
    made.close()


# -- many ranks: what `worlds` says


def check_ranks(fabric: Fabric, world: World) -> None:
    fabric.clear()
    consumer, producer = consumer_and_producer(LOCAL, REMOTE, world.direction)
    sides = {"p": producer, "d": consumer}
    assert list(wrong_ranks(world, lambda name, size: fabric.take(sides[name], size), fabric.move)) == []
    for name, each in (("p", world.producer), ("d", world.consumer)):
        array, expected = fabric.arrays[sides[name]], fabric.expected[sides[name]]
        for memory in each.memory.values():
            first = memory.ctypes.data - array.ctypes.data
            expected[first : first + len(memory)] = memory  # has been looked at; what is between the ranks has not
        assert np.array_equal(array, expected)


# -- two ranks: what `reference` says


def placed(layout: EngineLayout, memory_of: Callable[[int], Bytes]) -> EngineLayout:
    """The layout with each of its devices in memory that exists; NIXL knows one kind of memory here."""
    moved: dict[int, int] = {}
    for device in {region.device_id for _, region, _ in layout.places()}:
        there = [region for _, region, _ in layout.places() if region.device_id == device]
        first = min(region.base_addr for region in there)
        moved[device] = memory_of(max(region.end_addr for region in there) - first + 1).ctypes.data - first

    def move(regions: Sequence[Region]) -> tuple[Region, ...]:
        return tuple(
            msgspec.structs.replace(
                region, base_addr=region.base_addr + moved[region.device_id], device_id=0, mem_type="DRAM"
            )
            for region in regions
        )

    state = layout.mamba and MambaState(move(layout.mamba.regions), layout.mamba.conv, layout.mamba.state_bytes)
    return msgspec.structs.replace(layout, regions=move(layout.regions), mamba=state)


def check_case(fabric: Fabric, case: Case) -> None:
    describe(case.world, case.request)
    fabric.clear()
    local = placed(case.world.local, lambda size: fabric.take(LOCAL, size))
    remote = placed(case.world.remote, lambda size: fabric.take(REMOTE, size))
    world = TwoRanks(local, remote, case.world.direction)
    copies = expected_copies(*world, reference_placements(*world, case.request))
    to, source = consumer_and_producer(LOCAL, REMOTE, world.direction)
    starts = [array.ctypes.data for array in fabric.arrays]
    for (_, address), (_, origin) in copies.items():
        fabric.expected[to][address - starts[to]] = fabric.arrays[source][origin - starts[source]]
    plan = world.plan()
    fabric.move(plan, paired(plan, case.request))
    for side in (LOCAL, REMOTE):
        wrong = np.flatnonzero(fabric.arrays[side] != fabric.expected[side])
        assert wrong.tolist() == []


# -- as many cases as fit


def check(fabric: Fabric, case: World | Case) -> None:
    if isinstance(case, World):
        check_ranks(fabric, case)
    else:
        check_case(fabric, case)


ANY_CASE = {"ranks": worlds(), "two ranks": cases()}
quiet = settings(deadline=None, database=None, max_examples=EXAMPLES, suppress_health_check=list(HealthCheck))


def search(what: str, how: settings, check_one: Callable[[World | Case], None]) -> Callable[[], None]:
    """A search for a case that fails a check."""

    @how
    @given(ANY_CASE[what])
    def tried(case: World | Case) -> None:
        check_one(case)

    return tried


@pytest.mark.parametrize("what", ANY_CASE)
def test_nixl_moves_every_byte_to_where_it_belongs(fabric: Fabric, what: str) -> None:
    search(what, settings(quiet, derandomize=True), partial(check, fabric))()


@pytest.mark.soak
def test_nixl_moves_every_byte_for_as_long_as_asked(
    fabric: Fabric, soak_seconds: float, capsys: pytest.CaptureFixture[str]
) -> None:
    tries, end, number = dict.fromkeys(ANY_CASE, 0), time.monotonic() + soak_seconds, time.time_ns()

    def check_in_time(what: str, case: World | Case) -> None:
        if time.monotonic() < end:
            check(fabric, case)
            tries[what] += 1

    while time.monotonic() < end:
        number += 1
        for what in ANY_CASE:
            seed(number)(search(what, settings(quiet, max_examples=ROUND), partial(check_in_time, what)))()
    with capsys.disabled():
        print(f"\n{sum(tries.values())} cases tried: {tries}")
    assert all(tries.values())
