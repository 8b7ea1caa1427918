"""Two real vLLM engines on CPU, prefill on one and decode on the other, with tiny models of random weights.

Every exchange is checked three ways: the tokens are those of the decode engine alone, every destination descriptor holds
the bytes of the producer's memory when NIXL says DONE, and (models without state slots) every descriptor that moved is
the one that holds the same tokens on the other side. With KV from elsewhere the tokens differ: the control.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engine import BLOCKS, Engine

from conftest import OURS, STOCK, Pair

Make = Callable[..., Pair]
Checkpoint = Callable[[str], str]

TOKENS = 10
STOCK_PUSH = {"kv_connector": "NixlPushConnector"}
OURS_PUSH = {**STOCK_PUSH, "kv_connector_module_path": "nixl_fast.vllm"}


def prompt(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 500) for _ in range(length)]


def processes(pid: int) -> list[int]:
    """A process and its descendants."""
    found = [pid]
    for parent in found:
        for task in Path(f"/proc/{parent}/task").glob("*/children"):
            found += map(int, task.read_text().split())
    return found


def peek(pids: list[int], address: int, length: int) -> list[str]:
    """What lies at an address, in each process that has it."""
    out = []
    for pid in pids:
        try:
            with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
                out.append(os.pread(memory.fileno(), length, address).hex())
        except OSError:
            continue
    return out


def prefill(pair: Pair, tokens: list[int]) -> dict[str, Any]:
    done = pair.prefill.ask("generate", prompt=tokens, tokens=1, params={"do_remote_decode": True}, after=2)
    return done["params"]  # type: ignore[no-any-return]


def alone(engine: Engine, tokens: list[int]) -> list[int]:
    engine.ask("reset")
    out = engine.ask("generate", prompt=tokens, tokens=TOKENS)["tokens"]
    engine.ask("reset")
    return out  # type: ignore[no-any-return]


def check_bytes(pair: Pair, moved: list[Any]) -> None:
    assert moved
    pids = processes(pair.prefill.process.pid)
    for source, _, length, data in moved:
        assert data in peek(pids, source, length), "a descriptor does not hold the producer's bytes"
    assert any(set(data) != {"0"} for *_, data in moved)


def expected(
    request: dict[str, Any], sides: list[dict[str, Any]], windows: tuple[int, ...] = ()
) -> set[tuple[int, int]]:
    """Addresses of the kernel blocks that hold the same tokens, one token after the other."""
    tokens, pairs = request["tokens"], set()
    consumer, producer = sides
    for group, (ours, theirs) in enumerate(zip(request["local"], request["remote"], strict=True)):
        where = []
        for side, ids in ((consumer, ours), (producer, theirs)):
            block = side["kernel"] * side["ratio"]
            first = -(-tokens // block) - len(ids)
            where.append({first + index: id_ for index, id_ in enumerate(ids)})
        window = windows[group] if windows else tokens
        for token in range(max(0, tokens - window) if window else 0, tokens):
            kernels = []
            for side, table in zip((consumer, producer), where, strict=True):
                block = side["kernel"] * side["ratio"]
                if (id_ := table.get(token // block)) is None:
                    break
                kernels.append(id_ * side["ratio"] + token % block // side["kernel"])
            else:
                for region, (base, stride) in enumerate(zip(consumer["bases"], consumer["strides"], strict=True)):
                    source = producer["bases"][region] + kernels[1] * producer["strides"][region]
                    pairs.add((source, base + kernels[0] * stride))
    return pairs


def exchange(pair: Pair, tokens: list[int]) -> tuple[list[int], list[Any], dict[str, Any]]:
    """Prefill on one engine, decode on the other: tokens, what moved, and the request as the consumer saw it."""
    pair.decode.ask("moved")
    pair.decode.ask("requests")
    params = prefill(pair, tokens)
    got = pair.decode.ask("generate", prompt=tokens, tokens=TOKENS, params=params)
    moved = pair.decode.ask("moved")
    requests = pair.decode.ask("requests")
    check_bytes(pair, moved)
    assert len(requests) == 1
    return got["tokens"], moved, {**requests[0], "cached": got["cached"]}


def check_positions(pair: Pair, moved: list[Any], request: dict[str, Any], windows: tuple[int, ...] = ()) -> None:
    sides = [pair.decode.ask("layout"), pair.prefill.ask("layout")]
    got = {(source, target) for source, target, *_ in moved}
    needed = expected(request, sides, windows)
    assert needed <= got, "a descriptor that is needed did not move"
    if sides[0]["kernel"] == sides[1]["kernel"] and sides[0]["ratio"] == sides[1]["ratio"]:
        block = sides[0]["kernel"] * sides[0]["ratio"]  # equal blocks move whole
        request = {**request, "tokens": -(-request["tokens"] // block) * block}
    assert got <= expected(request, sides, tuple(0 for _ in windows)), "a descriptor moved that holds other tokens"
    assert len(got) == len(moved)


def control(pair: Pair, tokens: list[int]) -> None:
    """KV of blocks that nobody has written gives other tokens: the comparison means something."""
    params = prefill(pair, tokens)
    params["remote_block_ids"] = [[BLOCKS - 1 - each for each in ids] for ids in params["remote_block_ids"]]
    wrong = pair.decode.ask("generate", prompt=tokens, tokens=TOKENS, params=params)["tokens"]
    pair.decode.ask("moved")
    assert wrong != alone(pair.decode, tokens)


def settled(engine: Engine, steps: int = 40) -> dict[str, Any]:
    """The engine's counters once nothing is on its way any more."""
    for _ in range(steps):
        engine.ask("step", count=2, wait=0.05)
        stats = engine.ask("stats")
        if not stats["receiving"] and not stats["sending"]:
            break
    return stats  # type: ignore[no-any-return]


