"""Faults that real NIXL does not produce on demand, hostile peers on both ends of the handshake, and what stats show."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq
from prometheus_client import CollectorRegistry, generate_latest

import nixl_fast.worker as worker_module
from nixl_fast import (
    EngineLayout,
    GeometryError,
    Group,
    GroupKind,
    NixlFastError,
    Region,
    StalePlanError,
    TransferError,
    wire,
)
from nixl_fast.plan import Direction
from nixl_fast.stats import Histogram, PrometheusCollector, Stats
from nixl_fast.worker import Kind, Request, Status, TransferWorker
from worker_rig import Engine, Fabric, Spec, moves_of, ranks, request, until

P = Spec("p", seed=1)
D = Spec("d", seed=2)
BOOM = RuntimeError("NIXL_ERR_BACKEND")


@contextmanager
def pair(fabric: Fabric, source: Spec = P, sink: Spec = D, **options: Any) -> Iterator[tuple[Engine, Engine]]:
    options.setdefault("peer_timeout", 2.0)
    with Engine(source, fabric, **options) as producer, Engine(sink, fabric, **options) as consumer:
        yield producer, consumer


def pull(consumer: Engine, producer: Engine, name: str = "a", block: int = 3, **fields: Any) -> Request:
    made = request(name, "p", [[block]], [[block + 20]], [producer.address], tokens=16, **fields)
    consumer.worker.read(made)
    return made


def works(consumer: Engine, producer: Engine, name: str) -> None:
    """A read that has to succeed, right now and with the right bytes."""
    producer.worker.hold(f"{name}@p")
    pull(consumer, producer, name, block=40)
    assert consumer.inbox.wait(name)[0].error is None
    assert producer.inbox.wait(f"{name}@p")[0].ok
    assert consumer.memory[0][40].tobytes() == producer.memory[0][60].tobytes()


# ---- the agent's faults


@pytest.mark.parametrize(
    ("method", "outcome", "says"),
    [
        ("make_prepped_xfer", BOOM, "make_prepped_xfer failed: NIXL_ERR_BACKEND"),
        ("transfer", BOOM, "transfer failed"),
        ("transfer", "ERR", "transfer says ERR"),
        ("check_xfer_state", BOOM, "check_xfer_state failed"),
        ("check_xfer_state", "ERR", "check_xfer_state says ERR"),
        ("prep_xfer_dlist", BOOM, "prep_xfer_dlist failed"),
        ("add_remote_agent", BOOM, "add_remote_agent failed"),
    ],
)
def test_a_fault_of_nixl_fails_the_request_and_nothing_else(method: str, outcome: Any, says: str) -> None:
    fabric = Fabric(manual=True)
    with pair(fabric) as (producer, consumer):
        producer.worker.hold("a@p")
        consumer_agent = fabric.of("d")
        # The first prepared list may be of five columns, which older NIXL refuses: then it is asked again.
        consumer_agent.plan(method, *[outcome] * (2 if method == "prep_xfer_dlist" else 1))
        pull(consumer, producer)
        result = consumer.inbox.wait("a")[0]
        assert result.status is Status.FAILED
        assert isinstance(result.error, TransferError)
        assert says in str(result.error)
        assert result.invalid == ((0, 3),)
        fabric.manual = False
        works(consumer, producer, "again")
        assert consumer.wrong_bytes(P, moves_of(P, D, [[60]], [[40]])) == 0
        assert consumer.inbox.stats().failures == {"TransferError": 1}
    fabric.assert_clean()


def test_a_fault_of_nixl_frees_the_blocks_of_the_producer_that_is_still_there() -> None:
    fabric = Fabric()
    with pair(fabric) as (producer, consumer):
        producer.worker.hold("a@p")
        fabric.of("d").plan("transfer", "ERR")
        pull(consumer, producer)
        assert consumer.inbox.wait("a")[0].status is Status.FAILED
        assert producer.inbox.wait("a@p")[0].status is Status.FAILED
    fabric.assert_clean()


@pytest.mark.parametrize("when", ["at the post", "while polling"])
def test_a_release_that_refuses_once_is_tried_again(when: str) -> None:
    fabric = Fabric(manual=when == "while polling")
    with pair(fabric) as (producer, consumer):
        producer.worker.hold("a@p")
        fabric.of("d").plan("release_xfer_handle", BOOM)
        pull(consumer, producer)
        if fabric.manual:
            until(fabric.finish_all)
        assert consumer.inbox.wait("a")[0].status is Status.FAILED
        fabric.manual = False
        works(consumer, producer, "again")
        assert consumer.inbox.stats().leaked_handles == 0
    fabric.assert_clean()


def test_a_transfer_that_never_ends_is_given_up_once_its_peer_is_gone() -> None:
    fabric = Fabric(manual=True)
    with pair(fabric, peer_timeout=1.0) as (producer, consumer):
        producer.worker.hold("a@p")
        pull(consumer, producer)
        moving = until(fabric.moving)[0]
        producer.worker._withdraw = lambda: None  # type: ignore[method-assign] # it goes without a word
        consumer.worker.cancel("a")
        time.sleep(1.5)  # the peer is there: nobody may call the blocks free
        assert moving.is_moving
        assert consumer.inbox.collect() == {}
        producer.worker.close()
        result = consumer.inbox.wait("a")[0]
        assert result.status is Status.FAILED
        assert not moving.is_moving
        assert "silent" in str(result.error)
        assert consumer.inbox.stats().lost_peers == 1
        assert consumer.inbox.stats().leaked_handles == 0
    fabric.assert_clean()


def test_a_transfer_that_cannot_be_stopped_is_counted() -> None:
    fabric = Fabric(manual=True)
    with pair(fabric, peer_timeout=0.4) as (producer, consumer):
        producer.worker.hold("a@p")
        fabric.of("d").plan("release_xfer_handle", *[BOOM] * 1000)
        pull(consumer, producer)
        until(fabric.moving)
        producer.worker.close()
        assert consumer.inbox.wait("a")[0].status is Status.FAILED
        assert consumer.inbox.stats().leaked_handles == 1
    fabric.assert_clean(leaked=1)


def test_a_failing_look_for_notifications_does_not_end_the_worker() -> None:
    fabric = Fabric()
    with pair(fabric) as (producer, consumer):
        fabric.of("p").plan("get_new_notifs", BOOM, BOOM)
        producer.worker.hold("other")
        until(lambda: fabric.of("p").calls["get_new_notifs"] > 2)
        works(consumer, producer, "a")
    fabric.assert_clean()


def test_nothing_needs_send_notif_or_telemetry() -> None:
    fabric = Fabric()
    with pair(fabric) as (producer, consumer):
        for name in "pd":
            fabric.of(name).plan("send_notif", *[BOOM] * 100)
            fabric.of(name).plan("get_xfer_telemetry", *[BOOM] * 100)
        works(consumer, producer, "a")
        assert fabric.of("d").calls["get_xfer_telemetry"] == 0
    fabric.assert_clean()


@pytest.mark.parametrize("method", ["release_dlist_handle", "remove_remote_agent", "deregister_memory"])
def test_a_fault_while_closing_does_not_stop_the_closing(method: str) -> None:
    fabric = Fabric()
    with pair(fabric) as (producer, consumer):
        works(consumer, producer, "a")
        fabric.of("d").plan(method, BOOM)
    assert fabric.crimes == []
    left = [each for each in fabric.lists if not each.released]
    assert len(left) == (method == "release_dlist_handle")


@pytest.mark.parametrize("method", ["register_memory", "get_agent_metadata"])
def test_a_fault_at_the_start_is_raised_by_start(method: str) -> None:
    fabric = Fabric()

    def make(name: str) -> Any:
        agent = fabric(name)
        agent.plan(method, BOOM)
        return agent

    engine = Engine(D, make)
    with pytest.raises(TransferError, match=method):
        engine.worker.start()
    with pytest.raises(TransferError, match=method):
        engine.worker.connect("127.0.0.1", 1)
    engine.worker.close()
    assert fabric.registrations[fabric.of("d").name] == 0


def test_a_fault_while_registering_anew_ends_the_worker_with_a_result_for_every_request() -> None:
    fabric = Fabric(manual=True)
    with pair(fabric) as (producer, consumer):
        producer.worker.hold("a@p")
        fabric.of("d").plan("register_memory", BOOM)
        consumer.worker.expect("e", [[7, 8]])
        consumer.register_anew(seed=9)
        result = consumer.inbox.wait("e")[0]
        assert (result.status, result.invalid) == (Status.FAILED, ((0, 7), (0, 8)))
        until(lambda: consumer.worker._dead)
        with pytest.raises(TransferError, match="register_memory failed"):
            pull(consumer, producer)


def test_a_worker_that_dies_says_which_blocks_are_invalid(monkeypatch: pytest.MonkeyPatch) -> None:
    fabric = Fabric(manual=True)
    with pair(fabric) as (producer, consumer):
        producer.worker.hold("a@p")
        pull(consumer, producer)
        until(fabric.moving)

        def broken(*_: object) -> None:
            raise RuntimeError("a bug")

        monkeypatch.setattr(consumer.worker, "_watch", broken)
        result = consumer.inbox.wait("a")[0]
        assert result.status is Status.FAILED
        assert "a bug" in str(result.error)
        assert result.invalid == ((0, 3),)
        assert fabric.moving() == []


def test_older_nixl_gets_lists_of_one_row_per_descriptor() -> None:
    fabric = Fabric(strided=False)
    with pair(fabric) as (producer, consumer):
        works(consumer, producer, "a")
        works(consumer, producer, "b")
        assert fabric.of("d").calls["prep_xfer_dlist"] == 3  # refused once, then never asked again
        assert consumer.wrong_bytes(P, moves_of(P, D, [[60]], [[40]])) == 0
    fabric.assert_clean()


# ---- requests that are wrong, and their neighbours


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"local_block_ids": [[64]]}, "64"),
        ({"local_block_ids": [[-1]]}, "-1"),
        ({"local_block_ids": [[1], [2]]}, "group"),
        ({"local_block_ids": None}, ""),
        ({"local_block_ids": [["x"]]}, ""),
        ({"local_block_ids": [np.zeros((2, 2), np.int32)]}, ""),
        ({"num_tokens": -1}, ""),
        ({"num_tokens": 2**70}, ""),
        ({"num_tokens": "x"}, ""),
        ({"num_computed_blocks": [2**70]}, ""),
        ({"num_computed_blocks": 5}, ""),
        ({"peer": "nobody"}, "nobody"),
        ({"peer": "nobody", "addresses": ()}, "nobody"),
        ({"addresses": (("no such host", 1),)}, "no such host"),
        ({"addresses": (("127.0.0.1", 70000),)}, "70000"),
    ],
)
def test_a_wrong_request_fails_alone(fields: dict[str, Any], error: str) -> None:
    fabric = Fabric(manual=True)
    with pair(fabric) as (producer, consumer):
        producer.worker.hold("good@p")
        producer.worker.hold("bad@p")
        pull(consumer, producer, "good")
        until(fabric.moving)
        bad = request("bad", "p", [[1]], [[2]], [producer.address], tokens=16)
        consumer.worker.read(msgspec.structs.replace(bad, **fields))
        result = consumer.inbox.wait("bad")[0]
        assert result.status is Status.FAILED
        assert isinstance(result.error, NixlFastError)
        assert error in str(result.error)
        fabric.finish_all()
        assert consumer.inbox.wait("good")[0].ok
        assert consumer.wrong_bytes(P, moves_of(P, D, [[23]], [[3]])) == 0
    fabric.assert_clean()


@pytest.mark.parametrize(
    "fields",
    [
        {"remote_request_id": object()},
        {"remote_request_id": "\ud800"},
        {"peer": 5},
        {"addresses": (("127.0.0.1",),)},
        {"addresses": (["127.0.0.1", 1],)},
        {"addresses": (("127.0.0.1", "1"),)},
        {"addresses": ((["x"], 1),)},
    ],
)
def test_names_that_cannot_be_sent_are_refused_at_once(fields: dict[str, Any]) -> None:
    fabric = Fabric()
    with pair(fabric) as (producer, consumer):
        bad = request("bad", "p", [[1]], [[2]], [producer.address], tokens=16)
        with pytest.raises(TransferError):
            consumer.worker.read(msgspec.structs.replace(bad, **fields))
        works(consumer, producer, "a")


def test_a_hold_counts_from_the_call_not_from_the_next_turn_of_the_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine holds, tells the peer, and the peer's Begin is handled before the thread has looked at the hold."""
    fabric = Fabric()
    with pair(fabric) as (producer, consumer):
        begun = producer.worker._begun

        def late(peer: EngineLayout, message: wire.Begin) -> list[wire.AnyMessage]:
            producer.worker.hold(message.request_ids[0])
            return begun(peer, message)

        monkeypatch.setattr(producer.worker, "_begun", late)
        pull(consumer, producer)
        assert consumer.inbox.wait("a")[0].error is None
        assert producer.inbox.wait("a@p")[0].ok


