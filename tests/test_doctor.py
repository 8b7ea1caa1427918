"""``nixl-fast doctor`` where vLLM is not installed: what it finds, and what its exit status says."""

from __future__ import annotations

import json
from typing import Any

import pytest
from typer.testing import CliRunner

from nixl_fast import doctor
from nixl_fast.cli import app


def _run(*arguments: str) -> tuple[int, dict[str, Any]]:
    result = CliRunner().invoke(app, ["doctor", "--json", *arguments])
    return result.exit_code, json.loads(result.stdout)


def test_a_machine_that_works() -> None:
    status, report = _run()
    found = {check["name"]: check for check in report["checks"]}
    assert (status, report["healthy"]) == (0, True)
    assert found["nixl"]["detail"].startswith("nixl ")
    assert found["vllm"] == {
        "name": "vllm",
        "status": "info",
        "detail": "not installed; only needed for the vLLM connector",
    }
    assert found["N x 5 rows"]["status"] == "ok"
    assert "every byte right" in found["loopback transfer"]["detail"]


def test_without_the_loopback() -> None:
    status, report = _run("--no-loopback")
    assert status == 0
    assert "loopback transfer" not in [check["name"] for check in report["checks"]]


def test_what_fails_is_in_the_status_and_stops_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(loopback: bool) -> list[doctor.Check]:
        raise RuntimeError("no backend")

    monkeypatch.setattr(doctor, "_nixl", broken)
    monkeypatch.setenv("NIXL_FAST_SHADDOW", "1")
    monkeypatch.setenv("UCX_TLS", "tcp")
    status, report = _run()
    found = {check["name"]: check for check in report["checks"]}
    assert (status, report["healthy"]) == (1, False)
    assert (found["NIXL"]["status"], found["NIXL"]["detail"]) == ("failed", "RuntimeError: no backend")
    assert found["switches"]["status"] == "warning"
    assert "NIXL_FAST_SHADDOW" in found["switches"]["detail"]
    assert "nixl-fast" in found


def test_transports_that_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "cuda_copy")
    assert doctor._transports().status is doctor.Status.WARNING
    monkeypatch.delenv("UCX_TLS")
    assert doctor._transports().status is doctor.Status.OK
