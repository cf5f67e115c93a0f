from __future__ import annotations

import io
import re
import time
from typing import Any

import pytest
from app_events import MEMBER_EVENTS, RUN_EVENTS, evaluation, step
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from app.progress import PAINTS_PER_SECOND, PLAIN_BURST, LiveProgress, PlainProgress, ProgressPanel, progress_for
from app.run_view.run_state import RunState, reduce_events
from app.run_view.tables.evaluations import evaluation_lines
from training.records.events import (
    Event,
    MemberEvent,
    ProgressEvent,
    RequestEvent,
    RunEvent,
    SnapshotEvent,
    WarningEvent,
)

HOSTILE = "\x1b[31m[bold]red[/bold]\x1b]0;title\x07\r\n\u202egnp"


class Plain:
    """A plain display with a clock that the test turns and lines it can read."""

    def __init__(self) -> None:
        self.now = 0.0
        self.lines: list[str] = []
        self.display = PlainProgress("title", RunState(), self.lines.append, lambda: self.now)

    def feed(self, *events: Event) -> list[str]:
        """Return the lines that ``events`` add."""
        before = len(self.lines)
        for event in events:
            self.display(event)
        return self.lines[before:]


@pytest.fixture
def plain() -> Plain:
    return Plain()


def picture(events: list[Event], width: int = 100, **settings: Any) -> str:
    console = Console(width=width, height=24, force_terminal=True, **settings)
    with console.capture() as captured:
        console.print(ProgressPanel("demo", reduce_events(events), now=100.0))
    return captured.get()


RUNNING: list[Event] = [
    RunEvent(status="running", total_steps=100, time=0.0),
    MemberEvent(member=0, status="ready", name="worker-0", time=1.0),
    *[step(n, member=m, bytes_sent=2000) for n in range(10, 14) for m in (0, 1)],
]


def test_step_lines_come_every_ten_seconds(plain: Plain) -> None:
    steps: list[list[str]] = []
    for second in range(60):
        plain.now = float(second)
        steps.append(plain.feed(step(second + 1, time=float(second))))
    assert sum(map(len, steps)) == 6


def test_the_result_is_left_to_the_lines_under_the_panel() -> None:
    evaluated = [*RUNNING, evaluation(0, 0.98), evaluation(14, 0.05)]
    assert "WER on validation" in picture(evaluated)
    assert "WER on validation" not in picture([*evaluated, RunEvent(status="completed", time=99.0)])


def test_a_step_line_says_where_the_run_is(plain: Plain) -> None:
    plain.feed(RunEvent(time=0, status="running", total_steps=100), step(1), step(2))
    plain.now = 10.0
    (line,) = plain.feed(step(3))
    assert line == "[0:10] step 3/100, loss 1.000, 8.0 samples/s, 1:37 left"


def test_evaluations_and_changes_are_told_at_once(plain: Plain) -> None:
    lines = plain.feed(evaluation(0, 0.98), evaluation(50, 0.05), MemberEvent(member=1, status="lost", name="b"))
    assert [line.split("] ")[1] for line in lines] == [
        "WER on validation: 98.0 % (step 0)",
        "WER on validation: 98.0 % -> 5.0 % (step 50)",
        "b lost",
    ]


def test_the_same_status_is_told_once(plain: Plain) -> None:
    assert len(plain.feed(*[RunEvent(status="running", member=m) for m in range(3)])) == 1


def test_a_worker_is_told_when_it_joins_and_as_back_when_it_is_ready(plain: Plain) -> None:
    process, member = [
        MemberEvent(member=0, status=s, name="pc", message=m) for s, m in (("started", "pid 7"), ("joined", ""))
    ]
    lost = MemberEvent(member=0, status="lost", name="pc")
    lines = plain.feed(process, member, lost, process, member)
    assert [line.split("] ")[1] for line in lines] == ["pc joined", "pc lost"]
    lines += plain.feed(MemberEvent(member=0, status="ready", name="pc"))
    assert [line.split("] ")[1] for line in lines] == ["pc joined", "pc lost", "pc is back"]
    (started, *_) = plain.display.state.timeline["machine"].entries
    assert (started.text, started.hint) == ("pc started", "pid 7")


def test_a_member_that_left_is_told_once(plain: Plain) -> None:
    assert len(plain.feed(*[MemberEvent(member=0, status="left", name="a")] * 2)) == 1


