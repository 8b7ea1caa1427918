"""A front for a NIXL agent that keeps making and posting transfers off the calling thread.

`AgentFront` has the agent's methods. ``make_prepped_xfer`` and ``transfer`` answer at once with a pending handle; one
transfer thread makes, posts and looks after them, in order. Until a transfer is over its handle says ``PROC``; an error of
making or posting is raised by the first ``check_xfer_state`` after it. While transfers are on their way the caller stays
out of NIXL: asking for the state of one makes UCX work on all, and would cost the caller the copying. States and messages
are then those that the transfer thread saw last, and messages are sent by it, in order.

The agent need not be thread-safe (vLLM makes it without locks): one lock admits one thread at a time to it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from enum import IntEnum
from queue import Empty, SimpleQueue
from time import monotonic, perf_counter_ns, sleep
from typing import Any

import numpy as np

from nixl_fast.errors import TransferError
from nixl_fast.vllm.descriptors import LazyIds

_log = logging.getLogger(__name__)


_SHORTEST_WAIT, _LONGEST_WAIT = 0.0002, 0.002
"""Seconds between two looks at transfers that are on their way; doubled from one look to the next."""

SETTLE_SECONDS = 10.0
"""How long memory that is to be deregistered is kept for transfers that are on their way."""


class _State(IntEnum):
    NEW = 0
    """Made by the caller, not yet handed over."""
    QUEUED = 1
    RUNNING = 2
    """On the transfer thread, in NIXL."""
    POSTED = 3
    DONE = 4
    FAILED = 5
    """Making, posting or the transfer failed; nothing new will be written."""
    RELEASED = 6


class PendingTransfer:
    """What `AgentFront.make_prepped_xfer` returns in the place of NIXL's handle."""

    __slots__ = (
        "_made_with",
        "_notif",
        "_num_descs",
        "_posted_ns",
        "_queued_ns",
        "_telemetry",
        "error",
        "real",
        "state",
    )

    def __init__(self, made_with: tuple[Any, ...]) -> None:
        self._made_with: tuple[Any, ...] | None = made_with
        self._notif = b""
        self._num_descs = 0
        self._queued_ns = self._posted_ns = 0
        self._telemetry: Any = None
        self.error: Exception | None = None
        self.real: Any = None
        """NIXL's handle, once it is made and until it is released."""
        self.state = _State.NEW

    def __repr__(self) -> str:
        return f"PendingTransfer({self.state.name.lower()})"


class MissingTelemetry:
    """Stands in for NIXL's telemetry where NIXL has none; times in microseconds, as NIXL's."""

    def __init__(self, post_us: int, total_us: int, num_descs: int) -> None:
        self.startTime = 0
        self.postDuration = post_us
        self.xferDuration = total_us
        self.totalBytes = 0
        self.descCount = num_descs


