"""What ``runs show`` says of a start."""

from __future__ import annotations

from app.run_view.figures import start_line
from tests.app.app_events import step
from training.records.events import RunEvent, TimingEvent


def test_the_slowest_machine_stands_for_a_part() -> None:
    events = [
        TimingEvent(time=0.5, part="command: program", seconds=1.5e-5),  # too brief to tell anything
        TimingEvent(time=1.0, part="command", seconds=0.5),
        TimingEvent(time=4.0, part="imports", seconds=3.0, member=0),
        TimingEvent(time=6.0, part="imports", seconds=5.0, member=1),
    ]
    assert start_line(events) == "command 500 ms, imports 5 s"


def test_a_resumed_run_shows_its_newest_start() -> None:
    starts = [TimingEvent(time=time, part="imports", seconds=seconds, member=0) for time, seconds in ((1, 9), (99, 2))]
    assert start_line(starts) == "imports 2 s"
    first = [TimingEvent(time=0.5, part="machines: planned", seconds=20.0), starts[0]]
    ended = RunEvent(time=50.0, status="cancelled")
    assert start_line([*first, ended, starts[1], RunEvent(time=120.0, status="completed")]) == "imports 2 s"


def test_a_machine_that_comes_back_does_not_prolong_the_start() -> None:
    start = [TimingEvent(time=5.0, part="imports", seconds=5.0, member=rank) for rank in (0, 1)]
    first = TimingEvent(time=8.1, part="first step", seconds=3.0, member=0)
    late = [TimingEvent(time=90.0, part="imports", seconds=85.0, member=rank) for rank in (1, 2)]
    assert start_line([*start, step(1, time=8.0), first, step(2), *late]) == "imports 5 s, first step 3 s"


def test_a_run_without_measurements_says_nothing() -> None:
    assert start_line([step(1)]) == ""