def test_a_flood_of_warnings_is_counted(plain: Plain) -> None:
    assert len(plain.feed(*[WarningEvent(message=str(n)) for n in range(500)])) == PLAIN_BURST
    plain.now = 11.0
    told = plain.feed(WarningEvent(message="later"))
    assert told[0].endswith(f"... and {500 - PLAIN_BURST} more messages, kept in events.jsonl")
    assert told[1].endswith("warning: later")


def test_a_flood_of_warnings_hides_no_loss(plain: Plain) -> None:
    plain.feed(*[WarningEvent(message=str(n)) for n in range(500)])
    (line,) = plain.feed(MemberEvent(member=0, status="lost", name="pc", message="silent for 5 s"))
    assert "pc lost" in line


def test_what_is_past_is_bounded_by_the_times_of_its_events() -> None:
    lines: list[str] = []
    display = PlainProgress("title", RunState(), lines.append, lambda: 0.0, begun=100.0)
    for n in range(3 * PLAIN_BURST):
        display(WarningEvent(message=str(n), time=100.0 + n))
    assert len(lines) == 3 * PLAIN_BURST


@pytest.mark.parametrize(
    ("phase", "line"),
    [
        ("bytes to anna", "sending to anna: 85.4 MB/85.4 MB"),
        ("bytes copied on this computer", "copied on this computer: 85.4 MB/85.4 MB"),
        ("waiting for another worker: features", "waiting for another worker: features"),
    ],
)
def test_a_phase_is_told_with_its_own_unit(plain: Plain, phase: str, line: str) -> None:
    lines = plain.feed(ProgressEvent(member=0, phase=phase, done=85_400_000, total=85_400_000))
    assert [line.split("] ")[1] for line in lines] == [line]


def test_preparation_is_told_at_its_begin_and_end(plain: Plain) -> None:
    lines = plain.feed(
        *[ProgressEvent(member=m, phase="features", done=n, total=99) for n in range(100) for m in (0, 1)]
    )
    assert [line.split("] ")[1] for line in lines] == ["features: 0/99", "features: 99/99"]


def test_plain_lines_hold_no_control_byte_of_others(plain: Plain) -> None:
    (line,) = plain.feed(WarningEvent(message=HOSTILE))
    assert line.isprintable()
    assert "\\x1b[31m[bold]red[/bold]" in line


def test_a_reader_that_went_away_does_not_stop_the_run() -> None:
    def broken(_: str) -> None:
        raise BrokenPipeError

    display = PlainProgress("title", RunState(), broken)
    display(step(1))
    assert display.state.step == 1


def test_the_picture_has_a_row_a_worker_and_the_verdict() -> None:
    shown = picture([*RUNNING, evaluation(0, 0.98), evaluation(10, 0.1)], color_system=None)
    assert "step 13/100" in shown
    assert "worker-0" in shown
    assert "member 1" in shown
    assert "75 % | 25 %" in shown and "50 %" not in shown  # what adds up to all of the time
    assert "8.0 kB" in shown
    assert "WER on validation: 98.0 % -> 10.0 % (step 10)" in shown


def test_the_picture_of_a_resumed_run_has_no_warnings_of_its_earlier_attempt() -> None:
    earlier = WarningEvent(time=5.0, member=1, message="worker-1 does not come back by itself: killed")
    resumed = [RunEvent(status="failed", time=50.0), RunEvent(status="starting", time=60.0)]
    now = WarningEvent(time=61.0, message="continuing without worker-1: no answer")
    assert "does not come back" in picture([*RUNNING, earlier])
    shown = picture([*RUNNING, earlier, *resumed, now])
    assert "continuing without worker-1" in shown and "does not come back" not in shown


@pytest.mark.parametrize("width", [40, 80, 120])
def test_no_line_of_the_picture_is_wider_than_the_terminal(width: int) -> None:
    long = WarningEvent(message="word " * 100)
    shown = picture([*RUNNING, long], width=width, color_system=None)
    assert max(map(len, shown.splitlines())) <= width


def test_hostile_text_is_shown_literally() -> None:
    hostile = [MemberEvent(member=0, status="ready", name=HOSTILE), WarningEvent(message=HOSTILE)]
    shown = picture([*RUNNING, *hostile], width=200, color_system=None)
    assert "\x1b" not in shown
    assert "\u202e" not in shown
    assert "\\x1b[31m[bold]red[/bold]" in shown


