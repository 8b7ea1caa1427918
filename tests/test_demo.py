"""The demo: real NIXL agents in processes of their own, and the check that says whether every byte is right."""

import ctypes
import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from typer.testing import CliRunner

from nixl_fast import Direction, TransferError, plan_peer
from nixl_fast.cli import app
from nixl_fast.demo import Memory, Report, consumer_memory, producer_memory, run_demo, verify
from nixl_fast.plan import Side
from nixl_fast.scenarios import SCENARIOS, Scenario

COMMAND = [sys.executable, "-m", "nixl_fast.cli", "demo"]
DEAD_S = 10.0

needs_nixl = pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="nixl is not installed")


def demo(*options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, **environment}
    return subprocess.run([*COMMAND, *options], capture_output=True, text=True, timeout=180, env=env, check=False)


@pytest.fixture(scope="module")
def document() -> Any:
    done = demo("--json")
    assert (done.returncode, done.stderr) == (0, "")
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def results(document: Any) -> dict[str, Any]:
    return {result["name"]: result for result in document["scenarios"]}


# --- real agents -----------------------------------------------------------------------------------------------------


@needs_nixl
def test_every_scenario_is_verified(document: Any, results: dict[str, Any]) -> None:
    assert document["verified"] is True
    assert list(results) == list(SCENARIOS)
    for result in results.values():
        assert result["verified"] is True
        assert result["wrong_bytes"] == 0
        assert result["bytes"] == result["data_bytes"]
        assert result["checked_bytes"] > result["bytes"]


@needs_nixl
@pytest.mark.parametrize(
    ("name", "descriptors", "num_bytes", "untransferred"),
    [
        # ceil(1000 / 16) = 63 blocks of 1024 bytes in 8 areas
        pytest.param("full-attention", 63 * 8, 63 * 8 * 1024, 0, id="full"),
        # 32 blocks, and of the window ceil(128 / 16) + 1 = 9, of 512 bytes in 4 areas
        pytest.param("sliding-window", (32 + 9) * 4, 41 * 4 * 512, 0, id="window"),
        # 660 tokens are 10 whole logical blocks of 64 (4 x 512 bytes) and 2 kernel blocks of the eleventh, in 4 areas
        pytest.param("ratio-4", (10 + 2) * 4, (40 + 2) * 512 * 4, 2, id="ratio"),
        # units of 16: ceil(1000 / 16) = 63, the first 6 cached; of the consumer's 66 units 3 are past the data
        pytest.param("ratios-cached-prefix", (63 - 6) * 4, 57 * 512 * 4, 3, id="ratios"),
        # units of 4: 250, the first 2 * 4 cached; of the consumer's 63 * 4 units 2 are past the data
        pytest.param("kernel-4-to-16", (250 - 8) * 4, 242 * 128 * 4, 2, id="4-to-16"),
        pytest.param("kernel-16-to-4", (250 - 6) * 4, 244 * 128 * 4, 0, id="16-to-4"),
        # 400 tokens are 8 whole logical blocks of 48 (3 x 512 bytes) and 1 kernel block, and 2 + 1 slots in 4 parts
        # (192 + 64 + 64 + 1024 bytes), in 3 areas; left are 2 kernel blocks of the ninth and one slot to recompute
        pytest.param("mamba", (8 + 1 + 3 * 4) * 3, (25 * 512 + 3 * 1344) * 3, 2 + 1, id="mamba"),
        # units of 4: 125, the first 100 cached
        pytest.param("push-suffix", 25 * 4, 25 * 128 * 4, 0, id="push"),
        pytest.param("fragmented", 12_800 * 8, 12_800 * 512 * 8, 0, id="fragmented"),
        pytest.param("fully-cached", 0, 0, 0, id="nothing"),
        # units of 16: 63, the first 3 * 2 cached; the consumer's last block has one unit past the data
        pytest.param("kernel-48-to-32", (63 - 6) * 4, 57 * 512 * 4, 1, id="48-to-32"),
        # kernel blocks of 16: ceil(460 / 16) = 29, of 30 listed; padding keeps them apart and is not moved
        pytest.param("padded-pages", 29 * 4, 29 * 512 * 4, 1, id="padded"),
        # 40 blocks in 4 areas with each of 4 ranks that hold 2 heads of 512 bytes
        pytest.param("tp-4-to-1", 40 * 4 * 4, 40 * 4 * 8 * 512, 0, id="4-to-1"),
        pytest.param("tp-1-to-4", 40 * 4 * 4, 40 * 4 * 8 * 512, 0, id="1-to-4"),
        # 4 consumers take one head each
        pytest.param("gqa-2-to-4", 40 * 4 * 4, 40 * 4 * 4 * 512, 0, id="gqa"),
        # on each of 2 consumers ceil(500 / 16) = 32 blocks of one head in 3 areas and ceil(500 / 32) = 16 of MLA in 2
        pytest.param("mla-and-heads", 2 * (32 * 3 + 16 * 2), 2 * (32 * 512 * 3 + 16 * 1024 * 2), 0, id="mla"),
        # on 2 ranks in 3 areas 25 kernel blocks of one head of 256 bytes, and 2 slots: half of x (96 bytes) and of the
        # state (512), all of B and C (64 each)
        pytest.param(
            "mamba-tp-1-to-2",
            2 * 3 * (25 + 2 * 4),
            2 * 3 * (25 * 256 + 2 * (96 + 64 + 64 + 512)),
            2 * 2,
            id="mamba-1-to-2",
        ),
        # the same from 2 ranks, but B and C from one
        pytest.param(
            "mamba-tp-2-to-1",
            3 * (2 * 25 + 2 * (2 + 2 + 1 + 1)),
            3 * (25 * 512 + 2 * (192 + 64 + 64 + 1024)),
            2,
            id="mamba-2-to-1",
        ),
    ],
)
def test_numbers_follow_from_the_rules(
    results: dict[str, Any], name: str, descriptors: int, num_bytes: int, untransferred: int
) -> None:
    result = results[name]
    assert (result["descriptors"], result["bytes"]) == (descriptors, num_bytes)
    assert sum(each["untransferred"] for each in result["transfers"]) == untransferred


