"""Which bodies of vLLM's methods the overrides were verified against: fingerprints of their source, not versions."""

from __future__ import annotations

import ast
import hashlib
import inspect
import textwrap
from collections.abc import Callable
from functools import cache
from typing import Any


class _Normaliser(ast.NodeTransformer):
    """Removes what does not change a result: docstrings, annotations, the wording of messages."""

    def _function(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> ast.AST:
        node.returns = None
        node.body = _without_docstring(node.body)
        for argument in ast.walk(node.args):
            if isinstance(argument, ast.arg):
                argument.annotation = None
        self.generic_visit(node)
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        return self._function(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> ast.AST:
        return self._function(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        self.generic_visit(node)
        if node.value is None:
            return ast.Pass()
        return ast.Assign(targets=[node.target], value=node.value, lineno=0)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.AST:
        return ast.Constant(value="f-string")  # unparsed differently from one Python to the next


def _without_docstring(body: list[ast.stmt]) -> list[ast.stmt]:
    first = body[0]
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
        return body[1:] or [ast.Pass()]
    return body


def fingerprint_source(source: str) -> str:
    """Sixteen hex digits of one function's normalised source."""
    tree = _Normaliser().visit(ast.parse(textwrap.dedent(source)))
    text = ast.unparse(ast.fix_missing_locations(tree))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@cache
def fingerprint(function: Callable[..., Any]) -> str | None:
    """The fingerprint of a function's source; None where there is no source."""
    try:
        return fingerprint_source(inspect.getsource(function))
    except (OSError, TypeError, SyntaxError):
        return None