def test_no_color_is_respected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    assert "\x1b[32m" in picture(RUNNING, color_system="standard")
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[32m" not in picture(RUNNING, color_system="standard")


def test_the_picture_shows_diverged_weights() -> None:
    from app_events import sync

    events: list[Event] = [*RUNNING, sync(1, weight_hash="a"), sync(1, member=1, weight_hash="b")]
    assert "weights differ" in picture(events)


@pytest.mark.slow
def test_painting_does_not_follow_the_events() -> None:
    stream = io.StringIO()
    console = Console(file=stream, width=80, height=24, force_terminal=True)
    begin = time.monotonic()
    with LiveProgress("painted", RunState(), console) as display:
        number = 0
        while time.monotonic() < begin + 0.6 or number < 200:
            number += 1
            display(step(number))
    most = PAINTS_PER_SECOND * (time.monotonic() - begin) + 2  # the first one, and the last one
    assert stream.getvalue().count("painted") <= most < number
    assert f"{number}" in stream.getvalue()


def test_a_machine_that_comes_says_what_it_waits_for() -> None:
    """Between its joining and its first step may lie a whole round of the others."""
    joined = MemberEvent(member=2, status="joined", name="pc")
    assert "joined, waits" in picture([*RUNNING, joined])
    assert "joined, waits" not in picture([*RUNNING, joined, step(14, member=2)])
    assert "joined, waits" not in picture([RUNNING[0], joined])


ASKED = RequestEvent(request="1", time=60.0, action="add", machine="pc", outcome="accepted")


def test_a_machine_that_is_added_has_a_row_from_the_moment_it_is_asked_for() -> None:
    """With the stage of its start and a clock, until a member of its own reports, or it is refused."""

    def row(*more: Event) -> str:
        rows = picture([*RUNNING, ASKED, *more], width=120).splitlines()
        return re.sub(" +", " ", next((line for line in rows if "pc" in line), "")).strip()

    assert row() == "pc being added, 0:40 so far - - - - 0 B / 0 B"
    checking = ProgressEvent(time=70.0, phase="checking the files on pc", done=0)
    assert row(checking).startswith("pc checking the files on")
    assert "0:30 so far" in picture([*RUNNING, ASKED, checking], width=120)
    assert row(checking, MemberEvent(member=2, name="pc", status="started", time=90.0)).startswith("pc started")
    assert row(ASKED.model_copy(update={"outcome": "refused"})) == ""
    stale = ProgressEvent(time=50.0, phase="loading the program on pc", done=0)
    assert row(stale).startswith("pc being added")


def test_a_member_that_is_gone_and_asked_back_says_so() -> None:
    gone = MemberEvent(member=1, name="pc", status="left", time=50.0)
    assert "being added, 0:40" in picture([*RUNNING, gone, ASKED], width=120)


def test_the_first_evaluation_is_told(plain: Plain) -> None:
    """A run showed step 0 for half a minute."""
    begun = [RunEvent(status="running", total_steps=100, time=0.0)]
    reports = [
        ProgressEvent(member=0, time=60.0 + 8 * done, phase="evaluating validation", done=done, total=6)
        for done in (0, 1)
    ]
    stage = "evaluating the model before training, 1 of 6 samples, about 0:40 left"
    assert stage in picture([*begun, *reports], width=80).splitlines()[2]
    plain.feed(*begun, reports[0])
    plain.now = 8.0
    assert plain.feed(reports[1]) == []  # every ten seconds
    plain.now = 12.0
    assert plain.feed(reports[1]) == [f"[0:12] {stage}"]


def test_a_resumed_run_says_so_until_it_begins_again() -> None:
    """Its past, that it was stopped, is no state of the run that starts."""
    snapshot = SnapshotEvent(member=0, seq=2, step=40, path="a", bytes=1, seconds=0.1, live=(0,))
    past: list[Event] = [*RUNNING, snapshot, RunEvent(seq=3, status="cancelled", message="stopped", time=50.0)]
    console = Console(file=io.StringIO(), width=80, force_terminal=True)
    display = LiveProgress("demo", reduce_events(past), console, since=3)
    assert shown(display) == "demo\nresuming from step 40\n"
    display(past[-1])
    assert shown(display) == "demo\nresuming from step 40\n"
    display(ProgressEvent(member=1, seq=4, phase="connecting to b", done=0))
    assert "resuming" not in shown(display)


def test_a_worker_that_has_not_started_has_its_planned_name() -> None:
    console = Console(file=io.StringIO(), width=80, force_terminal=True)
    display = LiveProgress("demo", RunState(), console, names={0: "larder"})
    display(ProgressEvent(member=0, phase="connecting to larder", done=0))
    assert "connecting to larder" in shown(display) and "member 0" not in shown(display)


def shown(display: LiveProgress) -> str:
    console = Console(width=80, height=24)
    with console.capture() as captured:
        console.print(display.panel())
    return captured.get()


def test_without_a_terminal_the_display_is_plain(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_for("title") as display:
        display(WarningEvent(message="x"))
    assert re.fullmatch(r"\[\d:\d\d\] title\n\[\d:\d\d\] warning: x\n", capsys.readouterr().err)


def test_the_past_has_its_own_times() -> None:
    lines: list[str] = []
    display = PlainProgress("title", RunState(), lines.append, begun=100.0)
    for moment in (100.0, 161.0, 130.0):  # the clock of one machine is behind
        display(WarningEvent(message=f"at {moment:g}", time=moment))
    assert lines == ["[0:00] warning: at 100", "[1:01] warning: at 161", "[1:01] warning: at 130"]


@given(st.lists(st.one_of(MEMBER_EVENTS, RUN_EVENTS), max_size=12), st.integers(20, 200))
def test_any_events_can_be_shown(events: list[Event], width: int) -> None:
    numbered = [event.model_copy(update={"member": index % 3}) for index, event in enumerate(events)]
    picture(numbered, width=width)
    lines: list[str] = []
    display = PlainProgress("title", RunState(), lines.append)
    for event in numbered:
        display(event)
    assert all(line.isprintable() for line in lines)


def test_texts_that_were_cut_are_told_once_there_are_steps(plain: Plain) -> None:
    def with_cut(at: int) -> Event:
        return evaluation(at, 0.5).model_copy(update={"metrics": {"wer": 0.5, "cut": 0.25}})

    before, after = plain.feed(RunEvent(status="running", total_steps=2, time=0.0), with_cut(0), with_cut(2))[-2:]
    assert "cut" not in before
    assert after == "[0:00] WER on validation: 50.0 % -> 50.0 %, 25.0 % of the texts unfinished (step 2)"


def test_unfinished_texts_are_named_in_a_sentence_if_there_are_any() -> None:
    before = evaluation(0, 0.5).model_copy(update={"metrics": {"wer": 0.5, "cut": 0.25}})
    after = before.model_copy(update={"step": 6})
    assert not any("unfinished" in line for line in evaluation_lines(reduce_events([before, evaluation(6, 0.5)])))
    test = after.model_copy(update={"split": "test", "metrics": {"wer": 0.5, "cut": 1.0}})
    for events, shares in (
        ([before, after], "validation: 25.0 %"),
        ([after, test], "test: 100.0 %, validation: 25.0 %"),
    ):
        *_, unfinished = evaluation_lines(reduce_events(events))
        assert unfinished == f"{shares} of the texts are unfinished: the model went on and on, and was stopped"


def test_a_resumed_run_names_the_stage_of_its_start_and_goes_on_from_its_snapshot() -> None:
    """Its step never goes backwards, its start has a clock, and nobody waits any longer for who is ready."""
    names = ("larder", "garage")
    present = {
        status: [MemberEvent(member=m, status=status, name=name, time=85.0) for m, name in enumerate(names)]
        for status in ("started", "joined", "ready", "left")
    }
    waiting = [WarningEvent(message=f"waiting for {name}: ...", awaited=name, time=80.0) for name in names]
    events: list[Event] = [
        RunEvent(status="starting", time=1.0),
        *present["started"],
        RunEvent(status="running", total_steps=28, time=2.0),
        *[step(n, member=m, time=2.0 + n) for n in range(1, 21) for m in (0, 1)],
        *[SnapshotEvent(member=m, step=18, path="p", bytes=1, seconds=1.0, live=(0, 1)) for m in (0, 1)],
        *present["left"],
        RunEvent(status="cancelled", time=30.0),
        RunEvent(status="starting", time=58.0),
        ProgressEvent(phase="machines", done=2, total=2),
        *waiting,
    ]
    shown = picture(events, no_color=True)
    assert "step 18/28" in shown and "starting for 0:42" in shown and "left" not in shown
    assert "loading the program on larder, garage" in shown and "waiting for garage" in shown
    events += [*present["started"], *present["joined"]]
    assert "loading the model on larder, garage" in picture(events, no_color=True)
    shown = picture([*events, RunEvent(status="running", details={"step": 18}, time=90.0), *present["ready"]])
    assert "18/28" in shown and "taking the first step" in shown and "waiting for" not in shown