@needs_nixl
def test_neighbours_are_merged(results: dict[str, Any]) -> None:
    assert results["fragmented"]["runs"] == results["fragmented"]["descriptors"] >= 100_000
    assert results["full-attention"]["runs"] == 16 * 8  # 63 blocks in runs of 4


@needs_nixl
def test_every_rank_that_moves_is_reported(results: dict[str, Any]) -> None:
    moved = {name: [each["initiator"] for each in result["transfers"]] for name, result in results.items()}
    assert moved["tp-4-to-1"] == ["consumer-0"]
    assert moved["tp-1-to-4"] == [f"consumer-{rank}" for rank in range(4)]
    assert moved["push-suffix"] == ["producer-0"]


@needs_nixl
def test_scenarios_can_be_picked_and_shown() -> None:
    done = demo("--scenario", "mamba", "--scenario", "push-suffix")
    assert done.returncode == 0
    lines = done.stdout.splitlines()
    rows = [line.split() for line in lines if line.startswith(tuple(f" {name} " for name in SCENARIOS))]
    assert [(row[0], row[-1]) for row in rows] == [("mamba", "yes"), ("push-suffix", "yes")]
    assert rows[0][1:5] == ["12", "->", "13", "63"]
    assert done.stderr == ""


def test_an_unknown_scenario_is_refused_with_the_known_ones() -> None:
    done = demo("--scenario", "mamba", "--scenario", "mambo")
    assert (done.returncode, done.stdout) == (2, "")
    assert "'mambo'" in done.stderr
    assert ", ".join(SCENARIOS) in done.stderr


def children(parent: int) -> dict[str, int]:
    """Pids of the ranks that a process has started, by role and number."""
    found = {}
    for entry in Path("/proc").iterdir():
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            arguments = (entry / "cmdline").read_text().split("\0")
        except (OSError, ValueError):
            continue
        if int(fields[1]) == parent and arguments[1:3] == ["-P", "-c"] and "nixl_fast.demo" in arguments[3]:
            found["-".join(arguments[4:6])] = int(entry.name)
    return found


def wait_for_children(parent: int) -> dict[str, int]:
    deadline = time.monotonic() + 60
    while len(found := children(parent)) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert set(found) == {"producer-0", "consumer-0"}
    return found


