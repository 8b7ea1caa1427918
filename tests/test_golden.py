"""Public results are what `golden.json` pins, on every run and from every thread."""

import json
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import golden

PINNED = json.loads(golden.FILE.read_text())


def test_results_are_the_pinned_ones() -> None:
    found = json.loads(json.dumps(golden.results()))
    assert found.keys() == PINNED.keys()
    for what, pinned in PINNED.items():
        assert len(found[what]) == len(pinned)
        for number, (now, then) in enumerate(zip(found[what], pinned, strict=True)):
            assert now == then, f"{what} {number}"


def test_eight_threads_at_once_get_the_pinned_results() -> None:
    barrier = threading.Barrier(8)

    def results(_: int) -> Any:
        barrier.wait()
        return json.loads(json.dumps(golden.results()))

    with ThreadPoolExecutor(8) as pool:
        assert all(found == PINNED for found in pool.map(results, range(8)))


def _in_a_new_process(**environment: str) -> Any:
    """The results there, and what numpy finds that the processor can do."""
    code = "import golden, json; print(json.dumps([golden.results(), golden.processor_features()]))"
    paths = {"PYTHONPATH": str(golden.FILE.parent)}
    environment = {**os.environ, **paths, **environment}
    printed = subprocess.run([sys.executable, "-c", code], env=environment, check=True, capture_output=True).stdout
    return json.loads(printed)


def test_a_new_process_gets_the_pinned_results() -> None:
    assert _in_a_new_process(PYTHONHASHSEED="12345")[0] == PINNED


def test_a_lesser_processor_gets_the_pinned_results() -> None:
    """The core is compiled for one level of processors; numpy chooses by what it finds, and is told to find less."""
    found = golden.processor_features()
    if not found:
        pytest.skip("numpy finds nothing on this processor that it could do without")
    assert _in_a_new_process(NPY_DISABLE_CPU_FEATURES=" ".join(found)) == [PINNED, []]