def test_ranks_that_are_missing_are_named() -> None:
    fabric = Fabric()
    sinks = ranks(Spec("d", seed=2, layers="mm"), 2)
    with ExitStack() as stack:
        producer = stack.enter_context(Engine(Spec("p", seed=1, layers="mm"), fabric))
        first = stack.enter_context(Engine(sinks[0], fabric))
        first.worker.expect("a@d", [[1]])
        producer.worker.write(request("a", "d", [[2]], [[1]], [first.address], tokens=16))
        result = producer.inbox.wait("a")[0]
        assert isinstance(result.error, GeometryError)
        assert "2 ranks" in str(result.error)
    fabric.assert_clean()


# ---- hostile peers that connect


class Stranger:
    """A raw socket that speaks what it likes."""

    def __init__(self, address: tuple[str, int]) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.RCVTIMEO, 30_000)
        self.socket.connect(f"tcp://{address[0]}:{address[1]}")

    def __enter__(self) -> Stranger:
        return self

    def __exit__(self, *_: object) -> None:
        self.context.destroy(linger=0)

    def ask(self, data: bytes) -> wire.AnyMessage:
        self.socket.send(data)
        return wire.decode(self.socket.recv())

    def begin(self, name: str, direction: Direction = Direction.READ) -> int | None:
        """The nonce of the promise, None if there is none."""
        answer = self.ask(wire.encode(wire.Begin(1.0, direction, [name])))
        assert isinstance(answer, wire.Held | wire.Gone)
        return answer.nonces[0] if isinstance(answer, wire.Held) else None

    def done(self, name: str, nonce: int | None, engine: str = "d", rank: int = 0, stage: int = 0) -> None:
        self.socket.send(wire.encode(wire.Done(name, engine, stage, rank, nonce or 0, True)))
        assert isinstance(self.ask(wire.encode(wire.Ping())), wire.Pong)

    def is_refused(self, data: bytes, *says: str) -> None:
        answer = self.ask(data)
        assert isinstance(answer, wire.Refused)
        assert all(each in answer.reason for each in says), answer


def hello(spec: Spec = D, **fields: Any) -> bytes:
    layout = spec.layout(spec.memory())
    return wire.encode(wire.Hello("stranger", msgspec.structs.replace(layout, **fields)))


