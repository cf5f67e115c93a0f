"""Numbers with their nouns."""

from __future__ import annotations

from profiles.errors import counted


def test_one_is_singular_and_all_else_plural() -> None:
    assert [counted(count, "clip") for count in (0, 1, 2)] == ["0 clips", "1 clip", "2 clips"]
    assert [counted(count, "step is", "steps are") for count in (1, 2)] == ["1 step is", "2 steps are"]
