"""What the process around the package does: it forks, it ends, it plans while peers register anew."""

import multiprocessing
import os
import subprocess
import sys
import textwrap
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from nixl_fast import EngineLayout, Group, GroupKind, Region, TransferPlan, plan_peer
from worker_rig import PATIENCE, Engine, Fabric, Spec, moves_of, request, until

LAYOUT = EngineLayout("E", (Group(GroupKind.FULL_ATTENTION, 16, 2),), (Region(4096, 64, 40_000),))
IDS = list(range(20_000))


def run(code: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent), "NIXL_LOG_LEVEL": "FATAL"}
    code = textwrap.dedent(code)
    return subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        timeout=3 * PATIENCE,
        check=False,
    )


ENGINES = """
    from worker_rig import Engine, Spec, request, until
    source, sink = Spec("p", seed=1, blocks=20_000), Spec("d", seed=2, blocks=20_000)
    producer, consumer = Engine(source), Engine(sink)
    producer.worker.start(), consumer.worker.start()
    every, before = list(range(20_000)), sink.pattern(0)
    producer.worker.hold("a@p")
    consumer.worker.read(request("a", "p", [every], [every], [producer.address]))
    until(lambda: (consumer.memory[0] != before).any())
"""


@pytest.mark.parametrize("end", ["", "raise SystemExit(0)", "del producer, consumer", "consumer.worker.close()"])
def test_the_interpreter_ends_with_transfers_under_way(end: str) -> None:
    for _ in range(5):  # until it ends before the transfer does
        done = run(ENGINES + "    print('over' if consumer.worker.poll() else 'moving', flush=True)\n    " + end)
        if done.stdout != "over\n":
            break
    assert done.stdout.endswith("moving\n")
    assert (done.returncode, "Fatal" in done.stderr, "Traceback" in done.stderr) == (0, False, False), done.stderr


def test_a_killed_thread_of_plans_does_not_keep_the_interpreter() -> None:
    done = run(
        """
        import threading
        from test_process import IDS, LAYOUT, TransferPlan
        plan, started = TransferPlan(LAYOUT, LAYOUT), threading.Event()

        def plans():
            while True:
                plan.pair([IDS], [IDS])  # long enough to let go of the interpreter
                started.set()

        for _ in range(4):
            threading.Thread(target=plans, daemon=True).start()
        started.wait()
        """
    )
    assert (done.returncode, done.stderr) == (0, "")


def _digest(plan: TransferPlan) -> bytes:
    return plan.pair([IDS], [IDS[::-1]]).remote_desc_ids.tobytes()


def test_a_fork_after_import_plans_like_its_parent() -> None:
    done = run(
        """
        import os, threading
        from test_process import IDS, LAYOUT, TransferPlan, _digest
        plan = TransferPlan(LAYOUT, LAYOUT)
        right = _digest(plan)
        for _ in range(8):
            child = os.fork()
            if not child:
                threads = [threading.Thread(target=_digest, args=(plan,)) for _ in range(2)]
                [each.start() for each in threads], [each.join() for each in threads]
                os._exit(_digest(plan) != right or _digest(TransferPlan(LAYOUT, LAYOUT)) != right)
            assert os.waitpid(child, 0)[1] == 0
        assert _digest(plan) == right
        print("right")
        """
    )
    assert (done.returncode, done.stdout) == (0, "right\n"), done.stderr


def test_plans_travel_to_spawned_processes_as_layouts() -> None:
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        plan = TransferPlan(LAYOUT, LAYOUT)
        assert set(pool.map(_digest_of, [LAYOUT.to_bytes()] * 4)) == {_digest(plan)}


def _digest_of(data: bytes) -> bytes:
    layout = EngineLayout.from_bytes(data)
    return _digest(TransferPlan(layout, layout))


def test_planning_while_peers_register_anew() -> None:
    """Layouts are values: a plan goes on to be what it was made from, whatever is registered meanwhile."""
    newest, stop = [LAYOUT], threading.Event()

    def register() -> None:
        while not stop.is_set():
            last = newest[0]
            region = msgspec.structs.replace(last.regions[0], base_addr=last.regions[0].base_addr + 4096)
            newest[0] = msgspec.structs.replace(last, regions=(region,), generation=last.generation + 1)

    def plans(_: int) -> bool:
        layout = newest[0]
        plan = plan_peer(LAYOUT, [layout])[0]
        right = [layout.regions[0].base_addr, 128, 0, 128, 20_000]
        return plan.remote_table.tolist()[0] == right and _digest(plan) == _digest(TransferPlan(LAYOUT, LAYOUT))

    thread = threading.Thread(target=register)
    thread.start()
    try:
        with ThreadPoolExecutor(8) as pool:
            assert all(pool.map(plans, range(64)))
    finally:
        stop.set()
        thread.join()


def test_requests_while_their_peer_registers_anew_are_right_or_refused() -> None:
    fabric, source, sink = Fabric(), Spec("p", seed=1), Spec("d", seed=2)
    with Engine(source, fabric) as producer, Engine(sink, fabric) as consumer:
        old = []
        done = []
        for number in range(30):
            producer.worker.hold(f"{number}@p")
            consumer.worker.read(request(f"{number}", "p", [[number]], [[number + 9]], [producer.address], tokens=16))
            if number % 3 == 0:
                old += producer.register_anew(source.seed)
            result = consumer.inbox.take(f"{number}")[0]
            if result.ok:
                done += moves_of(source, sink, [[number + 9]], [[number]])
            for array in old:
                array[:] = 0xEE if producer.inbox.stats().generation == number // 3 + 1 else array
        until(lambda: not producer.inbox.stats().live or producer.inbox.collect())
        assert len(done) >= 2 * 5
        assert consumer.wrong_bytes(source, done) == 0
    fabric.assert_clean()