@pytest.mark.parametrize("length", [31, 100, 128])
def test_dense(engines: Make, checkpoint: Checkpoint, length: int) -> None:
    pair = engines(checkpoint("llama"), env={"NIXL_FAST_SHADOW": "1"})
    layout = pair.decode.ask("layout")
    assert layout["features"][1:6] == ["Agent", "PullPairing", "Pairing", "Descriptors", "Expand"]
    tokens = prompt(length, length)
    got, moved, request = exchange(pair, tokens)
    check_positions(pair, moved, request)
    assert got == alone(pair.decode, tokens)
    control(pair, tokens)
    shadow = pair.decode.ask("stats")["shadow"]
    assert shadow["pairing same"] > 0
    assert not [name for name in shadow if not name.endswith(" same")], shadow


def test_metrics_have_vllm_names(engines: Make, checkpoint: Checkpoint) -> None:
    pair = engines(checkpoint("llama"), env={"NIXL_FAST_SHADOW": "1"})
    exchange(pair, prompt(40, 5))
    metrics = pair.decode.ask("metrics")
    assert metrics["vllm:nixl_xfer_time_seconds"] > 0
    assert metrics["vllm:nixl_num_failed_transfers"] == 0


def test_abort_while_receiving(engines: Make, checkpoint: Checkpoint) -> None:
    pair = engines(checkpoint("llama"), env={"NIXL_FAST_SHADOW": "1"})
    before = settled(pair.decode)
    tokens = prompt(500, 6)
    for steps in (0, 1, 3):
        params = prefill(pair, tokens)
        pair.decode.ask("start", prompt=tokens, tokens=TOKENS, params=params, request=f"aborted-{steps}")
        pair.decode.ask("step", count=steps)
        pair.decode.ask("abort", request=f"aborted-{steps}")
    after = settled(pair.decode)
    assert (after["free"], after["receiving"]) == (before["free"], 0)
    # While NIXL may still write to them the blocks are not given back.
    params = prefill(pair, tokens)
    pair.decode.ask("hold")
    pair.decode.ask("start", prompt=tokens, tokens=TOKENS, params=params, request="aborted-held")
    pair.decode.ask("step", count=2)
    pair.decode.ask("abort", request="aborted-held")
    pair.decode.ask("step", count=5)
    held = pair.decode.ask("stats")
    assert held["receiving"] > 0
    assert held["free"] <= before["free"] - 500 // 32
    pair.decode.ask("let_go")
    after = settled(pair.decode)
    assert (after["free"], after["receiving"]) == (before["free"], 0)
    got, *_ = exchange(pair, prompt(60, 8))
    assert got == alone(pair.decode, prompt(60, 8))


def test_a_request_without_certain_positions_is_recomputed(engines: Make, checkpoint: Checkpoint) -> None:
    pair = engines(
        checkpoint("llama"),
        env={"NIXL_FAST_SHADOW": "1"},
        connectors=(OURS, {**OURS, "kv_load_failure_policy": "recompute"}),
    )
    tokens = prompt(100, 9)
    params = prefill(pair, tokens)
    params["remote_block_ids"] = [[*ids, 10_000] for ids in params["remote_block_ids"]]
    got = pair.decode.ask("generate", prompt=tokens, tokens=TOKENS, params=params)
    assert pair.decode.ask("moved") == []
    assert got["tokens"] == alone(pair.decode, tokens)
    got, *_ = exchange(pair, prompt(60, 10))
    assert got == alone(pair.decode, prompt(60, 10))
    # The producer dies with a request outstanding: the consumer gives an answer of its own, and goes on.
    params = prefill(pair, tokens)
    pair.prefill.kill()
    begin = time.monotonic()
    got = pair.decode.ask("generate", prompt=tokens, tokens=TOKENS, params=params, seconds=280)
    assert got["tokens"] == alone(pair.decode, tokens)
    assert time.monotonic() - begin < 280
    assert settled(pair.decode)["receiving"] == 0


