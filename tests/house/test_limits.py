"""The limits of the house: files stay readable from top to bottom, and one name means one thing."""

from __future__ import annotations

import ast
from collections import Counter
from functools import cache
from pathlib import Path
from typing import NamedTuple

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


class Outline(NamedTuple):
    """What a file defines."""

    file: str
    lines: int
    functions: dict[str, int]
    """Their lines by their names; the longest one's where several have a name."""
    classes: list[str]
    """The public ones."""


@cache
def _outlines() -> list[Outline]:
    return [_outline(path) for path in _sources()]


def _outline(path: Path) -> Outline:
    text, functions = path.read_text(), dict[str, int]()
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or 0) - node.lineno + 1
            functions[node.name] = max(length, functions.get(node.name, 0))
    classes = [node.name for node in tree.body if isinstance(node, ast.ClassDef) and node.name[0] != "_"]
    return Outline(str(path.relative_to(ROOT)), text.count("\n"), functions, classes)


def test_sizes() -> None:
    files = {outline.file: outline.lines for outline in _outlines() if outline.lines > LONGEST_FILE}
    functions = {
        f"{outline.file}: {name}": lines
        for outline in _outlines()
        for name, lines in outline.functions.items()
        if lines > LONGEST_FUNCTION
    }
    assert files | functions == {}


def test_few_files_lie_directly_in_a_folder() -> None:
    files = Counter(str(path.parent.relative_to(ROOT)) for path in _sources() if path.name != "__init__.py")
    assert {folder: number for folder, number in files.items() if number > MOST_FILES and folder not in MANY} == {}


def test_a_public_class_has_a_name_of_its_own() -> None:
    files: dict[str, list[str]] = {}
    for outline in _outlines():
        for name in outline.classes:
            files.setdefault(name, []).append(outline.file)
    assert {name: where for name, where in files.items() if len(where) > 1} == {}
