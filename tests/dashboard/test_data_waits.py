"""What is said where steps wait for their samples, and that nothing is where they hardly do."""

from __future__ import annotations

from pathlib import Path

import pytest
from run_folders import BEGAN, started, steps, view_of

from app.html_report import sections
from app.html_report.evidence import read_evidence
from app.progress import step_line
from app.report import completed_lines
from app.run_view.figures import data_text
from app.run_view.headline import headline
from app.run_view.run_state import RunState, reduce_events
from app.run_view.view import EndedRun
from profiles.errors import ExitCode
from tests.report.report_runs import write_run
from training.records.run_folder import RunFolder
from training.run.outcome import RunOutcome


def going(data: float, machines: int = 1, last: int = 12) -> RunState:
    """Steps of a second, of which the last machine but one waits for its samples for so long."""
    slow = max(0, machines - 2)
    others = [rank for rank in range(machines) if rank != slow]
    return reduce_events([*started(machines), *steps(1, last, [slow], data=data), *steps(1, last, others)])


def test_the_headline_says_how_much_of_a_step_waits_for_data() -> None:
    said = headline(view_of(going(0.45), BEGAN + 13))
    assert (said.level, said.details[2]) == ("warning", "41 % of each step waits for data")  # the longest one left out
    assert "41 % of each step waits for data on air" in headline(view_of(going(0.45, 3), BEGAN + 13)).details


@pytest.mark.parametrize("data", [0.0, 0.09])
def test_little_is_not_worth_a_word(data: float) -> None:
    state = going(data)
    assert headline(view_of(state, BEGAN + 13)).word == "Healthy"
    assert "data" not in step_line(state)


def test_a_start_alone_tells_nothing() -> None:
    assert not data_text(going(0.7, last=7)) and not data_text(going(0.7, last=7), whole_run=True)
    first = [*started(1), *steps(1, 1, [0], data=0.75, compute=100.0), *steps(2, 12, [0])]
    assert not data_text(reduce_events(first))


def test_lines_of_a_run_without_a_screen_say_so() -> None:
    assert step_line(going(0.45)).endswith(", 41 % of each step waits for data")


def test_the_end_and_the_report_say_what_to_do(tmp_path: Path) -> None:
    path = write_run(tmp_path, [*started(2), *steps(1, 12, [0, 1], data=0.41)])
    evidence = read_evidence(path)
    words = "41 % of each step waited for data on studio"
    assert f"{words}: set data_workers higher" in sections.machines(evidence)
    ended = EndedRun.of(RunOutcome("completed", path, {}, ExitCode.DONE), RunFolder.open(path).plan(), evidence.state)
    assert any(line.startswith(f"data    {words}; set data_workers higher") for line in completed_lines(ended))
