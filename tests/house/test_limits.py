"""The limits of the house: files stay readable from top to bottom, and one name means one thing."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
ROOMS = ("profiles", "training", "distributed", "app", "speech")
LONGEST_FUNCTION = 60
LONGEST_FILE = 400
MOST_FILES = 12
MANY = ("training/strategies",)
"""Folders with more: every strategy is a file there."""


def _sources() -> list[Path]:
    paths = [
        ROOT / "cli_typer.py",
        ROOT / "wizard.py",
        *(path for room in ROOMS for path in (ROOT / room).rglob("*.py")),
    ]
    return [path for path in paths if "_pb2" not in path.name]


def _functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def test_sizes() -> None:
    too_long: dict[str, int] = {}
    for path in _sources():
        text, file = path.read_text(), str(path.relative_to(ROOT))
        if text.count("\n") > LONGEST_FILE:
            too_long[file] = text.count("\n")
        for function in _functions(ast.parse(text)):
            length = (function.end_lineno or 0) - function.lineno + 1
            if length > LONGEST_FUNCTION:
                too_long[f"{file}: {function.name}"] = length
    assert too_long == {}


def test_few_files_lie_directly_in_a_folder() -> None:
    files = Counter(str(path.parent.relative_to(ROOT)) for path in _sources() if path.name != "__init__.py")
    assert {folder: number for folder, number in files.items() if number > MOST_FILES and folder not in MANY} == {}


def test_a_public_class_has_a_name_of_its_own() -> None:
    found: dict[str, list[str]] = {}
    for path in _sources():
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found.setdefault(node.name, []).append(str(path.relative_to(ROOT)))
    assert {name: files for name, files in found.items() if len(files) > 1} == {}
