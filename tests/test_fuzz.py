"""Every door that takes bytes or objects from outside: what comes is understood or refused, and nothing else happens.

Never a crash, a hang, an exception of another kind, or silence about something that was not understood.
"""

from __future__ import annotations

import array
import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nixl_fast import (
    BlockIdError,
    EngineLayout,
    GeometryError,
    Group,
    GroupKind,
    NixlFastError,
    PairingError,
    Region,
    TransferPlan,
    expand_block_ids,
    expand_groups,
    wire,
)
from nixl_fast.plan import Direction
from test_worker_faults import D, Impostor, P, Stranger, hello, pair, served, still_serves, welcome, works
from worker_rig import Fabric, request

__all__ = ["served"]  # a fixture

LAYOUT = EngineLayout("E", (Group(GroupKind.FULL_ATTENTION, 16, 2),), (Region(4096, 64, 200),))
PLAN = TransferPlan(LAYOUT, LAYOUT)
OTHER = [[1, 2, 3, 4]]
quick = settings(deadline=None, max_examples=400, database=None)


# -- objects


class Index:
    """Has an __index__ that does what it likes."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self.call = call

    def __index__(self) -> int:
        out: int = self.call()
        return out


class Mute:
    def __repr__(self) -> str:
        raise RuntimeError


class Loud(int):
    def __repr__(self) -> str:
        raise RuntimeError

    __str__ = __repr__


class Lying(int):
    def __index__(self) -> int:
        return 99

    def __int__(self) -> int:
        return 98


class Long(list[Any]):
    def __len__(self) -> int:
        return 10**6

    def __iter__(self) -> Iterator[Any]:
        return iter([7] * 10**6)

    def __getitem__(self, _: Any) -> Any:
        return 7


def raising() -> int:
    raise RuntimeError("no")


def changing(change: Callable[[list[Any]], object]) -> list[Any]:
    """A list that changes while its third id is read."""
    ids: list[Any] = [1, 2, None, 3]

    def call() -> int:
        change(ids)
        return 5

    ids[2] = Index(call)
    return ids


def growing() -> list[Any]:
    """A list that would never end: reading an id adds another."""
    ids: list[Any] = []

    def call() -> int:
        ids.append(ids[0])
        return 5

    ids.append(Index(call))
    return ids


REFUSED = {
    "huge": lambda: [10**5000],
    "huge and negative": lambda: [1, -(10**5000)],
    "no text": lambda: [Loud(2**31)],
    "no text, negative": lambda: [Loud(-9)],
    "index that raises": lambda: [Index(raising)],
    "index of a float": lambda: [Index(lambda: 1.0)],
    "index of a bool": lambda: [Index(lambda: True)],
    "index of an index": lambda: [Index(lambda: Index(lambda: 1))],
    "cleared meanwhile": lambda: changing(list.clear),
    "shortened meanwhile": lambda: changing(list.pop),
    "extended meanwhile": lambda: changing(lambda ids: ids.extend([6] * 100_000)),
    "growing": growing,
    "iterator": lambda: iter([1]),
    "generator": lambda: (block for block in [1]),
    "array.array": lambda: array.array("i", [1]),
    "memoryview": lambda: memoryview(array.array("i", [1])),
    "masked": lambda: np.ma.MaskedArray([1, 2], mask=[False, True]),
    "times": lambda: np.array([1], "m8[s]"),
    "records": lambda: np.zeros(2, [("id", "i4")]),
    "complex": lambda: np.array([1 + 0j]),
    "a float in objects": lambda: np.array([1, 2.5], object),
}


@pytest.mark.parametrize("make", REFUSED.values(), ids=REFUSED.keys())
@pytest.mark.parametrize("side", [0, 1])
def test_objects_that_are_no_ids_are_refused(make: Callable[[], Any], side: int) -> None:
    lists = [OTHER, OTHER]
    lists[side] = [make()]
    with pytest.raises(BlockIdError) as refused:
        PLAN.pair(*lists)
    assert ("local", "remote")[side] in str(refused.value)
    with pytest.raises(BlockIdError):
        expand_block_ids(make(), 2)


def test_the_refusal_of_a_huge_id_says_how_huge() -> None:
    for huge, says in ((1 << 40_000, "block id 2^40000 or beyond"), (-(1 << 40_000), "-2^40000 or beyond")):
        with pytest.raises(BlockIdError, match="position 1") as refused:
            PLAN.pair([[1, huge]], OTHER)
        assert says in str(refused.value)
        assert ("is negative" in str(refused.value)) == (huge < 0)


@pytest.mark.parametrize("ids", [[Lying(5)], Long([5]), [Index(lambda: 5)], (np.uint8(5),)])
def test_an_id_is_what_the_object_holds(ids: Any) -> None:
    assert PLAN.pair([ids], [[5]]).local_desc_ids.tolist() == [5]


def test_what_cannot_be_shown_is_refused_in_our_words() -> None:
    mute: Any = Mute()
    for call in (
        lambda: expand_groups(mute, [GroupKind.MLA], 1),
        lambda: expand_groups([[1]], [mute], 1),
        lambda: PLAN.expanded(mute),
        lambda: TransferPlan(mute, LAYOUT),
        lambda: TransferPlan(LAYOUT, LAYOUT, direction=mute),
        lambda: EngineLayout(mute, (), ()),
        lambda: Group(mute, 16),
        lambda: PLAN.pair(mute, mute),
    ):
        with pytest.raises(NixlFastError):
            call()


NO_COUNTS = [-1, 10**5000, -(10**5000), 1.0, True, "1", Index(lambda: None), Index(lambda: 1 // 0), Loud(-1), Mute()]


@pytest.mark.parametrize("which", range(len(NO_COUNTS)))
def test_counts_that_are_none_are_refused(which: int) -> None:
    count: Any = NO_COUNTS[which]
    with pytest.raises(PairingError):
        PLAN.pair(OTHER, OTHER, num_tokens=count)
    with pytest.raises(PairingError):
        PLAN.pair(OTHER, OTHER, num_computed_blocks=[count])
    with pytest.raises(GeometryError):
        expand_block_ids([1], count)
    with pytest.raises(GeometryError):
        Region(count, 1, 1)
    with pytest.raises(GeometryError):
        Group(GroupKind.MLA, 4, count)


def test_a_ratio_is_asked_for_once() -> None:
    answers = iter([2, -7, -7])
    assert expand_block_ids([3], Index(lambda: next(answers))).tolist() == [6, 7]  # type: ignore[arg-type]


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | st.binary(max_size=3) | st.integers(0, 99),
    lambda inner: st.lists(inner, max_size=4) | st.tuples(inner, inner) | st.dictionaries(st.text(max_size=2), inner, max_size=2),
    max_leaves=8,
)  # fmt: skip
arrays = st.builds(
    lambda values, dtype, shape: np.array(values, dtype=object).astype(dtype).reshape(shape),
    st.lists(st.integers(0, 99), min_size=4, max_size=4),
    st.sampled_from(["i1", "u2", "i4", ">i4", "u8", "f4", "?", "O", "c8", "S3"]),
    st.sampled_from([(4,), (2, 2), (1, 4), (4, 1)]),
)


@quick
@given(anything | arrays, anything | arrays, anything, anything)
def test_any_object_is_understood_or_refused(local: Any, remote: Any, tokens: Any, computed: Any) -> None:
    for ids in ((local, remote), ([local], [remote])):
        try:
            pairing = PLAN.pair(*ids, num_tokens=tokens, num_computed_blocks=computed)
        except NixlFastError:
            continue
        listed = [[int(block) for block in lists[0]] for lists in ids]
        for units, blocks in zip(pairing.kernel_pairs(0)[::-1], listed, strict=True):
            assert set(units.tolist()) <= {2 * block + page for block in blocks for page in (0, 1)}


def test_arrays_that_another_thread_resizes_and_overwrites() -> None:
    ids, stop, end = np.arange(60), threading.Event(), time.monotonic() + 3

    def disturb() -> None:
        pick = random.Random(1)
        while not stop.is_set():
            ids.resize(pick.randrange(90), refcheck=False)
            ids[:] = np.random.default_rng(pick.randrange(9)).permutation(len(ids)) + pick.choice([0, 0, 50])

    thread = threading.Thread(target=disturb)
    thread.start()
    answered = refused = 0
    try:
        while time.monotonic() < end or not (answered and refused):
            assert thread.is_alive()
            try:
                pairing = PLAN.pair([ids], [list(range(90))])
            except NixlFastError:
                refused += 1
                continue
            answered += 1
            units = pairing.local_desc_ids
            assert len(units) == 0 or (units.min() >= 0 and units.max() < 200)
            assert len(np.unique(units)) == len(units)
    finally:
        stop.set()
        thread.join()


# -- bytes

paths = st.lists(st.integers(0, 30), max_size=5)
scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from([2**31, 2**63, 2**64 - 1])
)


def changed(tree: Any, path: list[int], value: Any) -> Any:
    """A tree of lists and maps with one place replaced, or dropped where the value is ``...``."""
    if not path or not isinstance(tree, dict | list) or not tree:
        return value
    key = sorted(tree)[path[0] % len(tree)] if isinstance(tree, dict) else path[0] % len(tree)
    new = changed(tree[key], path[1:], value)
    copy = tree.copy()
    if new is ...:
        del copy[key]
    else:
        copy[key] = new
    return copy


FULL = TransferPlan(P.layout(P.memory()), D.layout(D.memory())).local
GOOD = msgspec.to_builtins(msgspec.structs.replace(FULL, null_block_id=0))


@quick
@given(st.lists(st.tuples(paths, scalars | st.just(...) | st.sampled_from([[], {}, [1], [[]]])), max_size=4))
def test_any_json_is_a_layout_or_refused(changes: list[tuple[list[int], Any]]) -> None:
    tree = GOOD
    for path, value in changes:
        tree = changed(tree, path, value)
    try:
        layout = EngineLayout.from_bytes(msgspec.json.encode(tree if tree is not ... else None))
    except NixlFastError:
        return
    assert EngineLayout.from_bytes(layout.to_bytes()) == layout
    try:
        TransferPlan(layout, layout).pair([[1]] * len(layout.groups), [[1]] * len(layout.groups))
    except NixlFastError:
        return


@quick
@given(
    st.binary(max_size=40) | st.text(max_size=10) | st.sampled_from(["\ud800", "[" * 100_000, '{"engine_id":' * 50_000])
)
def test_any_text_is_a_layout_or_refused(data: bytes | str) -> None:
    with pytest.raises(GeometryError):
        EngineLayout.from_bytes(data)


@pytest.mark.parametrize("name", ["\ud800", "a\udfff"])
def test_names_that_cannot_be_sent_are_no_names(name: str) -> None:
    with pytest.raises(GeometryError):
        EngineLayout(name, LAYOUT.groups, LAYOUT.regions)
    with pytest.raises(GeometryError):
        Region(0, 1, 1, layer=name)


ids = st.lists(st.sampled_from(["a", "mine", "", "x" * 300]), max_size=3)
numbers = st.integers(-(2**63), 2**64 - 1) | st.integers(0, 3)
times = st.floats() | st.integers(-1, 5).map(float)
layouts = st.builds(
    lambda changes: next((made for made in [_layout(changes)] if made), FULL),
    st.lists(st.tuples(paths, scalars), max_size=2),
)
messages: st.SearchStrategy[wire.AnyMessage] = st.one_of(
    st.builds(wire.Hello, st.text(max_size=3), layouts),
    st.builds(wire.Welcome, st.text(max_size=3), layouts, st.text(max_size=3), st.binary(max_size=9), times),
    st.builds(wire.Refused, st.text(max_size=9)),
    st.builds(wire.Begin, times, st.sampled_from(Direction), ids),
    st.builds(wire.Held, times, numbers, ids, st.lists(numbers, max_size=3)),
    st.builds(wire.Gone, times, ids),
    st.builds(wire.Ping),
    st.builds(wire.Pong, st.text(max_size=3), numbers),
    st.builds(wire.Done, st.sampled_from(["a", "mine"]), st.sampled_from("dpE"), numbers, numbers, numbers, st.booleans()),
)  # fmt: skip


def _layout(changes: list[tuple[list[int], Any]]) -> EngineLayout | None:
    tree = GOOD
    for path, value in changes:
        tree = changed(tree, path, value)
    try:
        return msgspec.convert(tree, EngineLayout)
    except (msgspec.ValidationError, NixlFastError):
        return None


def flipped(data: bytes, flips: list[tuple[int, int]]) -> bytes:
    out = bytearray(data)
    for place, value in flips:
        out[place % len(out)] = value
    return bytes(out)


damaged = st.builds(
    flipped, messages.map(wire.encode), st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), max_size=3)
)


@quick
@given(damaged | st.binary(max_size=60))
def test_any_bytes_are_a_message_or_refused(data: bytes) -> None:
    try:
        message = wire.decode(data)
    except GeometryError:
        return
    again = wire.decode(wire.encode(message))
    assert repr(again) == repr(message)  # a NaN equals nothing


TALKS = settings(deadline=None, max_examples=60, database=None)
talk = st.lists(damaged, max_size=20)
Served = tuple[Fabric, Any, Any]


def test_nobody_that_connects_can_end_the_worker(served: Served) -> None:
    _, producer, _ = served
    producer.worker.hold("mine")

    @TALKS
    @given(talk)
    def hears(said: list[bytes]) -> None:
        with Stranger(producer.address) as stranger:
            assert isinstance(stranger.ask(hello()), wire.Welcome)
            for data in said:
                stranger.socket.send(data)
            stranger.socket.send(wire.encode(wire.Ping()))
            while not isinstance(wire.decode(stranger.socket.recv()), wire.Pong):
                pass

    hears()
    still_serves(served)
    producer.worker.cancel("mine")


def test_no_notification_can_end_the_worker(served: Served) -> None:
    fabric = served[0]
    target = fabric.of("p")

    @TALKS
    @given(talk)
    def hears(said: list[bytes]) -> None:
        for data in said:
            fabric.deliver("stranger", target.name, data)

    hears()
    still_serves(served)


def test_nobody_that_is_connected_to_can_end_the_worker_or_finish_a_request() -> None:
    fabric, names = Fabric(), iter(range(10**6))
    with pair(fabric, peer_timeout=2.0) as (producer, consumer):

        @settings(TALKS, max_examples=25)
        @given(talk, talk)
        def survives(first: list[bytes], then: list[bytes]) -> None:
            answers = [[welcome(agent=fabric.of("p").name, metadata=fabric.of("p").name.encode()), *first], then]
            with Impostor(lambda _: answers.pop(0) if answers else []) as impostor:
                name = f"bad-{next(names)}"
                consumer.worker.read(request(name, "p", [[1]], [[2]], [impostor.address], tokens=16))
                assert not consumer.inbox.take(name)[0].ok

        survives()
        works(consumer, producer, "good")
    fabric.assert_clean()
