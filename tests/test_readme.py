"""The README's Python examples run."""

import re
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"
EXAMPLES = re.findall(r"^```python\n(.*?)^```", README.read_text(), re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("source", EXAMPLES)
def test_example(source: str) -> None:
    assert "assert " in source  # an example that shows nothing checks nothing
    exec(compile(source, str(README), "exec"), {"__name__": "readme"})  # noqa: S102


def test_there_are_examples() -> None:
    assert EXAMPLES
