"""One run has the same figures in dashboard (which the web serves), progress, report and ``runs show``."""

from __future__ import annotations

import html
import json
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from run_folders import live, new_folder, started, steps

from app.cli.main import main
from app.cli.runs.ask import _tell_leftovers
from app.cli.runs.listing import _cells
from app.console import diagnostics, tour_profile
from app.dashboard.reader import Picture
from app.dashboard.tabs.charts import newest_text
from app.dashboard.tabs.machines import table_of, who_is_slow
from app.dashboard.tabs.network import sums
from app.dashboard.tabs.overview import loss_chart, progress_line
from app.demo.services import write_demo_run
from app.follow import Follower
from app.html_report.evidence import Evidence, read_evidence
from app.html_report.page import page
from app.progress import PlainProgress, ProgressPanel, change_line, step_line
from app.report import completed_lines, stopped_line
from app.run_view.figures import waiting_text
from app.run_view.headline import headline
from app.run_view.run_state import RunState, reduce_events
from app.run_view.timeline import run_sentence, timeline_entry
from app.screens.home import _run
from app.trackers.notify import ending_text
from profiles.quantities import clock_text
from tests.report.report_runs import write_run
from training.records.events import EvaluationEvent, Event, MemberEvent, RunEvent, SnapshotEvent, WarningEvent
from training.records.runs import summarise

LOSSES = {0: 1.5, 1: 2.0, 2: 4.0}
"""Of the members, which train on 8, 16 and 8 samples: 2.375 together."""
LAST = 20


def wer(at: int, value: float) -> Event:
    return EvaluationEvent(time=9.0, step=at, split="test", loss=None, metrics={"wer": value}, samples=5, seconds=1.0)


def of_members(first: int, last: int) -> list[Event]:
    weights = {0: 8.0, 1: 16.0, 2: 8.0}
    return [
        event.model_copy(update={"loss": LOSSES[event.member or 0], "weight": weights[event.member or 0]})
        for event in steps(first, last)
    ]


def events() -> list[Event]:
    began = started(total=LAST)
    at = began[0].time + LAST
    return [
        *began,
        wer(0, 0.98),
        *of_members(1, LAST),
        wer(LAST, 0.123),
        WarningEvent(member=1, time=at, step=LAST, message="the disk is nearly full"),
        *(MemberEvent(member=rank, time=at, status="done") for rank in range(3)),
    ]


@dataclass(frozen=True)
class Displays:
    """What the displays show of one run that has ended."""

    path: Path
    evidence: Evidence
    report: str
    plain: list[str]

    @property
    def picture(self) -> Picture:
        return Picture(self.path, self.evidence.state, self.evidence.now, self.evidence.plan, live=False)


@pytest.fixture(scope="module")
def displays(tmp_path_factory: pytest.TempPathFactory) -> Displays:
    path, lines = new_folder(tmp_path_factory.mktemp("runs")), list[str]()
    with live(path, events()) as run:
        run.append(RunEvent(time=events()[0].time + LAST + 1, status="completed"))
        run.finish("completed", {"samples_per_second": 23.45, "seconds": 21.0, "steps": LAST})
    with PlainProgress("title", write=lines.append) as progress:
        for event in events():
            progress(event)
    evidence = read_evidence(path)
    return Displays(path, evidence, html.unescape(page(evidence)), lines)


def shown(path: Path, capsys: pytest.CaptureFixture[str], *options: str) -> str:
    assert main(["runs", "show", str(path), *options]) == 0
    return capsys.readouterr().out


def test_the_loss(displays: Displays, capsys: pytest.CaptureFixture[str]) -> None:
    """It is the mean over the samples, of the last step that all have done."""
    state = displays.evidence.state
    ahead = reduce_events([*events()[:-4], *of_members(LAST + 1, LAST + 1)[:1]])
    assert state.loss == ahead.loss == pytest.approx(2.375)
    assert loss_chart(displays.picture).title == "loss 2.375" and newest_text(displays.picture, "loss") == "2.375"
    assert ", loss 2.375" in step_line(state)
    assert json.loads(shown(displays.path, capsys, "--json"))["state"]["loss"] == pytest.approx(2.375)
    curve = next(trace for trace in traces(displays.report, "loss") if trace.get("name") == "training")
    assert curve["y"][-1] == pytest.approx(2.375)


