"""The NIXL agent of one rank: registered memory, prepared lists, and transfers. Not thread-safe, one thread owns it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from nixl_fast._native import Pairing
from nixl_fast.errors import GeometryError, TransferError
from nixl_fast.layout import EngineLayout, Region
from nixl_fast.plan import Direction, Lane, Side, TransferPlan

UCX_THREADS = 4
"""UCX worker threads of an agent made here; posting many descriptors without them blocks ten times as long."""


class Memory(NamedTuple):
    """A range of memory to register."""

    addr: int
    nbytes: int
    device_id: int = 0
    mem_type: str = "DRAM"


class PreparedLane(NamedTuple):
    """The two prepared lists of one memory type pair."""

    local: Any
    remote: Any


class Prepared(NamedTuple):
    """A plan whose lists NIXL has checked."""

    plan: TransferPlan
    agent: str
    lanes: tuple[PreparedLane, ...]


class Posted(NamedTuple):
    """A NIXL transfer of this agent."""

    handle: Any
    descriptors: int


def default_agent(name: str) -> Any:
    """A NIXL agent on UCX.

    Raises:
        TransferError: nixl is not installed.
    """
    try:
        from nixl._api import nixl_agent, nixl_agent_config  # noqa: PLC0415 - optional, and heavy
    except ImportError as error:
        raise TransferError(f"nixl cannot be imported ({error}); pip install 'nixl-fast[nixl]'") from None
    config = nixl_agent_config(backends=["UCX"], num_threads=UCX_THREADS)
    return nixl_agent(name, config)


class Endpoint:
    """One rank's agent with its registered memory.

    Args:
        name: Agent name, unique among all peers.
        make: Makes the agent; tests inject faults here.
    """

    def __init__(self, name: str, make: Callable[[str], Any] = default_agent) -> None:
        self.name = name
        self._agent = _call("nixl_agent", make, name)
        self._registered: list[Any] = []
        self._strided: bool | None = None

    def register(self, layout: EngineLayout, memory: Sequence[Memory]) -> None:
        """Registers memory with NIXL, in one call per memory type.

        Raises:
            GeometryError: A region of the layout that is not inside one of the ranges.
            TransferError: NIXL refuses the memory.
        """
        ranges = list(memory) or _ranges(layout)
        for name, region, _ in layout.places():
            if region.num_blocks and not any(_inside(region, each) for each in ranges):
                raise GeometryError(
                    f"{name}: bytes {region.base_addr:#x} .. {region.end_addr:#x} ({region.mem_type}, device "
                    f"{region.device_id}) are not inside one registered range; the ranges are "
                    + ", ".join(
                        f"{each.addr:#x} .. {each.addr + each.nbytes:#x} ({each.mem_type})" for each in ranges[:4]
                    )
                )
        for mem_type in dict.fromkeys(each.mem_type for each in ranges):
            rows = [(each.addr, each.nbytes, each.device_id, "") for each in ranges if each.mem_type == mem_type]
            self._registered.append(_call("register_memory", self._agent.register_memory, rows, mem_type))

    def deregister(self) -> None:
        """Deregisters everything; a second call does nothing."""
        while self._registered:
            _call("deregister_memory", self._agent.deregister_memory, self._registered.pop())

    def metadata(self) -> bytes:
        """What a peer needs to reach the registered memory."""
        data: bytes = _call("get_agent_metadata", self._agent.get_agent_metadata)
        return data

    def add_peer(self, name: str, metadata: bytes) -> None:
        """Loads a peer's metadata.

        Raises:
            TransferError: NIXL refuses it, or it is another agent's.
        """
        loaded = _call("add_remote_agent", self._agent.add_remote_agent, metadata)
        loaded = loaded.decode() if isinstance(loaded, bytes) else loaded
        if loaded != name:
            self.remove_peer(loaded)
            raise TransferError(f"NIXL metadata is of agent {loaded!r}, the peer called itself {name!r}")

    def remove_peer(self, name: str) -> None:
        """Forgets a peer and disconnects."""
        _call("remove_remote_agent", self._agent.remove_remote_agent, name)

    def prepare(self, plan: TransferPlan, agent: str) -> Prepared:
        """Has NIXL check a plan's lists.

        Raises:
            TransferError: NIXL refuses a list, which then lies outside the memory that its side registered.
        """
        lanes: list[PreparedLane] = []
        try:
            for index, lane in enumerate(plan.lanes):
                local = self._list(plan, Side.LOCAL, index, lane, "NIXL_INIT_AGENT")
                lanes.append(PreparedLane(local, None))
                lanes[-1] = PreparedLane(local, self._list(plan, Side.REMOTE, index, lane, agent))
        except TransferError:
            _release_lists(lanes)
            raise
        return Prepared(plan, agent, tuple(lanes))

    def unprepare(self, prepared: Prepared) -> None:
        """Releases a plan's lists."""
        _release_lists(prepared.lanes)

    def make(
        self, prepared: Prepared, ids: Sequence[tuple[NDArray[np.int32], NDArray[np.int32]]], notification: bytes
    ) -> list[Posted]:
        """Makes one NIXL transfer per lane that has descriptors; the notification goes with it if there is just one."""
        operation = "READ" if prepared.plan.direction is Direction.READ else "WRITE"
        used = [(lane, *pair) for lane, pair in zip(prepared.lanes, ids, strict=True) if len(pair[0])]
        made: list[Posted] = []
        try:
            for lane, local, remote in used:
                handle = _call(
                    "make_prepped_xfer",
                    self._agent.make_prepped_xfer,
                    operation,
                    lane.local,
                    local,
                    lane.remote,
                    remote,
                    notification,
                )
                made.append(Posted(handle, len(local)))
        except TransferError:
            for each in made:
                self.release(each)
            raise
        return made

    def post(self, posted: Posted) -> bool:
        """Starts a transfer; True if it is already done."""
        return self._state("transfer", self._agent.transfer, posted)

    def is_done(self, posted: Posted) -> bool:
        """Whether a transfer is done.

        Raises:
            TransferError: It has failed; its handle still has to be released.
        """
        return self._state("check_xfer_state", self._agent.check_xfer_state, posted)

    def release(self, posted: Posted) -> None:
        """Frees a transfer's handle.

        Raises:
            TransferError: It is still moving bytes and NIXL cannot stop it; the handle is not freed.
        """
        _call("release_xfer_handle", self._agent.release_xfer_handle, posted.handle)

    def notify(self, agent: str, message: bytes) -> None:
        """Sends a notification that belongs to no transfer."""
        _call("send_notif", self._agent.send_notif, agent, message)

    def notifications(self) -> list[bytes]:
        """Notifications that have arrived since the last call."""
        arrived: dict[str, list[bytes]] = _call("get_new_notifs", self._agent.get_new_notifs)
        return [message for messages in arrived.values() for message in messages]

    def _state(self, name: str, function: Callable[..., str], posted: Posted) -> bool:
        state = _call(name, function, posted.handle)
        if state not in ("DONE", "PROC"):
            raise TransferError(f"NIXL {name} says {state}")
        return bool(state == "DONE")

    def _list(self, plan: TransferPlan, side: Side, index: int, lane: Lane, agent: str) -> Any:
        table = lane.local_table if side is Side.LOCAL else lane.remote_table
        mem_type = lane.local_mem_type if side is Side.LOCAL else lane.remote_mem_type
        if self._strided is not False:
            try:
                handle = _call("prep_xfer_dlist", self._agent.prep_xfer_dlist, agent, table, mem_type)
            except TransferError:
                # NIXL before 1.5 has no strided rows; after that a refusal is about the memory.
                if self._strided:
                    raise
            else:
                self._strided = True
                return handle
        start = lane.local_start if side is Side.LOCAL else lane.remote_start
        rows = plan.expanded(side)[start : start + int(table[:, 4].sum())]
        handle = _call("prep_xfer_dlist", self._agent.prep_xfer_dlist, agent, rows, mem_type)
        self._strided = False
        return handle