def raw(*message: Any, version: int = wire.PROTOCOL_VERSION) -> bytes:
    return msgspec.msgpack.encode([version, list(message)])


HEAD = b"\x92" + bytes([wire.PROTOCOL_VERSION])
NONSENSE = {
    "nothing": b"",
    "text": b"GET / HTTP/1.1\r\n\r\n",
    "zeros": b"\0" * 1000,
    "nested arrays": HEAD + b"\x91" * 1_000_000,
    "nested maps": HEAD + b"\x81\xa0" * 500_000 + b"\xc0",
    "nested closed": HEAD + b"\x91" * 100_000 + b"\xc0",
    "array that claims four billion entries": HEAD + b"\xdd\xff\xff\xff\xff",
    "string that claims four gigabytes": HEAD + b"\x92\xa5Hello\xdb\xff\xff\xff\xffx",
    "truncated": hello()[:-7],
    "trailing": hello() + b"\0",
    "unknown type": raw("Goodbye", 1),
    "no type": raw(),
    "fields of wrong types": raw("Hello", 5, "x"),
    "layout with a field too many": raw("Hello", "i", {**msgspec.to_builtins(D.layout(D.memory())), "extra": 1}),
    "layout with a float": raw("Hello", "i", {**msgspec.to_builtins(D.layout(D.memory())), "tp_size": 1.5}),
    "layout with a huge number": raw("Hello", "i", {**msgspec.to_builtins(D.layout(D.memory())), "tp_size": 2**64 - 1}),
    "layout of no groups": raw("Hello", "i", {"engine_id": "x", "groups": [], "regions": []}),
    "a thousand groups in a thousand regions": raw(
        "Hello",
        "i",
        {
            "engine_id": "x",
            "groups": [{"kind": "mla", "block_size": 1}] * 20_000,
            "regions": [{"base_addr": 0, "block_len": 1, "num_blocks": 0}] * 20_000,
        },
    ),
    "invalid utf-8": HEAD + b"\x92\xa5Hello\xa2\xff\xfe",
}


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[Fabric, Engine, Engine]]:
    """A pair that has to survive every stranger of this module."""
    fabric = Fabric()
    with pair(fabric) as (producer, consumer):
        works(consumer, producer, "first")
        yield fabric, producer, consumer
    fabric.assert_clean()


Served = tuple[Fabric, Engine, Engine]
_names = (f"serve-{index}" for index in range(10_000))


def still_serves(served: Served) -> None:
    works(served[2], served[1], next(_names))


@pytest.mark.parametrize("data", NONSENSE.values(), ids=NONSENSE.keys())
def test_nonsense_is_answered_counted_and_survived(served: Served, data: bytes) -> None:
    producer = served[1]
    before = producer.inbox.stats()
    with Stranger(producer.address) as stranger:
        started = time.monotonic()
        stranger.is_refused(data)
        assert time.monotonic() - started < 10
        # The stranger may still be let in once it speaks the language.
        assert isinstance(stranger.ask(hello()), wire.Welcome)
    assert producer.inbox.stats().malformed_messages == before.malformed_messages + 1
    still_serves(served)


def test_another_protocol_version_is_refused_with_both(served: Served) -> None:
    with Stranger(served[1].address) as stranger:
        stranger.is_refused(raw("Something", "new", version=7), "local 2", "remote 7")
    still_serves(served)


def test_messages_before_hello_are_refused_and_change_nothing(served: Served) -> None:
    _, producer, _ = served
    producer.worker.hold("mine")
    with Stranger(producer.address) as stranger:
        for message in (
            wire.Ping(),
            wire.Begin(1.0, Direction.READ, ["mine"]),
            wire.Done("mine", "d", 0, 0, 1, True),
            wire.Held(1.0, 0, ["mine"], [1]),
            wire.Gone(1.0, ["mine"]),
            wire.Pong("x", 3),
        ):
            stranger.is_refused(wire.encode(message), "Hello")
    producer.worker.cancel("mine")
    assert producer.inbox.wait("mine")[0].status is Status.CANCELLED
    still_serves(served)


def test_messages_of_the_wrong_side_are_counted(served: Served) -> None:
    producer = served[1]
    before = producer.inbox.stats().malformed_messages
    with Stranger(producer.address) as stranger:
        assert isinstance(stranger.ask(hello()), wire.Welcome)
        stranger.socket.send(wire.encode(wire.Held(1.0, 0, ["x"], [1])))
        stranger.socket.send(wire.encode(wire.Gone(1.0, ["x"])))
        stranger.socket.send(wire.encode(wire.Pong("x", 9)))
        assert isinstance(stranger.ask(wire.encode(wire.Ping())), wire.Pong)
    assert producer.inbox.stats().malformed_messages == before + 3
    still_serves(served)


def test_messages_of_several_frames_are_counted(served: Served) -> None:
    producer = served[1]
    before = producer.inbox.stats().malformed_messages
    with Stranger(producer.address) as stranger:
        stranger.socket.send_multipart([hello(), b"more"])
        assert isinstance(stranger.ask(hello()), wire.Refused | wire.Welcome)
    until(lambda: producer.inbox.stats().malformed_messages == before + 1)
    still_serves(served)


def test_an_oversized_message_is_dropped(served: Served) -> None:
    with Stranger(served[1].address) as stranger:
        stranger.socket.send(b"\0" * (wire.MAX_MESSAGE_BYTES + 1))
        still_serves(served)
    with pytest.raises(GeometryError, match="at most"):
        wire.decode(b"\0" * (wire.MAX_MESSAGE_BYTES + 1))


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"num_kv_heads": 6}, ("4", "6")),
        ({"groups": (Group(GroupKind.FULL_ATTENTION, 24),)}, ("256", "3 units")),
        ({"groups": (Group(GroupKind.SLIDING_WINDOW, 16, sliding_window=64),)}, ("full_attention", "sliding_window")),
        ({"regions": (Region(0, 256, 4),)}, ("2", "1")),
        ({"regions": (Region(0, 256, 4), Region(2000, 512, 4))}, ("256", "512")),
        ({"tp_size": 2**31 - 1, "num_kv_heads": 4}, ("2147483647",)),
    ],
)
def test_a_layout_that_cannot_be_is_refused_with_both_values(
    served: Served, fields: dict[str, Any], says: tuple[str, ...]
) -> None:
    producer = served[1]
    before = producer.inbox.stats().refused_peers
    with Stranger(producer.address) as stranger:
        stranger.is_refused(hello(**fields), *says)
    assert producer.inbox.stats().refused_peers == before + 1
    still_serves(served)


def test_layouts_of_extreme_numbers_do_not_end_the_worker(served: Served) -> None:
    pick = random.Random(3)
    numbers = [0, 1, 2, 3, 16, 64, 2**31 - 2, 2**31 - 1, 2**32, 2**62, 2**63 - 1, 2**63, 2**64 - 2, 2**64 - 1]
    base = msgspec.to_builtins(D.layout(D.memory()))
    answers = 0
    with Stranger(served[1].address) as stranger:
        for _ in range(1500):
            layout = msgspec.json.decode(msgspec.json.encode(base))
            for _ in range(pick.randint(1, 4)):
                where = pick.choice([layout, layout["groups"][0], *layout["regions"]])
                key = pick.choice([key for key in where if key not in ("engine_id", "groups", "regions", "kind")])
                where[key] = pick.choice(numbers)
            if pick.random() < 0.5:
                layout["regions"] = [layout["regions"][0] | {"layer": "x"}] * pick.randint(0, 2)
            answer = stranger.ask(raw("Hello", "i", layout))
            assert isinstance(answer, wire.Welcome | wire.Refused)
            answers += isinstance(answer, wire.Refused)
    assert answers > 100
    still_serves(served)


