"""Real NIXL agents in separate processes: every byte of every rank's memory is checked against the formula."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import pytest

from nixl_fast import wire
from nixl_fast.worker import PIECE, Kind, Status
from worker_rig import Peer, Rig, Spec, moves_of, ranks, request, rig, until

P = Spec("p", seed=1)
D = Spec("d", seed=2, blocks=48)


@pytest.fixture
def made() -> Iterator[Rig]:
    with rig() as each:
        yield each


def addresses(ranks: Sequence[Peer]) -> list[tuple[str, int]]:
    return [rank.address for rank in ranks]


def test_pull_and_push_between_two_processes(made: Rig) -> None:
    producer, consumer = made.start(P, D)
    producer.call("hold", "a@p")
    pull = request("a", "p", [[3, 1, 7]], [[10, 11, 2]], [producer.address], tokens=40)
    consumer.call("read", pull)
    result = consumer.call("wait", "a")[0]
    assert (result.kind, result.status, result.error, result.invalid) == (Kind.READ, Status.DONE, None, ())
    assert result.num_descs == 2 * 3
    assert result.num_bytes == 2 * 3 * P.block_bytes(0)
    assert [left.tolist() for left in result.untransferred] == [[]]
    assert producer.call("wait", "a@p")[0].status is Status.DONE

    consumer.call("expect", "b@d", [[20, 21]])
    producer.call("write", request("b", "d", [[5, 6]], [[20, 21]], [consumer.address], tokens=32))
    assert producer.call("wait", "b")[0].ok
    assert consumer.call("wait", "b@d")[0].ok
    moves = [*moves_of(P, D, [[10, 11, 2]], [[3, 1, 7]]), *moves_of(P, D, [[5, 6]], [[20, 21]])]
    assert consumer.call("wrong_bytes", P, moves) == 0
    assert producer.call("wrong_bytes") == 0
    stats = consumer.call("stats")
    assert stats.requests == {"read.done": 1, "expect.done": 1}
    assert (stats.bytes, stats.descriptors, stats.handshakes, stats.peers) == (result.num_bytes, 6, 1, {"p": 1})
    assert (stats.late_notifications, stats.repeated_notifications, stats.malformed_messages) == (0, 0, 0)


def test_blocks_past_the_data_are_reported_and_untouched(made: Rig) -> None:
    producer, consumer = made.start(P, D)
    producer.call("hold", "a@p")
    consumer.call("read", request("a", "p", [[3, 1, 7]], [[10, 11]], [producer.address], tokens=32, computed=[0]))
    result = consumer.call("wait", "a")[0]
    assert [left.tolist() for left in result.untransferred] == [[7]]
    assert consumer.call("wrong_bytes", P, moves_of(P, D, [[10, 11]], [[3, 1]])) == 0


def test_one_producer_for_two_engines(made: Rig) -> None:
    producer, first, second = made.start(P, D, Spec("e", seed=3, ratio=2, blocks=64))
    producer.call("hold", "x@p", "y@p")
    first.call("read", request("x", "p", [[1, 2, 3, 4]], [[8, 7, 6, 5]], [producer.address], tokens=64))
    second.call("read", request("y", "p", [[9, 3]], [[8, 7, 6, 5]], [producer.address], tokens=64))
    assert first.call("wait", "x")[0].ok
    assert second.call("wait", "y")[0].ok
    assert all(result.ok for result in producer.call("wait", "x@p", "y@p"))
    assert first.call("wrong_bytes", P, moves_of(P, D, [[8, 7, 6, 5]], [[1, 2, 3, 4]])) == 0
    assert second.call("wrong_bytes", P, moves_of(P, second.spec, [[8, 7, 6, 5]], [[9, 3]])) == 0
    assert producer.call("stats").late_notifications == 0


@pytest.mark.parametrize(
    ("layers", "heads", "producers", "consumers"),
    [
        pytest.param("ff", 4, 1, 2, id="1-to-2"),
        pytest.param("ff", 4, 2, 1, id="2-to-1"),
        pytest.param("fm", 1, 2, 1, id="gqa-mla-mix-with-a-notify-only-rank"),
        pytest.param("mm", 4, 2, 1, id="mla-reads-one-rank-and-notifies-both"),
    ],
)
def test_unequal_tensor_parallelism(made: Rig, layers: str, heads: int, producers: int, consumers: int) -> None:
    source = ranks(Spec("p", seed=1, layers=layers, heads=heads), producers)
    sink = ranks(Spec("d", seed=2, layers=layers, heads=heads, blocks=48), consumers)
    everyone = made.start(*source, *sink)
    left, right = everyone[:producers], everyone[producers:]
    groups = len(set(layers))
    remote, local = [[10, 11, 30], [4, 5, 6]][-groups:], [[3, 1, 7], [40, 41, 42]][-groups:]
    for producer in left:
        producer.call("hold", "a@p")
    for consumer in right:
        consumer.call("read", request("a", "p", local, remote, addresses(left), tokens=48))
    for consumer in right:
        assert consumer.call("wait", "a")[0].error is None
    # Every producer rank is released, also those that nothing was read from.
    assert [producer.call("wait", "a@p")[0].status for producer in left] == [Status.DONE] * producers

    push_remote, push_local = [[20, 21], [23, 24]][-groups:], [[50, 51], [52, 53]][-groups:]
    for consumer in right:
        consumer.call("expect", "b@d", push_remote)
    for producer in left:
        producer.call("write", request("b", "d", push_local, push_remote, addresses(right), tokens=32))
    assert all(producer.call("wait", "b")[0].ok for producer in left)
    assert all(consumer.call("wait", "b@d")[0].ok for consumer in right)
    for consumer in right:
        spec = consumer.spec
        moves = moves_of(source[0], spec, remote, local) + moves_of(source[0], spec, push_local, push_remote)
        assert consumer.call("wrong_bytes", source[0], moves) == 0
    assert all(producer.call("wrong_bytes") == 0 for producer in left)
    for each in everyone:
        stats = each.call("stats")
        assert (stats.late_notifications, stats.repeated_notifications, stats.failures) == (0, 0, {})


def test_every_notification_carries_the_remote_request_id(made: Rig) -> None:
    """P47, for bytes in one piece, in several, and for ranks that are only notified."""
    source = ranks(Spec("p", seed=1, layers="mm", blocks=3 * PIECE), 2)
    sink = Spec("d", seed=2, layers="mm", blocks=3 * PIECE)
    first, second, consumer = made.start(*source, sink)
    many = list(range(PIECE))
    for producer in (first, second):
        producer.call("hold", "small@p", "large@p", "none@p")
    where = [first.address, second.address]
    consumer.call(
        "read",
        request("small", "p", [[PIECE]], [[1]], where, tokens=16),
        request("large", "p", [many], [many], where),
        request("none", "p", [[]], [[1]], where),
    )
    assert all(result.ok for result in consumer.call("wait", "small", "large", "none"))
    for producer in (first, second):
        assert all(result.ok for result in producer.call("wait", "small@p", "large@p", "none@p"))
        assert producer.call("stats").late_notifications == 0
    for message in consumer.call("sent"):
        done = wire.decode(message)
        assert isinstance(done, wire.Done)
        assert done.request_id.endswith("@p")


def test_200_concurrent_requests_of_random_sizes(made: Rig) -> None:
    source = Spec("p", seed=1, layers="ff", blocks=4096, head_bytes=16)
    sink = Spec("d", seed=2, layers="ff", blocks=4096, head_bytes=16, ratio=2)
    producer, consumer = made.start(source, sink)
    pick = random.Random(5)
    free, pushed = list(range(2048)), list(range(4096))
    pick.shuffle(free)
    pick.shuffle(pushed)
    moves, pulls, pushes, holds, expects = [], [], [], [], []
    for index in range(200):
        size = pick.choice([1, 1, 2, 3, 5, 8, 15])
        local = [free.pop() for _ in range(size)]
        remote = pick.sample(range(4096), 2 * size)
        tokens = pick.randint(32 * size - 31, 32 * size)
        remote = remote[: -(-tokens // 16)]
        moves += moves_of(source, sink, [remote], [local], tokens)
        if index % 4:
            holds.append(f"{index}@p")
            pulls.append(request(f"{index}", "p", [local], [remote], [producer.address], tokens=tokens))
        else:
            expects.append(f"{index}@d")
            consumer.call("expect", expects[-1], [local])
            pushes.append(request(f"{index}", "d", [remote], [local], [consumer.address], tokens=tokens))
    producer.call("hold", *holds)
    consumer.call("read", *pulls)
    producer.call("write", *pushes)
    results = consumer.call("wait", *(each.request_id for each in pulls), *expects)
    results += producer.call("wait", *(each.request_id for each in pushes), *holds)
    assert [result for result in results if not result.ok] == []
    assert consumer.call("wrong_bytes", source, moves) == 0
    assert producer.call("wrong_bytes") == 0
    figures = consumer.call("figures")
    assert figures["handles"] == 0


def test_a_long_request_travels_in_pieces(made: Rig) -> None:
    blocks = PIECE + PIECE // 2 + 7
    source = Spec("p", seed=1, layers="ff", blocks=blocks, head_bytes=4)
    sink = Spec("d", seed=2, layers="ff", blocks=blocks + 5, head_bytes=4)
    producer, consumer = made.start(source, sink)
    pick = random.Random(7)
    local, remote = pick.sample(range(blocks + 5), blocks), pick.sample(range(blocks), blocks)
    producer.call("hold", "a@p", "b@p")
    long = request("a", "p", [local[:-1]], [remote[:-1]], [producer.address])
    short = request("b", "p", [local[-1:]], [remote[-1:]], [producer.address])
    consumer.call("read", long, short)
    first, second = consumer.call("wait", "a", "b")
    assert first.ok
    assert second.ok
    assert first.num_descs == 2 * (blocks - 1) > 3 * PIECE
    assert consumer.call("order") == ["b", "a"]
    assert consumer.call("wrong_bytes", source, moves_of(source, sink, [remote], [local])) == 0
    assert all(result.ok for result in producer.call("wait", "a@p", "b@p"))


def test_a_full_prefix_hit_only_notifies(made: Rig) -> None:
    source = ranks(P, 2)
    first, second, consumer = made.start(*source, D)
    for producer in (first, second):
        producer.call("hold", "a@p")
    consumer.call("read", request("a", "p", [[]], [[4, 5]], [first.address, second.address], tokens=32))
    result = consumer.call("wait", "a")[0]
    assert (result.status, result.num_bytes, result.num_descs) == (Status.DONE, 0, 0)
    assert first.call("wait", "a@p")[0].ok
    assert second.call("wait", "a@p")[0].ok
    assert consumer.call("wrong_bytes") == 0
    assert consumer.call("sent") == []


def test_ten_thousand_small_requests_leave_nothing_behind(made: Rig) -> None:
    producer, consumer = made.start(P, D)

    def run(start: int, count: int) -> None:
        for batch in range(start, start + count, 250):
            names = [f"{index}" for index in range(batch, batch + 250)]
            held = [f"{name}@p" for name in names]
            producer.call("hold", *held)
            consumer.call(
                "read",
                *(
                    request(name, "p", [[int(name) % 48]], [[int(name) % 64]], [producer.address], tokens=16)
                    for name in names
                ),
            )
            assert [result for result in consumer.call("take", *names) if not result.ok] == []
            assert [result for result in producer.call("take", *held) if not result.ok] == []

    run(0, 1000)
    before = [consumer.call("figures"), producer.call("figures")]
    run(1000, 10_000)
    after = [consumer.call("figures"), producer.call("figures")]
    print(f"consumer, producer before {before} after {after}")
    for old, new in zip(before, after, strict=True):
        assert new["rss_kib"] - old["rss_kib"] < 8 * 1024
        assert all(new[name] <= old[name] for name in ("threads", "fds", "lists", "handles"))
        assert new["handles"] == 0
    assert consumer.call("close")["lists"] == 0
    assert until(lambda: producer.call("stats").live == 0)
