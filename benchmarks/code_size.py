"""How large the product is, and in which language: lines, files, classes, lengths of functions and empty names.

    .venv/bin/python benchmarks/code_size.py [FOLDER_OF_ANOTHER_CHECKOUT]

Prints a Markdown table with a row for each room and for each folder below it. Lines are all lines of a file; generated
ones count too. A name is empty if it says nothing about its value (:data:`EMPTY_NAMES`); counted are the bindings of
variables, parameters, attributes and functions, without the loop variables of comprehensions.
"""

from __future__ import annotations

import ast
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOMS = ("app", "distributed", "training", "speech", "profiles", "muster")
FACE = ("wizard.py", "cli_typer.py")
EMPTY_NAMES = frozenset(
    "found said told own one other known kept given there here how what who where when then wanted made way ways place "
    "said first last whole every rest more most least same again apart beside like such each both all some any part "
    "parts room rooms".split()
)
"""Words that are no names: whoever reads them, or searches for the concept, learns nothing."""


def functions(tree: ast.Module) -> Iterator[int]:
    """Yield the lines of every function."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield (node.end_lineno or node.lineno) - node.lineno + 1


def bound_names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield line and name of every binding: functions, parameters, variables, attributes that are assigned to."""
    loop_variables = set[int]()
    for node in ast.walk(tree):  # each node comes after those around it
        match node:
            case ast.comprehension():
                loop_variables |= {id(target) for target in ast.walk(node.target)}
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                yield node.lineno, node.name
            case ast.arg(arg=name) if name not in ("self", "cls"):
                yield node.lineno, name
            case ast.Name(id=name, ctx=ast.Store()) if id(node) not in loop_variables:
                yield node.lineno, name
            case ast.Attribute(attr=name, ctx=ast.Store()) | ast.ExceptHandler(name=str(name)):
                yield node.lineno, name


def is_empty(name: str) -> bool:
    """Whether a name is one of :data:`EMPTY_NAMES`; underscores around it do not count, ``__all__`` is Python's."""
    return name != "__all__" and name.strip("_") in EMPTY_NAMES


def row(room: str, files: Sequence[Path]) -> str:
    """Return the row of the table for these files."""
    texts = [file.read_text(encoding="utf-8") for file in files]
    trees = [ast.parse(text) for text in texts]
    lengths = [length for tree in trees for length in functions(tree)] or [0, 0]
    classes = sum(isinstance(node, ast.ClassDef) for tree in trees for node in ast.walk(tree))
    names = [name for tree in trees for _, name in bound_names(tree)]
    empty = sum(map(is_empty, names)) / max(1, len(names))
    longest = statistics.quantiles(lengths, n=10)[-1] if len(lengths) > 1 else lengths[0]
    return (
        f"| {room} | {sum(len(text.splitlines()) for text in texts)} | {len(files)} | {classes} | {len(lengths)} "
        f"| {statistics.median(lengths):.0f} | {longest:.0f} | {empty:.1%} |"
    )


def main() -> None:
    """Print the table."""
    root = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).resolve().parent.parent)
    print("| room | lines | files | classes | functions | median of their lines | 90 % have at most | empty names |")
    print("|---|---|---|---|---|---|---|---|")
    every_file = [root / name for name in FACE]
    for room in ROOMS:
        files = sorted((root / room).rglob("*.py"))
        every_file += files
        print(row(f"**{room}**", files))
        for folder in sorted({file.parent for file in files}):
            print(row(str(folder.relative_to(root)), [file for file in files if file.parent == folder]))
    print(row("**all**", every_file))


if __name__ == "__main__":
    main()