def traces(report: str, chart: str) -> list[dict[str, Any]]:
    figures = re.search(r'id="figures">(.*?)</script>', report)
    assert figures is not None
    traces: list[dict[str, Any]] = json.loads(figures[1])[chart]["data"]
    return traces


def test_steps_and_status(displays: Displays, capsys: pytest.CaptureFixture[str]) -> None:
    line, said = headline(displays.evidence), shown(displays.path, capsys)
    assert (line.word, line.details[0]) == ("Completed", "step 20/20")
    assert "step 20/20" in progress_line(displays.evidence.state, 0.0, 99).plain
    assert "<b>20/20</b><span>steps" in displays.report and "completed</span>" in displays.report
    assert "(completed, attempt 1)" in said and "steps     20/20" in said


def test_samples_a_second(displays: Displays, capsys: pytest.CaptureFixture[str]) -> None:
    going = reduce_events(events()[:-4])
    rate = f"{going.samples_per_second:.1f} samples/s"
    assert rate in step_line(going) and rate in progress_line(going, 0.0, 99).plain
    ended = Follower(displays.path).ended(displays.evidence.state)
    assert "23.4 samples/s over the whole run" in completed_lines(ended)[1]
    assert "<b>23.4 samples/s</b><span>over the whole run" in displays.report


def test_word_error_rates(displays: Displays, capsys: pytest.CaptureFixture[str]) -> None:
    line = "WER     test  98.0 % -> 12.3 %"
    assert line in shown(displays.path, capsys)
    assert line in completed_lines(Follower(displays.path).ended(displays.evidence.state))
    assert "WER on test: 98.0 % -> 12.3 %" in progress_line(displays.evidence.state, 0.0, 99).plain
    assert any("WER on test: 98.0 % -> 12.3 % (step 20)" in line for line in displays.plain)
    assert newest_text(displays.picture, "test wer") == "12.3 %"
    assert "<b>98.0 % → 12.3 %</b><span>WER on test" in displays.report
    assert re.search(r"test</td><td>WER</td>.*98.0 %</td>.*12.3 %</td>.*12.3 %</td>", displays.report)


def test_machines(displays: Displays, capsys: pytest.CaptureFixture[str]) -> None:
    names = ["studio", "air", "pc"]
    _, rows = table_of(displays.picture)
    assert [row.cells[0].plain for row in rows] == names
    table = re.findall(r'<td class="number">\d</td><td>(\w+)</td><td>cpu</td><td>done</td>', displays.report)
    assert table == names and "<b>3</b><span>workers" in displays.report
    document = json.loads(shown(displays.path, capsys, "--json"))
    assert [member["name"] for member in document["state"]["members"]] == names and document["workers"] == 3
    assert "workers   3, " in shown(displays.path, capsys)


def test_a_machine_that_came_later_is_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    joined = [MemberEvent(member=rank, time=1.0, status="joined", name=f"m{rank}") for rank in range(3)]
    path = write_run(tmp_path, joined)  # of two workers
    assert "workers   3, " in shown(path, capsys) and json.loads(shown(path, capsys, "--json"))["workers"] == 3
    assert "<b>3</b><span>workers" in page(read_evidence(path))


def test_the_time_that_it_took(displays: Displays, capsys: pytest.CaptureFixture[str]) -> None:
    assert displays.evidence.took == "trained 0:21" and "<b>0:21</b><span>trained" in displays.report
    assert headline(displays.evidence).details[-1] == "trained 0:21"
    assert "time      trained 0:21" in shown(displays.path, capsys)


