"""A worker that an engine embeds: it owns the NIXL agent and takes every transfer from request to result.

The engine's thread hands over requests and collects results; nothing it calls waits for NIXL, a peer, or the size of a
request. One thread of the worker owns the agent: planning, making, posting, polling, notifications and the handshake
happen there.

Who may touch which memory, and when:

- A consumer that reads first tells the producer (``Begin``), and reports success only if the producer has answered that
  it held the blocks (``Held``) for the whole of the transfer and under the registration the plan was made for.
- Either side posts its first byte only after every rank of the peer has answered, while at least half a lease of that
  promise is left; its ``Done`` counts only with the nonce of that answer.
- A transfer that may still move bytes has no result yet: its blocks are not free.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import logging
import math
import os
import secrets
import threading
import time
import uuid
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple, Self

import msgspec
import numpy as np
from numpy.typing import NDArray

from nixl_fast import wire
from nixl_fast._native import Pairing
from nixl_fast.agent import Endpoint, Memory, Posted, Prepared, default_agent, pieces
from nixl_fast.errors import GeometryError, NixlFastError, StalePlanError, TransferError
from nixl_fast.layout import EngineLayout
from nixl_fast.plan import (
    BlockIds,
    Direction,
    ExpandRule,
    RemoteBlocks,
    check_pair,
    plan_peer,
    readers,
    sources,
)
from nixl_fast.stats import Stats

__all__ = [
    "ExpandRule",
    "Kind",
    "Memory",
    "RemoteBlocks",
    "Request",
    "Result",
    "Stats",
    "Status",
    "Timings",
    "TransferWorker",
]

try:
    import zmq
except ImportError as missing:  # pragma: no cover - the extra is installed wherever tests run
    raise ImportError("nixl_fast.worker needs pyzmq; pip install 'nixl-fast[nixl]'") from missing

log = logging.getLogger("nixl_fast.worker")

PIECE = 16_384
"""Descriptors per NIXL transfer. A longer request is cut, so that its first bytes move while the rest is made, and so
that other requests get their turn; benches/README.md has the measurement."""

# Keeps the interpreter lock, unlike os.eventfd_write: the thread that it wakes up would take the lock at once, and the
# engine's would wait for it in the middle of a call.
_eventfd_write = ctypes.PyDLL(None).eventfd_write
_eventfd_write.argtypes = (ctypes.c_int, ctypes.c_uint64)

_SPIN = 1e-3  # seconds after the last event during which the thread does not sleep while transfers are under way
_NAP = 50e-6  # seconds between looks at NIXL after that
_IDLE = 50  # milliseconds to wait for a message when nothing is under way
_MAX_RANKS = 4096  # of one peer
_MAX_CLIENTS = 4096  # peers that are remembered
_MAX_REASON = 4096  # characters of a refusal, which quotes the peer
_MAX_SPENT = 65_536  # promises that are remembered after their Done
_SIZES = ("tp_size", "pp_size", "dcp_size", "num_kv_heads")  # what all ranks of an engine say alike
_WITHDRAWAL = 0.1  # seconds between taking a promise back and giving the memory up
_BURST = 256  # messages taken from one socket before the others get their turn


class Kind(StrEnum):
    """What was asked of the worker."""

    READ = "read"
    """Pull a request's blocks from the producer."""
    WRITE = "write"
    """Push a request's blocks to the consumer."""
    HOLD = "hold"
    """Keep a request's blocks until its consumers have read them."""
    EXPECT = "expect"
    """Wait until the producers have written a request's blocks."""


class Status(StrEnum):
    """How a request ended."""

    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"
    """A lease ran out before every rank of the peer had notified. The engine may use the blocks again: a reader that
    still reads them reports no success. An expectation that was begun waits half a lease more, since a writer posts
    nothing in the last half of a promise; but bytes that it posted before and that take longer than that, or a writer
    whose process was frozen just before a post and wakes up after it, may still arrive."""


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One transfer. Block ids must not be changed before its result.

    Args:
        request_id: This engine's name for the request, unique among the requests without a result.
        peer: Engine id of the peer.
        remote_request_id: The peer's name for the request; every notification carries it. Unique, too, among the requests
            to this peer in this direction that have no result yet.
        local_block_ids: This rank's logical block ids, one list per group.
        remote_block_ids: The peer's logical block ids, one list per group, the same on all its ranks.
        num_tokens: As for `TransferPlan.pair`.
        num_computed_blocks: As for `TransferPlan.pair`.
        addresses: ``(host, port)`` of every rank of the peer, to connect to those that are not connected yet.
    """

    request_id: str
    peer: str
    remote_request_id: str
    local_block_ids: Sequence[BlockIds]
    remote_block_ids: Sequence[BlockIds]
    num_tokens: int | None = None
    num_computed_blocks: Sequence[int | None] | None = None
    addresses: tuple[tuple[str, int], ...] = ()


class Timings(msgspec.Struct, frozen=True):
    """Where a transfer's time went, in seconds."""

    queued: float = 0.0
    """From the call to the start of planning: waiting for the handshake or for other requests."""
    plan: float = 0.0
    """Making plans with a new peer, announcing the request to it, and pairing."""
    make: float = 0.0
    post: float = 0.0
    transfer: float = 0.0
    """From the first post to the end of the last transfer."""


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """How one request ended; there is exactly one per request.

    Args:
        request_id: As in the request.
        kind: What was asked.
        status: How it ended. No byte of the request moves any more, with two exceptions: an expectation that EXPIRED
            (see there), and an ``error`` that says that bytes may still move, where NIXL could not stop a transfer.
        error: Why it failed; a `NixlFastError`.
        invalid: ``(group, block)`` of the consumer's blocks that hold no valid data. Empty unless it failed or was
            cancelled.
        untransferred: Per group the consumer's units that the request deliberately did not fill, int32 arrays.
        num_bytes: Bytes moved.
        num_descs: Descriptors.
        num_runs: What NIXL merges them to, as predicted.
        timings: Where the time went.
    """

    request_id: str
    kind: Kind
    status: Status
    error: NixlFastError | None = None
    invalid: tuple[tuple[int, int], ...] = ()
    untransferred: tuple[NDArray[np.int32], ...] = ()
    num_bytes: int = 0
    num_descs: int = 0
    num_runs: int = 0
    timings: Timings = Timings()

    @property
    def ok(self) -> bool:
        """Whether the blocks hold what was asked for (or, for a hold, have been read)."""
        return self.status is Status.DONE


@dataclass(slots=True, eq=False)
class _Link:
    """A connection to one rank of a peer."""

    address: tuple[str, int]
    socket: Any
    deadline: float
    heard: float
    pinged: float = 0.0
    welcome: wire.Welcome | None = None
    error: NixlFastError | None = None
    removed: bool = False
    """Whether NIXL has already forgotten this peer."""

    @property
    def engine_id(self) -> str | None:
        return self.welcome.layout.engine_id if self.welcome else None

    def __str__(self) -> str:
        return f"{self.address[0]}:{self.address[1]}"


@dataclass(slots=True, eq=False)
class _Plans:
    """The prepared plans with one peer in one direction."""

    ranks: frozenset[_Link]
    prepared: list[tuple[Prepared, _Link]]
    notify_only: list[_Link]

    def links(self) -> list[_Link]:
        return [link for _, link in self.prepared] + self.notify_only


class _Piece(NamedTuple):
    """A part of a request that becomes one NIXL transfer (one per memory type)."""

    prepared: Prepared
    link: _Link
    ids: list[tuple[NDArray[np.int32], NDArray[np.int32]]]
    attach: bool
    """Whether the notification can travel behind these bytes, since they are all of the link's."""


class _Moving(NamedTuple):
    posted: Posted
    link: _Link


