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
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray
from typer.testing import CliRunner

from nixl_fast import Direction, Group, GroupKind, TransferError, TransferPlan, plan_peer
from nixl_fast.cli import app
from nixl_fast.demo import (
    SCENARIOS,
    Area,
    Engine,
    Memory,
    RankMemory,
    Report,
    Role,
    Scenario,
    consumer_memory,
    producer_memory,
    run_demo,
    verify,
)
from nixl_fast.plan import Side

COMMAND = [sys.executable, "-m", "nixl_fast.cli", "demo"]
DEAD_S = 10.0

needs_nixl = pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="nixl is not installed")


def demo(*options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, **environment}
    return subprocess.run([*COMMAND, *options], capture_output=True, text=True, timeout=60, env=env, check=False)


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
    ],
)
def test_numbers_follow_from_the_rules(
    results: dict[str, Any], name: str, descriptors: int, num_bytes: int, untransferred: int
) -> None:
    result = results[name]
    assert (result["descriptors"], result["bytes"]) == (descriptors, num_bytes)
    assert sum(each["untransferred"] for each in result["transfers"]) == untransferred


@needs_nixl
def test_nixl_merges_what_the_pairing_says(results: dict[str, Any]) -> None:
    measured = {name: result["measured_runs"] for name, result in results.items() if result["descriptors"]}
    assert measured == {name: results[name]["runs"] for name in measured}
    assert results["fragmented"]["descriptors"] >= 100_000
    assert results["full-attention"]["runs"] == 16 * 8  # 63 blocks in runs of 4


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
        if int(fields[1]) == parent and "nixl_fast.demo" in arguments:
            role, number = arguments[arguments.index("nixl_fast.demo") + 1 :][:2]
            found[f"{role}-{number}"] = int(entry.name)
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
            "nixl cannot be imported (not today): pip install nixl-fast[nixl]",
            id="not-importable",
        ),
        pytest.param("import os; os.abort()", "was killed by SIGABRT", id="crashes"),
        pytest.param("nixl_agent = nixl_agent_config = None", "no NIXL agent: TypeError: 'NoneType'", id="no-agent"),
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


OLDER_NIXL = """
from nixl_cu13._api import nixl_agent as real, nixl_agent_config

class nixl_agent(real):
    get_xfer_telemetry = None

    def prep_xfer_dlist(self, agent_name, rows, mem_type):
        if rows.shape[1] != 3:
            raise TypeError("Nx3 shape required")
        return super().prep_xfer_dlist(agent_name, rows, mem_type)
"""


@pytest.mark.skipif(importlib.util.find_spec("nixl_cu13") is None, reason="wraps the CUDA 13 build")
def test_a_nixl_without_strided_lists_and_telemetry_will_do(tmp_path: Path) -> None:
    (tmp_path / "nixl").mkdir()
    (tmp_path / "nixl" / "__init__.py").touch()
    (tmp_path / "nixl" / "_api.py").write_text(OLDER_NIXL)
    done = demo("--json", "--scenario", "ratio-4", PYTHONPATH=str(tmp_path))
    assert done.returncode == 0
    (result,) = json.loads(done.stdout)["scenarios"]
    assert (result["verified"], result["measured_runs"]) == (True, None)
    assert result["transfers"][0]["strided"] is False


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


def unequal(producers: int, consumers: int, direction: Direction) -> Scenario:
    def engine(ranks: int, seed: int) -> Engine:
        blocks = np.random.default_rng(seed).permutation(64)[:40]
        memory = RankMemory((Area(4096 // ranks, 64),) * 3)
        group = Group(GroupKind.FULL_ATTENTION, 16)
        return Engine((group,), (memory,) * ranks, (tuple(blocks.tolist()),), num_kv_heads=4)

    name = f"{producers}-to-{consumers}"
    return Scenario(name, "", engine(producers, 1), engine(consumers, 2), num_tokens=640, direction=direction)


@needs_nixl
def test_engines_of_several_ranks_are_verified_too() -> None:
    report = run_demo([unequal(2, 1, Direction.READ), unequal(1, 2, Direction.READ), unequal(1, 2, Direction.WRITE)])
    assert report.verified
    for result in report.scenarios:
        assert len(result.transfers) == 2  # either one consumer with two producers, or the other way round
        assert result.bytes == 40 * 4096 * 3


# --- the check itself ------------------------------------------------------------------------------------------------


class Moved:
    """A scenario of two ranks moved without NIXL: descriptor by descriptor, as a plan says."""

    def __init__(self, scenario: Scenario, *, shift: int = 0) -> None:
        self.scenario = scenario
        self.consumer = consumer_memory(scenario, 0)
        self.producer = producer_memory(scenario, 0)
        read = scenario.direction is Direction.READ
        sides = [(self.consumer, Role.CONSUMER), (self.producer, Role.PRODUCER)]
        (local, ours), (remote, theirs) = sides if read else sides[::-1]
        (self.plan,) = plan_peer(local.layout("local"), [remote.layout("remote")], direction=scenario.direction)
        pairing = self.plan.pair(
            scenario.engine(ours).block_ids,
            scenario.engine(theirs).block_ids,
            num_tokens=scenario.num_tokens,
            num_computed_blocks=scenario.num_computed_blocks,
        )
        tables = (
            rows(self.plan, Side.LOCAL, pairing.local_desc_ids),
            rows(self.plan, Side.REMOTE, pairing.remote_desc_ids),
        )
        self.targets, sources = tables if read else tables[::-1]
        for (to, size), (origin, length) in zip(self.targets, np.roll(sources, shift, axis=0), strict=True):
            assert size == length
            ctypes.memmove(int(to), int(origin), int(size))


def flip(address: int) -> None:
    ctypes.c_uint8.from_address(address).value ^= 1


def rows(plan: TransferPlan, side: Side, ids: NDArray[np.int32]) -> NDArray[np.uint64]:
    """Address and length of each descriptor."""
    return plan.expanded(side)[ids, :2]


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_right_move_is_verified(name: str) -> None:
    scenario = SCENARIOS[name]
    moved = Moved(scenario)
    verdict = verify(scenario, moved.consumer)
    assert (verdict.wrong_bytes, verdict.first_wrong) == (0, "")
    assert verdict.data_bytes == int(moved.targets[:, 1].sum())
    assert verdict.checked_bytes == sum(buffer.nbytes for buffer in moved.consumer.buffers)


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
    flip(unmoved_bytes(moved.consumer)[place])
    verdict = verify(scenario, moved.consumer)
    assert verdict.wrong_bytes == 1
    assert verdict.first_wrong.startswith("area 0, page ")


@pytest.mark.parametrize("name", ["kernel-4-to-16", "sliding-window", "mamba", "push-suffix"])
@pytest.mark.parametrize("at", [0, -1])
def test_a_flipped_byte_in_a_moved_place_is_found(name: str, at: int) -> None:
    scenario = SCENARIOS[name]
    moved = Moved(scenario)
    address, size = moved.targets[at].tolist()
    flip(address + size // 2)
    assert verify(scenario, moved.consumer).wrong_bytes == 1


def test_data_of_another_token_is_found() -> None:
    scenario = SCENARIOS["full-attention"]
    moved = Moved(scenario, shift=1)
    verdict = verify(scenario, moved.consumer)
    assert verdict.wrong_bytes > 0.99 * verdict.data_bytes  # one byte in 256 is the same by chance


def test_nothing_moved_is_found() -> None:
    scenario = SCENARIOS["push-suffix"]
    verdict = verify(scenario, consumer_memory(scenario, 0))
    assert verdict.wrong_bytes > 0.99 * verdict.data_bytes > 0