def test_a_warning_has_its_machine_and_step(displays: Displays, capsys: pytest.CaptureFixture[str]) -> None:
    words = "air: the disk is nearly full (step 20)"
    assert f"warning   {words}" in shown(displays.path, capsys)
    assert any(line.endswith(f"warning: {words}") for line in displays.plain)
    assert f"warning:</span> {words}" in displays.report


@pytest.mark.parametrize(("profile", "offered"), [("p", True), (tour_profile(3), False)])
def test_what_can_be_resumed(tmp_path: Path, capsys: pytest.CaptureFixture[str], profile: str, offered: bool) -> None:
    """The tour has trained nothing, so nothing offers to resume it."""
    snapshots = [SnapshotEvent(member=rank, step=3, path="", bytes=1, seconds=0.1, live=(0, 1)) for rank in (0, 1)]
    path = write_run(tmp_path, [*started(2), *steps(1, 3, (0, 1)), *snapshots], name=profile, status="cancelled")
    assert ("\nresume    " in shown(path, capsys)) is offered
    assert ("It can be resumed from the snapshot of step 3" in page(read_evidence(path))) is offered
    assert ("--resume" in stopped_line(Follower(path).ended(read_evidence(path).state))) is offered
    _tell_leftovers(path, {}, {}, as_json=False)
    assert ("--resume" in capsys.readouterr().err) is offered


def test_the_list_and_home_name_how_many_machines_a_run_lost(tmp_path: Path) -> None:
    summary = summarise(write_run(tmp_path, [], metrics={"lost": ["air"]}))
    assert _cells(summary)["status"] == "completed, 1 lost"
    assert "completed, 1 lost" in _run(summary).cells[1].plain


def test_a_paused_run(capsys: pytest.CaptureFixture[str]) -> None:
    state = reduce_events([*started(), *steps(1, 3), RunEvent(time=2e9, status="paused")])
    _, rows = table_of(Picture(Path("run"), state))
    assert [row.cells[1].plain.split()[-1] for row in rows] == ["paused"] * 3
    with diagnostics().capture() as captured:
        diagnostics().print(ProgressPanel("title", state, 0.0))
    assert captured.get().count("paused") == 4


def test_the_share_of_waiting(displays: Displays) -> None:
    assert next(iter(sums(displays.picture))).plain.endswith("25 % of the time was waiting for exchanges")
    assert who_is_slow(displays.picture).plain.startswith("25 % of the time was waiting for exchanges (for the network")
    assert displays.report.count(" (25 %)</td>") == len(LOSSES)


def test_the_share_of_waiting_of_a_recorded_run(tmp_path: Path) -> None:
    evidence = read_evidence(write_demo_run(tmp_path, 3))
    picture, said = Picture(evidence.path, evidence.state), waiting_text(evidence.state)
    assert re.match(r"[1-9][0-9.]* % of the time was waiting for exchanges$", said)
    assert said in next(iter(sums(picture))).plain and said in who_is_slow(picture).plain
    figure = said.removesuffix(" of the time was waiting for exchanges")
    assert newest_text(picture, "wait share") == figure
    row = rf'<td>waiting, of the time</td><td class="number">[^<]*</td><td class="number">{re.escape(figure)}<'
    assert re.search(row, page(evidence))


def test_the_end_has_the_same_word_in_timeline_notification_and_replay() -> None:
    for status, sentence in (("completed", "the run completed"), ("cancelled", "the run was stopped")):
        event = RunEvent(time=1.0, status=status)
        entry = timeline_entry(event, None)
        assert entry is not None and entry.text == run_sentence(status) == sentence
        assert change_line(RunState(), RunState(), event) == sentence
        assert f"the run {ending_text(status)}" == sentence


def test_a_time_of_day_is_told_alike_everywhere() -> None:
    now = time.mktime((2026, 11, 20, 9, 0, 0, 0, 0, -1))
    ages = (3600, 12 * 3600, 8 * 86_400, now + 1)
    assert [clock_text(now - age, now) for age in ages] == ["08:00", "Thu 21:00", "12 Nov 09:00", "--:--"]
    assert clock_text(now) == "09:00:00" and clock_text(float("nan")) == "--:--:--"
