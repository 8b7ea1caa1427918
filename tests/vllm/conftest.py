"""Fixtures: checkpoints, pairs of engines, and the unpacked wheel of a second vLLM release."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from engine import ENVIRONMENT, Engine

if importlib.util.find_spec("vllm") is None:
    collect_ignore_glob = ["test_*.py"]  # these tests have an environment of their own

for _name, _value in ENVIRONMENT.items():
    os.environ.setdefault(_name, _value)

CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "nixl-fast-tests"


def unpacked(release: str) -> Path:
    """The folder with a vLLM release's wheel, unpacked without what it depends on; fetched once per machine."""
    target = CACHE / f"vllm-{release}"
    if Path(target, "vllm", "__init__.py").exists():
        return target
    uv = shutil.which("uv") or pytest.fail("uv is needed to fetch a second vLLM release")
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as part:  # an interrupted download must not look like a whole one
        command = [uv, "pip", "install", "--no-deps", "--python", sys.executable, "--target", part, f"vllm=={release}"]
        environment = {**os.environ, "UV_NATIVE_TLS": "1", "UV_SYSTEM_CERTS": "1"}  # the machine's own certificates
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1800, check=False)
        if done.returncode != 0 or not Path(part, "vllm", "__init__.py").exists():
            pytest.fail(f"vllm {release} could not be fetched from the package index:\n{done.stderr[-3000:]}")
        with contextlib.suppress(OSError):  # another run was first
            Path(part).rename(target)
            Path(part).mkdir()
    return target


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    folder = tmp_path_factory.mktemp("checkpoints")

    def make(name: str) -> str:
        script = f"import models, pathlib; print(models.make({name!r}, pathlib.Path({str(folder)!r})))"
        done = subprocess.run(
            [sys.executable, "-c", script], cwd=Path(__file__).parent, check=True, capture_output=True, text=True
        )
        return done.stdout.splitlines()[-1]

    return make


_ports: set[int] = set()


def free_port() -> int:
    """A port that nobody uses, below those that the system hands out; vLLM waits for ever for one that is taken."""
    rng = random.Random(os.urandom(8))
    while True:
        port = rng.randrange(15000, 30000, 10)
        with socket.socket() as sock, contextlib.suppress(OSError):
            sock.bind(("127.0.0.1", port))
            if port not in _ports:
                _ports.add(port)
                return port


OURS = {"kv_connector": "NixlConnector", "kv_connector_module_path": "nixl_fast.vllm"}
STOCK = {"kv_connector": "NixlConnector"}


class Pair:
    """A prefill engine and a decode engine."""

    def __init__(self, prefill: Engine, decode: Engine) -> None:
        self.prefill, self.decode = prefill, decode


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Pair]]:
    """Makes pairs of engines that live as long as the module's tests; the same settings give the same pair."""
    made: dict[str, Pair] = {}
    logs = tmp_path_factory.mktemp("logs")

    def make(
        model: str,
        *,
        prefill: dict[str, Any] | None = None,
        decode: dict[str, Any] | None = None,
        connectors: tuple[dict[str, Any], dict[str, Any]] = (OURS, OURS),
        env: dict[str, str] | None = None,
        **common: Any,
    ) -> Pair:
        key = repr((model, prefill, decode, connectors, env, common))
        if key in made and made[key].prefill.process.is_alive() and made[key].decode.process.is_alive():
            return made[key]
        for pair in made.values():  # two engines at a time are enough for two cores
            pair.prefill.close()
            pair.decode.close()
        sides = []
        for role, own, connector in zip(("producer", "consumer"), (prefill, decode), connectors, strict=True):
            transfer = {**connector, "kv_role": f"kv_{role}"}
            settings = {"model": model, "block_size": 32, "dtype": "float32", **common, **(own or {})}
            log = logs / f"{len(made)}-{role}.log"
            sides.append(Engine(log, port=free_port(), env=env, transfer=transfer, **settings))
        made[key] = Pair(*sides)
        for side in sides:
            assert side.answer() is None
        return made[key]

    yield make
    for pair in made.values():
        pair.prefill.close()
        pair.decode.close()
