"""The demo: processes with real workers move requests between them, and every destination byte is checked.

`run_demo` starts one process per rank. A rank allocates host memory, lets its `TransferWorker` move a request, and
compares what arrived with what the rules of pairing say. That comparison knows tokens and state slots only: it never
looks at a plan or a pairing, so a wrong pairing shows as wrong bytes.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from enum import IntEnum
from importlib.metadata import PackageNotFoundError, version
from multiprocessing.connection import Connection, wait
from typing import IO, TYPE_CHECKING, Any, NamedTuple, Self

import msgspec
import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from nixl_fast.errors import NixlFastError, TransferError
from nixl_fast.layout import BlockOrder, EngineLayout, Group, GroupKind, MambaState, Region
from nixl_fast.plan import Direction
from nixl_fast.scenarios import SCENARIOS, WORD, Area, Engine, Role, Scenario

if TYPE_CHECKING:  # a rank imports the worker itself: it needs the extra, and what is below does not
    from nixl_fast.worker import Result, TransferWorker

__all__ = ["SCENARIOS", "Report", "Scenario", "ScenarioResult", "run_demo"]

START_S = 30.0
"""Seconds within which a process has to give its first sign of life. One that ends is noticed at once."""

SILENCE_S = 8.0
"""Seconds without a sign of life after which a rank is given up; slow ones still send signs of life."""

STEP_S = 60.0
"""Seconds within which every rank has to answer a request."""

TRANSFER_S = 30.0
"""Seconds within which a request has to have its result."""

_GUARD = 64
_PART_WORDS = 1 << 20
_SLOT_WORDS = 1 << 24
_GRACE_S = 0.5
_BEAT_S = 0.5

Words = NDArray[np.uint64]
Indices = NDArray[np.int64]


# --- Memory and what must be in it -----------------------------------------------------------------------------------


class _Fill(IntEnum):
    """What a word of memory was written with; the same position of different fills has different bytes."""

    SENTINEL = 1
    NOISE = 2
    TOKEN = 3
    SLOT = 4


def _pattern(fill: _Fill, area: int, group: int, positions: Indices, words: Indices, num_words: int) -> Words:
    """The given words, of ``num_words``, of each position: ``uint64[len(positions), len(words)]``, all different."""
    first = np.uint64((fill << 60) | (group << 52) | (area << 44))
    out = positions.astype(np.uint64)[:, None] * np.uint64(num_words) + (words.astype(np.uint64) + first)
    # splitmix64: neighbouring words get unrelated bytes, so that data moved by one byte or one token does not fit.
    out ^= out >> np.uint64(30)
    out *= np.uint64(0xBF58476D1CE4E5B9)
    out ^= out >> np.uint64(27)
    out *= np.uint64(0x94D049BB133111EB)
    out ^= out >> np.uint64(31)
    return out


class Memory:
    """Host buffers of one rank, one per area, each between two guards of 64 bytes.

    Args:
        engine: The rank's engine.
        rank: Its tensor-parallel rank.
    """

    def __init__(self, engine: Engine, rank: int) -> None:
        self.engine = engine
        self.rank = rank
        self.spec = engine.ranks[rank]
        self.buffers = [
            np.empty((area.num_pages * area.stride + 2 * _GUARD) // WORD, np.uint64) for area in self.spec.areas
        ]

    def spans(self) -> list[tuple[int, int]]:
        """Address and bytes of every area, without the guards."""
        return [(int(buffer.ctypes.data) + _GUARD, buffer.nbytes - 2 * _GUARD) for buffer in self.buffers]

    def layout(self, engine_id: str) -> EngineLayout:
        """What the peers have to know."""
        groups = self.engine.groups
        attention: list[Region] = []
        slots: list[Region] = []
        for area, (address, _) in zip(self.spec.areas, self.spans(), strict=True):
            for regions, mamba in ((attention, False), (slots, True)):
                residents = tuple(group for group in area.groups if (groups[group].kind is GroupKind.MAMBA) == mamba)
                if residents:
                    regions.append(
                        Region(
                            address, area.page_bytes, area.num_pages, area.stride, residents, order=self.engine.order
                        )
                    )
        return EngineLayout(
            engine_id,
            groups,
            tuple(attention),
            MambaState(tuple(slots), self.spec.conv, self.spec.state_bytes) if slots else None,
            tp_rank=self.rank,
            tp_size=len(self.engine.ranks),
            num_kv_heads=self.engine.num_kv_heads,
            null_block_id=self.engine.null_block_id,
        )

    def fill(self, fill: _Fill) -> None:
        """Overwrites every byte, guards and padding too."""
        for index, buffer in enumerate(self.buffers):
            buffer[:] = _pattern(fill, index, 0, np.arange(len(buffer)), np.arange(1), 1)[:, 0]

    def put_tokens(self, group: int, tokens: Tokens) -> int:
        """Writes a group's tokens in every area where it lives; returns the bytes written."""
        size = self.engine.groups[group].kernel_block_size
        heads, num_heads = self.engine.heads(group, self.rank)
        written = 0
        for index, area, pages in self._homes(group):
            words = area.page_bytes // WORD // size // len(heads)
            row = words * WORD
            steps = (row, size * row) if self.engine.order is BlockOrder.HEAD_MAJOR else (len(heads) * row, row)
            places = as_strided(pages, (area.num_pages, size, len(heads), words), (area.stride, *steps, WORD))
            held = np.arange(heads.start * words, heads.stop * words)
            data = _pattern(_Fill.TOKEN, index, group, tokens.positions, held, num_heads * words)
            places[tokens.pages, tokens.offsets] = data.reshape(-1, len(heads), words)
            written += data.nbytes
        return written

    def put_slots(self, group: int, slots: Indices, positions: Indices) -> int:
        """Writes a group's state slots in every area where it lives; returns the bytes written."""
        ratio = self.engine.groups[group].blocks_per_logical
        words = self._slot_words()
        written = 0
        for index, area, pages in self._homes(group):
            places = as_strided(pages, (area.num_pages // ratio, len(words)), (area.stride * ratio, WORD))
            data = _pattern(_Fill.SLOT, index, group, positions, words, _SLOT_WORDS)
            places[slots] = data
            written += data.nbytes
        return written

    def _slot_words(self) -> Indices:
        """Number of each word of a slot over the whole model: which part it belongs to, and where in all ranks' it is."""
        parts = [(projection.size_bytes, projection.sharded) for projection in self.spec.conv]
        parts.append((self.spec.state_bytes, True))
        words = []
        for part, (size, sharded) in enumerate(parts):
            first = self.rank * size // WORD if sharded else 0
            words.append(np.arange(first, first + size // WORD) + part * _PART_WORDS)
        return np.concatenate(words)

    def _homes(self, group: int) -> Iterator[tuple[int, Area, Words]]:
        for index, (area, buffer) in enumerate(zip(self.spec.areas, self.buffers, strict=True)):
            if group in area.groups:
                yield index, area, buffer[_GUARD // WORD :]


class Tokens(NamedTuple):
    """Tokens of one group: the page each lies in, its place in that page, and its position in the sequence."""

    pages: Indices
    offsets: Indices
    positions: Indices

    def where(self, mask: NDArray[np.bool_]) -> Tokens:
        """Some of the tokens."""
        return Tokens(self.pages[mask], self.offsets[mask], self.positions[mask])


def _listed_tokens(scenario: Scenario, role: Role, group: int) -> Tokens:
    """Every token that an engine's blocks of a group have room for, placeholders left out."""
    engine = scenario.engine(role)
    shape = engine.groups[group]
    blocks = np.array(engine.block_ids[group], np.int64)
    inside = np.arange(shape.block_size)
    first = (scenario.first_block(role, group) + np.arange(len(blocks))) * shape.block_size
    tokens = Tokens(
        pages=(blocks[:, None] * shape.blocks_per_logical + inside // shape.kernel_block_size).ravel(),
        offsets=np.tile(inside % shape.kernel_block_size, len(blocks)),
        positions=(first[:, None] + inside).ravel(),
    )
    return tokens.where(np.repeat(blocks != _null(engine), shape.block_size))


def _null(engine: Engine) -> int:
    return -1 if engine.null_block_id is None else engine.null_block_id


def _moved_tokens(scenario: Scenario, group: int) -> Tokens:
    """Where in the consumer's memory data has to arrive.

    A token arrives if it lies in a unit that holds data, inside the window that both sides keep, and in a block of the
    producer's.
    """
    wanted = _listed_tokens(scenario, Role.CONSUMER, group)
    held = _listed_tokens(scenario, Role.PRODUCER, group)
    shapes = [scenario.engine(role).groups[group] for role in Role]
    unit = math.gcd(*(shape.kernel_block_size for shape in shapes))
    end = math.ceil(scenario.num_tokens / unit) * unit
    start = max(_window_start(shape, scenario.num_tokens) for shape in shapes)
    inside = (wanted.positions >= start) & (wanted.positions < end)
    return wanted.where(inside & np.isin(wanted.positions, held.positions))


def _window_start(shape: Group, num_tokens: int) -> int:
    """Position of the first token that a group keeps: that of its ``ceil(window / block_size) + 1`` last blocks."""
    if shape.sliding_window is None:
        return 0
    kept = math.ceil(shape.sliding_window / shape.block_size) + 1
    return max(0, math.ceil(num_tokens / shape.block_size) - kept) * shape.block_size


def producer_memory(scenario: Scenario, rank: int) -> Memory:
    """Memory that holds the request's tokens and state slots, and noise everywhere else."""
    memory = Memory(scenario.producer, rank)
    memory.fill(_Fill.NOISE)
    for index, group in enumerate(scenario.producer.groups):
        if group.kind is GroupKind.MAMBA:
            slots = np.array(scenario.producer.block_ids[index], np.int64)
            real = slots != _null(scenario.producer)
            memory.put_slots(index, slots[real], np.arange(len(slots))[real])
        else:
            memory.put_tokens(index, _listed_tokens(scenario, Role.PRODUCER, index))
    return memory


def consumer_memory(scenario: Scenario, rank: int) -> Memory:
    """Memory that holds the sentinel pattern and nothing else."""
    memory = Memory(scenario.consumer, rank)
    memory.fill(_Fill.SENTINEL)
    return memory


def expected_memory(scenario: Scenario, rank: int) -> tuple[Memory, int]:
    """What a consumer's memory must hold after the request, and how many bytes of it are data."""
    memory = consumer_memory(scenario, rank)
    moved = 0
    for index, group in enumerate(scenario.consumer.groups):
        if group.kind is GroupKind.MAMBA:
            slots = np.array(scenario.consumer.block_ids[index], np.int64)
            listed = len(scenario.producer.block_ids[index])
            # The tail of the producer's slots; a consumer with one more slot fills its last one itself.
            filled = min(len(slots), listed)
            moved += memory.put_slots(index, slots[:filled], np.arange(listed - filled, listed))
        else:
            moved += memory.put_tokens(index, _moved_tokens(scenario, index))
    return memory, moved


class Verdict(msgspec.Struct, frozen=True):
    """A consumer's memory compared with what it must hold.

    Args:
        checked_bytes: Bytes compared: all of the rank's memory.
        data_bytes: Bytes among them that had to arrive.
        wrong_bytes: Bytes that are not what they must be.
        first_wrong: Where the first of them is; empty if there is none.
    """

    checked_bytes: int
    data_bytes: int
    wrong_bytes: int
    first_wrong: str = ""


def verify(scenario: Scenario, memory: Memory) -> Verdict:
    """Compares every byte of a consumer rank's memory with what the rules of pairing say."""
    expected, data_bytes = expected_memory(scenario, memory.rank)
    checked = wrong = 0
    first_wrong = ""
    for index, (buffer, right) in enumerate(zip(memory.buffers, expected.buffers, strict=True)):
        got, want = buffer.view(np.uint8), right.view(np.uint8)
        places = np.flatnonzero(got != want)
        checked += got.size
        wrong += places.size
        if places.size and not first_wrong:
            at = int(places[0])
            page, byte = divmod(at - _GUARD, memory.spec.areas[index].stride)
            first_wrong = f"area {index}, page {page}, byte {byte}: {got[at]:#04x}, must be {want[at]:#04x}"
    return Verdict(checked, data_bytes, wrong, first_wrong)


# --- A rank: its process answers the demo's calls ---------------------------------------------------------------------


class RankId(NamedTuple):
    """One process of the demo."""

    role: Role
    number: int

    @property
    def name(self) -> str:
        """What messages call it."""
        return f"{self.role}-{self.number}"


class Transfer(msgspec.Struct, frozen=True):
    """What one rank moved from or to all ranks of its peer.

    Args:
        initiator: The rank that read or wrote.
        descriptors: Descriptors on each side.
        runs: Descriptors that remain once neighbours are merged.
        bytes: Bytes moved.
        untransferred: Units of the consumer that were listed but got no data.
        plan_us: Microseconds to make the plans, since every scenario is a new acquaintance, and to pair the request.
        make_us: Microseconds in which NIXL made the transfers.
        post_us: Microseconds in which NIXL was given them.
        transfer_us: Microseconds from the first post to the end; ``post_us`` is part of it.
    """

    initiator: str
    descriptors: int
    runs: int
    bytes: int
    untransferred: int
    plan_us: float
    make_us: float
    post_us: float
    transfer_us: float


def _engine_id(role: Role, scenario: Scenario) -> str:
    """Every scenario has engines of its own: one engine's ranks cannot differ in their numbers."""
    return f"{role}-{scenario.name}"


class _Rank:
    """One rank's part of a scenario, step by step.

    Args:
        me: Which rank this is.
    """

    def __init__(self, me: RankId) -> None:
        self._me = me
        self._worker: TransferWorker | None = None

    def start(self) -> None:
        """Shows that the process runs."""

    def allocate(self, scenario: Scenario) -> None:
        """Makes and fills the memory; the first time also starts the worker."""
        from nixl_fast.worker import TransferWorker  # noqa: PLC0415 - see above

        self._scenario = scenario
        self._memory = (producer_memory if self._me.role is Role.PRODUCER else consumer_memory)(
            scenario, self._me.number
        )
        self._layout = self._memory.layout(_engine_id(self._me.role, scenario))
        self._registered = self._worker is None
        if self._worker is None:
            # The demo notices a dead peer earlier, and says which it is.
            self._worker = TransferWorker(lease=STEP_S, peer_timeout=TRANSFER_S)
            self._worker.register(self._layout, self._memory.buffers)
            self._worker.start()

    def offer(self) -> tuple[str, int]:
        """Lets the peer move the request; returns where it finds this rank."""
        worker = self._register()
        if self._me.role is Role.PRODUCER:
            worker.hold(self._scenario.name)
        else:
            worker.expect(self._scenario.name, self._scenario.consumer.block_ids)
        return worker.address

    def move(self, addresses: tuple[tuple[str, int], ...]) -> Transfer:
        """Reads or writes the request; the addresses are those of all ranks of the peer."""
        from nixl_fast.worker import Request  # noqa: PLC0415 - see above

        worker, scenario = self._register(), self._scenario
        peer = Role.CONSUMER if self._me.role is Role.PRODUCER else Role.PRODUCER
        request = Request(
            request_id=scenario.name,
            peer=_engine_id(peer, scenario),
            remote_request_id=scenario.name,
            local_block_ids=scenario.engine(self._me.role).block_ids,
            remote_block_ids=scenario.engine(peer).block_ids,
            num_tokens=scenario.num_tokens,
            num_computed_blocks=scenario.num_computed_blocks,
            addresses=addresses,
        )
        (worker.read if scenario.direction is Direction.READ else worker.write)(request)
        result = self._done()
        return Transfer(
            initiator=self._me.name,
            descriptors=result.num_descs,
            runs=result.num_runs,
            bytes=result.num_bytes,
            untransferred=sum(map(len, result.untransferred)),
            plan_us=result.timings.plan * 1e6,
            make_us=result.timings.make * 1e6,
            post_us=result.timings.post * 1e6,
            transfer_us=result.timings.transfer * 1e6,
        )

    def settle(self) -> None:
        """Waits until every rank of the peer has notified."""
        self._done()

    def verify(self) -> Verdict:
        """Compares all memory with what it must hold."""
        return verify(self._scenario, self._memory)

    def close(self) -> None:
        """Ends the worker."""
        if self._worker is not None:
            self._worker.close()

    def _register(self) -> TransferWorker:
        """The worker, with this scenario's memory."""
        if self._worker is None:
            raise TransferError("allocate comes first")
        if not self._registered:
            before = self._worker.stats().generation
            self._worker.register(self._layout, self._memory.buffers)
            while self._worker.stats().generation == before:  # a peer must not meet the old memory
                if results := self._worker.poll():
                    raise results[0].error or TransferError(f"unexpected result {results[0].status}")
                time.sleep(0.001)
            self._registered = True
        return self._worker

    def _done(self) -> Result:
        result = self._result()
        if not result.ok:
            raise result.error or TransferError(f"{result.kind} ended as {result.status}")
        return result

    def _result(self) -> Result:
        """The result of the only request under way."""
        deadline = time.monotonic() + TRANSFER_S
        while self._worker is not None and time.monotonic() < deadline:
            for result in self._worker.poll():
                return result
            time.sleep(0.001)
        raise TransferError(f"no result within {TRANSFER_S:g} s")


class _Reply(NamedTuple):
    """What a rank answers; an empty message in between is a sign of life."""

    value: Any
    error: str = ""


def rank_main(role: str, number: str, descriptor: str) -> None:
    """A rank's process: answers calls until the connection closes."""
    logging.getLogger("nixl_fast").setLevel(logging.ERROR)  # peers that register anew are no news here
    connection = Connection(int(descriptor))
    sending = threading.Lock()
    threading.Thread(target=_show_life, args=(connection, sending), daemon=True).start()
    rank = _Rank(RankId(Role(role), int(number)))
    with suppress(EOFError, ConnectionError):
        while True:
            step, args = connection.recv()
            try:
                reply = _Reply(getattr(rank, step)(*args))
            except Exception as error:  # the demo shows it and ends this process
                reply = _Reply(None, _one_line(error))
            with sending:
                connection.send(reply)
    rank.close()


def _show_life(connection: Connection, sending: threading.Lock) -> None:
    """Also ends this process when the demo has ended, whatever this process is doing."""
    with suppress(OSError):
        while True:
            with sending:
                connection.send(None)
            time.sleep(_BEAT_S)
    os._exit(1)


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if isinstance(error, NixlFastError | ImportError) else f"{type(error).__name__}: {text}"


# --- The demo --------------------------------------------------------------------------------------------------------


class _Process(NamedTuple):
    popen: subprocess.Popen[bytes]
    connection: Connection
    log: IO[bytes]

    def status(self) -> str:
        """How it ended, with the last line that it wrote."""
        code = self.popen.poll()
        if code is None:
            how = "closed its connection"
        elif code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
        else:
            how = f"ended with status {code}"
        self.log.seek(0)
        lines = self.log.read().decode(errors="replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        return f"{how}; its last words: {last}" if last else how


class _Fleet:
    """The processes of a demo: started when a scenario needs them, gone on exit."""

    def __init__(self) -> None:
        self._processes: dict[RankId, _Process] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for process in self._processes.values():
            process.connection.close()  # asks it to end
            if kind is not None:
                process.popen.kill()
        for process in self._processes.values():
            try:
                process.popen.wait(timeout=3)
            except subprocess.TimeoutExpired:
                process.popen.kill()
                process.popen.wait()
            process.log.close()

    def start(self, ranks: Sequence[RankId]) -> None:
        """Starts the processes that are not there yet."""
        new = [rank for rank in ranks if rank not in self._processes]
        for rank in new:
            self._processes[rank] = self._spawn(rank)
        self.ask("start", new, silence=START_S)

    def ask(self, step: str, ranks: Sequence[RankId], *args: Any, silence: float | None = None) -> dict[RankId, Any]:
        """Has ranks do the next step, all at the same time, and waits until all have; a step is a method of `_Rank`.

        Raises:
            TransferError: A rank failed, or any has died or is silent for too long.
        """
        for rank in ranks:
            try:
                self._processes[rank].connection.send((step, args))
            except BlockingIOError:
                raise TransferError(f"{rank.name} takes no message") from None
            except OSError:
                raise self._gone(rank) from None
        silence = silence or SILENCE_S
        began = time.monotonic()
        heard = dict.fromkeys(self._processes, began)
        by_connection: dict[Any, RankId] = {process.connection: rank for rank, process in self._processes.items()}
        replies: dict[RankId, Any] = {}
        while len(replies) < len(ranks):
            for connection in wait(list(by_connection), _BEAT_S):
                rank = by_connection[connection]
                reply = self._receive(rank)
                heard[rank] = time.monotonic()
                if reply is not None:
                    replies[rank] = reply.value
            now = time.monotonic()
            for rank, last in heard.items():
                if now - last > silence:
                    raise TransferError(f"{rank.name} has shown no sign of life for {silence:g} s")
            if now - began > STEP_S:
                raise TransferError(f"no answer from all of {', '.join(rank.name for rank in ranks)} in {STEP_S:g} s")
        return replies

    def _receive(self, rank: RankId) -> _Reply | None:
        try:
            reply: _Reply | None = self._processes[rank].connection.recv()
        except BlockingIOError:
            raise TransferError(f"{rank.name} has stopped in the middle of a message") from None
        except (EOFError, OSError):
            raise self._gone(rank) from None
        if reply and reply.error:
            raise self._crashed() or TransferError(f"{rank.name}: {reply.error}")
        return reply

    def _crashed(self) -> TransferError | None:
        """The death of a rank that others may have failed for, and were heard first."""
        deadline = time.monotonic() + _GRACE_S
        while time.monotonic() < deadline:
            for rank, process in self._processes.items():
                if process.popen.poll() is not None:
                    return self._gone(rank)
            time.sleep(0.01)
        return None

    def _gone(self, rank: RankId) -> TransferError:
        process = self._processes[rank]
        with suppress(subprocess.TimeoutExpired):
            process.popen.wait(timeout=_GRACE_S)
        return TransferError(f"{rank.name} {process.status()}")

    @staticmethod
    def _spawn(rank: RankId) -> _Process:
        ours, theirs = socket.socketpair()
        for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):  # a stopped process must not stop the demo
            ours.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", int(SILENCE_S), 0))
        # Not the working directory, but where this process finds its packages.
        paths = os.pathsep.join(os.path.abspath(path) for path in sys.path if path)
        environment = {"NIXL_LOG_LEVEL": "WARN", **os.environ, "PYTHONPATH": paths}
        log = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        main = "import sys; from nixl_fast.demo import rank_main; rank_main(*sys.argv[1:])"
        command = [sys.executable, "-P", "-c", main, rank.role.value, str(rank.number), str(theirs.fileno())]
        with theirs:
            popen = subprocess.Popen(  # noqa: S603 - this interpreter and this module
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                pass_fds=[theirs.fileno()],
            )
        return _Process(popen, Connection(ours.detach()), log)


class ScenarioResult(msgspec.Struct, frozen=True):
    """What one scenario did.

    Args:
        name: The scenario.
        description: What it is about.
        direction: Who moved the bytes.
        producer_blocks: Logical blocks that the producer listed.
        consumer_blocks: Logical blocks that the consumer listed.
        descriptors: Descriptors on each side, all transfers together, as the next two.
        runs: Descriptors that remain once neighbours are merged.
        bytes: Bytes moved.
        planning_us: Microseconds to plan and pair, of the slowest rank.
        nixl_us: Microseconds to make and transfer, of the slowest rank.
        verified: Whether every byte is right and as many bytes moved as had to.
        checked_bytes: Bytes compared: all memory of all consumer ranks.
        data_bytes: Bytes among them that had to arrive.
        wrong_bytes: Bytes that are not what they must be.
        first_wrong: Where the first of them is.
        transfers: One per rank that read or wrote.
    """

    name: str
    description: str
    direction: Direction
    producer_blocks: int
    consumer_blocks: int
    descriptors: int
    runs: int
    bytes: int
    planning_us: float
    nixl_us: float
    verified: bool
    checked_bytes: int
    data_bytes: int
    wrong_bytes: int
    first_wrong: str
    transfers: tuple[Transfer, ...]


class Report(msgspec.Struct, frozen=True):
    """What the demo did.

    Args:
        nixl: Version of NIXL.
        seconds: Time the demo took, processes and all.
        verified: Whether every byte of every scenario was right.
        scenarios: One per scenario, in order.
    """

    nixl: str
    seconds: float
    verified: bool
    scenarios: tuple[ScenarioResult, ...]


def run_demo(scenarios: Sequence[Scenario], on_step: Callable[[Scenario, str], None] | None = None) -> Report:
    """Runs scenarios one after the other, in the same processes.

    Args:
        scenarios: What to run.
        on_step: Called at the start of every step with the scenario and what happens next.

    Raises:
        TransferError: NIXL cannot be imported or failed, a process died, or one was silent for too long. Wrong bytes
            are not an error but a result that is not ``verified``.
    """
    started = time.monotonic()
    with _Fleet() as fleet:
        results = tuple(_run(fleet, scenario, on_step or (lambda *_: None)) for scenario in scenarios)
    return Report(_version("nixl"), time.monotonic() - started, all(result.verified for result in results), results)


def _run(fleet: _Fleet, scenario: Scenario, on_step: Callable[[Scenario, str], None]) -> ScenarioResult:
    everyone = [RankId(role, index) for role in Role for index in range(len(scenario.engine(role).ranks))]
    initiators = [rank for rank in everyone if rank.role is scenario.initiator]
    targets = [rank for rank in everyone if rank.role is not scenario.initiator]
    fleet.start(everyone)
    on_step(scenario, "allocating")
    fleet.ask("allocate", everyone, scenario)
    on_step(scenario, "moving")
    addresses = fleet.ask("offer", targets)
    moved = fleet.ask("move", initiators, tuple(addresses.values()))
    fleet.ask("settle", targets)
    on_step(scenario, "checking every byte")
    verdicts = fleet.ask("verify", [rank for rank in everyone if rank.role is Role.CONSUMER]).values()
    transfers = tuple(moved[rank] for rank in initiators)
    data_bytes, wrong_bytes = sum(each.data_bytes for each in verdicts), sum(each.wrong_bytes for each in verdicts)
    moved_bytes = sum(each.bytes for each in transfers)
    return ScenarioResult(
        name=scenario.name,
        description=scenario.description,
        direction=scenario.direction,
        producer_blocks=scenario.producer.num_blocks,
        consumer_blocks=scenario.consumer.num_blocks,
        descriptors=sum(each.descriptors for each in transfers),
        runs=sum(each.runs for each in transfers),
        bytes=moved_bytes,
        planning_us=max(each.plan_us for each in transfers),
        nixl_us=max(each.make_us + each.transfer_us for each in transfers),
        verified=wrong_bytes == 0 and moved_bytes == data_bytes,
        checked_bytes=sum(each.checked_bytes for each in verdicts),
        data_bytes=data_bytes,
        wrong_bytes=wrong_bytes,
        first_wrong=next((each.first_wrong for each in verdicts if each.first_wrong), ""),
        transfers=transfers,
    )


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"