def test_prefix_hit_on_the_decode_side(engines: Make, checkpoint: Checkpoint) -> None:
    pair = engines(checkpoint("llama"), decode={"enable_prefix_caching": True})
    head = prompt(70, 11)
    exchange(pair, [*head, *prompt(20, 12)])
    tokens = [*head, *prompt(50, 13)]
    got, moved, request = exchange(pair, tokens)
    assert len(request["local"][0]) == 2, "two of four blocks were cached"
    check_positions(pair, moved, request)
    assert got == alone(pair.decode, tokens)
    control(pair, tokens)


def test_full_and_sliding_window(engines: Make, checkpoint: Checkpoint) -> None:
    pair = engines(checkpoint("gemma2"), env={"NIXL_FAST_SHADOW": "1"})
    for length in (40, 64, 200):
        tokens = prompt(length, length)
        got, moved, request = exchange(pair, tokens)
        windows = tuple(64 if len(ids) <= 3 and length > 96 else length for ids in request["local"])
        check_positions(pair, moved, request, windows)
        assert got == alone(pair.decode, tokens)
    control(pair, prompt(200, 200))


def test_mamba_hybrid(engines: Make, checkpoint: Checkpoint) -> None:
    pair = engines(checkpoint("nemotron_h"), block_size=None)
    for length in (40, 150):
        tokens = prompt(length, length)
        got, *_ = exchange(pair, tokens)
        assert got == alone(pair.decode, tokens)
    control(pair, prompt(150, 150))


RATIO = {"kernel_block_size": 32}


def test_ratio_four_on_both_sides(engines: Make, checkpoint: Checkpoint) -> None:
    pair = engines(checkpoint("llama"), block_size=128, **RATIO)
    assert pair.decode.ask("layout")["ratio"] == 4
    for length in (60, 300):
        tokens = prompt(length, length)
        got, moved, request = exchange(pair, tokens)
        check_positions(pair, moved, request)
        assert got == alone(pair.decode, tokens)
    control(pair, prompt(300, 300))


@pytest.mark.parametrize("blocks", [(128, 64), (64, 128)], ids=["prefill larger", "decode larger"])
def test_different_ratios(engines: Make, checkpoint: Checkpoint, blocks: tuple[int, int]) -> None:
    sides = {"prefill": {"block_size": blocks[0]}, "decode": {"block_size": blocks[1]}}
    pair = engines(checkpoint("llama"), **sides, **RATIO)
    for length in (100, 192, 300):
        tokens = prompt(length, length)
        got, moved, request = exchange(pair, tokens)
        check_positions(pair, moved, request)
        assert got == alone(pair.decode, tokens)
    control(pair, tokens)


def test_different_ratios_are_wrong_in_stock(engines: Make, checkpoint: Checkpoint) -> None:
    sides = {"prefill": {"block_size": 128}, "decode": {"block_size": 64}}
    pair = engines(checkpoint("llama"), **sides, connectors=(STOCK, STOCK), **RATIO)
    tokens = prompt(192, 192)
    got, moved, request = exchange(pair, tokens)
    with pytest.raises(AssertionError, match="descriptor"):
        check_positions(pair, moved, request)
    assert got != alone(pair.decode, tokens)


@pytest.mark.parametrize("connectors", [(STOCK, OURS), (OURS, STOCK)], ids=["stock to ours", "ours to stock"])
def test_a_stock_peer(engines: Make, checkpoint: Checkpoint, connectors: Any) -> None:
    pair = engines(checkpoint("gemma2"), connectors=connectors)
    classes = [side.ask("layout")["class"] for side in (pair.prefill, pair.decode)]
    assert [name.startswith("NixlFast") for name in classes] == [connector is OURS for connector in connectors]
    tokens = prompt(200, 21)
    got, *_ = exchange(pair, tokens)
    assert got == alone(pair.decode, tokens)
    control(pair, tokens)


