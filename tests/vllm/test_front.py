"""The front before a NIXL agent: real agents and real bytes, and an agent that misbehaves where NIXL cannot be made to."""

# ruff: noqa: PLC0415 - vLLM, torch and NIXL are imported when they are needed
from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from nixl_fast.errors import TransferError
from nixl_fast.vllm.agent import AgentFront, MissingTelemetry, PendingTransfer
from nixl_fast.vllm.descriptors import IndexSpace, LazyIds, Part

BLOCK, BLOCKS = 256, 64


def until(ready: Callable[[], bool], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < end, "not in time"
        time.sleep(0.001)


class Rig:
    """Two real agents in one process; ours is behind a front."""

    def __init__(self, **options: Any) -> None:
        from nixl_cu13._api import nixl_agent, nixl_agent_config

        config = nixl_agent_config(num_threads=0, capture_telemetry=True)
        self.real = nixl_agent("consumer", config)
        self.peer = nixl_agent("producer", config)
        self.front = AgentFront(self.real, **options)
        self.target = np.zeros((BLOCKS, BLOCK), np.uint8)
        self.source = np.random.default_rng(0).integers(1, 255, (BLOCKS, BLOCK), np.uint8)
        self.registered = self.front.register_memory([(self.target.ctypes.data, self.target.nbytes, 0, "")], "DRAM")
        self.peer.register_memory([(self.source.ctypes.data, self.source.nbytes, 0, "")], "DRAM")
        self.name = self.front.add_remote_agent(self.peer.get_agent_metadata())
        self.local = self.front.prep_xfer_dlist("NIXL_INIT_AGENT", self._rows(self.target), mem_type="DRAM")
        self.remote = self.front.prep_xfer_dlist(self.name, self._rows(self.source), mem_type="DRAM")

    @staticmethod
    def _rows(memory: np.ndarray) -> np.ndarray:
        """With a row of no blocks, which NIXL alone would refuse."""
        base = memory.ctypes.data
        return np.array([[base, BLOCK, 0, BLOCK, 0], [base, BLOCK, 0, BLOCK, BLOCKS]], np.uint64)

    def make(self, local: Any, remote: Any, note: bytes = b"") -> Any:
        return self.front.make_prepped_xfer("READ", self.local, local, self.remote, remote, notif_msg=note)


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    yield made
    made.front.close()


def test_a_transfer_moves_the_right_bytes_and_notifies(rig: Rig) -> None:
    handle = rig.make(np.array([3, 1], np.int32), np.array([5, 6], np.int32), b"done")
    assert isinstance(handle, PendingTransfer)
    assert rig.front.transfer(handle) == "PROC"
    until(lambda: rig.front.check_xfer_state(handle) == "DONE")
    assert rig.front.get_xfer_telemetry(handle).totalBytes == 2 * BLOCK
    rig.front.release_xfer_handle(handle)
    np.testing.assert_array_equal(rig.target[[3, 1]], rig.source[[5, 6]])
    assert not rig.target[[0, 2, 4]].any()
    until(lambda: b"done" in rig.peer.get_new_notifs().get("consumer", []))


def test_ids_may_be_lazy(rig: Rig) -> None:
    space = IndexSpace([BLOCKS], [Part((0,), (0,))])
    handle = rig.make(LazyIds(space, [[7, 8]]), LazyIds(space, [[1, 2]]))
    rig.front.transfer(handle)
    until(lambda: rig.front.check_xfer_state(handle) == "DONE")
    np.testing.assert_array_equal(rig.target[[7, 8]], rig.source[[1, 2]])


def test_an_error_is_raised_once_and_after_the_fact(rig: Rig) -> None:
    handle = rig.make(np.array([1], np.int32), np.array([BLOCKS], np.int32))  # past the end: NIXL refuses
    assert rig.front.transfer(handle) == "PROC"
    rig.front.drain()
    with pytest.raises(Exception, match=r".+"):
        rig.front.check_xfer_state(handle)
    assert rig.front.check_xfer_state(handle) == "ERR"
    rig.front.release_xfer_handle(handle)
    good = rig.make(np.array([1], np.int32), np.array([2], np.int32))
    rig.front.transfer(good)
    until(lambda: rig.front.check_xfer_state(good) == "DONE")


def test_synchronous_is_the_agent_alone() -> None:
    rig = Rig(sync=True)
    handle = rig.make(np.array([3], np.int32), np.array([5], np.int32))
    assert not isinstance(handle, PendingTransfer)
    rig.front.transfer(handle)
    until(lambda: rig.front.check_xfer_state(handle) == "DONE")
    rig.front.release_xfer_handle(handle)
    assert not any(thread.name == "nixl-fast-transfer" for thread in threading.enumerate())


def test_many_transfers_from_two_threads(rig: Rig) -> None:
    def work(first: int) -> None:
        for block in range(first, BLOCKS, 2):
            handle = rig.make(np.array([block], np.int32), np.array([BLOCKS - 1 - block], np.int32))
            rig.front.transfer(handle)
            until(lambda handle=handle: rig.front.check_xfer_state(handle) == "DONE")
            rig.front.release_xfer_handle(handle)

    threads = [threading.Thread(target=work, args=(first,)) for first in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    np.testing.assert_array_equal(rig.target, rig.source[::-1])


class Slow:
    """An agent whose ``transfer`` waits for the test, and that must never be entered by two threads."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.calls: list[str] = []
        self._inside = threading.Lock()
        self.states: dict[int, Any] = {}
        self.no_telemetry = False
        self.crowded: list[str] = []
        """Calls that came while another thread was in the agent."""
        self.threads: set[str] = set()

    def _enter(self, call: str) -> None:
        if not self._inside.acquire(blocking=False):
            self.crowded.append(call)
            return
        self.threads.add(threading.current_thread().name)
        self.calls.append(call)
        self._inside.release()

    def make_prepped_xfer(self, *args: Any) -> int:
        self._enter(f"make {args[2]}")
        return int(args[2])

    def transfer(self, handle: int, note: bytes) -> str:
        assert self._inside.acquire(blocking=False)
        try:
            self.calls.append(f"transfer {handle}")
            assert self.gate.wait(20)
            return "PROC"
        finally:
            self._inside.release()

    def check_xfer_state(self, handle: int) -> str:
        self._enter(f"check {handle}")
        state = self.states.get(handle, "DONE")
        if isinstance(state, Exception):
            raise state
        return str(state)

    def get_xfer_telemetry(self, handle: int) -> str:
        self._enter(f"telemetry {handle}")
        if self.no_telemetry:
            raise RuntimeError("no telemetry")
        return "telemetry"

    def release_xfer_handle(self, handle: int) -> None:
        self._enter(f"release {handle}")

    def send_notif(self, name: str, note: bytes, backend: str | None = None) -> None:
        self._enter(f"notify {note!r}")
        if note == b"lost":
            raise RuntimeError("no such peer")

    def get_new_notifs(self, backends: Any = ()) -> dict[str, list[bytes]]:
        self._enter("notifs")
        return {"peer": [b"hello"]}

    def deregister_memory(self, descs: Any) -> None:
        self._enter("deregister")


class Ids(list[int]):
    """An id list that shows which transfer it is."""

    def __int__(self) -> int:
        return self[0]


def started(front: AgentFront, number: int) -> Any:
    handle = front.make_prepped_xfer("READ", None, Ids([number]), None, Ids([number]))
    front.transfer(handle)
    return handle


def on_its_way() -> tuple[Slow, AgentFront, Any]:
    """An agent, its front, and a transfer that has been posted and goes on until the agent is told otherwise."""
    agent = Slow()
    agent.gate.set()
    agent.states[0] = "PROC"
    front = AgentFront(agent)
    handle = started(front, 0)
    front.drain()
    return agent, front, handle


def test_the_caller_never_waits_for_a_post() -> None:
    agent = Slow()
    front = AgentFront(agent)
    handles = [started(front, number) for number in range(3)]
    until(lambda: "transfer 0" in agent.calls)
    time.sleep(0.05)
    assert [front.check_xfer_state(handle) for handle in handles] == ["PROC"] * 3
    assert front.get_new_notifs() == {}
    front.send_notif("peer", b"after")
    assert agent.calls[-1] == "transfer 0"
    agent.gate.set()
    front.drain()
    posts = [call for call in agent.calls if call.startswith(("transfer", "notify"))]
    assert posts == ["transfer 0", "transfer 1", "transfer 2", "notify b'after'"], "a message overtook a transfer"
    assert front.get_new_notifs()["peer"], "what came while NIXL was busy is not lost"
    assert [front.check_xfer_state(handle) for handle in handles] == ["DONE"] * 3
    assert not agent.crowded
    front.close()


def test_the_caller_stays_out_of_nixl_while_a_transfer_is_on_its_way() -> None:
    agent, front, handle = on_its_way()
    for _ in range(20):
        assert front.check_xfer_state(handle) == "PROC"
        front.get_new_notifs()
        front.send_notif("peer", b"heartbeat")
        time.sleep(0.001)
    front.drain()
    assert agent.calls.count("notify b'heartbeat'") == 20
    agent.states[0] = "DONE"
    until(lambda: front.check_xfer_state(handle) == "DONE")
    assert agent.threads == {"nixl-fast-transfer"}
    assert not agent.crowded
    front.close()


def test_quiet_means_that_there_is_nothing_to_hear() -> None:
    agent = Slow()
    front = AgentFront(agent)
    assert not front.quiet, "nothing is on its way: messages may come at any time"
    agent.states[0] = "PROC"
    handle = started(front, 0)
    front.get_new_notifs()
    assert front.quiet, "being posted"
    agent.gate.set()
    until(lambda: not front.quiet)  # the other side has said something
    assert front.get_new_notifs()["peer"]
    agent.get_new_notifs = lambda *_: {}  # type: ignore[method-assign]
    until(lambda: (front.get_new_notifs(), front.quiet)[1])
    assert front.check_xfer_state(handle) == "PROC"
    other = started(front, 1)
    until(lambda: not front.quiet)
    assert front.check_xfer_state(other) == "DONE"
    front.get_new_notifs()
    assert front.quiet
    agent.states[0] = RuntimeError("lost the peer")
    until(lambda: not front.quiet)
    with pytest.raises(RuntimeError, match="lost the peer"):
        front.check_xfer_state(handle)
    front.close()


def test_release_before_the_post_means_never() -> None:
    agent = Slow()
    front = AgentFront(agent)
    started(front, 0)
    until(lambda: "transfer 0" in agent.calls)
    waiting, unstarted = started(front, 1), front.make_prepped_xfer("READ", None, Ids([2]), None, Ids([2]))
    front.release_xfer_handle(waiting)
    front.release_xfer_handle(unstarted)
    agent.gate.set()
    front.drain()
    assert not {"make 1", "make 2"} & set(agent.calls)
    with pytest.raises(TransferError):
        front.transfer(unstarted)
    front.close()


def test_release_waits_for_a_post_that_has_begun() -> None:
    agent = Slow()
    front = AgentFront(agent)
    handle = started(front, 0)
    until(lambda: "transfer 0" in agent.calls)
    threading.Timer(0.1, agent.gate.set).start()
    front.release_xfer_handle(handle)
    assert agent.calls.index("release 0") > agent.calls.index("transfer 0")
    front.close()


def test_memory_is_deregistered_behind_everything_handed_over() -> None:
    agent = Slow()
    front = AgentFront(agent)
    for number in range(3):
        started(front, number)
    threading.Timer(0.1, agent.gate.set).start()
    front.deregister_memory("descs")
    done = [call for call in agent.calls if call.startswith(("transfer", "deregister"))]
    assert done == ["transfer 0", "transfer 1", "transfer 2", "deregister"]
    front.close()


def test_memory_is_kept_for_what_still_moves() -> None:
    agent, front, handle = on_its_way()
    threading.Timer(0.2, agent.states.update, [{0: "DONE"}]).start()
    front.deregister_memory("descs")
    assert front.check_xfer_state(handle) == "DONE"
    assert agent.calls.index("deregister") > agent.calls.index("release 0")
    front.close()


def test_a_transfer_that_never_ends_holds_nothing_up_for_ever() -> None:
    agent = Slow()
    agent.gate.set()
    agent.states[0] = "PROC"
    front = AgentFront(agent)
    handle = started(front, 0)
    assert not front.settle(0.05)
    front.release_xfer_handle(handle)
    assert front.settle(20)
    checks = agent.calls.count("check 0")
    time.sleep(0.02)
    assert agent.calls.count("check 0") == checks, "a released transfer is asked for its state"
    front.close()


def test_telemetry_that_is_missing_is_no_failure() -> None:
    agent = Slow()
    agent.no_telemetry = True
    agent.gate.set()
    front = AgentFront(agent)
    handle = started(front, 0)
    until(lambda: front.check_xfer_state(handle) == "DONE")
    assert isinstance(front.get_xfer_telemetry(handle), MissingTelemetry)
    never = front.make_prepped_xfer("READ", None, Ids([1]), None, Ids([1]))
    assert front.get_xfer_telemetry(never).totalBytes == 0
    front.close()


@pytest.mark.parametrize("state", ["ERR", RuntimeError("lost the peer")])
def test_a_failed_transfer_is_let_go_of(state: Any) -> None:
    agent = Slow()
    agent.gate.set()
    agent.states[0] = state
    front = AgentFront(agent)
    handle = started(front, 0)
    front.drain()
    if isinstance(state, Exception):
        with pytest.raises(RuntimeError, match="lost the peer"):
            front.check_xfer_state(handle)
    assert front.check_xfer_state(handle) == "ERR"
    front.release_xfer_handle(handle)
    assert agent.calls.count("release 0") == 1
    front.close()


def test_a_lost_message_is_reported() -> None:
    agent = Slow()
    lost: list[tuple[bytes, str]] = []
    front = AgentFront(agent, on_lost_notification=lambda message, error: lost.append((message, str(error))))
    started(front, 0)
    front.send_notif("peer", b"lost")
    agent.gate.set()
    front.drain()
    assert lost == [(b"lost", "no such peer")]
    with pytest.raises(RuntimeError, match="no such peer"):
        front.send_notif("peer", b"lost")  # nothing is in the way: the caller hears of it at once
    front.close()


def test_nothing_starts_after_close() -> None:
    agent = Slow()
    agent.gate.set()
    front = AgentFront(agent)
    started(front, 0)
    front.close()
    front.close()
    with pytest.raises(TransferError):
        started(front, 1)
    front.deregister_memory("descs")
    assert agent.calls[-1] == "deregister"


def test_messages_can_be_taken() -> None:
    front = AgentFront(Slow(), take=lambda message: message == b"hello")
    assert front.get_new_notifs() == {"peer": []}


def test_messages_that_were_found_outlive_an_error() -> None:
    agent = Slow()
    agent.gate.set()
    front = AgentFront(agent)
    agent.states[0] = "PROC"
    handle = started(front, 0)
    until(lambda: bool(front._notifs))
    agent.states[0] = "DONE"
    until(lambda: front.check_xfer_state(handle) == "DONE")
    agent.get_new_notifs = lambda *_: (_ for _ in ()).throw(RuntimeError("for now"))  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="for now"):
        front.get_new_notifs()
    agent.get_new_notifs = lambda *_: {"peer": [b"later"]}  # type: ignore[method-assign]
    messages = front.get_new_notifs()["peer"]
    assert messages[0] == b"hello"
    assert messages[-1] == b"later"
    front.close()


def test_what_comes_behind_the_end_is_done_by_its_caller() -> None:
    agent, front, _ = on_its_way()
    front.close()
    front.send_notif("peer", b"last")
    assert agent.calls[-1] == "notify b'last'"
    front._put(lambda: agent._enter("late"))  # as a call does that had begun when `close` was called
    assert agent.calls[-1] == "late"
    assert threading.current_thread().name in agent.threads
    assert front.drain(20)


def test_a_wait_in_vain_is_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    from nixl_fast.vllm import agent as module

    monkeypatch.setattr(module, "SETTLE_SECONDS", 0.3)
    agent, front, _ = on_its_way()
    begin = time.monotonic()
    for _ in range(20):
        front.deregister_memory("descs")
    assert 0.3 <= time.monotonic() - begin < 3
    agent.states[0] = "DONE"
    assert front.settle(20)
    assert agent.calls.count("deregister") == 20
    front.close()