def test_random_bytes_and_flipped_bits_do_not_end_the_worker(served: Served) -> None:
    pick = random.Random(4)
    good = [hello(), wire.encode(wire.Begin(1.0, Direction.READ, ["x"])), wire.encode(wire.Ping())]
    with Stranger(served[1].address) as stranger:
        for _ in range(2000):
            data = bytearray(pick.choice(good))
            for _ in range(pick.randint(1, 3)):
                data[pick.randrange(len(data))] = pick.randrange(256)
            stranger.socket.send(bytes(data))
        stranger.socket.send(wire.encode(wire.Ping()))
    still_serves(served)


def test_a_rank_cannot_notify_for_ranks_that_do_not_exist(served: Served) -> None:
    producer = served[1]
    producer.worker.hold("two-readers")
    first, second = ranks(replace(D, engine="many"), 2)
    with Stranger(producer.address) as stranger, Stranger(producer.address) as other:
        assert isinstance(stranger.ask(hello(first)), wire.Welcome)
        assert isinstance(other.ask(hello(second)), wire.Welcome)
        nonce = stranger.begin("two-readers")
        for engine, stage, rank in (("many", 0, 1_000_000), ("many", 5, 0), ("many", 0, -1), ("nobody", 0, 0)):
            stranger.done("two-readers", nonce, engine, rank, stage)
        stranger.done("two-readers", nonce, "many")
        stranger.done("two-readers", nonce, "many", 1)
        assert producer.inbox.collect().get("two-readers") is None
        other.done("two-readers", other.begin("two-readers"), "many", 1)
        assert producer.inbox.wait("two-readers")[0].ok
    still_serves(served)


def test_a_flood_does_not_keep_others_from_being_served(served: Served) -> None:
    producer, stop = served[1], threading.Event()

    def flood() -> None:
        with Stranger(producer.address) as stranger:
            while not stop.is_set():
                with_nothing = wire.encode(wire.Ping())
                try:
                    stranger.socket.send(with_nothing, zmq.NOBLOCK)
                except zmq.Again:
                    time.sleep(0.001)

    thread = threading.Thread(target=flood)
    thread.start()
    try:
        for _ in range(5):
            still_serves(served)
    finally:
        stop.set()
        thread.join()


def test_many_strangers_are_not_remembered_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_module, "_MAX_CLIENTS", 8)
    fabric = Fabric()
    with pair(fabric) as (producer, consumer):
        for index in range(30):
            with Stranger(producer.address) as stranger:
                assert isinstance(stranger.ask(hello(engine_id=f"stranger-{index}")), wire.Welcome)
        assert len(producer.worker._clients) <= 8
        works(consumer, producer, "a")


# ---- hostile peers that are connected to


class Impostor:
    """A raw server that answers whatever the test says."""

    def __init__(self, answer: Callable[[wire.AnyMessage], Sequence[bytes]]) -> None:
        self.answer = answer
        self.heard: list[wire.AnyMessage] = []
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.ROUTER)
        self.address = ("127.0.0.1", self.socket.bind_to_random_port("tcp://127.0.0.1"))
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self.run)

    def __enter__(self) -> Impostor:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop.set()
        self.thread.join()
        self.context.destroy(linger=0)

    def run(self) -> None:
        while not self.stop.is_set():
            if self.socket.poll(5):
                identity, data = self.socket.recv_multipart()
                message = wire.decode(data)
                self.heard.append(message)
                for each in self.answer(message):
                    self.socket.send_multipart((identity, each))


def welcome(agent: str = "x", metadata: bytes = b"x", spec: Spec = P, lease: float = 480.0, **fields: Any) -> bytes:
    layout = msgspec.structs.replace(spec.layout(spec.memory()), **fields)
    return wire.encode(wire.Welcome("impostor", layout, agent, metadata, lease))


@pytest.mark.parametrize(
    ("answers", "error", "says"),
    [
        pytest.param([b"junk"], GeometryError, ("not a message",), id="junk"),
        pytest.param([raw("Welcome", version=9)], GeometryError, ("local 2", "remote 9"), id="version"),
        pytest.param([wire.encode(wire.Refused("because"))], GeometryError, ("because",), id="refused"),
        pytest.param([welcome(num_kv_heads=6)], GeometryError, ("4", "6"), id="layout"),
        pytest.param([welcome(tp_size=2**31 - 1)], GeometryError, ("2147483647",), id="ranks"),
        pytest.param([welcome()], TransferError, ("add_remote_agent",), id="metadata"),
        pytest.param([welcome(lease=-1.0)], GeometryError, ("lease", "-1"), id="lease"),
        pytest.param([welcome(lease=float("nan"))], GeometryError, ("lease",), id="lease-nan"),
        pytest.param([welcome()[:-9]], GeometryError, ("not a message",), id="truncated"),
        pytest.param([], TransferError, ("no answer",), id="silence"),
    ],
)
def test_a_hostile_server_fails_its_requests_only(
    answers: list[bytes], error: type[NixlFastError], says: tuple[str, ...]
) -> None:
    fabric = Fabric()
    with pair(fabric, peer_timeout=2.0) as (producer, consumer), Impostor(lambda _: answers) as impostor:
        consumer.worker.read(request("bad", "p", [[1]], [[2]], [impostor.address], tokens=16))
        works(consumer, producer, "good")
        result = consumer.inbox.wait("bad")[0]
        assert result.status is Status.FAILED
        assert isinstance(result.error, error)
        assert all(each in str(result.error) for each in says), result.error
        assert result.invalid == ((0, 1),)
        works(consumer, producer, "still good")
        if says == ("4", "6"):  # both sides hear of both values
            assert any(isinstance(each, wire.Refused) and "6" in each.reason for each in impostor.heard)
    fabric.assert_clean()


def test_a_peer_of_another_name_is_not_used() -> None:
    fabric = Fabric()
    with pair(fabric, replace(P, engine="q")) as (other, consumer):
        other.worker.hold("a@p")
        pull(consumer, other)
        result = consumer.inbox.wait("a")[0]
        assert isinstance(result.error, GeometryError)
        assert "'p'" in str(result.error)
        assert "'q'" in str(result.error)
        other.worker.cancel("a@p")  # what it holds under the same id is its own business
        assert other.inbox.wait("a@p")[0].status is Status.CANCELLED


def test_a_promise_for_an_earlier_request_of_the_same_name_does_not_count() -> None:
    """A late Held of a request that was given up must not vouch for the next one."""
    fabric = Fabric()
    stale: list[bytes] = []

    def answer(message: wire.AnyMessage) -> list[bytes]:
        match message:
            case wire.Hello():
                return [welcome(agent="p-agent", metadata=b"p-agent")]
            case wire.Begin() if not stale:
                stale.append(wire.encode(wire.Held(message.sent, 0, message.request_ids, [7])))
                return []
            case wire.Begin():
                return [stale[0]]
            case wire.Ping():
                return [wire.encode(wire.Pong("impostor", 0))]
            case _:
                return []

    fabric("p-agent")
    with Engine(D, fabric, peer_timeout=3.0) as consumer, Impostor(answer) as impostor:
        first = request("a", "p", [[1]], [[1]], [impostor.address], tokens=16)
        fabric.manual = True
        consumer.worker.read(first)
        until(lambda: stale)
        consumer.worker.cancel("a")
        assert consumer.inbox.take("a")[0].status is Status.CANCELLED
        consumer.worker.read(first)
        time.sleep(0.5)
        assert consumer.inbox.collect() == {}
        assert fabric.transfers == []
        consumer.worker.cancel("a")
        assert consumer.inbox.wait("a")[0].status is Status.CANCELLED


