"""Names say what a value is: words without content are rare, in each room and in all."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from benchmarks.code_size import ROOMS, bound_names, is_empty

ROOT = Path(__file__).parents[2]
MOST = 0.01
"""Share of empty names; the models of this house, torchft, nanochat and httpx, have 0 to 2 %."""


@pytest.mark.parametrize("room", ROOMS)
def test_few_names_are_empty(room: str) -> None:
    names: list[str] = []
    empty: list[str] = []
    for path in sorted((ROOT / room).rglob("*.py")):
        for line, name in bound_names(ast.parse(path.read_text())):
            names.append(name)
            if is_empty(name):
                empty.append(f"{path.relative_to(ROOT)}:{line} {name}")
    assert len(empty) <= max(1, MOST * len(names)), "\n".join(empty)


def test_an_empty_name_is_seen_where_it_is_bound() -> None:
    source = (
        "def given(own, *, rest=1):\n    found: int = own\n    self._kept = [one for one in rest]\n    return found\n"
    )
    bound = [name for _, name in bound_names(ast.parse(source)) if is_empty(name)]
    assert sorted(bound) == ["_kept", "found", "given", "own", "rest"]
