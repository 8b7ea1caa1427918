"""Engines for the worker's tests: ranks in processes of their own, memory that can be checked byte by byte, a fake NIXL.

The expected bytes come from a formula over (engine seed, layer, kernel block, byte of the block before tensor
parallelism cuts it), never from a plan or a pairing.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import multiprocessing
import os
import signal
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")

import numpy as np
from numpy.typing import NDArray

from nixl_fast import EngineLayout, Group, GroupKind, Region
from nixl_fast.agent import default_agent
from nixl_fast.stats import Stats
from nixl_fast.worker import Request, Result, TransferWorker

Bytes = NDArray[np.uint8]
Move = tuple[int, int, int]
"""Group, producer's kernel block, consumer's kernel block."""

PATIENCE = float(os.environ.get("NIXL_FAST_TEST_PATIENCE", "60"))
"""Seconds that a test waits before it calls something lost."""


@dataclass(frozen=True)
class Spec:
    """One rank: equal block sizes on all sides, so that kernel blocks of one position pair one to one."""

    engine: str
    seed: int
    tp_rank: int = 0
    tp_size: int = 1
    heads: int = 4
    head_bytes: int = 64
    layers: str = "ff"
    """One letter per region: f full attention (group 0), m MLA (the last group)."""
    blocks: int = 64
    ratio: int = 1
    generation: int = 0

    @property
    def kinds(self) -> list[str]:
        return sorted(set(self.layers))

    @property
    def held_heads(self) -> range:
        """Each rank's share of the heads; where ranks outnumber heads, each head is on several ranks in a row."""
        if self.tp_size <= self.heads:
            each = self.heads // self.tp_size
            return range(self.tp_rank * each, (self.tp_rank + 1) * each)
        head = self.tp_rank * self.heads // self.tp_size
        return range(head, head + 1)

    def block_bytes(self, layer: int) -> int:
        return self.head_bytes * (len(self.held_heads) if self.layers[layer] == "f" else 3)

    def pattern(self, layer: int) -> Bytes:
        """What this rank's region of a layer holds at first, one row per kernel block."""
        if self.layers[layer] == "f":
            held = self.held_heads
            columns = np.arange(held.start * self.head_bytes, held.stop * self.head_bytes, dtype=np.uint32)
        else:
            columns = np.arange(3 * self.head_bytes, dtype=np.uint32)
        rows = np.arange(self.blocks, dtype=np.uint32)[:, None]
        with np.errstate(over="ignore"):
            mixed = (
                rows * np.uint32(2654435761)
                + columns[None, :] * np.uint32(2246822519)
                + np.uint32((self.seed * 3266489917 + layer * 668265263) & 0xFFFFFFFF)
            )
            mixed ^= mixed >> np.uint32(15)
            mixed *= np.uint32(2246822519)
            mixed ^= mixed >> np.uint32(13)
        out: Bytes = (mixed >> np.uint32(7)).astype(np.uint8)
        return out

    def layout(self, memory: Sequence[Bytes]) -> EngineLayout:
        kinds = {"f": GroupKind.FULL_ATTENTION, "m": GroupKind.MLA}
        return EngineLayout(
            self.engine,
            tuple(Group(kinds[kind], 16 * self.ratio, self.ratio) for kind in self.kinds),
            tuple(
                Region(
                    memory[layer].ctypes.data,
                    self.block_bytes(layer),
                    self.blocks,
                    groups=(self.kinds.index(kind),),
                )
                for layer, kind in enumerate(self.layers)
            ),
            tp_rank=self.tp_rank,
            tp_size=self.tp_size,
            num_kv_heads=self.heads,
            generation=self.generation,
        )

    def memory(self) -> list[Bytes]:
        return [self.pattern(layer) for layer in range(len(self.layers))]

    def wrong_bytes(
        self, memory: Sequence[Bytes], source: Spec | None, moves: Iterable[Move], torn: Iterable[Move] = ()
    ) -> int:
        """How many bytes of the whole memory are not what they have to be; torn moves may have happened in part."""
        wrong = 0
        done, perhaps = list(moves), list(torn)
        for layer, kind in enumerate(self.layers):
            expected = self.pattern(layer)
            if source is not None:
                # The source seen with this rank's heads: bytes are compared before any cut.
                theirs = replace(self, seed=source.seed, blocks=source.blocks).pattern(layer)
                pairs = [(src, dst) for group, src, dst in done if group == self.kinds.index(kind)]
                if pairs:
                    expected[[dst for _, dst in pairs]] = theirs[[src for src, _ in pairs]]
            differs = memory[layer] != expected
            if source is not None:
                for group, src, dst in perhaps:
                    if group == self.kinds.index(kind):
                        differs[dst] &= memory[layer][dst] != theirs[src]
            wrong += int(np.count_nonzero(differs))
        return wrong