def test_silence_before_a_request_is_not_held_against_the_peer() -> None:
    fabric = Fabric(manual=True)

    def answer(message: wire.AnyMessage) -> list[bytes]:
        if isinstance(message, wire.Hello):
            return [welcome(agent="p-agent", metadata=b"p-agent")]
        if isinstance(message, wire.Begin):
            time.sleep(0.6)
            return [wire.encode(wire.Held(message.sent, 0, message.request_ids, [7]))]
        return [wire.encode(wire.Pong("impostor", 0))] if isinstance(message, wire.Ping) else []

    fabric("p-agent")
    with Engine(D, fabric, peer_timeout=1.5) as consumer, Impostor(answer) as impostor:
        consumer.worker.connect(*impostor.address)
        until(lambda: consumer.inbox.stats().peers)
        time.sleep(1.8)
        consumer.worker.read(request("a", "p", [[1]], [[1]], tokens=16))
        with_destination_kept(fabric)
        assert consumer.inbox.wait("a")[0].error is None


def test_bytes_that_nobody_held_are_no_success_however_fast_they_came() -> None:
    fabric = Fabric()
    with pair(fabric) as (producer, consumer):
        works(consumer, producer, "first")
        pull(consumer, producer)
        result = consumer.inbox.wait("a")[0]
        assert (result.status, result.invalid) == (Status.FAILED, ((0, 3),))
        assert "does not hold" in str(result.error)
    fabric.assert_clean()


def with_destination_kept(fabric: Fabric) -> None:
    """Ends what moves without moving it: an impostor's addresses are nobody's memory."""
    for transfer in until(fabric.moving):
        transfer.copies = []
        transfer.finish()


# ---- timing of promises


@pytest.mark.parametrize("lease", [1e9, 480.0])
def test_leases_of_any_length_are_asked_for_at_once(lease: float) -> None:
    fabric = Fabric()
    with pair(fabric, lease=lease) as (producer, consumer):
        works(consumer, producer, "a")


def test_heartbeats_follow_the_lease_of_the_peer_that_holds_the_blocks() -> None:
    fabric = Fabric(manual=True)
    with Engine(P, fabric, lease=0.8) as producer, Engine(D, fabric, lease=480.0) as consumer:
        producer.worker.hold("a@p")
        pull(consumer, producer)
        until(fabric.moving)
        time.sleep(2.0)
        assert producer.inbox.collect() == {}
        fabric.finish_all()
        assert consumer.inbox.wait("a")[0].ok
        assert producer.inbox.wait("a@p")[0].ok
    fabric.assert_clean()


def test_more_requests_at_once_than_a_socket_queues() -> None:
    fabric = Fabric()
    names = [f"{index}" for index in range(4000)]
    with pair(fabric, lease=480.0, peer_timeout=10.0) as (producer, consumer):
        for name in names:
            producer.worker.hold(f"{name}@p")
        for name in names:
            pull(consumer, producer, name, block=int(name) % 40)
        assert [result for result in consumer.inbox.wait(*names) if not result.ok] == []
        assert [result for result in producer.inbox.wait(*(f"{name}@p" for name in names)) if not result.ok] == []
    fabric.assert_clean()


def test_a_silent_peer_is_given_up_although_requests_keep_coming() -> None:
    fabric = Fabric(manual=True)
    with pair(fabric, peer_timeout=1.5) as (producer, consumer):
        producer.worker.hold("0@p")
        pull(consumer, producer, "0", block=0)
        until(fabric.moving)
        address = producer.address
        producer.worker.close()
        for index in range(1, 400):
            consumer.worker.read(request(f"{index}", "p", [[index % 64]], [[index % 64]], [address], tokens=16))
            time.sleep(0.05)
            if consumer.inbox.collect():
                break
        assert consumer.inbox.results["0"].status is Status.FAILED


def test_a_connection_that_fails_does_not_fail_requests_for_others() -> None:
    fabric = Fabric()
    with pair(fabric, peer_timeout=1.5) as (producer, consumer), Impostor(lambda _: []) as impostor:
        consumer.worker.connect(*producer.address)
        until(lambda: consumer.inbox.stats().peers)
        consumer.worker.connect(*impostor.address)
        producer.worker.hold("a@p")
        consumer.worker.read(request("a", "p", [[1]], [[2]], tokens=16))
        assert consumer.inbox.wait("a")[0].error is None


# ---- what a promise is worth


def test_a_late_or_forged_done_ends_nothing(served: Served) -> None:
    producer = served[1]
    with Stranger(producer.address) as reader, Stranger(producer.address) as forger:
        assert isinstance(reader.ask(hello(replace(D, engine="reader"))), wire.Welcome)
        assert isinstance(forger.ask(hello(replace(D, engine="forger"))), wire.Welcome)
        producer.worker.hold("again")
        first = reader.begin("again")
        assert reader.begin("again") == first  # a heartbeat
        before = producer.inbox.stats().late_notifications
        forger.done("again", (first or 0) ^ 1, "reader")
        forger.done("again", first, "forger")
        reader.done("again", first, "reader")
        assert producer.inbox.take("again")[0].ok
        producer.worker.hold("again")
        reader.done("again", first, "reader")
        second = reader.begin("again")
        assert second not in (None, first)
        reader.done("again", first, "reader")
        assert producer.inbox.stats().late_notifications == before + 4
        assert producer.inbox.collect().get("again") is None
        assert isinstance(forger.ask(hello(replace(D, engine="reader"))), wire.Welcome)
        third = forger.begin("again")  # the reader has come back over another connection
        assert third not in (None, second)
        reader.done("again", second, "reader")
        assert producer.inbox.collect().get("again") is None
        forger.done("again", third, "reader")
        assert producer.inbox.wait("again")[0].ok
    still_serves(served)


def test_notifications_are_taken_while_nothing_waits() -> None:
    """One that comes between two holds of the same name is not kept for the second."""
    fabric = Fabric()
    with pair(fabric) as (producer, consumer):
        works(consumer, producer, "a")
        fabric.deliver("d", fabric.of("p").name, wire.encode(wire.Done("b", "d", 0, 0, 5, True)))
        until(lambda: producer.inbox.stats().late_notifications == 1)


def test_a_wait_belongs_to_the_first_engine_and_to_the_ranks_that_look_after_it() -> None:
    fabric = Fabric()
    readers = ranks(replace(D, engine="four"), 4)
    with ExitStack() as stack:
        producer = stack.enter_context(Engine(ranks(P, 2)[0], fabric))
        producer.worker.hold("a")
        strangers = [stack.enter_context(Stranger(producer.address)) for _ in range(4)]
        for stranger, spec in zip(strangers, [readers[2], readers[0], readers[1], replace(D, engine="e")], strict=True):
            assert isinstance(stranger.ask(hello(spec)), wire.Welcome)
        outside, first, second, other = strangers
        assert outside.begin("a") is None
        nonce = first.begin("a")
        assert nonce is not None
        assert other.begin("a") is None
        assert outside.begin("a") is None
        first.done("a", nonce, "four")
        assert first.begin("a") is None  # it has finished
        assert producer.inbox.collect() == {}
        second.done("a", second.begin("a"), "four", 1)
        assert producer.inbox.wait("a")[0].ok


def test_a_rank_that_contradicts_its_engine_is_refused_until_that_has_gone(served: Served) -> None:
    producer = served[1]
    two = replace(D, engine="changing", tp_size=2)
    with Stranger(producer.address) as second:
        with Stranger(producer.address) as first:
            assert isinstance(first.ask(hello(two)), wire.Welcome)
            second.is_refused(hello(replace(D, engine="changing")), "changing", "tp_size 2", ", 1 of")

        def accepted() -> bool:
            return isinstance(second.ask(hello(replace(D, engine="changing"))), wire.Welcome)

        until(accepted)
    still_serves(served)


