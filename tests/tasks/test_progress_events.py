from __future__ import annotations

from training.tasks.base import throttled


def test_of_many_samples_some_are_told_and_of_each_phase_begin_and_end() -> None:
    told: list[tuple[str, int, int | None]] = []
    now = 0.0
    tell = throttled(lambda *one: told.append(one), lambda: now)
    for done in range(1001):  # for one second
        now = done / 1000
        tell("features", done, 1000)
    tell("tokens", 0, None)
    tell("tokens", 1, None)
    assert told == [("features", done, 1000) for done in (0, 250, 500, 750, 1000)] + [("tokens", 0, None)]
