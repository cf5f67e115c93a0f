"""The limits of the house: files stay readable from top to bottom, one name means one thing, one function writes a
quantity."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
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
UNITS = r"[kMGT]?B|[kMG]bit/s|ms|s|min|h|samples/s|[GT]FLOP/s|k?Wh?|°C|%"
BY_HAND = re.compile(
    rf"\{{\w*(:[^{{}}]*[gGeE%]\}}|(:[^{{}}]*)?\}} ({UNITS})(?![\w/])|:[^{{}}]+\}}({UNITS})(?![\w/]))|%\.\d[fge]"
)
"""A number that a text formats with an exponent or as a percentage, or to which it appends a unit."""
FORMATTERS = {
    "profiles/quantities.py": "one function for each quantity",
    "app/dashboard/tabs/chart_values.py": "values at an axis, of eight cells at most",
    "app/html_report/charts.py": "formats of the charts in a browser",
    "training/exchange/torch_backend/group_base.py": "the words of torch's own error",
    "speech/recordings/recording.py": "part of the identity of a clip",
}


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
    formats: list[str]
    """Texts that format a quantity by hand."""


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
    formats = [template for template in _templates(tree) if BY_HAND.search(template)]
    return Outline(str(path.relative_to(ROOT)), text.count("\n"), functions, classes, formats)


def _templates(tree: ast.AST) -> Iterator[str]:
    """Yield the texts outside docstrings, with ``{:format}`` where an f-string has a value."""
    documents = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield "".join(map(_template, node.values))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documents:
            yield node.value


def _template(part: ast.expr) -> str:
    if isinstance(part, ast.FormattedValue):
        pieces = part.format_spec.values if isinstance(part.format_spec, ast.JoinedStr) else []
        spec = "".join(str(piece.value) for piece in pieces if isinstance(piece, ast.Constant))
        return f"{{:{spec}}}" if spec else "{}"
    return str(part.value) if isinstance(part, ast.Constant) else ""


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


def test_a_quantity_is_written_by_its_function() -> None:
    formats = {outline.file: outline.formats for outline in _outlines() if outline.formats}
    assert {file: texts for file, texts in formats.items() if file not in FORMATTERS} == {}
    assert formats.keys() == FORMATTERS.keys()


def test_formats_by_hand_are_seen() -> None:
    by_hand = (
        """f"{a:.3g}", f"{a:.1%}", f"{n / 1e6:.0f} MB", f"{n:.0f}ms", "{n:.0f} %", "%.1f s", f"{a} s", f"{b:{c}e}" """
    )
    assert [bool(BY_HAND.search(text)) for text in _templates(ast.parse(by_hand))].count(True) == 8
    fine = """f"{a:.2f} times", f"{word}s", f"{bytes_text(n)}/s", f"{address}%{card}", f"{name} samples", f"{a:>6}" """
    assert [text for text in _templates(ast.parse(fine)) if BY_HAND.search(text)] == []
