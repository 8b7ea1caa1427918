"""Options of the tests that run as long as they are asked to: ``pytest -m soak --soak-seconds 600``."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--soak-seconds", type=float, default=600, help="how long each test of -m soak runs")


@pytest.fixture
def soak_seconds(request: pytest.FixtureRequest) -> float:
    seconds: float = request.config.getoption("--soak-seconds")
    return seconds