def ranks(spec: Spec, size: int) -> list[Spec]:
    return [replace(spec, tp_rank=rank, tp_size=size) for rank in range(size)]


def moves_of(
    source: Spec, sink: Spec, remote: Sequence[Sequence[int]], local: Sequence[Sequence[int]], tokens: int | None = None
) -> list[Move]:
    """The kernel blocks that have to move, by position in the sequence; nothing cached."""
    moves = []
    for group, (theirs, ours) in enumerate(zip(remote, local, strict=True)):
        sources = [block * source.ratio + part for block in theirs for part in range(source.ratio)]
        sinks = [block * sink.ratio + part for block in ours for part in range(sink.ratio)]
        count = min(len(sources), len(sinks)) if tokens is None else -(-tokens // 16)
        moves += [(group, src, dst) for src, dst in list(zip(sources, sinks, strict=False))[:count]]
    return moves


def until(condition: Callable[[], Any], patience: float = PATIENCE, what: str = "") -> Any:
    """Waits until a condition is true and returns its value."""
    end = time.monotonic() + patience
    while not (value := condition()):
        if time.monotonic() > end:
            raise AssertionError(f"still waiting after {patience} s: {what or condition}")
        time.sleep(0.001)
    return value


class Inbox:
    """Collects a worker's results and insists that none comes twice."""

    def __init__(self, worker: TransferWorker) -> None:
        self.worker = worker
        self.results: dict[str, Result] = {}
        self.order: list[str] = []

    def collect(self) -> dict[str, Result]:
        for result in self.worker.poll():
            assert result.request_id not in self.results, f"second result: {result}"
            self.results[result.request_id] = result
            self.order.append(result.request_id)
        return self.results

    def wait(self, *names: str, patience: float = PATIENCE) -> list[Result]:
        until(lambda: self.collect().keys() >= set(names), patience, f"results of {names[:5]}")
        return [self.results[name] for name in names]

    def take(self, *names: str, patience: float = PATIENCE) -> list[Result]:
        """As `wait`, and makes the ids free for another use."""
        self.wait(*names, patience=patience)
        return [self.results.pop(name) for name in names]

    def stats(self) -> Stats:
        return self.worker.stats()


# ---- agents that are watched


class CountingAgent:
    """A real agent that counts what it has handed out, and records every notification it sends."""

    def __init__(self, name: str, slow: float = 0.0) -> None:
        self._real = default_agent(name)
        self._slow = slow
        self.handles = 0
        self.lists = 0
        self.sent: list[bytes] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def make_prepped_xfer(self, *args: Any) -> Any:
        handle = self._real.make_prepped_xfer(*args)
        self.handles += 1
        if args[5]:
            self.sent.append(args[5])
        return handle

    def transfer(self, handle: Any) -> Any:
        time.sleep(self._slow)
        return self._real.transfer(handle)

    def release_xfer_handle(self, handle: Any) -> Any:
        out = self._real.release_xfer_handle(handle)
        self.handles -= 1
        return out

    def prep_xfer_dlist(self, *args: Any) -> Any:
        self.lists += 1
        return _CountedList(self, self._real.prep_xfer_dlist(*args))


class _CountedList:
    def __init__(self, owner: CountingAgent, real: Any) -> None:
        self._owner, self._real = owner, real

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def release(self) -> None:
        self._real.release()
        self._owner.lists -= 1


# ---- ranks in processes of their own


class _Child:
    """What runs in a rank's process; every public method is a command."""

    def __init__(self, spec: Spec, options: dict[str, Any]) -> None:
        self.spec = spec
        self.memory = spec.memory()
        slow = options.pop("slow", 0.0)
        self.agents: list[CountingAgent] = []

        def make(name: str) -> CountingAgent:
            self.agents.append(CountingAgent(name, slow))
            return self.agents[-1]

        self.worker = TransferWorker(agent=make, **options)
        self.worker.register(spec.layout(self.memory), self.memory)
        self.worker.start()
        self.inbox = Inbox(self.worker)

    def address(self) -> tuple[str, int]:
        return self.worker.address

    def read(self, *requests: Request) -> None:
        for request in requests:
            self.worker.read(request)

    def write(self, *requests: Request) -> None:
        for request in requests:
            self.worker.write(request)

    def hold(self, *names: str, lease: float | None = None) -> None:
        for name in names:
            self.worker.hold(name, lease=lease)

    def expect(self, name: str, blocks: Sequence[Sequence[int]], lease: float | None = None) -> None:
        self.worker.expect(name, blocks, lease=lease)

    def cancel(self, *names: str) -> None:
        for name in names:
            self.worker.cancel(name)

    def connect(self, host: str, port: int) -> None:
        self.worker.connect(host, port)

    def results(self) -> dict[str, Result]:
        return self.inbox.collect()

    def order(self) -> list[str]:
        self.inbox.collect()
        return self.inbox.order

    def wait(self, *names: str, patience: float = PATIENCE) -> list[Result]:
        return self.inbox.wait(*names, patience=patience)

    def take(self, *names: str, patience: float = PATIENCE) -> list[Result]:
        return self.inbox.take(*names, patience=patience)

    def stats(self) -> Stats:
        return self.worker.stats()

    def wrong_bytes(self, source: Spec | None = None, moves: Sequence[Move] = (), torn: Sequence[Move] = ()) -> int:
        return self.spec.wrong_bytes(self.memory, source, moves, torn)

    def refill(self) -> None:
        """Makes the memory what it was at first."""
        for layer, array in enumerate(self.memory):
            array[:] = self.spec.pattern(layer)

    def generation(self) -> int:
        layout = self.worker._layout
        return layout.generation if layout else -1

    def snapshot(self) -> None:
        self.before = [array.copy() for array in self.memory]

    def changed_bytes(self) -> int:
        return sum(int(np.count_nonzero(old != new)) for old, new in zip(self.before, self.memory, strict=True))

    def block(self, layer: int, block: int) -> bytes:
        out: bytes = self.memory[layer][block].tobytes()
        return out

    def register_anew(self, seed: int) -> None:
        """New memory of another seed; the old one is overwritten, as an engine that reuses it would."""
        self.old = self.memory
        self.spec = replace(self.spec, seed=seed)
        self.memory = self.spec.memory()
        self.worker.register(self.spec.layout(self.memory), self.memory)

    def scribble_old(self) -> None:
        for array in self.old:
            array[:] = 0xEE

    def sent(self) -> list[bytes]:
        return [message for agent in self.agents for message in agent.sent]

    def figures(self) -> dict[str, int]:
        with open("/proc/self/statm", encoding="ascii") as statm:
            pages = int(statm.read().split()[1])
        return {
            "rss_kib": pages * os.sysconf("SC_PAGE_SIZE") // 1024,
            "threads": len(os.listdir("/proc/self/task")),
            "fds": len(os.listdir("/proc/self/fd")),
            "handles": sum(agent.handles for agent in self.agents),
            "lists": sum(agent.lists for agent in self.agents),
        }

    def close(self) -> dict[str, int]:
        self.worker.close()
        self.inbox.collect()
        return self.figures()


def _child_main(pipe: Any) -> None:
    """Serves one rank after the other; starting Python and loading NIXL takes longer than most tests."""
    child: _Child | None = None
    try:
        while True:
            if not pipe.poll(0.002):
                if child is not None:
                    child.inbox.collect()
                continue
            name, args, kwargs = pipe.recv()
            try:
                if name == "open":
                    value, child = None, _Child(*args)
                elif name == "end":
                    if child is not None:
                        child.worker.close()
                    value = child = None
                    gc.collect()  # the agent and its threads
                else:
                    value = getattr(child, name)(*args, **kwargs)
                pipe.send((True, value))
            except Exception as error:
                pipe.send((False, f"{type(error).__name__}: {error}"))
    except (EOFError, KeyboardInterrupt, BrokenPipeError):
        os._exit(0)


class _Host:
    """A process that ranks live in."""

    idle: ClassVar[list[_Host]] = []

    def __init__(self) -> None:
        spawn = multiprocessing.get_context("spawn")
        self.pipe, theirs = spawn.Pipe()
        self.process = spawn.Process(target=_child_main, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()

    @classmethod
    def take(cls) -> _Host:
        return cls.idle.pop() if cls.idle else cls()

    @classmethod
    def end_all(cls) -> None:
        while cls.idle:
            cls.idle.pop().end()

    def end(self) -> None:
        with suppress(ProcessLookupError):
            self.process.kill()
        self.process.join(PATIENCE)
        assert not self.process.is_alive()
        self.process.close()
        self.pipe.close()


atexit.register(_Host.end_all)


class Peer:
    """A rank in another process."""

    def __init__(self, spec: Spec, **options: Any) -> None:
        self.spec = spec
        self._host = _Host.take()
        self._host.pipe.send(("open", (spec, options), {}))
        self._started = False
        self._hurt = False
        self._address: tuple[str, int] | None = None

    def ready(self) -> Peer:
        if not self._started:
            self._answer(PATIENCE)
            self._started = True
        return self

    @property
    def address(self) -> tuple[str, int]:
        if self._address is None:
            self._address = self.call("address")
        return self._address

    def call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        self.ready()
        self._host.pipe.send((name, args, kwargs))
        return self._answer(3 * PATIENCE)

    def _answer(self, patience: float) -> Any:
        assert self._host.pipe.poll(patience), f"{self.spec.engine} does not answer"
        good, value = self._host.pipe.recv()
        assert good, f"{self.spec.engine}: {value}"
        return value

    def kill(self) -> None:
        self._hurt = True
        self._host.process.kill()
        self._host.process.join(PATIENCE)

    def stop(self) -> None:
        self._hurt = True
        os.kill(self._host.process.pid or 0, signal.SIGSTOP)

    def resume(self) -> None:
        os.kill(self._host.process.pid or 0, signal.SIGCONT)

    def end(self, *, reuse: bool) -> None:
        """Ends the rank; its process serves another one if nothing has gone wrong."""
        if reuse and not self._hurt:
            self.call("end")
            _Host.idle.append(self._host)
        else:
            self._host.end()


class Rig:
    """The peers of one test, killed at its end if it fails or has hurt them."""

    def __init__(self) -> None:
        self.peers: list[Peer] = []

    def peer(self, spec: Spec, **options: Any) -> Peer:
        self.peers.append(Peer(spec, **options))
        return self.peers[-1]

    def start(self, *specs: Spec, **options: Any) -> list[Peer]:
        """Ranks that start side by side."""
        return [peer.ready() for peer in [self.peer(spec, **options) for spec in specs]]

    def end(self, *, reuse: bool) -> None:
        for peer in self.peers:
            peer.end(reuse=reuse)


@contextmanager
def rig() -> Iterator[Rig]:
    made = Rig()
    good = False
    try:
        yield made
        good = True
    finally:
        made.end(reuse=good)


def request(
    name: str,
    producer: str,
    local: Sequence[Sequence[int]],
    remote: Sequence[Sequence[int]],
    addresses: Iterable[tuple[str, int]] = (),
    *,
    remote_name: str | None = None,
    tokens: int | None = None,
    computed: Sequence[int | None] | None = None,
) -> Request:
    return Request(
        request_id=name,
        peer=producer,
        remote_request_id=remote_name or f"{name}@{producer}",
        local_block_ids=local,
        remote_block_ids=remote,
        num_tokens=tokens,
        num_computed_blocks=computed,
        addresses=tuple(addresses),
    )


# ---- a NIXL in memory, whose faults and states a test scripts


@dataclass(eq=False)
class FakeTransfer:
    """A transfer that moves its bytes when the test says so; until then it is under way."""

    agent: FakeAgent
    copies: list[tuple[int, int, int]]
    """Source, destination, length."""
    target: str
    notification: bytes
    reads: bool
    state: str = "INIT"
    released: bool = False

    @property
    def is_moving(self) -> bool:
        return self.state == "PROC"

    def finish(self) -> None:
        with self.agent.fabric.lock:
            if self.state != "PROC":
                return
            for source, sink, size in self.copies:
                ctypes.memmove(sink, source, size)
            self.state = "DONE"
            if self.notification:
                self.agent.fabric.deliver(self.agent.name, self.target, self.notification)

    def touches(self, start: int, end: int) -> bool:
        return any((at < end and start < at + size) for source, sink, size in self.copies for at in (source, sink))


@dataclass(eq=False)
class FakeList:
    """A prepared list."""

    agent: FakeAgent
    owner: str
    descriptors: list[tuple[int, int]]
    released: bool = False

    def release(self) -> None:
        self.agent.fault("release_dlist_handle")
        with self.agent.fabric.lock:
            if self.released:
                self.agent.fabric.crimes.append(f"{self.agent.name}: list released twice")
            self.released = True


@dataclass(eq=False)
class Fabric:
    """What connects the fake agents of one test, and what they did."""

    manual: bool = False
    """Whether transfers wait for the test to finish them."""
    strided: bool = True
    """Whether lists of five columns are taken (NIXL 1.5 and later)."""
    lock: threading.RLock = field(default_factory=threading.RLock)
    agents: dict[str, FakeAgent] = field(default_factory=dict)
    transfers: list[FakeTransfer] = field(default_factory=list)
    lists: list[FakeList] = field(default_factory=list)
    registrations: Counter[str] = field(default_factory=Counter)
    crimes: list[str] = field(default_factory=list)
    sent: list[tuple[str, str, bytes]] = field(default_factory=list)

    def __call__(self, name: str) -> FakeAgent:
        with self.lock:
            agent = self.agents[name] = FakeAgent(self, name)
            return agent

    def deliver(self, sender: str, target: str, message: bytes) -> None:
        with self.lock:
            self.sent.append((sender, target, message))
            if target in self.agents:
                self.agents[target].inbox.append((sender, message))

    def moving(self) -> list[FakeTransfer]:
        with self.lock:
            return [transfer for transfer in self.transfers if transfer.is_moving]

    def finish_all(self) -> int:
        moving = self.moving()
        for transfer in moving:
            transfer.finish()
        return len(moving)

    def of(self, engine: str) -> FakeAgent:
        """The agent that was made last for an engine."""
        with self.lock:
            return next(agent for name, agent in reversed(self.agents.items()) if name.startswith(f"{engine}-"))

    def assert_clean(self, *, leaked: int = 0) -> None:
        """After all workers are closed: everything was given back, and exactly once."""
        assert self.crimes == []
        assert sum(not transfer.released for transfer in self.transfers) == leaked
        assert [each for each in self.lists if not each.released] == []
        assert {name: count for name, count in self.registrations.items() if count} == {}


class FakeAgent:
    """The part of nixl_agent that an endpoint uses."""

    def __init__(self, fabric: Fabric, name: str) -> None:
        self.fabric, self.name = fabric, name
        self.inbox: deque[tuple[str, bytes]] = deque()
        self.faults: dict[str, deque[Any]] = {}
        self.calls: Counter[str] = Counter()
        self.peers: set[str] = set()

    def plan(self, method: str, *outcomes: Any) -> None:
        """The next calls of a method raise these exceptions, or return these states; None lets a call pass."""
        self.faults.setdefault(method, deque()).extend(outcomes)

    def fault(self, method: str) -> Any:
        self.calls[method] += 1
        if self.faults.get(method):
            outcome = self.faults[method].popleft()
            if isinstance(outcome, BaseException):
                raise outcome
            return outcome
        return None

    def register_memory(self, rows: Any, mem_type: str) -> Any:
        self.fault("register_memory")
        self.fabric.registrations[self.name] += 1
        return (rows, mem_type)

    def deregister_memory(self, registered: Any) -> None:
        self.fault("deregister_memory")
        self.fabric.registrations[self.name] -= 1

    def get_agent_metadata(self) -> bytes:
        self.fault("get_agent_metadata")
        return self.name.encode()

    def add_remote_agent(self, metadata: bytes) -> bytes:
        self.fault("add_remote_agent")
        if metadata.decode(errors="replace") not in self.fabric.agents:
            raise RuntimeError("NIXL_ERR_NOT_FOUND")
        self.peers.add(metadata.decode())
        return metadata

    def remove_remote_agent(self, name: str) -> None:
        self.fault("remove_remote_agent")
        self.peers.discard(name)

    def prep_xfer_dlist(self, owner: str, table: NDArray[np.uint64], mem_type: str) -> FakeList:
        self.fault("prep_xfer_dlist")
        rows = table.tolist()
        if table.shape[1] == 5:
            if not self.fabric.strided:
                raise ValueError("descriptor list must be N x 3")
            found = [(addr + at * stride, size) for addr, size, _, stride, count in rows for at in range(count)]
        else:
            found = [(addr, size) for addr, size, _ in rows]
        made = FakeList(self, owner, found)
        with self.fabric.lock:
            self.fabric.lists.append(made)
        return made

    def make_prepped_xfer(self, operation: str, local: Any, mine: Any, remote: Any, theirs: Any, message: bytes) -> Any:
        self.fault("make_prepped_xfer")
        if local.released or remote.released:
            self.fabric.crimes.append(f"{self.name}: transfer from released lists")
        if remote.owner not in self.peers:
            raise RuntimeError("NIXL_ERR_NOT_FOUND")
        copies = []
        for ours, other in zip(mine.tolist(), theirs.tolist(), strict=True):
            (here, size), (there, length) = local.descriptors[ours], remote.descriptors[other]
            assert size == length
            copies.append((there, here, size) if operation == "READ" else (here, there, size))
        made = FakeTransfer(self, copies, remote.owner, message, operation == "READ")
        with self.fabric.lock:
            self.fabric.transfers.append(made)
        return made

    def transfer(self, handle: FakeTransfer) -> str:
        scripted = self.fault("transfer")
        if handle.released or handle.state != "INIT":
            self.fabric.crimes.append(f"{self.name}: posted in state {handle.state}")
        if scripted:
            handle.state = str(scripted)
            return str(scripted)
        handle.state = "PROC"
        if not self.fabric.manual:
            handle.finish()
        return handle.state

    def check_xfer_state(self, handle: FakeTransfer) -> str:
        scripted = self.fault("check_xfer_state")
        if handle.released:
            self.fabric.crimes.append(f"{self.name}: checked after release")
        if scripted:
            handle.state = str(scripted)
        return handle.state

    def release_xfer_handle(self, handle: FakeTransfer) -> None:
        self.fault("release_xfer_handle")
        with self.fabric.lock:
            if handle.released:
                self.fabric.crimes.append(f"{self.name}: transfer released twice")
            handle.released = True
            if handle.state == "PROC":
                handle.state = "STOPPED"

    def send_notif(self, target: str, message: bytes) -> None:
        self.fault("send_notif")
        self.fabric.deliver(self.name, target, message)

    def get_new_notifs(self) -> dict[str, list[bytes]]:
        self.fault("get_new_notifs")
        out: dict[str, list[bytes]] = {}
        with self.fabric.lock:
            while self.inbox:
                sender, message = self.inbox.popleft()
                out.setdefault(sender, []).append(message)
        return out

    def get_xfer_telemetry(self, handle: FakeTransfer) -> Any:
        self.fault("get_xfer_telemetry")
        raise RuntimeError("NIXL_ERR_NO_TELEMETRY")


class Engine:
    """A rank in this process, on a fake or a real agent."""

    def __init__(self, spec: Spec, agent: Callable[[str], Any] | None = None, **options: Any) -> None:
        self.spec = spec
        self.memory = spec.memory()
        if agent is not None:
            options["agent"] = agent
        self.worker = TransferWorker(**options)
        self.worker.register(spec.layout(self.memory), self.memory)
        self.inbox = Inbox(self.worker)

    def __enter__(self) -> Engine:
        self.worker.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.worker.close()
        assert self.worker._thread is None or not self.worker._thread.is_alive()

    @property
    def address(self) -> tuple[str, int]:
        return self.worker.address

    def register_anew(self, seed: int) -> list[Bytes]:
        """New memory of another seed; returns the old one."""
        old, self.spec = self.memory, replace(self.spec, seed=seed)
        self.memory = self.spec.memory()
        self.worker.register(self.spec.layout(self.memory), self.memory)
        return old

    def wrong_bytes(self, source: Spec | None = None, moves: Iterable[Move] = ()) -> int:
        return self.spec.wrong_bytes(self.memory, source, moves)

    def addresses_of(self, blocks: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
        """Byte ranges of logical blocks, group by group."""
        out = []
        for layer, kind in enumerate(self.spec.layers):
            size = self.spec.block_bytes(layer) * self.spec.ratio
            base = self.memory[layer].ctypes.data
            out += [(base + block * size, base + (block + 1) * size) for block in blocks[self.spec.kinds.index(kind)]]
        return out
