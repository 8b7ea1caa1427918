"""Death, silence, aborts, leases and new registrations; each request ends in exactly one result whatever happens."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import pytest
import zmq
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from nixl_fast import GeometryError, StalePlanError, TransferError, wire
from nixl_fast.plan import Direction
from nixl_fast.worker import PIECE, Kind, Result, Status
from worker_rig import Bytes, Engine, Fabric, Move, Rig, Spec, moves_of, ranks, request, rig, until

P = Spec("p", seed=1)
D = Spec("d", seed=2)
LONG = 2 * PIECE
"""Blocks of two layers: four pieces."""
BIG_P = Spec("p", seed=1, blocks=LONG, head_bytes=4)
BIG_D = Spec("d", seed=2, blocks=LONG, head_bytes=4)
EVERY = list(range(LONG))
MARGIN = 15.0
"""Seconds for a loaded machine on top of every stated time."""


@pytest.fixture
def made() -> Iterator[Rig]:
    with rig() as each:
        yield each


def long_read(producer: Any, name: str = "a") -> Any:
    return request(name, "p", [EVERY], [EVERY], [producer.address])


def works(consumer: Any, producer: Any, name: str) -> list[Move]:
    """A short read that has to succeed; returns what it moved."""
    producer.call("hold", f"{name}@p")
    consumer.call("read", request(name, "p", [[7]], [[9]], [producer.address], tokens=16))
    result = consumer.call("wait", name)[0]
    assert result.error is None
    assert producer.call("wait", f"{name}@p")[0].ok
    return moves_of(producer.spec, consumer.spec, [[9]], [[7]])


def test_a_producer_killed_mid_transfer_and_back_at_another_address(made: Rig) -> None:
    producer = made.start(BIG_P)[0]
    consumer = made.start(BIG_D, peer_timeout=1.0, slow=0.4)[0]
    producer.call("hold", "a@p")
    consumer.call("read", long_read(producer))
    time.sleep(0.6)
    producer.kill()
    killed = time.monotonic()
    result = consumer.call("wait", "a")[0]
    waited = time.monotonic() - killed
    print(f"given up {waited:.2f} s after SIGKILL, peer_timeout 1 s: {result.error}")
    assert result.status is Status.FAILED
    assert isinstance(result.error, TransferError)
    assert waited < 2 * 1.0 + 4 * 0.4 + MARGIN
    assert result.invalid == tuple((0, block) for block in EVERY)
    assert consumer.call("figures")["handles"] == 0
    again = made.start(Spec("p", seed=5, blocks=64, head_bytes=4))[0]
    assert again.address != producer.address
    works(consumer, again, "b")
    assert consumer.call("block", 0, 7) == again.call("block", 0, 9)
    assert consumer.call("stats").peers == {"p": 1}


def test_a_silent_producer_is_given_up_and_nothing_arrives_later(made: Rig) -> None:
    producer = made.start(BIG_P)[0]
    consumer = made.start(BIG_D, peer_timeout=2.0, slow=1.0)[0]  # four pieces outlast the patience
    assert producer.address  # before it falls silent
    producer.call("hold", "a@p")
    producer.stop()
    consumer.call("read", long_read(producer, "b"))  # no handshake
    result = consumer.call("wait", "b")[0]
    assert "no answer" in str(result.error)
    producer.resume()
    producer.call("hold", "c@p")
    consumer.call("read", long_read(producer, "c"))
    time.sleep(0.4)
    producer.stop()
    stopped = time.monotonic()
    result = consumer.call("wait", "c")[0]
    waited = time.monotonic() - stopped
    print(f"given up {waited:.2f} s after SIGSTOP, peer_timeout 2 s: {result.error}")
    assert result.status is Status.FAILED
    assert isinstance(result.error, TransferError)
    assert waited < 2 * 2.0 + 4 * 1.0 + MARGIN
    consumer.call("snapshot")
    producer.resume()
    time.sleep(1.0)
    assert consumer.call("changed_bytes") == 0
    works(consumer, producer, "d")


def test_a_consumer_killed_mid_transfer_costs_one_lease(made: Rig) -> None:
    producer = made.start(BIG_P, lease=1.5)[0]
    consumer = made.start(BIG_D, slow=0.4)[0]
    producer.call("hold", "a@p")
    consumer.call("read", long_read(producer))
    time.sleep(0.6)
    consumer.kill()
    killed = time.monotonic()
    result = producer.call("wait", "a@p")[0]
    waited = time.monotonic() - killed
    assert result.status is Status.EXPIRED
    print(f"expired {waited:.2f} s after SIGKILL of the consumer, lease 1.5 s")
    assert waited < 1.5 + MARGIN
    assert "0 ranks had notified" in str(result.error)
    works(made.start(BIG_D)[0], producer, "b")


def test_a_restart_at_the_same_address_and_at_a_new_one_without_addresses(made: Rig) -> None:
    consumer, producer = made.start(D, P)
    consumer.call("connect", *producer.address)
    done = works(consumer, producer, "first")
    assert consumer.call("wrong_bytes", P, done) == 0
    host, port = producer.address
    producer.kill()
    again = made.peer(Spec("p", seed=3), port=port).ready()
    for attempt in range(5):
        again.call("hold", f"{attempt}@p")
        consumer.call("read", request(f"{attempt}", "p", [[7]], [[9]], [(host, port)], tokens=16))
        result = consumer.call("wait", f"{attempt}")[0]
        if result.ok:
            break
        assert attempt < 2
    assert consumer.call("wrong_bytes", again.spec, done) == 0
    again.kill()
    moved = made.start(Spec("p", seed=4))[0]
    consumer.call("connect", *moved.address)
    until(lambda: consumer.call("stats").handshakes >= 3)
    moved.call("hold", "moved@p")
    consumer.call("read", request("moved", "p", [[7]], [[9]], tokens=16))
    assert consumer.call("wait", "moved")[0].error is None
    assert consumer.call("wrong_bytes", moved.spec, done) == 0


def test_an_abort_storm_leaves_one_result_each_and_no_byte_moving(made: Rig) -> None:
    source = Spec("p", seed=1, blocks=6000, head_bytes=16)
    sink = Spec("d", seed=2, blocks=6000, head_bytes=16)
    producer, consumer = made.start(source, sink)
    pick = random.Random(11)
    free = list(range(6000))
    pick.shuffle(free)
    names, plan = [f"{index}" for index in range(300)], {}
    for start in range(0, 300, 30):
        batch = names[start : start + 30]
        requests = []
        for name in batch:
            local = [free.pop() for _ in range(pick.choice([1, 5, 30]))]
            remote = pick.sample(range(6000), len(local))
            plan[name] = moves_of(source, sink, [remote], [local])
            requests.append(request(name, "p", [local], [remote], [producer.address]))
        producer.call("hold", *(f"{name}@p" for name in batch))
        producer.call("cancel", *(f"{name}@p" for name in pick.sample(batch, 3)))
        consumer.call("read", *requests)
        for _ in range(3):
            consumer.call("cancel", *pick.sample(batch, 6))
        producer.call("cancel", *(f"{name}@p" for name in pick.sample(batch, 3)))
    results = {result.request_id: result for result in consumer.call("wait", *names)}
    consumer.call("snapshot")
    holds = producer.call("wait", *(f"{name}@p" for name in names))
    consumer.call("cancel", *names)
    kinds = {result.status for result in results.values()}
    assert kinds >= {Status.DONE, Status.CANCELLED}
    assert {result.status for result in holds} <= {Status.DONE, Status.FAILED, Status.CANCELLED}
    done = [move for name in names if results[name].ok for move in plan[name]]
    torn = [move for name in names if not results[name].ok for move in plan[name]]
    assert consumer.call("wrong_bytes", source, done, torn) == 0
    for name in names:
        blocks = {block for _, block in results[name].invalid}
        assert blocks == (set() if results[name].ok else {sink for _, _, sink in plan[name]})
    assert consumer.call("changed_bytes") == 0
    assert consumer.call("results").keys() == set(names)
    assert (consumer.call("stats").live, producer.call("stats").live) == (0, 0)
    assert consumer.call("figures")["handles"] == 0


def test_a_new_registration_mid_transfer_never_yields_the_memory_after_it(made: Rig) -> None:
    """The producer overwrites its old memory as soon as its new registration is in force."""
    producer = made.start(BIG_P)[0]
    consumer = made.start(BIG_D, slow=0.3)[0]
    producer.call("hold", "a@p")
    consumer.call("read", long_read(producer))
    time.sleep(0.5)
    producer.call("register_anew", 9)
    until(lambda: producer.call("generation") == 1)
    producer.call("scribble_old")
    result = consumer.call("wait", "a")[0]
    moves = moves_of(BIG_P, BIG_D, [EVERY], [EVERY])
    if result.ok:
        assert consumer.call("wrong_bytes", BIG_P, moves) == 0
    else:
        assert isinstance(result.error, StalePlanError | TransferError)
    fresh = Spec("p", seed=9, blocks=LONG, head_bytes=4)
    for attempt in range(3):
        producer.call("hold", f"{attempt}@p")
        consumer.call("read", long_read(producer, f"{attempt}"))
        result = consumer.call("wait", f"{attempt}")[0]
        if result.ok:
            break
        assert isinstance(result.error, StalePlanError)
    assert result.ok
    assert consumer.call("wrong_bytes", fresh, moves) == 0


def test_a_lease_that_nobody_uses_expires(made: Rig) -> None:
    producer, consumer = made.start(P, D)
    producer.call("hold", "a@p", lease=0.3)
    consumer.call("expect", "b@d", [[4, 5]], lease=0.3)
    held, expected = producer.call("wait", "a@p")[0], consumer.call("wait", "b@d")[0]
    assert (held.status, held.invalid) == (Status.EXPIRED, ())
    assert (expected.status, expected.invalid) == (Status.EXPIRED, ((0, 4), (0, 5)))
    consumer.call("read", request("a", "p", [[1]], [[2]], [producer.address], tokens=16))
    result = consumer.call("wait", "a")[0]
    assert result.status is Status.FAILED
    assert "does not hold" in str(result.error)
    producer.call("write", request("b", "d", [[1]], [[2]], [consumer.address], tokens=16))
    assert producer.call("wait", "b")[0].status is Status.FAILED
    assert producer.call("wrong_bytes") == 0
    assert consumer.call("wrong_bytes", P, [], moves_of(P, D, [[2]], [[1]])) == 0  # never the block that was written to


# ---- on the fake, step by step


def test_late_repeated_and_unknown_notifications_are_counted() -> None:
    fabric = Fabric()
    with Engine(P, fabric) as producer:
        context = zmq.Context()
        try:
            producer.worker.hold("a")
            producer.worker.hold("b")
            nonces = {("nobody", 0): 1}
            sockets = [context.socket(zmq.DEALER) for _ in range(2)]
            for two, socket in zip(ranks(Spec("d", seed=2), 2), sockets, strict=True):
                socket.connect(f"tcp://{producer.address[0]}:{producer.address[1]}")
                socket.send(wire.encode(wire.Hello("x", two.layout(two.memory()))))
                assert isinstance(wire.decode(socket.recv()), wire.Welcome)
                socket.send(wire.encode(wire.Begin(1.0, Direction.READ, ["a", "b"])))
                held = wire.decode(socket.recv())
                assert isinstance(held, wire.Held)
                nonces |= {("ab"[at], two.tp_rank): nonce for at, nonce in enumerate(held.nonces)}
            name = fabric.of("p").name
            for request_id, rank in (("a", 0), ("a", 0), ("nobody", 0), ("a", 1), ("a", 1), ("b", 0), ("b", 0)):
                nonce = nonces[request_id, rank]
                fabric.deliver("d", name, wire.encode(wire.Done(request_id, "d", 0, rank, nonce, True)))
            for junk in (b"", b"junk", wire.encode(wire.Ping()), wire.encode(wire.Begin(1.0, Direction.READ, ["a"]))):
                fabric.deliver("d", name, junk)
            assert producer.inbox.wait("a")[0].ok
            until(lambda: producer.inbox.stats().malformed_messages == 4)
            stats = producer.inbox.stats()
            assert (stats.late_notifications, stats.repeated_notifications) == (2, 2)
            assert producer.inbox.collect().keys() == {"a"}
        finally:
            context.destroy(linger=0)


@pytest.mark.parametrize("kind", [Kind.READ, Kind.WRITE])
def test_cancelling_before_during_and_after(kind: Kind) -> None:
    fabric = Fabric(manual=True)
    with Engine(P, fabric) as producer, Engine(D, fabric) as consumer:
        mover, other = (consumer, producer) if kind is Kind.READ else (producer, consumer)
        move = mover.worker.read if kind is Kind.READ else mover.worker.write

        def wait(name: str) -> None:
            if kind is Kind.READ:
                other.worker.hold(name)
            else:
                other.worker.expect(name, [[5]])

        def ask(name: str) -> None:
            move(request(name, other.spec.engine, [[4]], [[5]], [other.address], tokens=16, remote_name=name))

        wait("before")
        ask("before")
        mover.worker.cancel("before")
        mover.worker.cancel("before")
        finishing = until(lambda: fabric.finish_all() or mover.inbox.collect())
        assert finishing
        assert mover.inbox.wait("before")[0].status is Status.CANCELLED
        assert other.inbox.wait("before")[0].status in (Status.FAILED, Status.DONE)

        wait("during")
        ask("during")
        moving = until(fabric.moving)[0]
        until(lambda: other.worker._waits["during"].begun)
        mover.worker.cancel("during")
        other.worker.cancel("during")
        time.sleep(0.2)
        assert mover.inbox.results.keys() == {"before"}
        assert mover.inbox.collect().keys() == {"before"}
        assert other.inbox.collect().keys() == {"before"}  # begun: its blocks may still be touched
        assert moving.is_moving
        moving.finish()
        assert mover.inbox.wait("during")[0].status is Status.CANCELLED
        assert other.inbox.wait("during")[0].status is Status.CANCELLED

        wait("after")
        ask("after")
        until(fabric.finish_all)
        assert mover.inbox.wait("after")[0].ok
        mover.worker.cancel("after")
        assert other.inbox.wait("after")[0].ok
        other.worker.cancel("after")
        time.sleep(0.1)
        assert mover.inbox.collect().keys() == other.inbox.collect().keys() == {"before", "during", "after"}
    fabric.assert_clean()


def test_closing_ends_every_request_once_and_frees_everything() -> None:
    fabric = Fabric(manual=True)
    with Engine(P, fabric, peer_timeout=0.5) as producer, Engine(D, fabric, peer_timeout=0.5) as consumer:
        for name in ("a", "b", "c"):
            producer.worker.hold(f"{name}@p")
            consumer.worker.read(request(name, "p", [[4]], [[5]], [producer.address], tokens=16))
        until(lambda: len(fabric.moving()) == 3)
        fabric.moving()[0].finish()
        consumer.worker.expect("e", [[9]])
        consumer.worker.close()
        results = consumer.inbox.wait("a", "b", "c", "e")
        assert all(result.status in (Status.FAILED, Status.DONE) for result in results)
        assert fabric.moving() == []
        assert consumer.worker.poll() == []
    fabric.assert_clean()


class Asked(NamedTuple):
    """What a request may touch. Its blocks are nobody else's, so that every byte has one writer."""

    kind: Kind
    blocks: dict[str, list[int]]
    """Each engine's blocks."""
    since: dict[str, int]
    """Each engine's registrations when it was asked for: it is carried out with one of these or a later one."""