@pytest.mark.parametrize(
    "sides",
    [{}, {"prefill": {"block_size": 128}, "decode": {"block_size": 64}, **RATIO}],
    ids=["equal", "different ratios"],
)
def test_prefill_reads_what_decode_has_of_an_earlier_turn(
    engines: Make, checkpoint: Checkpoint, sides: dict[str, Any]
) -> None:
    both = {**OURS, "kv_connector_extra_config": {"bidirectional_kv_xfer": True, "kv_recompute_threshold": 0}}
    pair = engines(checkpoint("llama"), connectors=(both, both), **sides)
    back = Pair(pair.decode, pair.prefill)
    first = prompt(100, 24)
    answer = pair.decode.ask("generate", prompt=first, tokens=TOKENS, params=prefill(pair, first))
    assert answer["params"]["remote_num_tokens"] == len(first) + TOKENS - 1
    second = [*first, *answer["tokens"], *prompt(150, 25)]
    pair.prefill.ask("moved")
    pair.prefill.ask("requests")
    done = pair.prefill.ask("generate", prompt=second, tokens=1, params=answer["params"])
    moved, requests = pair.prefill.ask("moved"), pair.prefill.ask("requests")
    check_bytes(back, moved)
    check_positions(back, moved, requests[0])
    for side in (pair.prefill, pair.decode):
        side.ask("step", count=2)
    pair.decode.ask("moved")
    got = pair.decode.ask("generate", prompt=second, tokens=TOKENS, params=done["params"])
    check_bytes(pair, pair.decode.ask("moved"))
    assert got["tokens"] == alone(pair.decode, second)


def test_multi_connector(engines: Make, checkpoint: Checkpoint) -> None:
    def multi(role: str) -> dict[str, Any]:
        child = {**OURS, "kv_connector": "NixlPullConnector", "kv_role": role}
        return {"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": [child]}}

    pair = engines(checkpoint("llama"), connectors=(multi("kv_producer"), multi("kv_consumer")))
    assert pair.decode.ask("layout")["class"] == "NixlFastPullWorker"
    tokens = prompt(100, 22)
    got, moved, request = exchange(pair, tokens)
    check_positions(pair, moved, request)
    assert got == alone(pair.decode, tokens)
    assert pair.decode.ask("metrics")["vllm:nixl_xfer_time_seconds"] > 0
    control(pair, tokens)


def push(pair: Pair, tokens: list[int], name: str, prefilled: list[int] | None = None) -> list[int]:
    """The decode engine registers first, then the prefill engine writes; what it has ``prefilled`` if not the same."""
    layout = pair.prefill.ask("side_channel")
    params = {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_request_id": name,
        "tp_size": 1,
        **layout,
    }
    pair.decode.send("generate", prompt=tokens, tokens=TOKENS, params=params, request=name)
    done = pair.prefill.ask(
        "generate", prompt=prefilled or tokens, tokens=1, params={"do_remote_decode": True}, request=name
    )
    assert len(done["tokens"]) == 1
    for _ in range(400):
        pair.prefill.ask("step", count=1, wait=0.05)
        if not pair.prefill.ask("stats")["sending"]:
            break
    return pair.decode.answer()["tokens"]  # type: ignore[no-any-return]


@pytest.mark.parametrize("blocks", [(32, 32), (128, 64)], ids=["equal", "ratios differ"])
def test_push(engines: Make, checkpoint: Checkpoint, blocks: tuple[int, int]) -> None:
    sides = {"prefill": {"block_size": blocks[0]}, "decode": {"block_size": blocks[1]}}
    pair = engines(checkpoint("llama"), **sides, **RATIO, connectors=(OURS_PUSH, OURS_PUSH))
    assert pair.decode.ask("layout")["class"] == "NixlFastPushWorker"
    for number, length in enumerate((100, 192)):
        tokens = prompt(length, length)
        got = push(pair, tokens, f"push-{number}")
        moved, requests = pair.prefill.ask("moved"), pair.prefill.ask("requests")
        assert len(requests) == 1
        check_positions(pair, moved, {**requests[0], "tokens": length})
        check_arrived(pair, moved, requests[0]["local"])
        assert got == alone(pair.decode, tokens)
    wrong = push(pair, tokens, "push-of-another", prefilled=prompt(length, 1))
    assert wrong != alone(pair.decode, tokens)


def check_arrived(pair: Pair, moved: list[Any], blocks: list[list[int]]) -> None:
    """The decode engine's memory holds what was written, but for the last block, where it has gone on writing."""
    assert moved
    side = pair.decode.ask("layout")
    sizes = [stride * side["ratio"] for stride in side["strides"]]
    last = [base + ids[-1] * size for base, size in zip(side["bases"], sizes, strict=True) for ids in blocks]
    pids = processes(pair.decode.process.pid)
    checked = 0
    for _, target, length, data in moved:
        if not any(begin <= target < begin + sizes[0] for begin in last):
            assert data in peek(pids, target, length), "a descriptor did not arrive"
            checked += 1
    assert checked


def test_tensor_parallel_prefill(engines: Make, checkpoint: Checkpoint) -> None:
    pair = engines(checkpoint("llama"), prefill={"tensor_parallel_size": 2})
    tokens = prompt(100, 23)
    got, moved, _ = exchange(pair, tokens)
    assert len(moved) == 2 * 4 * 4, "half of the heads from either rank: 2 ranks, 4 layers, 4 blocks"
    assert len({target for _, target, *_ in moved}) == len(moved)
    assert got == alone(pair.decode, tokens)
    control(pair, tokens)