@needs_nixl
@pytest.mark.parametrize("rank", ["producer-0", "consumer-0"])
@pytest.mark.parametrize("delay", [0.0, 0.5])
def test_a_child_that_is_killed_while_starting_ends_the_demo(rank: str, delay: float) -> None:
    with subprocess.Popen([*COMMAND, "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        found = wait_for_children(running.pid)
        time.sleep(delay)
        os.kill(found[rank], signal.SIGKILL)
        out, err = running.communicate(timeout=DEAD_S)
    assert (running.returncode, out) == (1, "")
    assert err == f"error: {rank} was killed by SIGKILL\n"
    assert not any(Path(f"/proc/{pid}").exists() for pid in found.values())


@needs_nixl
@pytest.mark.parametrize("rank", ["producer-0", "consumer-0"])
@pytest.mark.parametrize(("step", "delay"), [("allocating", 0.0), ("moving", 0.15)])
def test_a_child_that_is_killed_at_work_ends_the_demo(rank: str, step: str, delay: float) -> None:
    killed: list[float] = []

    def kill() -> None:
        killed.append(time.monotonic())
        os.kill(children(os.getpid())[rank], signal.SIGKILL)

    def on_step(_: Scenario, name: str) -> None:
        if name == step:
            timers.append(threading.Timer(delay, kill))
            timers[-1].start()

    timers: list[threading.Timer] = []
    with pytest.raises(TransferError, match=rf"^{rank} was killed by SIGKILL"):
        run_demo([SCENARIOS["fragmented"]], on_step)
    assert time.monotonic() - killed[0] < DEAD_S
    timers[0].join()
    assert children(os.getpid()) == {}


@needs_nixl
def test_a_child_that_hangs_ends_the_demo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nixl_fast.demo.SILENCE_S", 2.0)

    def on_step(_: Scenario, name: str) -> None:
        if name == "moving":
            os.kill(children(os.getpid())["producer-0"], signal.SIGSTOP)

    with pytest.raises(TransferError, match=r"^producer-0 has shown no sign of life for 2 s"):
        run_demo([SCENARIOS["fragmented"]], on_step)
    assert children(os.getpid()) == {}


@needs_nixl
def test_children_end_with_the_demo() -> None:
    with subprocess.Popen(COMMAND, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as running:
        found = wait_for_children(running.pid)
        time.sleep(0.5)
        running.kill()
    deadline = time.monotonic() + DEAD_S
    while (alive := [pid for pid in found.values() if is_running(pid)]) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert alive == []


def is_running(pid: int) -> bool:
    try:
        return (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize(
    ("source", "message"),
    [
        pytest.param(
            "raise ImportError('not today')",
            "nixl cannot be imported (not today); pip install 'nixl-fast[nixl]'",
            id="not-importable",
        ),
        pytest.param("import os; os.abort()", "was killed by SIGABRT", id="crashes"),
        pytest.param(
            "nixl_agent = nixl_agent_config = None",
            "-0: NIXL nixl_agent failed: 'NoneType' object is not callable\n",
            id="no-agent",
        ),
    ],
)
def test_a_nixl_that_does_not_work_is_one_line(tmp_path: Path, source: str, message: str) -> None:
    (tmp_path / "nixl").mkdir()
    (tmp_path / "nixl" / "__init__.py").touch()
    (tmp_path / "nixl" / "_api.py").write_text(source)
    started = time.monotonic()
    done = demo("--json", PYTHONPATH=str(tmp_path))
    assert time.monotonic() - started < DEAD_S
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(("error: producer-0", "error: consumer-0"))
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


@needs_nixl
@pytest.mark.parametrize("options", [[], ["--json"]])
def test_wrong_bytes_are_exit_status_1(document: Any, options: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    report = msgspec.convert(document, Report)
    bad = msgspec.structs.replace(report.scenarios[0], verified=False, wrong_bytes=7, first_wrong="area 0")
    report = msgspec.structs.replace(report, verified=False, scenarios=(bad, *report.scenarios[1:]))
    monkeypatch.setattr("nixl_fast.cli.run_demo", lambda *_: report)
    done = CliRunner().invoke(app, ["demo", *options])
    assert done.exit_code == 1
    if options:
        assert json.loads(done.stdout)["scenarios"][0]["wrong_bytes"] == 7
    else:
        assert "full-attention: 7 of 1,0" in done.stdout


@needs_nixl
def test_a_push_between_unequal_ranks_is_verified_too() -> None:
    pull = [SCENARIOS["mamba-tp-1-to-2"], SCENARIOS["mamba-tp-2-to-1"]]
    push = [replace(scenario, direction=Direction.WRITE) for scenario in pull]
    report = run_demo([pull[0], *push, pull[1]])
    assert report.verified
    assert len({result.bytes for result in report.scenarios}) == 2
    initiators = [[each.initiator for each in result.transfers] for result in report.scenarios]
    assert initiators == [["consumer-0", "consumer-1"], ["producer-0"], ["producer-0", "producer-1"], ["consumer-0"]]


# --- the check itself ------------------------------------------------------------------------------------------------


class Moved:
    """A scenario moved without NIXL: descriptor by descriptor, as the plans say."""

    def __init__(self, scenario: Scenario, *, shift: int = 0) -> None:
        self.consumers = [consumer_memory(scenario, rank) for rank in range(len(scenario.consumer.ranks))]
        producers = [producer_memory(scenario, rank) for rank in range(len(scenario.producer.ranks))]
        self.targets: list[tuple[int, int]] = []
        """Address and bytes of every place that data was moved to."""
        read = scenario.direction is Direction.READ
        local, remote = (self.consumers, producers) if read else (producers, self.consumers)
        layouts = [memory.layout("remote") for memory in remote]
        ids = scenario.consumer.block_ids, scenario.producer.block_ids
        for memory in local:
            for plan in plan_peer(memory.layout("local"), layouts, direction=scenario.direction):
                pairing = plan.pair(
                    *(ids if read else ids[::-1]),
                    num_tokens=scenario.num_tokens,
                    num_computed_blocks=scenario.num_computed_blocks,
                )
                ours = plan.expanded(Side.LOCAL)[pairing.local_desc_ids, :2]
                theirs = plan.expanded(Side.REMOTE)[pairing.remote_desc_ids, :2]
                to, origin = (ours, theirs) if read else (theirs, ours)
                self.targets += [(address, size) for address, size in to.tolist()]
                for (target, size), (source, length) in zip(to, np.roll(origin, shift, axis=0), strict=True):
                    assert size == length
                    ctypes.memmove(int(target), int(source), int(size))


def flip(address: int) -> None:
    ctypes.c_uint8.from_address(address).value ^= 1


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_right_move_is_verified(name: str) -> None:
    moved = Moved(SCENARIOS[name])
    verdicts = [verify(SCENARIOS[name], memory) for memory in moved.consumers]
    assert {(verdict.wrong_bytes, verdict.first_wrong) for verdict in verdicts} == {(0, "")}
    assert sum(verdict.data_bytes for verdict in verdicts) == sum(size for _, size in moved.targets)
    for verdict, memory in zip(verdicts, moved.consumers, strict=True):
        assert verdict.checked_bytes == sum(buffer.nbytes for buffer in memory.buffers)


def unmoved_bytes(memory: Memory) -> dict[str, int]:
    """Addresses of one byte of each kind that a move must leave alone."""
    (address, size), area = memory.spans()[0], memory.spec.areas[0]
    listed = memory.engine.block_ids[0]
    free = next(page for page in range(area.num_pages) if page not in listed)
    return {
        "before": address - 1,
        "after": address + size,
        "padding": address + listed[0] * area.stride + area.page_bytes,
        "free block": address + free * area.stride,
        "tail": address + listed[-1] * area.stride + area.page_bytes - 1,
    }


@pytest.mark.parametrize("place", ["before", "after", "padding", "free block", "tail"])
def test_a_flipped_byte_in_an_unmoved_place_is_found(place: str) -> None:
    scenario = SCENARIOS["kernel-4-to-16"]  # its last block has a tail of two units, and pages are padded
    moved = Moved(scenario)
    flip(unmoved_bytes(moved.consumers[0])[place])
    verdict = verify(scenario, moved.consumers[0])
    assert verdict.wrong_bytes == 1
    assert verdict.first_wrong.startswith("area 0, page ")


@pytest.mark.parametrize(
    "name", ["kernel-4-to-16", "sliding-window", "mamba", "push-suffix", "mla-and-heads", "mamba-tp-1-to-2"]
)
@pytest.mark.parametrize("at", [0, -1])
def test_a_flipped_byte_in_a_moved_place_is_found(name: str, at: int) -> None:
    scenario = SCENARIOS[name]
    moved = Moved(scenario)
    address, size = moved.targets[at]
    flip(address + size // 2)
    assert sum(verify(scenario, memory).wrong_bytes for memory in moved.consumers) == 1


def test_data_of_another_token_is_found() -> None:
    scenario = SCENARIOS["full-attention"]
    moved = Moved(scenario, shift=1)
    verdict = verify(scenario, moved.consumers[0])
    assert verdict.wrong_bytes > 0.99 * verdict.data_bytes  # one byte in 256 is the same by chance


def test_nothing_moved_is_found() -> None:
    scenario = SCENARIOS["push-suffix"]
    verdict = verify(scenario, consumer_memory(scenario, 0))
    assert verdict.wrong_bytes > 0.99 * verdict.data_bytes > 0