class AgentFront:
    """Stands before a NIXL agent; has all of its methods.

    Args:
        agent: The agent; nobody else may use it from now on.
        sync: Make and post on the calling thread, as the agent alone would.
        on_lost_notification: Called with a message that had been put off and could not be sent, and the error. Runs on
            the transfer thread.
        take: Is shown every message that comes in; those it returns True for are not handed on.
    """

    def __init__(
        self,
        agent: Any,
        *,
        sync: bool = False,
        on_lost_notification: Callable[[bytes, Exception], None] | None = None,
        take: Callable[[bytes], bool] | None = None,
    ) -> None:
        self._agent = agent
        self._take = take
        self._sync = sync
        self._on_lost_notification = on_lost_notification
        self._lock = threading.Lock()
        """Held while a thread is inside the agent."""
        self._mutex = threading.Lock()
        """Guards the handles' states and what follows; never held across a call into the agent."""
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._outstanding = 0
        """Jobs put and not yet run."""
        self._thread: threading.Thread | None = None
        self._closed = False
        self._posted: list[PendingTransfer] = []
        """Transfers on their way; only the transfer thread changes it."""
        self._notifs: dict[str, list[bytes]] = {}
        self._given_up = False
        """Whether the last `settle` has waited in vain."""
        self._news = False
        """Whether a transfer has ended or a message has come since messages were last asked for."""

    # What moves bytes

    def make_prepped_xfer(
        self,
        operation: str,
        local_xfer_side: Any,
        local_indices: Any,
        remote_xfer_side: Any,
        remote_indices: Any,
        notif_msg: bytes = b"",
        backends: Sequence[str] = (),
        skip_desc_merge: bool = False,
    ) -> Any:
        """As the agent's. The indices may also be `LazyIds`.

        Returns:
            A pending handle; nothing has been made yet.
        """
        made_with = (
            operation,
            local_xfer_side,
            local_indices,
            remote_xfer_side,
            remote_indices,
            notif_msg,
            list(backends),
            skip_desc_merge,
        )
        return self._exclusively(lambda: self._make(made_with)) if self._sync else PendingTransfer(made_with)

    def _make(self, made_with: tuple[Any, ...]) -> Any:
        operation, local_side, local_ids, remote_side, remote_ids, *rest = made_with
        local_ids, remote_ids = (ids.resolve() if isinstance(ids, LazyIds) else ids for ids in (local_ids, remote_ids))
        return self._agent.make_prepped_xfer(operation, local_side, local_ids, remote_side, remote_ids, *rest)

    def transfer(self, handle: Any, notif_msg: bytes = b"") -> str:
        """As the agent's, for a pending handle without waiting: it is queued for the transfer thread.

        Raises:
            TransferError: The handle has been handed over before, or the front is closed.
        """
        if not isinstance(handle, PendingTransfer):
            return str(self._exclusively(lambda: self._agent.transfer(handle, notif_msg)))
        if handle.state is not _State.NEW or self._closed:
            raise TransferError(f"{handle!r} cannot be started" + (", the agent is shut down" if self._closed else ""))
        handle._notif = notif_msg
        handle._queued_ns = perf_counter_ns()
        handle.state = _State.QUEUED
        self._put(lambda: self._start(handle))
        return "PROC"

    def _start(self, handle: PendingTransfer) -> None:
        """Makes and posts; on the transfer thread."""
        with self._mutex:
            if handle.state is not _State.QUEUED:
                return  # released while it waited
            handle.state = _State.RUNNING
        made_with, handle._made_with = handle._made_with, None
        try:
            assert made_with is not None  # noqa: S101 - set by the constructor, taken only here
            handle._num_descs = len(made_with[2])
            handle.real = self._make(made_with)
            status = self._agent.transfer(handle.real, handle._notif)
            handle._posted_ns = perf_counter_ns()
        except Exception as error:
            self._fail(handle, error)
            return
        handle.state = _State.POSTED
        if status == "DONE":
            self._finish(handle)
        else:
            self._posted.append(handle)

    def check_xfer_state(self, handle: Any) -> str:
        """``PROC`` until the transfer has been posted and is over, then ``DONE`` or ``ERR``.

        Raises:
            Exception: What making, posting or polling raised, once.
        """
        if not isinstance(handle, PendingTransfer):
            return str(self._exclusively(lambda: self._agent.check_xfer_state(handle)))
        if self._closed and handle.state is _State.POSTED:
            with self._lock:
                self._poll(handle)
        if handle.state is _State.FAILED:
            error, handle.error = handle.error, None
            if error is not None:
                raise error
            return "ERR"
        return "DONE" if handle.state is _State.DONE else "PROC"

    def _poll(self, handle: PendingTransfer) -> None:
        """Looks after a posted transfer; inside the lock."""
        if handle.state is not _State.POSTED:
            return
        try:
            status = self._agent.check_xfer_state(handle.real)
        except Exception as error:
            self._fail(handle, error)
            return
        if status == "DONE":
            self._finish(handle)
        elif status != "PROC":
            self._fail(handle, None)

    def _fail(self, handle: PendingTransfer, error: Exception | None) -> None:
        """Notes a failure and stops what may still be moving; inside the lock."""
        handle.error = error
        self._let_go(handle)
        handle.state = _State.FAILED
        self._news = True

    def _finish(self, handle: PendingTransfer) -> None:
        """Takes the telemetry of a transfer that is over and lets go of it; inside the lock."""
        try:
            handle._telemetry = self._agent.get_xfer_telemetry(handle.real)
        except Exception:  # no telemetry is no failure: the data has arrived
            _log.debug("NIXL has no telemetry of a finished transfer", exc_info=True)
        self._let_go(handle)
        handle.state = _State.DONE
        self._news = True

    def _let_go(self, handle: PendingTransfer) -> None:
        if handle.real is None:
            return
        try:
            self._agent.release_xfer_handle(handle.real)
            handle.real = None
        except Exception:  # the owner's own release tries again, and hears of it
            _log.debug("NIXL did not release a transfer", exc_info=True)

    def get_xfer_telemetry(self, handle: Any) -> Any:
        """NIXL's telemetry of a finished transfer, or a `MissingTelemetry` where NIXL has none."""
        if not isinstance(handle, PendingTransfer):
            return self._exclusively(lambda: self._agent.get_xfer_telemetry(handle))
        if handle._telemetry is not None:
            return handle._telemetry
        now = perf_counter_ns()
        queued, posted = handle._queued_ns or now, handle._posted_ns or now
        return MissingTelemetry((posted - queued) // 1000, (now - queued) // 1000, handle._num_descs)

    def release_xfer_handle(self, handle: Any) -> None:
        """As the agent's. A transfer that has not been started never will be; one being posted is waited for.

        Raises:
            Exception: What NIXL raises for a transfer that it cannot stop; the handle is still valid then.
        """
        if not isinstance(handle, PendingTransfer):
            self._exclusively(lambda: self._agent.release_xfer_handle(handle))
            return
        with self._mutex:
            if handle.state in (_State.NEW, _State.QUEUED):
                handle.state = _State.RELEASED
                handle._made_with = None
        if handle.state is _State.RELEASED or (handle.real is None and handle.state in (_State.DONE, _State.FAILED)):
            handle.state = _State.RELEASED
            return

        def release() -> None:
            if handle.real is not None:
                self._agent.release_xfer_handle(handle.real)
                handle.real = None
            handle.state = _State.RELEASED

        self._exclusively(release)

    # Messages

    def send_notif(self, remote_agent_name: str, notif_msg: bytes, backend: str | None = None) -> None:
        """As the agent's; behind every transfer that was handed over before it."""
        if self._enter():
            try:
                self._agent.send_notif(remote_agent_name, notif_msg, backend)
            finally:
                self._lock.release()
            return

        def send() -> None:
            try:
                self._agent.send_notif(remote_agent_name, notif_msg, backend)
            except Exception as error:
                _log.warning("a notification to %s was lost: %s", remote_agent_name, error)
                if self._on_lost_notification is not None:
                    self._on_lost_notification(notif_msg, error)

        self._put(send)

    def get_new_notifs(self, backends: Sequence[str] = ()) -> dict[str, list[bytes]]:
        """As the agent's; while transfers are on their way, what the transfer thread has found."""
        self._news = False  # before anything is looked at: what ends from here on is news for the next call
        with self._mutex:
            out, self._notifs = self._notifs, {}
        if self._enter():
            try:
                new = self._agent.get_new_notifs(list(backends))
            except Exception:
                with self._mutex:  # what the transfer thread had found is for the next call
                    _merge(out, self._notifs)
                    self._notifs, self._news = out, True
                raise
            finally:
                self._lock.release()
            if out:
                _merge(out, new)
            else:
                out = dict(new)
        if out and self._take is not None:
            out = {name: [each for each in messages if not self._take(each)] for name, messages in out.items()}
        return out

    # The rest

    @property
    def quiet(self) -> bool:
        """Transfers are on their way, and none has ended nor has a message come since `get_new_notifs` was called."""
        return bool(self._posted or self._outstanding) and not self._news

    def prep_xfer_dlist(self, agent_name: str, xfer_list: Any, *args: Any, **kwargs: Any) -> Any:
        """As the agent's; rows of no blocks are left out, NIXL would refuse the whole list for one of them."""
        if isinstance(xfer_list, np.ndarray) and xfer_list.ndim == 2 and xfer_list.shape[1] == 5:
            filled = xfer_list[:, 4] > 0
            if not filled.all():
                xfer_list = np.ascontiguousarray(xfer_list[filled])
        return self._exclusively(lambda: self._agent.prep_xfer_dlist(agent_name, xfer_list, *args, **kwargs))

    def drain(self, timeout: float | None = None) -> bool:
        """Waits until everything that has been handed over is posted or has failed.

        Args:
            timeout: Seconds, or None for no limit.

        Returns:
            Whether it is.
        """
        if threading.current_thread() is self._thread or self._thread is None:
            return True
        reached = threading.Event()
        self._put(reached.set)
        return reached.wait(timeout)

    def settle(self, timeout: float) -> bool:
        """Waits until nothing moves any more and nothing is about to.

        Args:
            timeout: Seconds.

        Returns:
            Whether that is so.
        """
        end = monotonic() + timeout
        while (busy := bool(self._outstanding or self._posted)) and not self._closed and monotonic() < end:
            sleep(_SHORTEST_WAIT)
        self._given_up = busy
        return not busy

    def deregister_memory(self, *args: Any, **kwargs: Any) -> Any:
        """As the agent's, once nothing moves any more; what still does after some seconds is left to NIXL."""
        if self._given_up or not self.settle(SETTLE_SECONDS):
            _log.warning("memory is deregistered while transfers are on their way")
        return self._exclusively(lambda: self._agent.deregister_memory(*args, **kwargs))

    def close(self, timeout: float = 10.0) -> None:
        """Drains, then ends the transfer thread; transfers cannot be started afterwards. Twice is once."""
        if self._closed:
            return
        self.drain(timeout)
        with self._mutex:  # nothing is put behind the end
            self._closed = True
            self._jobs.put(None)
        if self._thread is not None:
            self._thread.join(timeout)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_agent" not in self.__dict__:
            raise AttributeError(name)
        value = getattr(self._agent, name)
        if not callable(value):
            return value

        def call(*args: Any, **kwargs: Any) -> Any:
            return self._exclusively(lambda: value(*args, **kwargs))

        return call

    def _enter(self) -> bool:
        """Takes the lock if the transfer thread has nothing to do."""
        return not self._outstanding and not self._posted and self._lock.acquire(blocking=False)

    def _exclusively(self, call: Callable[[], Any]) -> Any:
        """A call into the agent, behind everything that has been handed over before; returns or raises what it does."""
        if self._thread is None or self._closed or threading.current_thread() is self._thread:
            with self._lock:
                return call()
        if self._enter():
            try:
                return call()
            finally:
                self._lock.release()
        ended = threading.Event()
        outcome: list[Any] = [None, None]

        def job() -> None:
            try:
                outcome[0] = call()
            except BaseException as error:
                outcome[1] = error
            ended.set()

        self._put(job)
        ended.wait()
        if outcome[1] is not None:
            raise outcome[1]
        return outcome[0]

    def _put(self, job: Callable[[], None]) -> None:
        """Hands a job to the transfer thread; once that has ended, the caller runs it."""
        with self._mutex:
            if not self._closed:
                self._outstanding += 1
                if self._thread is None:
                    self._thread = threading.Thread(target=self._run, name="nixl-fast-transfer", daemon=True)
                    self._thread.start()
                self._jobs.put(job)
                return
        with self._lock:
            job()

    def _run(self) -> None:
        wait = _SHORTEST_WAIT
        while True:
            try:
                job = self._jobs.get(timeout=wait if self._posted else None)
            except Empty:
                wait = min(2 * wait, _LONGEST_WAIT)
                with self._lock:
                    self._look_around()
                continue
            if job is None:
                return
            wait = _SHORTEST_WAIT
            with self._lock:
                try:
                    job()
                except Exception:  # every job handles its own errors; the thread must outlive a mistake
                    _log.exception("the transfer thread met an unexpected error")
                with self._mutex:
                    self._outstanding -= 1
                if self._posted:
                    self._look_around()

    def _look_around(self) -> None:
        """The states of what is on its way, and the messages that callers would have asked for; inside the lock."""
        for handle in self._posted:
            self._poll(handle)
        self._posted = [handle for handle in self._posted if handle.state is _State.POSTED]
        try:
            new = self._agent.get_new_notifs()
        except Exception:
            _log.warning("NIXL's notifications could not be read", exc_info=True)
            return
        if new:
            with self._mutex:
                _merge(self._notifs, new)
            self._news = True


def _merge(into: dict[str, list[bytes]], new: dict[str, list[bytes]]) -> None:
    for name, messages in new.items():
        into.setdefault(name, []).extend(messages)
