"""The house's limits on size, so that files stay readable from top to bottom."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROOMS = ("profiles", "training", "distributed", "app")
LONGEST_FUNCTION = 60
LONGEST_FILE = 400


def _sources() -> list[Path]:
    paths = [
        ROOT / "cli_typer.py",
        ROOT / "wizard.py",
        *(path for room in ROOMS for path in (ROOT / room).rglob("*.py")),
    ]
    return [path for path in paths if "_pb2" not in path.name]


def _functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


@pytest.mark.parametrize("path", _sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_sizes(path: Path) -> None:
    text = path.read_text()
    lengths = {
        function.name: (function.end_lineno or 0) - function.lineno + 1 for function in _functions(ast.parse(text))
    }
    assert {name: length for name, length in lengths.items() if length > LONGEST_FUNCTION} == {}
    assert text.count("\n") <= LONGEST_FILE