@dataclass(slots=True, eq=False)
class _Job:
    """A read or write on its way."""

    request: Request
    kind: Kind
    submitted: float
    cancelled: bool = False
    error: NixlFastError | None = None
    waiting: list[_Link] | None = None
    plans: _Plans | None = None
    pairings: list[Pairing] = field(default_factory=list)
    todo: deque[_Piece] = field(default_factory=deque)
    moving: list[_Moving] = field(default_factory=list)
    told: set[_Link] = field(default_factory=set)
    held: dict[_Link, float] = field(default_factory=dict)
    """Until when each rank of the peer has promised to hold the blocks, on this machine's clock."""
    nonces: dict[_Link, int] = field(default_factory=dict)
    """Which promise that is."""
    ended: set[_Link] = field(default_factory=set)
    """Who was told behind its last byte, within its promise: nothing more is asked of it."""
    begun: float = -math.inf
    first_begun: float = -math.inf
    give_up: float = 0.0
    posted_at: float = 0.0
    moved_at: float = 0.0
    ended_at: float = 0.0
    timings: Timings = field(default_factory=Timings)

    @property
    def direction(self) -> Direction:
        return Direction.READ if self.kind is Kind.READ else Direction.WRITE

    @property
    def consumer_ids(self) -> Sequence[BlockIds]:
        return self.request.local_block_ids if self.kind is Kind.READ else self.request.remote_block_ids

    def is_held(self, until: float) -> bool:
        """Whether every rank of the peer has promised to hold the blocks until then or longer."""
        return all(self.held.get(link, 0.0) >= until for link in self.pending())

    def may_post(self, now: float) -> bool:
        """Whether every rank has promised to hold the blocks, and for at least half a lease from now."""
        return all(
            link in self.nonces and link.welcome and self.held[link] - now >= link.welcome.lease / 2
            for link in self.pending()
        )

    def pending(self) -> list[_Link]:
        """The ranks of the peer whose promise is still needed."""
        return [link for link in self.plans.links() if link not in self.ended] if self.plans else []

    def spend(self, **seconds: float) -> None:
        """Adds to the timings."""
        spent = {name: getattr(self.timings, name) + value for name, value in seconds.items()}
        self.timings = msgspec.structs.replace(self.timings, **spent)


@dataclass(slots=True, eq=False)
class _Wait:
    """A hold or an expectation: blocks that peers may touch until they have notified."""

    request_id: str
    kind: Kind
    deadline: float
    blocks: Sequence[BlockIds] = ()
    cancelled: bool = False
    ok: bool = True
    engine: str | None = None
    """The first that began it: nobody else may."""
    awaited: frozenset[tuple[int, int]] = frozenset()
    """Stage and rank of those of that engine that have to notify."""
    begun: dict[tuple[str, int, int], int] = field(default_factory=dict)
    """The nonce of the promise that each rank was given."""
    layouts: dict[tuple[int, int], EngineLayout] = field(default_factory=dict)
    done: set[tuple[str, int, int]] = field(default_factory=set)


class _Parting(NamedTuple):
    """A Done that waits for the nonce of its promise, since its job ended before that was known."""

    sent: float
    ok: bool
    deadline: float