@contextmanager
def scripted(fabric: Fabric, answer: Callable[[wire.Begin], Sequence[bytes]], **fields: Any) -> Iterator[Impostor]:
    """An impostor that says how it answers Begin."""

    def respond(message: wire.AnyMessage) -> Sequence[bytes]:
        match message:
            case wire.Hello():
                return [welcome(agent="p-agent", metadata=b"p-agent", **fields)]
            case wire.Begin():
                return answer(message)
            case wire.Ping():
                return [wire.encode(wire.Pong("impostor", 0))]
            case _:
                return []

    fabric("p-agent")
    with Impostor(respond) as impostor:
        yield impostor


def promise(message: wire.Begin, nonce: int = 7) -> bytes:
    return wire.encode(wire.Held(message.sent, 0, message.request_ids, [nonce]))


@pytest.mark.parametrize("kind", [Kind.READ, Kind.WRITE])
def test_nothing_is_posted_before_a_promise_with_half_a_lease_left(kind: Kind) -> None:
    fabric, begins = Fabric(manual=True), list[wire.Begin]()

    def answer(message: wire.Begin) -> list[bytes]:
        begins.append(message)
        if len(begins) == 1:
            time.sleep(0.7)
            assert fabric.transfers == []
        if len(begins) == 2:
            time.sleep(0.05)
            assert fabric.transfers == []  # the first promise came with less than half a lease left
        return [promise(message)]

    with (
        Engine(D, fabric, peer_timeout=3.0) as engine,
        scripted(fabric, answer, lease=1.2) as impostor,
    ):
        ask = request("a", "p", [[1]], [[1]], [impostor.address], tokens=16)
        (engine.worker.read if kind is Kind.READ else engine.worker.write)(ask)
        with_destination_kept(fabric)
        assert engine.inbox.wait("a")[0].error is None
        assert len(begins) >= 2
        assert [wire.decode(message).nonce for *_, message in fabric.sent] == [7]  # type: ignore[union-attr]


def test_a_write_that_outlives_its_promise_is_no_success() -> None:
    fabric, begins = Fabric(manual=True), list[wire.Begin]()

    def answer(message: wire.Begin) -> list[bytes]:
        begins.append(message)
        return [promise(message)] if len(begins) == 1 else []

    with Engine(D, fabric, peer_timeout=3.0) as engine, scripted(fabric, answer, lease=0.4) as impostor:
        engine.worker.write(request("a", "p", [[1]], [[1]], [impostor.address], tokens=16))
        until(fabric.moving)
        time.sleep(0.6)
        with_destination_kept(fabric)
        result = engine.inbox.wait("a")[0]
        assert result.status is Status.FAILED
        assert "lease" in str(result.error)


@pytest.mark.parametrize("kind", [Kind.READ, Kind.WRITE])
def test_a_rank_that_is_done_is_asked_nothing_while_another_still_moves(kind: Kind) -> None:
    fabric = Fabric(manual=True)
    with ExitStack() as stack:
        others = [stack.enter_context(Engine(spec, fabric, lease=0.8)) for spec in ranks(P, 2)]
        engine = stack.enter_context(Engine(D, fabric))
        for other in others:
            other.worker.hold("a@p") if kind is Kind.READ else other.worker.expect("a@p", [[5]])
        ask = request("a", "p", [[4]], [[5]], [other.address for other in others], tokens=16)
        (engine.worker.read if kind is Kind.READ else engine.worker.write)(ask)
        first, second = until(lambda: len(fabric.moving()) == 2 and fabric.moving())
        first.finish()
        time.sleep(1.5)  # heartbeats come and go
        assert engine.inbox.collect() == {}
        second.finish()
        assert engine.inbox.wait("a")[0].error is None
        assert all(other.inbox.wait("a@p")[0].ok for other in others)
        assert [other.inbox.stats().late_notifications for other in others] == [0, 0]


def test_two_live_requests_for_the_same_are_refused() -> None:
    fabric = Fabric(manual=True)
    with pair(fabric) as (producer, consumer):
        producer.worker.hold("x")
        pull(consumer, producer, "a", remote_name="x")
        until(fabric.moving)
        consumer.worker.cancel("a")
        pull(consumer, producer, "b", block=5, remote_name="x")
        result = consumer.inbox.wait("b")[0]
        assert isinstance(result.error, TransferError)
        assert "'a'" in str(result.error)
        assert "'b'" in str(result.error)
        assert result.invalid == ((0, 5),)
        assert producer.inbox.collect() == {}
        fabric.finish_all()
        assert consumer.inbox.wait("a")[0].status is Status.CANCELLED
        producer.inbox.take("x")
        fabric.manual = False
        producer.worker.hold("x")
        pull(consumer, producer, "c", remote_name="x")
        assert consumer.inbox.wait("c")[0].error is None
    fabric.assert_clean()


def test_a_job_that_ends_before_its_promise_answers_that_with_done() -> None:
    fabric, begins = Fabric(manual=True), list[wire.Begin]()
    later = threading.Event()

    def answer(message: wire.Begin) -> list[bytes]:
        begins.append(message)
        if len(begins) < 2:
            return []
        later.wait(30)
        return [promise(message, 99)]

    with Engine(D, fabric, peer_timeout=20.0) as engine, scripted(fabric, answer) as impostor:
        engine.worker.read(request("a", "p", [[1]], [[1]], [impostor.address], tokens=16))
        until(lambda: begins)
        engine.worker.cancel("a")
        assert engine.inbox.wait("a")[0].status is Status.CANCELLED  # at once
        until(lambda: len(begins) == 2)
        assert not any(isinstance(message, wire.Done) for message in impostor.heard)
        later.set()
        done = until(lambda: [message for message in impostor.heard if isinstance(message, wire.Done)])
        assert done == [wire.Done("a@p", "d", 0, 0, 99, False)]
        assert engine.worker._partings == {}


def test_a_promise_that_was_answered_with_done_is_worth_nothing_to_the_next_request() -> None:
    fabric = Fabric()
    with Engine(D, fabric, peer_timeout=1.0) as engine, scripted(fabric, lambda begin: [promise(begin)]) as impostor:
        engine.worker.read(request("a", "p", [[]], [[1]], [impostor.address], remote_name="x", tokens=16))
        assert engine.inbox.wait("a")[0].ok
        until(lambda: any(isinstance(message, wire.Done) for message in impostor.heard))
        engine.worker.read(request("b", "p", [[1]], [[1]], [impostor.address], remote_name="x", tokens=16))
        time.sleep(0.8)
        assert fabric.transfers == []
        engine.worker.cancel("b")
        assert engine.inbox.wait("b")[0].status is Status.CANCELLED


