"""One answer to how long a run takes: what Strategy says is promised wherever the run is shown, and after its end."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import pytest
from textual.pilot import Pilot

from app.cli.main import main
from app.cli.train.request import TrainRequest
from app.cli.train.trial_run import show_plan
from app.dashboard.app import DashboardApp
from app.dashboard.reader import Picture
from app.demo.run import recorded
from app.demo.services import recommended, write_demo_run
from app.html_report.evidence import read_evidence
from app.html_report.sections import heading
from app.plan_table import summary_lines
from app.report import completed_lines
from app.run_view.headline import headline
from app.run_view.run_state import RunState, reduce_events
from app.run_view.view import EndedRun
from app.screens.home import _run
from app.wizard.services.forecasting import ranked
from app.wizard.state.ways import about
from distributed.launcher import PlannedRun
from distributed.planning.documents.document import Planning, Reason
from distributed.planning.feedback import planning_in
from distributed.planning.reasons import IN_USE, why_in_words
from distributed.planning.run_time import promised_time
from profiles.errors import ExitCode
from tests.screens.pilot import run as run_app
from tests.screens.pilot import text, until_text
from training.records.attempts import attempts_after
from training.records.events import RunEvent, StepEvent
from training.records.run_folder import RunFolder
from training.records.runs import summarise
from training.run.outcome import RunOutcome

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def three() -> PlannedRun:
    return recommended(3)


@pytest.fixture(scope="module")
def planning(three: PlannedRun) -> Planning:
    assert three.planning is not None
    return three.planning


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_demo_run(tmp_path_factory.mktemp("runs"), 3)


@pytest.fixture(scope="module")
def said(planning: Planning) -> tuple[str, str]:
    """The time of the run, and of the best machine alone, as Strategy says them."""
    chosen = next(way for way in ranked(planning, None).ways if way.recommended)
    sentence = next(iter(about(chosen)))
    times = re.fullmatch(r"This run takes (\S+); demo-pc alone would take (\S+)\.", sentence)
    assert times is not None
    return times[1], times[2]


def test_the_plan_says_the_same_before_it_starts(
    three: PlannedRun, planning: Planning, said: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    sentence = f"This run takes {said[0]}; demo-pc alone would take {said[1]}"
    assert why_in_words(planning) == sentence
    show_plan(three.plan, TrainRequest(plan_only=True), planning)
    assert f"{sentence}.\n" in capsys.readouterr().out


def test_a_time_from_a_busy_machine_is_marked_before_it_starts(planning: Planning) -> None:
    busy = Reason.of(IN_USE, "demo-pc", others=62.0)
    doubtful = planning.model_copy(update={"reasons": (busy,)})
    told = " ".join(" ".join(summary_lines(doubtful)).split())
    assert "measured while demo-pc was busy (other programs used 62 % of its processors)" in told


def states(run: Path) -> list[RunState]:
    """The states of a run after each of its steps."""
    state, seen = RunState(), list[RunState]()
    for event in RunFolder.open(run).events():
        state = reduce_events([event], state)
        if isinstance(event, StepEvent) and event.member == 0:
            seen.append(state)
    return seen


def test_the_promise_stays_to_the_end_whoever_is_lost(run: Path, said: tuple[str, str]) -> None:
    began = next(e.time for e in RunFolder.open(run).events() if isinstance(e, RunEvent) and e.status == "running")
    for state in states(run)[::20]:
        now = state.updated or 0.0
        picture = Picture(run, state, now=now, planning=planning_in(run))
        details = headline(picture).details
        assert picture.time is not None and picture.time.seconds == pytest.approx(seconds(said[0]), abs=0.5)
        if now - began < seconds(said[0]) - 1:
            promise = next(detail for detail in details if detail.startswith("promised in "))
            assert now - began + seconds(promise.split()[-1]) == pytest.approx(seconds(said[0]), abs=1)


def test_its_end_is_beside_its_promise_wherever_it_is_shown(
    run: Path, said: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    evidence = read_evidence(run)
    took = re.match(r"trained \S+ ", str(evidence.plan_vs_actual))
    assert took is not None
    sentence = f"{took[0]}({said[0]} promised; demo-pc alone {said[1]})"
    assert sentence in headline(evidence).details
    assert sentence in heading(evidence)
    assert main(["runs", "show", str(run)]) == 0 and f"time      {sentence}" in capsys.readouterr().out
    outcome = RunOutcome("completed", run, evidence.metrics, ExitCode.DONE)
    ended = EndedRun.of(outcome, RunFolder.open(run).plan(), evidence.state)
    assert f"{sentence}" in completed_lines(ended)
    assert main(["runs", "list", "--output", str(run.parent)]) == 0
    assert took[0].split()[1] in " ".join(capsys.readouterr().out.split())
    assert took[0] in f"{_run(summarise(run)).cells[1].plain} "

    async def drive(pilot: Pilot[Any]) -> None:
        await until_text(pilot, "WER     test")
        assert " ".join(text(pilot.app).split()).count(sentence) == 1  # the headline says it, not the result again

    run_app(DashboardApp(run), drive)


@pytest.mark.parametrize("machines", [2, 3, 8])
def test_the_tour_takes_what_its_plan_promised(machines: int) -> None:
    planned = recommended(machines)
    promised = promised_time(planned.planning)
    attempts = functools.reduce(attempts_after, recorded(planned.plan), ())
    assert promised is not None
    assert attempts[0].until(recorded(planned.plan)[-1].time) == pytest.approx(promised.seconds, rel=0.03)


def seconds(clock: str) -> float:
    """Return the seconds of ``1:24``."""
    minutes, rest = clock.split(":")
    return 60 * int(minutes) + int(rest)
