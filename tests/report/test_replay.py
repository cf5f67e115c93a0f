"""A finished run, played again by a clock that the test moves."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.follow import LONGEST_SILENCE, Replay
from app.run_view.run_state import reduce_events
from cli_typer import main
from profiles.errors import BadInput
from tests.app.app_events import evaluation, step
from tests.report.report_runs import write_run
from training.records.events import ErrorEvent, Event, RunEvent
from training.records.run_folder import RunFolder


class Clock:
    """Time that passes only when somebody sleeps."""

    def __init__(self) -> None:
        self.time = 1000.0

    def __call__(self) -> float:
        return self.time

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.time += seconds


def play(path: Path, speed: float = 1.0) -> tuple[list[tuple[float, Event]], Replay]:
    clock = Clock()
    replay = Replay(path, speed, clock, clock.sleep)
    return [(clock() - 1000, event) for event in replay.events() if event is not None], replay


@pytest.mark.parametrize("speed", [1.0, 4.0])
def test_events_come_in_their_own_time_or_as_many_times_as_fast(tmp_path: Path, speed: float) -> None:
    path = write_run(tmp_path, [step(1, time=10.0), step(2, time=12.0), step(3, time=42.0)])
    played, replay = play(path, speed)
    steps = {event.step: at for at, event in played if event.kind == "step"}
    assert steps == pytest.approx({1: 10 / speed, 2: 12 / speed, 3: 42 / speed})
    assert [event.seq for _, event in played] == list(range(5))
    assert replay.now() == 100


def test_the_state_at_the_end_is_the_runs_own_whatever_the_speed(tmp_path: Path) -> None:
    path = write_run(tmp_path, [step(n, member=n % 2, time=n / 2) for n in range(1, 60)])
    played, replay = play(path, 1000)
    state = reduce_events(event for _, event in played)
    assert state == reduce_events(RunFolder.open(path).events())
    assert replay.ended(state).outcome.status == "completed"


def test_how_it_ended_is_told_with_its_error(tmp_path: Path) -> None:
    path = write_run(
        tmp_path, [ErrorEvent(message="broken", hint="mend it", time=5)], status="failed", error_message="broken"
    )
    _, replay = play(path)
    ended = replay.outcome()
    assert (ended.status, ended.message, ended.hint) == ("failed", "broken", "mend it")


def test_the_present_goes_on_between_events_and_stands_still_at_the_end(tmp_path: Path) -> None:
    clock = Clock()
    replay = Replay(write_run(tmp_path, [step(1, time=10.0)]), 2.0, clock, clock.sleep)
    events = replay.events()
    assert next(events) is not None
    assert next(events) is None and replay.now() == 0
    clock.time += 3
    assert replay.now() == 6
    clock.time += 3
    assert replay.now() == 10, "the display lags behind: the next event is at 10"
    list(events)
    clock.time += 50
    assert replay.now() == 100


@settings(max_examples=20)
@given(st.lists(st.floats(-1e9, 1e9), max_size=20), st.floats(0.1, 1000))
def test_clocks_that_differ_neither_stop_nor_turn_the_replay(
    tmp_path_factory: pytest.TempPathFactory, times: list[float], speed: float
) -> None:
    folder = tmp_path_factory.mktemp("run")
    path = write_run(folder, [step(n, time=time) for n, time in enumerate(times, 1)])
    played, _ = play(path, speed)
    assert [event.seq for _, event in played] == list(range(len(times) + 2))
    moments = [at for at, _ in played]
    assert moments == sorted(moments)
    assert moments[-1] <= LONGEST_SILENCE * (len(times) + 2) / speed + 1e-3


def test_a_run_that_goes_on_is_not_replayed(tmp_path: Path) -> None:
    path = write_run(tmp_path, [])
    with RunFolder.take_over(path), pytest.raises(BadInput, match="still going on") as caught:
        Replay(path)
    assert caught.value.hint.endswith(f"attach {path.name[:20]} --output {path.parent}")


def test_where_no_screen_fits_it_writes_the_lines_of_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.console.interactive", lambda: True)  # errors go to a terminal; nothing comes from one
    running = RunEvent(status="running", total_steps=30, time=0)
    steps = [step(n, time=float(n)) for n in range(1, 31)]
    path = write_run(tmp_path, [running, evaluation(0, 0.9), *steps, evaluation(30, 0.2)])
    assert main(["replay", str(path), "--speed", "100000", "--ascii"]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert re.match(r"\[\d:\d\d\] replay of p", lines[0])
    assert any(re.search(r"step \d+/30", line) for line in lines)
    assert lines[-3:-1] == ["the run completed", "WER     validation  90.0 % -> 20.0 %"]
    assert not any("\x1b" in line or not line.isascii() for line in lines)