class TransferWorker:
    """Owns a rank's NIXL agent, registered memory, handshakes and transfers.

    A worker is used as a context manager or with `start` and `close`. All methods but `close` are for one thread, the
    engine's; none of them waits (`start` waits once for the agent).

    Args:
        host: Address to listen on; the default reaches only this machine.
        port: Port to listen on; 0 lets the system choose, see `address`.
        lease: Seconds that blocks are held for a peer after its last sign of life about the request.
        peer_timeout: Seconds of silence after which a peer that has requests under way is given up; a handshake may take
            twice as long.
        agent: Makes the NIXL agent from its name; the default is UCX with `nixl_fast.agent.UCX_THREADS` threads.
    """

    def __init__(
        self,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        lease: float = 480.0,
        peer_timeout: float = 5.0,
        agent: Callable[[str], Any] = default_agent,
    ) -> None:
        if lease <= 0 or peer_timeout <= 0:
            raise GeometryError(f"lease {lease} and peer_timeout {peer_timeout} must be above 0 seconds")
        self._host, self._port = host, port
        self._lease, self._peer_timeout = lease, peer_timeout
        self._make_agent = agent
        self._instance = uuid.uuid4().hex
        self._layout: EngineLayout | None = None
        self._memory: tuple[Memory, ...] = ()
        self._keep: Any = None
        self._stats = Stats()
        # Between the two threads: two deques, a wake-up, and a dict that only the engine's thread changes.
        self._commands: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self._results: deque[Result] = deque()
        self._live: dict[str, Kind] = {}
        self._thread: threading.Thread | None = None
        self._ready = threading.Event()
        self._wake = -1
        self._closing = False
        self._dead: NixlFastError | None = None
        # The worker thread's own.
        self._endpoint: Endpoint | None = None
        self._links: dict[tuple[str, int], _Link] = {}
        self._plans: dict[tuple[str, Direction], _Plans] = {}
        self._leaving: list[_Link] = []
        self._retired: list[_Plans] = []
        self._clients: dict[bytes, EngineLayout] = {}
        self._counts: dict[tuple[str, Kind], frozenset[tuple[int, int]]] = {}
        self._covered: dict[str, tuple[tuple[EngineLayout, ...], GeometryError | None]] = {}
        self._partings: dict[tuple[_Link, str], _Parting] = {}
        self._spent: dict[int, None] = {}
        self._jobs: dict[str, _Job] = {}
        self._names: dict[tuple[str, str, Kind], str] = {}
        self._waits: dict[str, _Wait] = {}
        self._registering: tuple[EngineLayout, tuple[Memory, ...], Any] | None = None
        self._deferred: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self._later: list[tuple[_Link, wire.Welcome]] = []
        self._metadata = b""
        self._busy_until = 0.0
        self._watched = 0.0

    # ---- the engine's side

    def register(self, layout: EngineLayout, memory: Sequence[Any] = ()) -> None:
        """Says what this rank has; before `start`, and again whenever its memory is allocated anew.

        A second call waits (in the worker's thread) until nothing moves and no peer uses a hold or expectation, ends
        the others as stale, and gives the registration a higher generation: peers make new plans. What is asked for after
        it is about the new memory and waits for it; ``stats().generation`` says when it is in force. If NIXL or the layout
        refuses it, the worker ends: the old memory has been given back by then.

        Args:
            layout: The rank's layout, with real addresses.
            memory: What to register: `Memory` ranges, or objects of the buffer protocol (kept alive), one or a list of
                them; default: the regions of the layout.

        Raises:
            GeometryError: A region that lies in none of the ranges (from `start`; later it ends the worker and is every
                request's error).
        """
        if isinstance(memory, Memory) or not isinstance(memory, list | tuple):
            memory = (memory,)
        ranges = tuple(_memory(each) for each in memory)
        if self._thread is None:
            self._layout, self._memory, self._keep = layout, ranges, tuple(memory)
        else:
            self._submit(self._do_register, layout, ranges, tuple(memory))

    def start(self) -> Self:
        """Starts the thread, makes the agent and listens.

        Raises:
            GeometryError: `register` was not called, or its layout lies outside its memory.
            TransferError: NIXL or the network refuses.
        """
        if self._layout is None:
            raise GeometryError("register(layout) comes before start()")
        if self._thread is not None:
            raise TransferError("the worker has been started before")
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="nixl-fast-worker", daemon=True)
        self._thread.start()
        _running.add(self)
        self._ready.wait()
        if self._dead is not None:
            self.close()
            raise self._dead
        return self

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def address(self) -> tuple[str, int]:
        """Where peers connect to."""
        return self._host, self._port

    def connect(self, host: str, port: int) -> None:
        """Begins the handshake with one rank of a peer; `stats` says when it is connected.

        Not needed for requests that carry ``addresses``.
        """
        self._submit(self._do_connect, _checked_address((host, port)))

    def read(self, request: Request) -> None:
        """Pulls a request's blocks; this rank is the consumer.

        Raises:
            TransferError: The request id is in use, or the worker is closed or has died.
        """
        self._begin(request.request_id, Kind.READ, self._do_transfer, request, Kind.READ, time.perf_counter())

    def write(self, request: Request) -> None:
        """Pushes a request's blocks; this rank is the producer.

        Raises:
            TransferError: As `read`.
        """
        self._begin(request.request_id, Kind.WRITE, self._do_transfer, request, Kind.WRITE, time.perf_counter())

    def hold(self, request_id: str, *, lease: float | None = None) -> None:
        """Keeps a request's blocks readable until every consumer rank has notified; call it before a peer may read.

        A read that fails notifies too: the blocks are given back, and another try needs another hold. A hold is for the
        first engine that begins to read it.

        Args:
            request_id: What the peer's ``remote_request_id`` will say.
            lease: Seconds until the first sign of life; default: the worker's lease.

        Raises:
            TransferError: As `read`.
        """
        self._begin(request_id, Kind.HOLD, self._do_wait, request_id, Kind.HOLD, lease or self._lease, ())

    def expect(self, request_id: str, block_ids: Sequence[BlockIds], *, lease: float | None = None) -> None:
        """Lets producers write a request's blocks, until every producer rank has notified.

        An expectation is for the first engine that begins to write it, and fails if that engine's ranks leave out a byte.

        Args:
            request_id: What the peer's ``remote_request_id`` will say.
            block_ids: This rank's logical block ids, one list per group: what a failure reports as invalid.
            lease: Seconds until the first sign of life; default: the worker's lease.

        Raises:
            TransferError: As `read`.
        """
        self._begin(request_id, Kind.EXPECT, self._do_wait, request_id, Kind.EXPECT, lease or self._lease, block_ids)

    def cancel(self, request_id: str) -> None:
        """Asks for a request to end; its result follows once nothing moves any more, and is the only one.

        A hold or expectation that a peer has begun to use stays until that peer has notified or its lease has run out.
        An unknown or finished request is ignored, as is any after `close`.
        """
        if request_id in self._live:
            with contextlib.suppress(NixlFastError):  # a worker that has ended gives every request its result
                self._submit(self._do_cancel, request_id)

    def poll(self) -> list[Result]:
        """The results since the last call."""
        out = []
        gone = self._thread is not None and not self._thread.is_alive()
        while self._results:
            result = self._results.popleft()
            del self._live[result.request_id]
            out.append(result)
        if gone and self._live:  # handed over in the moment in which the thread ended
            error = self._dead or TransferError("the worker is closed")
            out += [
                Result(request_id=name, kind=kind, status=Status.FAILED, error=error)
                for name, kind in self._live.items()
            ]
            self._live.clear()
        return out

    def stats(self) -> Stats:
        """A copy of the statistics."""
        copied: Stats = msgspec.convert(msgspec.to_builtins(self._stats), Stats)
        copied.live = len(self._live)
        return copied

    def close(self) -> None:
        """Ends every request, waits for what NIXL cannot stop, and releases everything.

        A second call waits for the first, or goes on where an interrupt has ended it.

        Peers that are using held blocks are told that these are gone, so that they report no success with them.

        Requests that had no result fail with `TransferError`; `poll` still returns them.
        """
        if self._thread is None:
            return
        if not self._closing:
            self._closing = True
            self._wake_up()
        self._thread.join()
        wake, self._wake = self._wake, -1
        if wake >= 0:
            os.close(wake)

    def _begin(self, request_id: str, kind: Kind, command: Callable[..., None], *args: Any) -> None:
        names = (args[0].peer, args[0].remote_request_id) if isinstance(args[0], Request) else ()
        for address in args[0].addresses if names else ():
            _checked_address(address)
        for name in (request_id, *names):
            try:
                name.encode()
            except (AttributeError, UnicodeEncodeError):
                raise TransferError(f"request and engine ids are strings that can be sent, got {name!r}") from None
        if request_id in self._live:
            raise TransferError(f"request id {request_id!r} is in use")
        self._submit(command, *args)
        self._live[request_id] = kind

    def _submit(self, command: Callable[..., None], *args: Any) -> None:
        if self._dead is not None:
            raise self._dead
        if self._thread is None or self._closing:
            raise TransferError("the worker is not running")
        self._commands.append((command, args))
        self._wake_up()

    def _wake_up(self) -> None:
        _eventfd_write(self._wake, 1)

    # ---- the worker's thread

    def _run(self) -> None:
        context = zmq.Context()
        try:
            self._listen(context)
            self._ready.set()
            while not self._closing:
                self._turn()
            self._shut_down()
        except NixlFastError as error:
            self._die(error)
        except (SystemExit, KeyboardInterrupt):
            raise
        except BaseException as error:  # a bug, or a panic of Rust, must not leave requests without a result
            log.exception("worker thread died")
            self._die(TransferError(f"the worker thread died: {error!r}"))
        finally:
            if self._endpoint is not None and not any(job.moving for job in self._jobs.values()):
                self._quietly(self._endpoint.deregister)
            context.destroy(linger=100)
            self._ready.set()

    def _listen(self, context: Any) -> None:
        layout = self._the_layout
        self._endpoint = Endpoint(
            f"{layout.engine_id}-{layout.pp_rank}-{layout.tp_rank}-{self._instance}", self._make_agent
        )
        self._endpoint.register(layout, self._memory)
        self._metadata = self._endpoint.metadata()
        self._stats.generation = layout.generation
        self._context = context
        self._poller = zmq.Poller()
        self._server = self._socket(zmq.ROUTER)
        self._server.setsockopt(zmq.ROUTER_MANDATORY, 1)  # a send says whether the client has gone
        try:
            if self._port:
                self._server.bind(f"tcp://{self._host}:{self._port}")
            else:
                self._port = self._server.bind_to_random_port(f"tcp://{self._host}")
        except zmq.ZMQError as error:
            raise TransferError(f"cannot listen on {self._host}:{self._port}: {error}") from None
        self._poller.register(self._wake, zmq.POLLIN)

    def _socket(self, kind: int) -> Any:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, 100)
        socket.setsockopt(zmq.MAXMSGSIZE, wire.MAX_MESSAGE_BYTES)
        if kind == zmq.DEALER:
            socket.setsockopt(zmq.SNDHWM, 0)  # a Done that is dropped would cost the peer a lease
        self._poller.register(socket, zmq.POLLIN)
        return socket

    @property
    def _the_layout(self) -> EngineLayout:
        if self._layout is None:
            raise GeometryError("register(layout) comes before start()")
        return self._layout

    @property
    def _nixl(self) -> Endpoint:
        if self._endpoint is None:
            raise TransferError("the worker is not running")
        return self._endpoint

    def _poll(self, now: float) -> list[tuple[Any, int]]:
        """Messages that are there, waiting for them as long as nothing else can be missed."""
        if any(job.moving or (job.todo and job.may_post(now)) for job in self._jobs.values()):
            if now > self._busy_until:
                time.sleep(_NAP)
            return self._poller.poll(0)
        # Notifications of NIXL have no file descriptor to wait for.
        return self._poller.poll(1 if self._jobs or self._waits else _IDLE)

    def _turn(self) -> None:
        """One look at everything."""
        now = time.monotonic()
        ready = self._poll(now)
        if ready:
            self._busy_until = now + _SPIN
        sockets = {socket for socket, _ in ready}
        if self._wake in sockets:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._wake)
        self._obey()
        if self._server in sockets:
            self._serve()
        for link in list(self._links.values()):
            if link.socket in sockets:
                self._hear(link)
        if self._waits or self._clients:
            self._quietly(self._take_notifications)
        self._watch(now)
        for job in list(self._jobs.values()):
            self._advance(job)
        for wait in list(self._waits.values()):
            self._check_wait(wait, now)
        for key in [key for key, parting in self._partings.items() if now > parting.deadline]:
            del self._partings[key]
        if self._leaving or self._retired or self._later:
            self._sweep()
        if self._registering and not self._is_in_use():
            self._register_again()

    def _is_in_use(self) -> bool:
        """Whether this rank or a peer that was promised blocks may still touch the registered memory."""
        return any(job.plans for job in self._jobs.values()) or any(wait.begun for wait in self._waits.values())

    # commands

    def _obey(self) -> None:
        """Does what the engine asked for.

        What comes after a registration is about the new memory and waits for it, except for cancelling what came before.
        """
        if not self._registering:
            self._commands.extendleft(reversed(self._deferred))
            self._deferred.clear()
        while self._commands:
            command, args = self._commands.popleft()
            cancels = command == self._do_cancel and (args[0] in self._jobs or args[0] in self._waits)
            if self._registering and not cancels:
                self._deferred.append((command, args))
            else:
                command(*args)

    def _do_transfer(self, request: Request, kind: Kind, submitted: float) -> None:
        name = request.peer, request.remote_request_id, kind
        first = self._names.setdefault(name, request.request_id)
        if first != request.request_id:
            error = TransferError(
                f"request {request.request_id!r} asks for the same as {first!r}, which has no result yet: "
                f"{request.remote_request_id!r} of {request.peer!r}"
            )
            blocks = request.local_block_ids if kind is Kind.READ else request.remote_block_ids
            self._result(
                Result(
                    request_id=request.request_id,
                    kind=kind,
                    status=Status.FAILED,
                    error=error,
                    invalid=_blocks(blocks, self._the_layout.null_block_id if kind is Kind.READ else None),
                )
            )
            return
        self._jobs[request.request_id] = _Job(request, kind, submitted)

    def _do_wait(self, request_id: str, kind: Kind, lease: float, blocks: Sequence[BlockIds]) -> None:
        self._waits[request_id] = _Wait(request_id, kind, time.monotonic() + lease, blocks)

    def _do_cancel(self, request_id: str) -> None:
        if job := self._jobs.get(request_id):
            job.cancelled = True
        elif wait := self._waits.get(request_id):
            wait.cancelled = True

    def _do_register(self, layout: EngineLayout, memory: tuple[Memory, ...], keep: Any) -> None:
        self._registering = layout, memory, keep

    # ---- the side that connects

    def _do_connect(self, address: tuple[str, int]) -> None:
        self._link(address)

    def _link(self, address: tuple[str, int]) -> _Link:
        """The connection to an address, begun if there is none."""
        if address not in self._links:
            socket = self._socket(zmq.DEALER)
            socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
            now = time.monotonic()
            link = self._links[address] = _Link(address, socket, now + 2 * self._peer_timeout, now)
            try:
                socket.connect(f"tcp://{address[0]}:{address[1]}")
                self._send(link, wire.Hello(self._instance, self._the_layout))
            except (zmq.ZMQError, TypeError, ValueError) as error:
                self._drop(link, TransferError(f"cannot connect to {link}: {error}"))
            return link
        return self._links[address]

    def _send(self, link: _Link, message: wire.AnyMessage) -> None:
        if not link.socket.closed:
            with contextlib.suppress(zmq.Again):  # a peer that takes nothing is given up for its silence
                link.socket.send(wire.encode(message), zmq.NOBLOCK)

    def _hear(self, link: _Link) -> None:
        for frames in _arrived(link.socket):
            if link.error:
                return
            link.heard = time.monotonic()
            self._guard(link, self._heard, link, frames)

    def _guard(self, link: _Link, function: Callable[..., None], *args: Any) -> None:
        """Ends a connection whose peer says what cannot be handled; that must not end the thread."""
        try:
            function(*args)
        except (SystemExit, KeyboardInterrupt):
            raise
        except BaseException as error:  # a panic of Rust is no Exception
            log.exception("message of the peer at %s", link)
            self._stats.malformed_messages += 1
            self._drop(link, GeometryError(f"a message of {link} cannot be handled: {error!r}"[:_MAX_REASON]))

    def _heard(self, link: _Link, frames: list[bytes]) -> None:
        try:
            message = _one_message(frames)
        except GeometryError as error:
            self._stats.malformed_messages += 1
            if link.welcome is None:
                self._drop(link, error)
            return
        match message:
            case wire.Welcome() if link.welcome is None:
                self._welcome(link, message)
            case wire.Refused():
                self._stats.refused_peers += 1
                self._drop(link, GeometryError(f"peer at {link} refuses: {message.reason[:_MAX_REASON]}"))
            case wire.Held():
                self._promised(link, message)
                self._check_generation(link, None, message.generation)
            case wire.Gone():
                self._taken_back(link, message)
            case wire.Pong():
                self._check_generation(link, message.instance, message.generation)
            case _:
                self._stats.malformed_messages += 1

    def _promised(self, link: _Link, message: wire.Held) -> None:
        nonces = dict(zip(message.request_ids, message.nonces, strict=True))
        for name, nonce in nonces.items() if self._partings else ():
            parting = self._partings.get((link, name))
            if parting and parting.sent == message.sent:
                del self._partings[link, name]
                self._tell(link, name, nonce, ok=parting.ok)
        for job in self._jobs_on(link, message.request_ids):
            nonce, known = nonces[job.request.remote_request_id], job.nonces.get(link)
            # Not the promise to an earlier request of the same name, nor one that was answered with Done.
            if not link.welcome or not job.first_begun <= message.sent <= job.begun:
                continue
            if nonce != known and (nonce in self._spent or link in job.told):
                continue
            if known not in (None, nonce) and job.posted_at:
                self._fail(job, TransferError(_gone(job, link)))
                continue
            job.nonces[link] = nonce
            job.held[link] = message.sent + link.welcome.lease

    def _taken_back(self, link: _Link, message: wire.Gone) -> None:
        for job in self._jobs_on(link, message.request_ids):
            # A heartbeat may come after the notification that travels behind the bytes; and that of an earlier request
            # of the same name says nothing about this one.
            stale = message.sent and (link in job.told or message.sent < job.first_begun)
            if not stale and link not in job.ended:
                self._fail(job, TransferError(_gone(job, link)))

    def _welcome(self, link: _Link, welcome: wire.Welcome) -> None:
        if any(other.welcome and other.welcome.agent == welcome.agent for other in self._leaving):
            # The same process under its old agent name: let what is left of the old connection end first.
            self._later.append((link, welcome))
            return
        try:
            _check_peer(self._the_layout, welcome.layout)
            if not 0 < welcome.lease < math.inf:
                raise GeometryError(
                    f"lease is {welcome.lease} seconds at {link}, {self._lease} here; it must be above 0"
                )
            for other in self._links.values():
                if other.welcome and other.welcome.agent == welcome.agent:
                    raise GeometryError(f"{link} and {other} are the same rank of {welcome.layout.engine_id}")
            self._nixl.add_peer(welcome.agent, welcome.metadata)
        except NixlFastError as error:
            self._stats.refused_peers += 1
            self._send(link, wire.Refused(str(error)[:_MAX_REASON]))
            self._drop(link, error)
            return
        for other in list(self._links.values()):
            if other.welcome and _rank_of(other.welcome.layout) == _rank_of(welcome.layout):
                self._drop(other, StalePlanError(f"{_rank_of(welcome.layout)} at {other} has come back at {link}"))
        link.welcome = welcome
        self._stats.handshakes += 1
        self._stats.peers[welcome.layout.engine_id] = self._stats.peers.get(welcome.layout.engine_id, 0) + 1
        log.info("connected to %s at %s", link.engine_id, link, extra={"peer": link.engine_id})

    def _check_generation(self, link: _Link, instance: str | None, generation: int) -> None:
        """A peer that registered anew, or another process at its address, needs new plans."""
        known = link.welcome
        if known and (known.layout.generation != generation or instance not in (None, known.instance)):
            message = f"peer at {link} has registered its memory anew: planned for generation {known.layout.generation}"
            self._drop(
                link, StalePlanError(f"{message} of instance {known.instance[:8]}, now {generation} of {instance}")
            )
            self._link(link.address)

    def _drop(self, link: _Link, error: NixlFastError) -> None:
        """Ends a connection and everything that relies on it; the next request makes a new one."""
        if link.error is not None:
            return
        link.error = error
        level = logging.INFO if self._closing else logging.WARNING
        log.log(level, "connection with %s (%s) ends: %s", link, link.engine_id, error, extra={"peer": link.engine_id})
        for job in self._jobs.values():
            if job.plans and link in job.plans.links():
                self._fail(job, error)
        for key, plans in list(self._plans.items()):
            if link in plans.ranks:
                self._retired.append(self._plans.pop(key))
        for parting in [parting for parting in self._partings if parting[0] is link]:
            del self._partings[parting]
        if self._links.get(link.address) is link:
            del self._links[link.address]
        self._leaving.append(link)
        if link.engine_id:
            self._stats.peers[link.engine_id] -= 1
            if not self._stats.peers[link.engine_id]:
                del self._stats.peers[link.engine_id]

    def _sweep(self) -> None:
        """Releases what ended connections leave, once nothing uses it."""
        used = [job.plans for job in self._jobs.values()]
        for plans in [plans for plans in self._retired if plans not in used]:
            self._retired.remove(plans)
            for prepared, _ in plans.prepared:
                self._quietly(self._nixl.unprepare, prepared)
        for link in [link for link in self._leaving if not any(link in plans.ranks for plans in self._retired)]:
            self._leaving.remove(link)
            self._poller.unregister(link.socket)
            link.socket.close(linger=100)
            if link.welcome and not link.removed:
                self._quietly(self._nixl.remove_peer, link.welcome.agent)
        waiting, self._later = self._later, []
        for link, welcome in waiting:
            if not link.error:
                self._guard(link, self._welcome, link, welcome)

    def _quietly(self, function: Callable[..., None], *args: Any) -> None:
        try:
            function(*args)
        except TransferError as error:
            log.warning("%s", error)

    def _watch(self, now: float) -> None:
        """Gives up peers that do not answer while something waits for them."""
        if now < self._watched + self._peer_timeout / 8:
            return
        self._watched = now
        busy = {link for job in self._jobs.values() if job.plans for link in job.plans.links()}
        for link in list(self._links.values()):
            if link.welcome is None:
                if now > link.deadline:
                    self._drop(link, TransferError(f"no answer from {link} within {2 * self._peer_timeout:g} s"))
            elif link in busy:
                if now - link.heard > self._peer_timeout:
                    self._stats.lost_peers += 1
                    self._drop(
                        link, TransferError(f"peer {link.engine_id} at {link} was silent for {now - link.heard:.1f} s")
                    )
                elif now - link.pinged > self._peer_timeout / 4:
                    link.pinged = now
                    self._send(link, wire.Ping())
            else:
                link.heard = now  # silence counts from the moment in which something waits

    def _jobs_on(self, link: _Link, request_ids: Sequence[str]) -> list[_Job]:
        """The jobs that move something over a link, by the peer's request ids."""
        named = set(request_ids)
        return [
            job
            for job in self._jobs.values()
            if job.request.remote_request_id in named and job.plans and link in job.plans.links()
        ]

    # ---- the side that is connected to

    def _serve(self) -> None:
        for identity, *frames in _arrived(self._server):
            try:
                answer = self._answer(identity, _one_message(frames))
            except NixlFastError as error:
                self._stats.malformed_messages += not isinstance(error, _PeerRefusedError)
                answer = [wire.Refused(str(error)[:_MAX_REASON])]
            except (SystemExit, KeyboardInterrupt):
                raise
            except BaseException as error:  # what a peer says must not end the thread; a panic of Rust is no Exception
                log.exception("message of %d bytes from a peer", sum(map(len, frames)))
                self._stats.malformed_messages += 1
                answer = [wire.Refused(f"the message cannot be handled: {type(error).__name__}")]
            for message in answer:
                with contextlib.suppress(zmq.ZMQError):  # it has gone, or takes nothing
                    self._server.send_multipart((identity, wire.encode(message)), zmq.NOBLOCK)

    def _answer(self, identity: bytes, message: wire.AnyMessage) -> list[wire.AnyMessage]:
        layout = self._the_layout
        if isinstance(message, wire.Hello):
            try:
                _check_peer(layout, message.layout)
                self._check_client(message.layout)
            except GeometryError as error:
                self._stats.refused_peers += 1
                log.warning("refused %s: %s", message.layout.engine_id, error, extra={"peer": message.layout.engine_id})
                raise _PeerRefusedError(str(error)) from None
            if len(self._clients) >= _MAX_CLIENTS:  # the longest known goes; it is asked to say hello again
                self._clients.pop(next(iter(self._clients)))
            self._clients[identity] = message.layout
            self._counts.clear()
            return [wire.Welcome(self._instance, layout, self._nixl.name, self._metadata, self._lease)]
        if identity not in self._clients:
            raise _PeerRefusedError("this worker does not know you, or not any more; say Hello first")
        match message:
            case wire.Ping():
                return [wire.Pong(self._instance, layout.generation)]
            case wire.Begin():
                return self._begun(self._clients[identity], message)
            case wire.Done():
                self._done(message)
            case wire.Refused():
                self._stats.refused_peers += 1
                peer = self._clients[identity].engine_id
                log.warning("%s refuses: %s", peer, message.reason[:_MAX_REASON], extra={"peer": peer})
            case _:
                self._stats.malformed_messages += 1
        return []

    def _check_client(self, layout: EngineLayout) -> None:
        """Refuses a rank that contradicts the ranks of its engine that are still connected."""
        for identity, known in list(self._clients.items()):
            if known.engine_id != layout.engine_id:
                continue
            differ = [size for size in _SIZES if getattr(known, size) != getattr(layout, size)]
            if not differ:
                continue
            try:  # one that has gone counts no more
                pong = wire.encode(wire.Pong(self._instance, self._the_layout.generation))
                self._server.send_multipart((identity, pong), zmq.NOBLOCK)
            except zmq.Again:
                pass
            except zmq.ZMQError:
                del self._clients[identity]
                continue
            raise GeometryError(
                f"{layout.engine_id} is known by other numbers: "
                + ", ".join(
                    f"{size} {getattr(known, size)} of rank {known.pp_rank}.{known.tp_rank}, {getattr(layout, size)} of "
                    f"rank {layout.pp_rank}.{layout.tp_rank}"
                    for size in differ
                )
            )

    def _begun(self, peer: EngineLayout, message: wire.Begin) -> list[wire.AnyMessage]:
        kind = Kind.HOLD if message.direction is Direction.READ else Kind.EXPECT
        self._obey()  # the engine's hold comes before anything that a peer says about it
        held, nonces, gone, client = [], [], [], _rank_of(peer)
        for request_id in message.request_ids:
            wait = self._waits.get(request_id)
            ending = wait and (wait.cancelled or self._registering) and not wait.begun
            if wait and wait.kind is kind and not ending and self._may_begin(wait, peer):
                wait.deadline = max(wait.deadline, time.monotonic() + self._lease)
                if wait.layouts.get(client[1:]) is not peer:  # a new connection: what came over another counts no more
                    wait.layouts[client[1:]] = peer
                    wait.begun[client] = secrets.randbits(63)
                held.append(request_id)
                nonces.append(wait.begun[client])
            else:
                gone.append(request_id)
        answer: list[wire.AnyMessage] = []
        if held:
            answer.append(wire.Held(message.sent, self._the_layout.generation, held, nonces))
        if gone:
            answer.append(wire.Gone(message.sent, gone))
        return answer

    def _may_begin(self, wait: _Wait, peer: EngineLayout) -> bool:
        """Whether a peer's rank is one that a wait is for; the first engine that begins it is the only one."""
        client = _rank_of(peer)
        if wait.engine is None and client[1:] in (awaited := self._awaited(peer, wait.kind)):
            wait.engine, wait.awaited = peer.engine_id, awaited
        return wait.engine == peer.engine_id and client[1:] in wait.awaited and client not in wait.done

    def _take_notifications(self) -> None:
        for message in self._nixl.notifications():
            self._notified(message)

    def _notified(self, data: bytes) -> None:
        try:
            message = wire.decode(data)
        except GeometryError:
            message = None
        if isinstance(message, wire.Done):
            self._done(message)
        else:
            self._stats.malformed_messages += 1

    def _done(self, message: wire.Done) -> None:
        self._obey()
        wait = self._waits.get(message.request_id)
        rank = message.engine_id, message.pp_rank, message.tp_rank
        if wait is None or wait.begun.get(rank) != message.nonce:  # not what this rank was promised, or not any more
            self._stats.late_notifications += 1
            return
        if rank in wait.done:
            self._stats.repeated_notifications += 1
            return
        wait.done.add(rank)
        wait.ok &= message.ok
        if len(wait.done) < len(wait.awaited):
            return
        if wait.cancelled:
            self._end_wait(wait, Status.CANCELLED)
        elif wait.ok:
            error = self._uncovered(wait) if wait.kind is Kind.EXPECT else None
            self._end_wait(wait, Status.FAILED if error else Status.DONE, error)
        else:
            self._end_wait(
                wait,
                Status.FAILED,
                TransferError(f"{message.engine_id} gave the request up; hold or expect it again before another try"),
            )

    def _uncovered(self, wait: _Wait) -> GeometryError | None:
        """Why what all producers of an expectation write leaves out a byte of this rank's blocks, if it does."""
        layouts = tuple(wait.layouts[rank] for rank in sorted(wait.layouts))
        known = self._covered.get(wait.engine or "")
        if known is None or known[0] != layouts:
            error = None
            try:
                plan_peer(self._the_layout, layouts, direction=Direction.READ)
            except GeometryError as refused:
                error = refused
            if len(self._covered) >= _MAX_CLIENTS:
                self._covered.clear()
            known = self._covered[wait.engine or ""] = layouts, error
        return known[1]

    def _awaited(self, peer: EngineLayout, kind: Kind) -> frozenset[tuple[int, int]]:
        """Which ranks of a peer have to notify."""
        key, layout = (peer.engine_id, kind), self._the_layout
        if key not in self._counts:
            self._counts[key] = readers(peer, layout) if kind is Kind.HOLD else sources(layout, peer)
        return self._counts[key]

    def _check_wait(self, wait: _Wait, now: float) -> None:
        # A writer posts nothing with less than half a lease left, and what it posted gets another half to end.
        grace = self._lease / 2 if wait.kind is Kind.EXPECT and wait.begun else 0.0
        if wait.cancelled and not wait.begun:
            self._end_wait(wait, Status.CANCELLED)
        elif now > wait.deadline + grace:
            error = TransferError(f"the lease ran out; {len(wait.done)} ranks had notified")
            self._end_wait(wait, Status.CANCELLED if wait.cancelled else Status.EXPIRED, error)

    def _end_wait(self, wait: _Wait, status: Status, error: NixlFastError | None = None) -> None:
        del self._waits[wait.request_id]
        invalid = () if status is Status.DONE else _blocks(wait.blocks, self._the_layout.null_block_id)
        self._result(Result(request_id=wait.request_id, kind=wait.kind, status=status, error=error, invalid=invalid))

    # ---- transfers

    def _advance(self, job: _Job) -> None:
        try:
            if not (job.error or job.cancelled):
                self._step(job)
        except NixlFastError as error:
            self._fail(job, error)
        except (SystemExit, KeyboardInterrupt):
            raise
        except BaseException as error:  # what one request says must not end the others; a panic is no Exception
            log.exception("request %s", job.request.request_id)
            self._fail(job, TransferError(f"the request cannot be carried out: {error!r}"))
        if job.error or job.cancelled:
            self._drain(job)

    def _step(self, job: _Job) -> None:
        """One step of a job: connect, announce, plan, post a piece, look at what moves, report."""
        if job.plans is None:
            links = None if self._registering else self._links_of(job)
            if links is None:
                return
            started = time.perf_counter()
            plans = job.plans = self._plans_with(job.request.peer, job.direction, links)
            self._announce(job, time.monotonic())  # the answer is on its way while the request is paired
            self._pair(job, plans)
            job.spend(queued=started - job.submitted, plan=time.perf_counter() - started)
            if not job.todo:
                self._finish(job, Status.DONE)
                return
        now = time.monotonic()
        if now - job.begun > self._patience(job, now):
            self._announce(job, now)
        if job.todo and job.may_post(now):
            self._post(job, job.todo.popleft())
        self._look(job)
        self._end_links(job)
        if job.todo or job.moving:
            return
        job.moved_at = job.moved_at or time.monotonic()
        if not job.is_held(job.moved_at):
            return
        self._finish(job, Status.DONE)

    def _pair(self, job: _Job, plans: _Plans) -> None:
        """Pairs a job with every rank of its peer before anything is posted."""
        request = job.request
        job.pairings = [
            prepared.plan.pair(
                request.local_block_ids,
                request.remote_block_ids,
                num_tokens=request.num_tokens,
                num_computed_blocks=request.num_computed_blocks,
            )
            for prepared, _ in plans.prepared
        ]
        for (prepared, link), pairing in zip(plans.prepared, job.pairings, strict=True):
            cut = pieces(prepared.plan, pairing, PIECE)
            attach = len(cut) == 1 and len(prepared.lanes) == 1
            job.todo.extend(_Piece(prepared, link, ids, attach) for ids in cut if not pairing.notify_only)

    def _end_links(self, job: _Job) -> None:
        """Checks the promise of each rank whose notification travelled behind its bytes at the end of these."""
        moving = {each.link for each in job.moving}
        for link in job.told - job.ended - moving:
            if job.held[link] < time.monotonic():
                raise TransferError(f"the lease of {link} ran out before its bytes had arrived")
            job.ended.add(link)

    def _links_of(self, job: _Job) -> list[_Link] | None:
        """The connected ranks of a job's peer, None while a handshake is under way."""
        peer = job.request.peer
        if job.waiting is None:
            named = [self._link(address) for address in job.request.addresses]
            job.waiting = named or [link for link in self._links.values() if link.engine_id in (None, peer)]
        if any(isinstance(link.error, StalePlanError) for link in job.waiting):
            job.waiting = None
            return None
        failed = [link.error for link in job.waiting if link.error]
        if failed and (job.request.addresses or len(failed) == len(job.waiting)):
            raise failed[0]
        job.waiting = [link for link in job.waiting if not link.error]
        if any(link.welcome is None for link in job.waiting):
            return None
        ranks = [link for link in job.waiting if link.engine_id == peer]
        if job.request.addresses and len(ranks) < len(job.waiting):
            other = next(link for link in job.waiting if link.engine_id != peer)
            raise GeometryError(f"request is for engine {peer!r}, {other} is {other.engine_id!r}")
        if not ranks:
            raise TransferError(f"not connected to {peer!r}; call connect(host, port) or give the request addresses")
        return ranks

    def _plans_with(self, peer: str, direction: Direction, links: list[_Link]) -> _Plans:
        key, ranks = (peer, direction), frozenset(links)
        known = self._plans.get(key)
        if known and known.ranks == ranks:
            return known
        by_layout = {id(link.welcome.layout): link for link in links if link.welcome}
        layouts = [link.welcome.layout for link in links if link.welcome]
        size, stages = layouts[0].tp_size, layouts[0].pp_size
        if len(layouts) != size * stages:
            given = ", ".join(f"{layout.pp_rank}.{layout.tp_rank}" for layout in layouts)
            raise GeometryError(
                f"{peer} has {stages} stages of {size} ranks, connected to {len(layouts)} (stage.rank: {given})"
            )
        planned = plan_peer(self._the_layout, layouts, direction=direction)
        prepared: list[tuple[Prepared, _Link]] = []
        made = _Plans(ranks, prepared, [by_layout[id(layout)] for layout in planned.notify_only])
        try:
            for plan in planned:
                link = by_layout[id(plan.remote)]
                prepared.append((self._nixl.prepare(plan, link.welcome.agent if link.welcome else ""), link))
        except TransferError:
            self._retired.append(made)
            raise
        if known:
            self._retired.append(known)
        self._plans[key] = made
        return made

    def _patience(self, job: _Job, now: float) -> float:
        """Seconds between two announcements of a job: a part of the shortest lease, or of the timeout if unanswered."""
        leases = [link.welcome.lease for link in job.plans.links() if link.welcome] if job.plans else []
        patience = min(leases, default=self._lease) / 4
        return patience if job.may_post(now) else min(patience, self._peer_timeout / 2)

    def _announce(self, job: _Job, now: float) -> None:
        job.begun = now
        if job.first_begun == -math.inf:
            job.first_begun = now
        for link in job.pending():
            self._send(link, wire.Begin(now, job.direction, [job.request.remote_request_id]))

    def _post(self, job: _Job, piece: _Piece) -> None:
        nonce, name = job.nonces[piece.link], job.request.remote_request_id
        notification = wire.encode(self._done_message(name, nonce, ok=True)) if piece.attach else b""
        started = time.perf_counter()
        try:
            made = self._nixl.make(piece.prepared, piece.ids, notification)
            posting = time.perf_counter()
            job.posted_at = job.posted_at or posting
            job.spend(make=posting - started)
            for index, posted in enumerate(made):
                try:
                    if self._nixl.post(posted):
                        self._nixl.release(posted)
                    else:
                        job.moving.append(_Moving(posted, piece.link))
                except TransferError:
                    job.moving += [_Moving(each, piece.link) for each in made[index:]]
                    raise
            job.ended_at = time.perf_counter()
            job.spend(post=job.ended_at - posting)
        except TransferError as error:
            self._drop(piece.link, error)
            raise
        if piece.attach:
            job.told.add(piece.link)
            self._spend(nonce)
        self._busy_until = time.monotonic() + _SPIN

    def _look(self, job: _Job) -> None:
        """Takes what has ended from what moves."""
        still = []
        moving = job.moving
        for index, each in enumerate(moving):
            try:
                if self._nixl.is_done(each.posted):
                    self._nixl.release(each.posted)
                else:
                    still.append(each)
            except TransferError as error:
                job.moving = still + moving[index:]
                self._drop(each.link, error)
                raise
        if len(still) < len(moving):
            job.ended_at = time.perf_counter()
            self._busy_until = time.monotonic() + _SPIN
        job.moving = still

    def _fail(self, job: _Job, error: NixlFastError) -> None:
        if job.error is None:
            job.error = error
            job.give_up = time.monotonic() + self._peer_timeout

    def _drain(self, job: _Job) -> None:
        """Waits for what an ended job still moves; its blocks are not free before that."""
        job.todo.clear()
        if job.moving and job.error is not None and time.monotonic() > job.give_up:
            for link in {moving.link for moving in job.moving}:
                self._cut(link, job.error)
        still = []
        for moving in job.moving:
            try:
                ended = self._nixl.is_done(moving.posted)
            except TransferError as error:
                self._fail(job, error)
                ended = True
            if not ended:
                still.append(moving)
                continue
            job.ended_at = time.perf_counter()
            try:
                self._nixl.release(moving.posted)
            except TransferError as error:
                log.error("a transfer of request %s could not be stopped: %s", job.request.request_id, error)
                self._stats.leaked_handles += 1
        job.moving = still
        if not still:
            self._finish(job, Status.FAILED if job.error else Status.CANCELLED)

    def _cut(self, link: _Link, error: NixlFastError) -> None:
        """Stops whatever moves over a link and has NIXL disconnect, so that nothing can move after it."""
        self._drop(link, error)
        stuck, jobs = 0, []
        for job in self._jobs.values():
            for moving in [moving for moving in job.moving if moving.link is link]:
                jobs.append(job)
                job.moving.remove(moving)
                try:
                    self._nixl.release(moving.posted)
                except TransferError as refused:
                    log.error("a transfer of request %s could not be stopped: %s", job.request.request_id, refused)
                    stuck += 1
        try:
            if link.welcome and not link.removed:
                self._nixl.remove_peer(link.welcome.agent)
                link.removed = True
        except TransferError as refused:
            log.error("%s could not be disconnected: %s", link, refused)
            stuck = stuck or len(jobs)
        self._stats.leaked_handles += stuck
        for job in jobs if stuck else ():
            job.error = TransferError(f"{job.error}; NIXL could not stop a transfer, bytes may still move")

    def _finish(self, job: _Job, status: Status) -> None:
        del self._jobs[job.request.request_id]
        del self._names[job.request.peer, job.request.remote_request_id, job.kind]
        ok = status is Status.DONE
        for link in self._listeners(job):
            if link not in job.told:
                self._part(job, link, ok=ok)
        if job.posted_at:
            job.spend(transfer=max(0.0, job.ended_at - job.posted_at))
        groups = range(len(self._the_layout.groups)) if ok else ()
        self._result(
            Result(
                request_id=job.request.request_id,
                kind=job.kind,
                status=status,
                error=job.error,
                invalid=() if ok else _blocks(job.consumer_ids, self._null_of(job)),
                untransferred=tuple(_left(job.pairings, group) for group in groups),
                num_bytes=sum(pairing.num_bytes for pairing in job.pairings),
                num_descs=sum(pairing.num_descs for pairing in job.pairings),
                num_runs=sum(pairing.num_runs for pairing in job.pairings),
                timings=job.timings,
            )
        )

    def _listeners(self, job: _Job) -> list[_Link]:
        """Who has to hear that a job is over; a cancelled one may have to connect for it, since blocks are held."""
        if job.plans:
            return job.plans.links()
        if job.error or not job.request.addresses:
            return [link for link in self._links.values() if link.engine_id == job.request.peer]
        return [self._link(address) for address in job.request.addresses]

    def _part(self, job: _Job, link: _Link, *, ok: bool) -> None:
        """Tells a rank that a job is over; one that has promised nothing yet is asked for the nonce first."""
        name = job.request.remote_request_id
        if link in job.nonces:
            self._tell(link, name, job.nonces[link], ok=ok)
        elif not link.error:
            now = time.monotonic()
            self._partings[link, name] = _Parting(now, ok, now + 2 * self._peer_timeout)
            self._send(link, wire.Begin(now, job.direction, [name]))

    def _tell(self, link: _Link, request_id: str, nonce: int, *, ok: bool) -> None:
        self._spend(nonce)
        self._send(link, self._done_message(request_id, nonce, ok=ok))

    def _spend(self, nonce: int) -> None:
        """Remembers a promise that was answered with Done: it is worth nothing to another request."""
        if len(self._spent) >= _MAX_SPENT:
            del self._spent[next(iter(self._spent))]
        self._spent[nonce] = None

    def _done_message(self, request_id: str, nonce: int, *, ok: bool) -> wire.Done:
        layout = self._the_layout
        return wire.Done(request_id, layout.engine_id, layout.pp_rank, layout.tp_rank, nonce, ok)

    def _null_of(self, job: _Job) -> int | None:
        """The id that names no block of the consumer."""
        if job.kind is Kind.READ:
            return self._the_layout.null_block_id
        layouts = [link.welcome.layout for link in job.plans.links() if link.welcome] if job.plans else []
        return layouts[0].null_block_id if layouts else None

    def _result(self, result: Result) -> None:
        stats = self._stats
        outcome = f"{result.kind}.{result.status}"
        stats.requests[outcome] = stats.requests.get(outcome, 0) + 1
        if result.error is not None:
            name = type(result.error).__name__
            stats.failures[name] = stats.failures.get(name, 0) + 1
            log.warning(
                "request %s %s: %s", result.request_id, outcome, result.error, extra={"request": result.request_id}
            )
        elif result.kind in (Kind.READ, Kind.WRITE) and result.ok:
            stats.bytes += result.num_bytes
            stats.descriptors += result.num_descs
            stats.merged += result.num_runs
            for name in ("plan", "make", "post", "transfer"):
                getattr(stats, f"{name}_seconds").add(getattr(result.timings, name))
        self._results.append(result)

    # ---- registering anew, and the end

    def _register_again(self) -> None:
        if self._registering is None:
            return
        layout, memory, keep = self._registering
        connected = [link.address for link in self._links.values() if link.welcome]
        for link in list(self._links.values()):
            self._drop(link, StalePlanError("this rank registers its memory anew"))
        self._sweep()
        for wait in list(self._waits.values()):
            self._end_wait(wait, Status.FAILED, StalePlanError("this rank registered its memory anew"))
        self._nixl.deregister()
        generation = max(layout.generation, self._the_layout.generation + 1)
        self._layout = msgspec.structs.replace(layout, generation=generation)
        self._counts.clear()
        self._covered.clear()  # what peers cover is covered of this rank's layout
        self._nixl.register(self._layout, memory)
        self._metadata = self._nixl.metadata()
        self._memory, self._keep, self._registering = memory, keep, None
        self._stats.generation = generation
        for address in connected:
            self._link(address)
        self._obey()

    def _shut_down(self) -> None:
        closed = TransferError("the worker was closed")
        self._registering = None
        self._obey()
        for job in list(self._jobs.values()):
            self._fail(job, closed)
        while self._jobs:
            for job in list(self._jobs.values()):
                self._advance(job)
            time.sleep(_NAP)
        end = time.monotonic() + _WITHDRAWAL
        while self._partings and time.monotonic() < end:
            for link in list(self._links.values()):
                self._hear(link)
            time.sleep(_NAP)
        self._withdraw()
        for wait in list(self._waits.values()):
            self._end_wait(wait, Status.FAILED, closed)
        for link in list(self._links.values()):
            self._drop(link, closed)
        self._sweep()
        self._quietly(self._nixl.deregister)

    def _withdraw(self) -> None:
        """Takes back what peers were promised, and lets them hear of it before the memory is anybody else's."""
        begun = [wait.request_id for wait in self._waits.values() if wait.begun]
        if not begun:
            return
        for identity in self._clients:
            with contextlib.suppress(zmq.ZMQError):
                self._server.send_multipart((identity, wire.encode(wire.Gone(0.0, begun))), zmq.NOBLOCK)
        time.sleep(_WITHDRAWAL)

    def _die(self, error: NixlFastError) -> None:
        self._dead = error
        null = self._layout.null_block_id if self._layout else None
        ended = [
            (job.request.request_id, job.kind, _blocks(job.consumer_ids, self._null_of(job)))
            for job in self._jobs.values()
        ]
        ended += [(wait.request_id, wait.kind, _blocks(wait.blocks, null)) for wait in self._waits.values()]
        for moving in [moving for job in self._jobs.values() for moving in job.moving]:
            self._quietly(self._nixl.release, moving.posted)
        for request_id, kind, invalid in ended:
            self._results.append(
                Result(request_id=request_id, kind=kind, status=Status.FAILED, error=error, invalid=invalid)
            )


