"""How large the product is: lines, files and classes by room, and how long its functions are.

    .venv/bin/python benchmarks/code_size.py [FOLDER_OF_ANOTHER_CHECKOUT]

Prints a Markdown table. Lines are all lines of a file; generated ones count too.
"""

from __future__ import annotations

import ast
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path

ROOMS = ("app", "distributed", "training", "profiles")
FACE = ("wizard.py", "cli_typer.py")


def functions(tree: ast.Module) -> Iterator[int]:
    """Yield the lines of every function."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield (node.end_lineno or node.lineno) - node.lineno + 1


def main() -> None:
    """Print the table."""
    root = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).resolve().parent.parent)
    rooms = {room: sorted((root / room).rglob("*.py")) for room in ROOMS}
    rooms["all"] = [*(file for room in rooms.values() for file in room), *(root / name for name in FACE)]
    print("| room | lines | files | classes | functions | median of their lines | 90 % have at most |")
    print("|---|---|---|---|---|---|---|")
    for room, files in rooms.items():
        texts = [file.read_text(encoding="utf-8") for file in files]
        trees = [ast.parse(text) for text in texts]
        lengths = [length for tree in trees for length in functions(tree)]
        classes = sum(isinstance(node, ast.ClassDef) for tree in trees for node in ast.walk(tree))
        lines = sum(len(text.splitlines()) for text in texts)
        most = statistics.quantiles(lengths, n=10)[-1]
        print(
            f"| {room} | {lines} | {len(files)} | {classes} | {len(lengths)} "
            f"| {statistics.median(lengths):.0f} | {most:.0f} |"
        )


if __name__ == "__main__":
    main()
