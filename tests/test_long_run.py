"""Mixed traffic for as long as asked: pulls, pushes, aborts, new registrations and restarts, every byte checked.

``uv run pytest -m soak tests/test_long_run.py --soak-seconds 3600``; `.ci/run` has a short one.
"""

import random
import time
from collections import Counter
from typing import Any, NamedTuple

import pytest

from nixl_fast.agent import UCX_THREADS
from nixl_fast.worker import Result
from worker_rig import Move, Peer, Rig, Spec, moves_of, ranks, request, rig, until

OPTIONS = {"lease": 20.0, "peer_timeout": 15.0}
"""Patience for a loaded machine; a restart costs one and a half leases."""
BATCH = 40
QUIET = "nothing"
SOURCE = Spec("p", seed=1, layers="fm", blocks=1024, head_bytes=32)
SINK = Spec("d", seed=2, layers="fm", blocks=1024, head_bytes=32, ratio=2)
FLAT = ("threads", "lists", "handles")
DISRUPTIONS = ("a restart", "a new registration")
EVENTS = [*6 * [QUIET], *4 * ["aborts"], *DISRUPTIONS]
FDS = 2 * (UCX_THREADS + 1)
"""Sockets that NIXL 1.5.1 keeps for good where a peer is removed and comes back: one per UCX worker, in both directions."""
RSS_KIB = 48 * 1024


class Traffic(NamedTuple):
    """One batch of requests, and the kernel blocks that each one moves."""

    reads: list[Any]
    writes: list[Any]
    expects: list[tuple[str, list[list[int]]]]
    moves: dict[str, list[Move]]
    """By the name that the consumer gives the request."""


def traffic(number: int, pick: random.Random, consumer: Peer, producers: list[Peer]) -> Traffic:
    made = Traffic([], [], [], {})
    free = [pick.sample(range(SINK.blocks // 2), SINK.blocks // 2) for _ in SINK.kinds]
    for index in range(BATCH):
        tokens = pick.choice([1, 16, 17, 100, 200, 333])
        local = [[blocks.pop() for _ in range(-(-tokens // 32))] for blocks in free]
        remote = [pick.sample(range(SOURCE.blocks), -(-tokens // 16)) for _ in SOURCE.kinds]
        name = f"{number}.{index}"
        moves = moves_of(SOURCE, SINK, remote, local, tokens)
        if index % 4:
            made.reads.append(request(name, "p", local, remote, [each.address for each in producers], tokens=tokens))
            made.moves[name] = moves
        else:
            made.writes.append(request(name, "d", remote, local, [consumer.address], tokens=tokens))
            made.expects.append((f"{name}@d", local))
            made.moves[f"{name}@d"] = moves
    return made


def restarted(made: Rig, peer: Peer, where: int) -> Peer:
    """The same rank in another process, at the same address or at another one."""
    peer.kill()
    peer.end(reuse=False)
    made.peers.remove(peer)
    return made.peer(peer.spec, port=where, **OPTIONS).ready()


@pytest.mark.soak
def test_mixed_traffic_leaves_no_wrong_byte_and_nothing_behind(
    soak_seconds: float, capsys: pytest.CaptureFixture[str]
) -> None:
    start, number, event = time.monotonic(), 0, QUIET
    pick = random.Random(7)
    events, statuses, moved = Counter[str](), Counter[str](), 0
    with rig() as made:
        consumer, *producers = made.start(SINK, *ranks(SOURCE, 2), **OPTIONS)
        steady = [consumer, producers[0]]
        before: list[dict[str, int]] = []
        disrupted = 0
        calm = True
        while time.monotonic() < start + soak_seconds or not (before and calm):
            last, event = event, pick.choice(EVENTS)
            number += 1
            events[event] += 1
            results, batch = carry_out(event, number, pick, made, consumer, producers)
            statuses.update(f"{result.kind}.{result.status}" for result in results)
            if calm := event == QUIET and last in (QUIET, "aborts"):  # after anything else a peer is met anew
                assert [result for result in results if not result.ok] == []
            ok = {result.request_id for result in results if result.ok}
            done = [move for name, moves in batch.moves.items() if name in ok for move in moves]
            torn = [move for name, moves in batch.moves.items() if name not in ok for move in moves]
            assert consumer.call("wrong_bytes", SOURCE, done, torn) == 0
            assert [each.call("wrong_bytes") for each in producers] == [0, 0]
            consumer.call("refill")
            moved += len(done)
            if calm and not before and time.monotonic() > start + soak_seconds / 4 and events.keys() >= set(EVENTS):
                before, disrupted = settled(steady), sum(events[each] for each in DISRUPTIONS)
        after, disrupted = settled(steady), sum(events[each] for each in DISRUPTIONS) - disrupted
    with capsys.disabled():
        print(f"\n{time.monotonic() - start:.0f} s, {number} batches of {BATCH}: {dict(events)}")
        print(f"{dict(statuses)}; {moved} blocks of 16 tokens moved, no wrong byte")
        print(f"consumer, producer after the first quarter: {before}\n{'at the end:':>42} {after}")
    for old, new in zip(before, after, strict=True):
        assert {name: new[name] for name in FLAT} == {name: old[name] for name in FLAT}
        assert new["fds"] - old["fds"] <= FDS * disrupted
        assert new["rss_kib"] - old["rss_kib"] < RSS_KIB


def carry_out(
    event: str, number: int, pick: random.Random, made: Rig, consumer: Peer, producers: list[Peer]
) -> tuple[list[Result], Traffic]:
    """The consumer's results of a batch during which something happens."""
    batch = traffic(number, pick, consumer, producers)
    holds = [each.remote_request_id for each in batch.reads]
    pushes = [each.request_id for each in batch.writes]
    for each in producers:
        each.call("hold", *holds)
    for name, blocks in batch.expects:
        consumer.call("expect", name, blocks)
    consumer.call("read", *batch.reads)
    for each in producers:
        each.call("write", *batch.writes)
    answering = list(producers)
    match event:
        case "aborts":
            consumer.call("cancel", *pick.sample([*batch.moves], 10))
            pick.choice(producers).call("cancel", *pick.sample([*holds, *pushes], 10))
            consumer.call("cancel", *pick.sample([*batch.moves], 10))
        case "a restart":
            answering.remove(producers[1])
            producers[1] = restarted(made, producers[1], pick.choice([0, producers[1].address[1]]))
        case "a new registration":
            generation = producers[0].call("generation")
            producers[0].call("register_anew", SOURCE.seed)
            until(lambda: producers[0].call("generation") > generation)
            producers[0].call("scribble_old")
    results: list[Result] = consumer.call("take", *batch.moves)
    for each in answering:
        each.call("take", *holds, *pushes)
    return results, batch


def settled(peers: list[Peer]) -> list[dict[str, int]]:
    """Figures once nothing is under way and connections with those that have gone are closed."""
    until(lambda: not any(peer.call("stats").live for peer in peers))
    time.sleep(3)
    return [peer.call("figures") for peer in peers]
