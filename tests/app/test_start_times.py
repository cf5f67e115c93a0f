"""What ``runs show`` says of a start."""

from __future__ import annotations

from collections.abc import Sequence

from app.run_view.figures import start_line
from tests.app.app_events import step
from training.records.attempts import Attempts, attempts_after
from training.records.events import Event, RunEvent, TimingEvent

STARTING, RUNNING = RunEvent(time=100.0, status="starting"), RunEvent(time=174.0, status="running")


def shown(events: Sequence[Event]) -> str:
    attempts: Attempts = ()
    for event in events:
        attempts = attempts_after(attempts, event)
    return start_line(events, attempts[-1])


def phase(part: str, end: float, member: int | None = None) -> TimingEvent:
    return TimingEvent(time=end, part=part, seconds=50.0, member=member)


MEASURED = [
    phase("supervisor: program", 99.0),
    STARTING,
    phase("machine: connected", 101.6),
    phase("machine: code and data", 114.0),
    phase("engine", 130.0),
    phase("worker: imports", 140.0, member=0),
    phase("worker: imports", 155.2, member=1),
    phase("worker: data", 155.3, member=0),
    phase("worker: data", 155.4, member=1),
    RUNNING,
]


def test_the_stages_of_a_start_add_up_to_the_whole() -> None:
    stages = "connecting 0:02, sending code and data 0:12, loading the program 0:41, loading the model 0:19"
    assert shown(MEASURED) == f"1:14 ({stages})"


def test_a_resumed_run_shows_its_newest_start() -> None:
    again = [RunEvent(time=300.0, status="starting"), phase("worker: imports", 302.0, 0)]
    ended, runs = RunEvent(time=290.0, status="cancelled"), RunEvent(time=303.0, status="running")
    assert shown([*MEASURED, ended, *again, runs]) == "0:03 (loading the program 0:02, loading the model 0:01)"


def test_a_machine_that_comes_back_does_not_prolong_the_start() -> None:
    assert shown([*MEASURED, step(1, time=180.0), phase("worker: data", 400.0, 1)]) == shown(MEASURED)


def test_a_start_without_measurements_is_one_figure() -> None:
    assert shown([STARTING, RUNNING]) == "1:14"
    assert shown([STARTING, phase("worker: imports", 120.0, 0)]) == ""