def _call(name: str, function: Callable[..., Any], *args: Any) -> Any:
    try:
        return function(*args)
    except TransferError:
        raise
    except Exception as error:  # NIXL raises classes of its own
        raise TransferError(f"NIXL {name} failed: {error or type(error).__name__}") from error


def _release_lists(lanes: Sequence[PreparedLane]) -> None:
    failed: TransferError | None = None
    for handle in [handle for lane in lanes for handle in lane if handle is not None]:
        try:
            _call("release_dlist_handle", handle.release)
        except TransferError as error:
            failed = error
    if failed is not None:
        raise failed


def _ranges(layout: EngineLayout) -> list[Memory]:
    """The layout's regions, joined where they overlap: interleaved regions are one allocation."""
    ranges: list[Memory] = []
    for _, region, _ in sorted(
        layout.places(), key=lambda place: (place[1].mem_type, place[1].device_id, place[1].base_addr)
    ):
        last = ranges[-1] if ranges else None
        where = (region.device_id, region.mem_type)
        if last and (last.device_id, last.mem_type) == where and region.base_addr < last.addr + last.nbytes:
            end = max(last.addr + last.nbytes, region.end_addr)
            ranges[-1] = last._replace(nbytes=end - last.addr)
        elif region.num_blocks:
            ranges.append(Memory(region.base_addr, region.end_addr - region.base_addr, *where))
    return ranges


def _inside(region: Region, memory: Memory) -> bool:
    return (
        (region.mem_type, region.device_id) == (memory.mem_type, memory.device_id)
        and memory.addr <= region.base_addr
        and region.end_addr <= memory.addr + memory.nbytes
    )


def pieces(plan: TransferPlan, pairing: Pairing, size: int) -> list[list[tuple[NDArray[np.int32], NDArray[np.int32]]]]:
    """A pairing's indices by lane, cut into pieces of at most ``size`` descriptors."""
    lanes = plan.split(pairing)
    longest = max(len(local) for local, _ in lanes)
    if longest <= size:
        return [list(lanes)]
    return [
        [(local[at : at + size], remote[at : at + size]) for local, remote in lanes] for at in range(0, longest, size)
    ]