_running: weakref.WeakSet[TransferWorker] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """Closes what the engine has not: a thread that the interpreter ends inside NIXL takes the process down with it."""
    for worker in list(_running):
        try:
            worker.close()
        except Exception:  # the others still have to be closed
            log.exception("a worker could not be closed at exit")


class _PeerRefusedError(NixlFastError):
    """A refusal that is sent to the peer and has been counted."""


def _gone(job: _Job, link: _Link) -> str:
    """What a peer's ``Gone`` means, and what to do."""
    name, call = job.request.remote_request_id, "hold" if job.kind is Kind.READ else "expect"
    return (
        f"peer at {link} does not hold the blocks of its request {name!r}, or not any more: it calls {call}({name!r}) before "
        "a transfer, and again before another try"
    )


def _checked_address(address: Any) -> tuple[str, int]:
    match address:
        case (str() as host, int() as port) if isinstance(address, tuple):
            return host, port
    raise TransferError(f"an address is a tuple of host and port, got {address!r}")


def _rank_of(layout: EngineLayout) -> tuple[str, int, int]:
    return layout.engine_id, layout.pp_rank, layout.tp_rank


def _check_peer(local: EngineLayout, remote: EngineLayout) -> None:
    """Refuses a peer that cannot be, or that would keep the thread busy."""
    if remote.tp_size * remote.pp_size > _MAX_RANKS:
        raise GeometryError(f"{remote.tp_size} ranks in {remote.pp_size} stages are more than {_MAX_RANKS}")
    check_pair(local, remote)