@pytest.mark.parametrize("refuses", [None, "remove_remote_agent", "release_xfer_handle"])
def test_nixl_disconnects_before_a_request_that_cannot_end_gets_its_result(
    refuses: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    fabric, connected = Fabric(manual=True), list[bool]()
    with pair(fabric, peer_timeout=0.5) as (producer, consumer):
        producer.worker.hold("a@p")
        pull(consumer, producer)
        until(fabric.moving)
        agent, name, report = fabric.of("d"), fabric.of("p").name, consumer.worker._result

        def watched(result: Any) -> None:
            connected.append(name in agent.peers)
            report(result)

        monkeypatch.setattr(consumer.worker, "_result", watched)
        if refuses:
            agent.plan(refuses, BOOM)
        job = consumer.worker._jobs["a"]
        consumer.worker._submit(consumer.worker._fail, job, TransferError("the peer does not hold it"))
        result = consumer.inbox.wait("a")[0]
        assert connected == [refuses == "remove_remote_agent"]
        assert ("may still move" in str(result.error)) == bool(refuses)
        assert consumer.inbox.stats().leaked_handles == bool(refuses)
    fabric.assert_clean(leaked=refuses == "release_xfer_handle")


def test_what_producers_cover_is_worked_out_anew_for_a_new_registration() -> None:
    fabric = Fabric()
    with Engine(P, fabric) as producer, Engine(D, fabric) as consumer:
        consumer.worker.expect("a@d", [[5]])
        producer.worker.write(request("a", "d", [[4]], [[5]], [consumer.address], tokens=16))
        assert consumer.inbox.wait("a@d")[0].ok
        assert consumer.worker._covered
        consumer.register_anew(9)
        until(lambda: consumer.inbox.stats().generation == 1)
        assert consumer.worker._covered == {}


def test_an_expectation_that_was_begun_waits_half_a_lease_more() -> None:
    fabric = Fabric(manual=True)
    with Engine(D, fabric, lease=0.8) as consumer, Stranger(consumer.address) as stranger:
        assert isinstance(stranger.ask(hello(P)), wire.Welcome)
        consumer.worker.expect("begun", [[3]])
        consumer.worker.expect("idle", [[4]])
        started = time.monotonic()
        assert stranger.begin("begun", Direction.WRITE) is not None
        assert consumer.inbox.wait("idle")[0].status is Status.EXPIRED
        assert "begun" not in consumer.inbox.collect()
        assert consumer.inbox.wait("begun")[0].status is Status.EXPIRED
        assert time.monotonic() - started >= 1.2


class PanicError(BaseException):
    """What a panic of Rust looks like: no Exception."""


@pytest.mark.parametrize("bug", [RuntimeError, PanicError])
def test_no_bug_and_no_panic_ends_the_thread(bug: type[BaseException], monkeypatch: pytest.MonkeyPatch) -> None:
    fabric = Fabric()

    def broken(*_: object) -> None:
        raise bug("a bug")

    with pair(fabric) as (producer, consumer), Impostor(lambda _: [welcome()]) as impostor:
        with monkeypatch.context() as patched:
            patched.setattr(consumer.worker, "_welcome", broken)
            consumer.worker.read(request("a", "p", [[1]], [[2]], [impostor.address], tokens=16))
            assert "a bug" in str(consumer.inbox.wait("a")[0].error)
        with monkeypatch.context() as patched:
            patched.setattr(consumer.worker, "_links_of", broken)
            pull(consumer, producer, "b")
            assert "a bug" in str(consumer.inbox.wait("b")[0].error)
        with monkeypatch.context() as patched, Stranger(producer.address) as stranger:
            patched.setattr(producer.worker, "_check_client", broken)
            stranger.is_refused(hello(), bug.__name__)
        works(consumer, producer, "c")
        monkeypatch.setattr(consumer.worker, "_watch", broken)
        consumer.worker.expect("d", [[7]])
        assert "a bug" in str(consumer.inbox.wait("d")[0].error)


def test_promises_without_nonces_end_the_connection_only() -> None:
    fabric = Fabric()

    def answer(begin: wire.Begin) -> list[bytes]:
        return [wire.encode(wire.Held(begin.sent, 0, begin.request_ids, []))]

    with pair(fabric) as (producer, consumer):
        with scripted(fabric, answer, spec=replace(P, engine="q")) as impostor:
            consumer.worker.read(request("a", "q", [[1]], [[1]], [impostor.address], tokens=16))
            assert "cannot be handled" in str(consumer.inbox.wait("a")[0].error)
        works(consumer, producer, "b")


def test_long_reasons_are_cut() -> None:
    fabric = Fabric()
    reason = wire.encode(wire.Refused("x" * 1_000_000))
    with Engine(D, fabric) as engine, Impostor(lambda _: [reason]) as impostor:
        engine.worker.read(request("a", "p", [[1]], [[1]], [impostor.address], tokens=16))
        assert len(str(engine.inbox.wait("a")[0].error)) < 5000


def test_an_expectation_that_no_producer_fills_fails() -> None:
    """A layer that no stage has: every producer reports success, but the blocks are not complete."""
    fabric = Fabric()

    def worker(name: str, layers: Sequence[str], stage: int = 0, stages: int = 1) -> TransferWorker:
        memory = np.zeros(1024, np.uint8)
        regions = tuple(Region(memory.ctypes.data + 256 * at, 64, 4, layer=each) for at, each in enumerate(layers))
        made = TransferWorker(agent=fabric)
        group = Group(GroupKind.FULL_ATTENTION, 16)
        made.register(EngineLayout(name, (group,), regions, pp_rank=stage, pp_size=stages), [memory])
        return made

    with worker("d", ["0", "1", "draft"]) as consumer:
        with worker("p", ["0"], 0, 2) as first, worker("p", ["1"], 1, 2) as second:
            consumer.expect("a@d", [[3]])
            for each in (first, second):
                each.write(request("a", "d", [[1]], [[3]], [consumer.address], tokens=16, remote_name="a@d"))
            (result,) = until(consumer.poll)
        assert (result.status, result.invalid) == (Status.FAILED, ((0, 3),))
        assert isinstance(result.error, GeometryError)
        assert "draft" in str(result.error)


def test_the_null_block_is_not_invalid_and_cancelling_after_the_end_is_ignored() -> None:
    fabric = Fabric()
    memory = D.memory()
    worker = TransferWorker(agent=fabric)
    worker.register(msgspec.structs.replace(D.layout(memory), null_block_id=0), memory)
    with worker:
        worker.read(request("a", "nobody", [[0, 3, 0, 4]], [[1]], tokens=16))
        worker.expect("e", [[0, 5]])
        (result,) = until(worker.poll)
        assert result.invalid == ((0, 3), (0, 4))
    worker.cancel("e")
    (result,) = worker.poll()
    assert result.invalid == ((0, 5),)


# ---- registering anew


def test_registering_while_requests_wait_for_a_handshake_does_not_block() -> None:
    fabric = Fabric()
    with pair(fabric) as (producer, consumer):
        works(consumer, producer, "first")
        producer.worker.hold("a@p")
        consumer.register_anew(seed=9)
        pull(consumer, producer, "a")  # in the same breath
        assert consumer.inbox.wait("a")[0].ok
        moves = moves_of(P, consumer.spec, [[23]], [[3]])
        assert consumer.wrong_bytes(P, moves) == 0
    fabric.assert_clean()


def test_what_is_asked_for_after_a_registration_is_about_the_new_memory() -> None:
    fabric = Fabric()
    with pair(fabric) as (producer, consumer):
        producer.worker.hold("before@p")
        producer.register_anew(seed=9)
        producer.worker.hold("after@p")  # in the same breath
        producer.worker.hold("cancelled@p")
        producer.worker.cancel("cancelled@p")
        assert isinstance(producer.inbox.wait("before@p")[0].error, StalePlanError)
        assert producer.inbox.wait("cancelled@p")[0].status is Status.CANCELLED
        assert "after@p" not in producer.inbox.collect()
        pull(consumer, producer, "after")
        assert consumer.inbox.wait("after")[0].ok
        assert consumer.wrong_bytes(producer.spec, moves_of(producer.spec, D, [[23]], [[3]])) == 0
        assert producer.inbox.wait("after@p")[0].ok
    fabric.assert_clean()


def test_closing_while_a_registration_waits_leaves_no_request_without_a_result() -> None:
    fabric = Fabric(manual=True)
    with pair(fabric) as (producer, consumer):
        producer.worker.hold("a@p")
        pull(consumer, producer)
        until(fabric.moving)
        until(lambda: producer.worker._waits["a@p"].begun)
        producer.register_anew(seed=9)
        producer.worker.hold("late@p")
        producer.worker.close()
        assert {producer.inbox.wait(name)[0].status for name in ("a@p", "late@p")} == {Status.FAILED}
        fabric.finish_all()
        consumer.inbox.wait("a")


def test_memory_that_a_peer_has_begun_to_read_is_not_given_away() -> None:
    """The producer promised to hold the blocks: the old memory stays until the reader is done or its lease is over."""
    fabric = Fabric(manual=True)
    with pair(fabric) as (producer, consumer):
        producer.worker.hold("a@p")
        producer.worker.hold("idle")
        pull(consumer, producer)
        until(fabric.moving)
        until(lambda: producer.worker._waits["a@p"].begun)
        producer.register_anew(seed=5)
        time.sleep(0.3)
        assert producer.worker._layout is not None
        assert producer.worker._layout.generation == 0
        fabric.finish_all()
        assert consumer.inbox.wait("a")[0].ok
        assert consumer.wrong_bytes(P, moves_of(P, D, [[23]], [[3]])) == 0
        assert producer.inbox.wait("a@p")[0].ok
        idle = producer.inbox.wait("idle")[0]
        assert isinstance(idle.error, StalePlanError)
        # The next request meets the new registration: stale once at most, then the new bytes.
        fabric.manual = False
        until(lambda: producer.worker._layout and producer.worker._layout.generation == 1)
        for attempt in range(3):
            producer.worker.hold(f"{attempt}@p")
            pull(consumer, producer, f"{attempt}")
            result = consumer.inbox.wait(f"{attempt}")[0]
            if result.ok:
                break
            assert isinstance(result.error, StalePlanError)
        assert result.ok
        assert consumer.wrong_bytes(producer.spec, moves_of(producer.spec, D, [[23]], [[3]])) == 0
    fabric.assert_clean()


def test_closing_takes_back_what_a_reader_was_promised() -> None:
    fabric = Fabric(manual=True)
    with pair(fabric) as (producer, consumer):
        producer.worker.hold("a@p")
        pull(consumer, producer)
        until(fabric.moving)
        time.sleep(0.2)  # the promise arrives
        producer.worker.close()
        time.sleep(0.2)  # and what takes it back
        fabric.finish_all()
        (result,) = consumer.inbox.wait("a")
        assert result.status is Status.FAILED
        assert "does not hold" in str(result.error)


def test_a_new_handshake_follows_a_new_registration_without_being_asked_for() -> None:
    fabric = Fabric()
    with pair(fabric) as (producer, consumer):
        consumer.worker.connect(*producer.address)
        until(lambda: consumer.inbox.stats().peers)
        for engine in (producer, consumer):
            engine.register_anew(seed=5 + (engine is consumer))
            until(lambda worker=engine.worker: worker._layout.generation == 1)  # type: ignore[misc]
            for attempt in range(3):
                name = f"{engine.spec.engine}-{attempt}"
                producer.worker.hold(f"{name}@p")
                consumer.worker.read(request(name, "p", [[3]], [[23]], tokens=16))
                result = consumer.inbox.wait(name)[0]
                if result.ok:
                    break
                assert isinstance(result.error, StalePlanError)
            assert result.error is None
            moves = moves_of(producer.spec, consumer.spec, [[23]], [[3]])
            assert consumer.wrong_bytes(producer.spec, moves) == 0


# ---- statistics


def test_prometheus_shows_every_statistic() -> None:
    stats = Stats(
        requests={"read.done": 3, "hold.expired": 1},
        failures={"TransferError": 2},
        bytes=4096,
        descriptors=7,
        merged=5,
        handshakes=2,
        refused_peers=1,
        lost_peers=4,
        malformed_messages=6,
        late_notifications=8,
        repeated_notifications=9,
        leaked_handles=10,
        live=11,
        peers={"p": 2},
    )
    for seconds in (0.0, 1e-6, 3e-6, 0.5, 1e9):
        stats.post_seconds.add(seconds)

    class Worker:
        def stats(self) -> Stats:
            return stats

    registry = CollectorRegistry()
    registry.register(PrometheusCollector(Worker(), {"engine": "d"}))
    lines = set(generate_latest(registry).decode().splitlines())
    for name, value in {
        "bytes_total": 4096,
        "descriptors_total": 7,
        "merged_total": 5,
        "handshakes_total": 2,
        "refused_peers_total": 1,
        "lost_peers_total": 4,
        "malformed_messages_total": 6,
        "late_notifications_total": 8,
        "repeated_notifications_total": 9,
        "leaked_handles_total": 10,
        "live": 11,
        "post_seconds_count": 5,
        "plan_seconds_count": 0,
        "make_seconds_count": 0,
        "transfer_seconds_count": 0,
    }.items():
        assert f'nixl_fast_{name}{{engine="d"}} {float(value)}' in lines
    assert 'nixl_fast_requests_total{engine="d",outcome="read.done"} 3.0' in lines
    assert 'nixl_fast_requests_total{engine="d",outcome="hold.expired"} 1.0' in lines
    assert 'nixl_fast_failures_total{engine="d",error="TransferError"} 2.0' in lines
    assert 'nixl_fast_peers{engine="d",peer="p"} 2.0' in lines
    assert 'nixl_fast_post_seconds_bucket{engine="d",le="1e-06"} 1.0' in lines
    assert 'nixl_fast_post_seconds_bucket{engine="d",le="4e-06"} 3.0' in lines
    assert 'nixl_fast_post_seconds_bucket{engine="d",le="+Inf"} 5.0' in lines


def test_a_histogram_counts_below_its_bounds() -> None:
    histogram = Histogram()
    for micros in (0, 1, 2, 3, 4, 2**40):
        histogram.add(micros / 1e6)
    assert histogram.count == 6
    assert [count for _, count in histogram.bounds()][:4] == [1, 2, 4, 5]
    assert list(histogram.bounds())[-1][1] == 6


def test_statistics_are_a_copy_and_count_outcomes() -> None:
    fabric = Fabric()
    with pair(fabric) as (producer, consumer):
        works(consumer, producer, "a")
        first = consumer.inbox.stats()
        first.requests["read.done"] = 100
        first.plan_seconds.add(1.0)
        second = consumer.inbox.stats()
        assert second.requests == {"read.done": 1}
        assert second.plan_seconds.count == 1
        assert (second.descriptors, second.merged, second.live) == (2, 2, 0)


def test_methods_outside_the_life_of_a_worker_say_so() -> None:
    fabric = Fabric()
    with pytest.raises(GeometryError, match="register"):
        TransferWorker(agent=fabric).start()
    with pytest.raises(GeometryError, match="above 0"):
        TransferWorker(agent=fabric, lease=0)
    engine = Engine(D, fabric)
    with pytest.raises(TransferError, match="not running"):
        engine.worker.hold("a")
    engine.worker.start()
    with pytest.raises(TransferError, match="started before"):
        engine.worker.start()
    engine.worker.hold("a")
    with pytest.raises(TransferError, match="in use"):
        engine.worker.expect("a", [[1]])
    engine.worker.close()
    engine.worker.close()
    with pytest.raises(TransferError, match="not running"):
        engine.worker.hold("b")
    result = engine.inbox.wait("a")[0]
    assert (result.kind, result.status) == (Kind.HOLD, Status.FAILED)
    layout = EngineLayout("x", (Group(GroupKind.FULL_ATTENTION, 16),), (Region(1000, 64, 4),))
    outside = TransferWorker(agent=fabric)
    outside.register(layout, [bytearray(10)])
    with pytest.raises(GeometryError, match="not inside one registered range"):
        outside.start()
    fabric.assert_clean()