class Lifecycle(RuleBasedStateMachine):
    """Two engines on the fake. The machine owns every step of a transfer; the workers' threads run freely between."""

    def __init__(self) -> None:
        super().__init__()
        self.fabric = Fabric(manual=True)
        self.count = 0
        self.seed = 10
        self.engines: dict[str, Engine] = {}
        self.past: list[Engine] = []
        self.had: dict[str, list[tuple[Spec, list[Bytes]]]] = {"p": [], "d": []}
        """All that an engine has ever registered."""
        self.open: dict[tuple[str, str], Asked] = {}
        self.ended: list[str] = []
        for name in "pd":
            self.begin(name)

    def begin(self, name: str) -> None:
        self.seed += 1
        engine = Engine(Spec(name, seed=self.seed, blocks=256), self.fabric, peer_timeout=0.6, lease=100.0)
        engine.__enter__()
        self.engines[name] = engine
        self.had[name].append((engine.spec, engine.memory))

    def ask(self, kind: Kind, engine: str, name: str, blocks: dict[str, list[int]]) -> Engine:
        """Notes what is asked of an engine."""
        self.open[engine, name] = Asked(kind, blocks, {each: len(had) - 1 for each, had in self.had.items()})
        return self.engines[engine]

    # ---- rules: p produces, d consumes

    @rule(
        kind=st.sampled_from([Kind.READ, Kind.WRITE]),
        size=st.integers(0, 3),
        known=st.sampled_from([True, True, True, False]),
        patient=st.booleans(),
    )
    def move(self, kind: Kind, size: int, known: bool, patient: bool) -> None:
        self.count += 1
        name = f"{self.count}"
        ids = [3 * self.count + step for step in range(size)]
        blocks = {"p": ids, "d": ids[::-1]}
        mover, other = ("d", "p") if kind is Kind.READ else ("p", "d")
        if known and kind is Kind.READ:
            self.ask(Kind.HOLD, "p", f"{name}!", blocks).worker.hold(f"{name}!")
        elif known:
            self.ask(Kind.EXPECT, "d", f"{name}!", blocks).worker.expect(f"{name}!", [blocks["d"]])
        asked = request(
            name,
            other,
            [blocks[mover]],
            [blocks[other]],
            [self.engines[other].address],
            tokens=16 * size,
            remote_name=f"{name}!",
        )
        worker = self.ask(kind, mover, name, blocks).worker
        (worker.read if kind is Kind.READ else worker.write)(asked)
        end = time.monotonic() + (0.05 if patient else 0.0)
        while time.monotonic() < end and not self.is_touched(mover, self.open[mover, name]):
            time.sleep(0.001)

    @rule(engine=st.sampled_from("pd"), read=st.booleans())
    def wait_for_nobody(self, engine: str, read: bool) -> None:
        self.count += 1
        name = f"{self.count}!"
        blocks = {"p": [1], "d": [1]}
        worker = self.ask(Kind.HOLD if read else Kind.EXPECT, engine, name, blocks).worker
        if read:
            worker.hold(name)
        else:
            worker.expect(name, [[1]])

    @rule(pick=st.integers(0, 10**6))
    def progress(self, pick: int) -> None:
        if moving := self.fabric.moving():
            moving[pick % len(moving)].finish()

    @rule()
    def progress_all(self) -> None:
        self.fabric.finish_all()

    @rule(pick=st.integers(0, 10**6))
    def fail(self, pick: int) -> None:
        if moving := self.fabric.moving():
            moving[pick % len(moving)].state = "ERR"

    @rule(pick=st.integers(0, 10**6))
    def cancel(self, pick: int) -> None:
        if self.open:
            engine, name = sorted(self.open)[pick % len(self.open)]
            self.engines[engine].worker.cancel(name)

    @rule(pick=st.integers(0, 10**6))
    def cancel_what_moves(self, pick: int) -> None:
        touched = [key for key, asked in sorted(self.open.items()) if self.is_touched(key[0], asked)]
        if touched:
            engine, name = touched[pick % len(touched)]
            self.engines[engine].worker.cancel(name)
            time.sleep(0.003)  # time to do the wrong thing

    @rule(engine=st.sampled_from("pd"), pick=st.integers(0, 10**6), rank=st.integers(0, 1))
    def late_notification(self, engine: str, pick: int, rank: int) -> None:
        name = [*self.ended, "unknown"][pick % (len(self.ended) + 1)]
        target = self.fabric.of(engine).name
        self.fabric.deliver("x", target, wire.encode(wire.Done(name, "d" if engine == "p" else "p", 0, rank, 5, True)))

    @precondition(lambda self: self.count > 3)
    @rule(engine=st.sampled_from("pd"), lost=st.booleans())
    def renew(self, engine: str, lost: bool) -> None:
        """The engine registers its memory anew, or closes and comes back at another address under the same id."""
        each = self.engines[engine]
        if not lost:
            self.seed += 1
            each.register_anew(self.seed)
            self.had[engine].append((each.spec, each.memory))
            return
        each.worker.close()
        self.collect(each, closed=True)
        assert [key for key in self.open if key[0] == engine] == []
        self.past.append(each)
        self.begin(engine)

    @rule(micros=st.sampled_from([0, 500, 3000, 20_000]))
    def settle(self, micros: int) -> None:
        time.sleep(micros / 1e6)

    # ---- what must hold

    @invariant()
    def every_result_is_the_first_and_true(self) -> None:
        for engine in self.engines.values():
            self.collect(engine)

    def collect(self, engine: Engine, *, closed: bool = False) -> None:
        known = set(engine.inbox.results)
        for name, result in engine.inbox.collect().items():
            if name not in known:
                key = engine.spec.engine, name
                assert key in self.open, f"result of nobody's request: {result}"
                self.check(result, self.open.pop(key), engine.spec.engine, closed=closed)
                self.ended.append(name)

    def check(self, result: Result, asked: Asked, engine: str, *, closed: bool) -> None:
        assert result.kind is asked.kind
        if result.status is Status.FAILED:
            assert isinstance(result.error, TransferError | StalePlanError | GeometryError)
        else:
            assert result.error is None
        moves = result.kind in (Kind.READ, Kind.WRITE)
        if moves or not closed:  # a peer that does not hear of a close goes on for a moment
            assert not self.is_touched(engine, asked), f"reported while its blocks are moving: {result}"
        if moves and result.ok:
            pairs = list(zip(asked.blocks["d"], asked.blocks["p"], strict=True))
            sinks = [memory for _, memory in self.had["d"][asked.since["d"] :]]
            sources = [spec for spec, _ in self.had["p"][asked.since["p"] :]]
            assert any(self.holds(memory, spec, pairs) for memory in sinks for spec in sources)

    def is_touched(self, engine: str, asked: Asked) -> bool:
        """Whether a transfer moves bytes of a request's blocks in an engine's memory."""
        moving = self.fabric.moving()
        for spec, memory in self.had[engine][asked.since[engine] :]:
            for layer in range(len(spec.layers)):
                base, size = memory[layer].ctypes.data, spec.block_bytes(layer)
                ranges = [(base + block * size, base + (block + 1) * size) for block in asked.blocks[engine]]
                if any(each.touches(*where) for each in moving for where in ranges):
                    return True
        return False

    @staticmethod
    def holds(memory: Sequence[Bytes], spec: Spec, pairs: Sequence[tuple[int, int]]) -> bool:
        """Whether the consumer's blocks hold what a producer of this spec had in its own."""
        return all(
            memory[layer][sink].tobytes() == spec.pattern(layer)[source].tobytes()
            for layer in range(len(spec.layers))
            for sink, source in pairs
        )

    def teardown(self) -> None:
        for engine in self.engines.values():
            engine.worker.close()
            self.collect(engine, closed=True)
        assert self.open == {}
        for engine in [*self.engines.values(), *self.past]:
            assert engine.worker.poll() == []
            assert engine.inbox.stats().live == 0
        self.fabric.assert_clean()


Lifecycle.TestCase.settings = settings(
    max_examples=60,
    stateful_step_count=30,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
TestLifecycle = Lifecycle.TestCase