def _arrived(socket: Any) -> Iterator[list[bytes]]:
    """The frames of messages that have arrived, up to a burst."""
    for _ in range(_BURST):
        try:
            yield socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return


def _one_message(frames: Sequence[bytes]) -> wire.AnyMessage:
    if len(frames) != 1:
        raise GeometryError(f"not a message of this protocol: {len(frames)} frames")
    return wire.decode(frames[0])


def _blocks(lists: Sequence[BlockIds], null: int | None = None) -> tuple[tuple[int, int], ...]:
    """``(group, block)`` of every id in a request's lists, as far as they are ids; the null id names no block."""
    with contextlib.suppress(TypeError, ValueError):
        return tuple((group, int(block)) for group, ids in enumerate(lists) for block in ids if block != null)
    return ()


def _left(pairings: Sequence[Pairing], group: int) -> NDArray[np.int32]:
    """Consumer units that no plan of a request fills."""
    left = [pairing.untransferred(group) for pairing in pairings]
    return left[0] if len(left) == 1 else np.unique(np.concatenate(left)) if left else np.empty(0, np.int32)


def _memory(each: Any) -> Memory:
    """A range of memory, from a `Memory` or an object of the buffer protocol."""
    if isinstance(each, Memory):
        return each
    try:
        array = np.frombuffer(each, np.uint8)
    except (TypeError, ValueError, BufferError) as error:
        raise GeometryError(
            f"memory must be Memory ranges or contiguous buffers, got {type(each).__name__}: {error}"
        ) from None
    return Memory(array.ctypes.data, array.nbytes)
