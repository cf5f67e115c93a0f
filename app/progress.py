"""Progress of a run on stderr: a live display on a terminal, plain lines elsewhere.

Both read :class:`app.run_view.run_state.RunState`; neither disturbs the run, whatever happens to the terminal.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.segment import Segment, Segments
from rich.table import Table
from rich.text import Text

from app.console import diagnostics, interactive, say, visible
from app.run_view import figures
from app.run_view.figures import LAST_EVALUATION, data_text, end_stage, rate_text, stages_times_text, start_stages
from app.run_view.headline import remarks_on
from app.run_view.member_state import AWAITS_EXCHANGE, MemberState
from app.run_view.metrics import simulated_text
from app.run_view.run_state import RunState, apply
from app.run_view.tables.evaluations import evaluation_headline
from app.run_view.tables.newcomers import newcomers, stage_of
from app.run_view.timeline import TimelineEntry, entry_text, run_sentence, snapshot_sentence, timeline_entry
from profiles.errors import counted
from profiles.quantities import bytes_text, duration_text, loss_text, share_text, throughput_figure
from training.records.events import (
    EvaluationEvent,
    Event,
    MemberEvent,
    ProgressEvent,
    RunEvent,
    SnapshotEvent,
    StepEvent,
)
from training.records.plan import status_word

PAINTS_PER_SECOND = 4
PLAIN_INTERVAL = 10.0
"""Seconds between two plain lines of the same kind."""
PLAIN_BURST = 24
"""Plain lines about warnings and changes in one interval; further ones are only counted."""
SHOWN_WARNINGS = 3
BAR_CELLS = 12
_STATUS_STYLES = {"training": "green", "done": "green", "lost": "bold red", "failed": "bold red", "left": "yellow"}


class ProgressDisplay(contextlib.AbstractContextManager["ProgressDisplay"]):
    """Shows a run; a context manager around its events."""

    def __init__(self, title: str, state: RunState) -> None:
        self.state = state
        self._title = title

    paints = False
    """Whether it paints over what the terminal echoes."""

    def __call__(self, event: Event) -> None:
        self.state = apply(self.state, event)

    def ask(self, question: str) -> None:
        """Show a question while the run goes on; empty: it is over."""
        if question:
            say(question)

    def show_answer(self, typed: str) -> None:
        """Show what was typed so far, where the terminal does not."""


def progress_for(
    title: str,
    state: RunState | None = None,
    write: Callable[[str], None] | None = None,
    begun: float | None = None,
    names: Mapping[int, str] | None = None,
    since: int | None = None,
) -> ProgressDisplay:
    """Return the display that fits where stderr goes.

    Args:
        title: of the run, in one line.
        state: the state so far, for a run that is resumed.
        write: takes plain lines, also on a terminal.
        begun: when the run began, if its past is shown, too.
        names: planned names of the members, by rank.
        since: number of the last event before it is resumed; until another one comes, a live display says that.
    """
    if interactive() and write is None:
        return LiveProgress(title, state or RunState(), diagnostics(), names, since)
    return PlainProgress(title, state, write or say, begun=begun)


class LiveProgress(ProgressDisplay):
    """A display that is painted at most four times a second, by a thread of its own."""

    paints = True

    def __init__(
        self,
        title: str,
        state: RunState,
        console: Console,
        names: Mapping[int, str] | None = None,
        since: int | None = None,
    ) -> None:
        super().__init__(title, state)
        self._names, self._since = names or {}, since
        self._question = self._typed = ""
        self._live = Live(
            console=console,
            get_renderable=self.panel,
            refresh_per_second=PAINTS_PER_SECOND,
            redirect_stdout=False,
        )

    def __enter__(self) -> ProgressDisplay:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):  # the terminal is gone; the run is not
            self._live.stop()

    def __call__(self, event: Event) -> None:
        super().__call__(event)
        if self._since is not None and (event.seq is None or event.seq > self._since):
            self._since = None

    def panel(self) -> ProgressPanel:
        """Return what is painted now."""
        question, is_past = self._question + self._typed, self._since is not None
        return ProgressPanel(self._title, self.state, time.time(), self._names, question, is_past)

    def ask(self, question: str) -> None:
        self._question, self._typed = question, ""

    def show_answer(self, typed: str) -> None:
        self._typed = typed


@dataclass(frozen=True)
class ProgressPanel:
    """A state as rich renders it."""

    title: str
    state: RunState
    now: float
    names: Mapping[int, str] = field(default_factory=dict)
    """Planned names of the members, which have reported none before their workers start."""
    question: str = ""
    """A question to the user, below the rest, which gives way to it on a small terminal."""
    is_past: bool = False
    """Whether the state is that before a resume which has not begun yet."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        if not self.question:
            yield from self._picture(options)
            return
        question = Text(visible(self.question), style="bold")
        room = console.height - len(question.wrap(console, options.max_width)) - 1
        lines = console.render_lines(Group(*self._picture(options)), options, pad=False)
        for line in lines[: max(1, room)]:
            yield Segments([*line, Segment.line()])
        yield question

    def _picture(self, options: ConsoleOptions) -> Iterator[RenderableType]:
        state = self.state
        yield Text(visible(self.title), style="bold", no_wrap=True, overflow="ellipsis")
        if self.is_past:
            yield Text(f"resuming from step {self.state.resume_step or 0}")
            return
        yield self._status_line()
        stages = start_stages(state, self.now) if self._resumes else (figures.first_evaluation(state, self.now),)
        if any(stages):
            yield Text(visible("; ".join(stages)), no_wrap=True, overflow="ellipsis")
        yield _members(state, self.names, self.now, narrow=options.max_width < 100)
        evaluations = state.evaluations if state.status != "completed" else {}  # they are in the result below it
        for split, results in evaluations.items():
            yield Text(visible(evaluation_headline(results, split)), style="cyan")
        for remark in remarks_on(state):
            yield Text(visible(remark), style="yellow")
        begun = (state.started or 0.0) - 1.0  # what was said of an earlier attempt is over
        for notices, style in ((state.warnings, "yellow"), (state.errors, "bold red")):
            for notice in [notice for notice in notices if notice.time >= begun][-SHOWN_WARNINGS:]:
                yield Text(visible(_line_of(notice, state)), style=style)

    @property
    def _resumes(self) -> bool:
        """Whether a run that has trained before has not taken a step of this attempt yet."""
        attempts = self.state.attempts
        return self.state.ended is None and len(attempts) > 1 and not attempts[-1].first_steps

    def _status_line(self) -> Table:
        state = self.state
        stage, left = end_stage(state), time_left_text(state, self.now)
        is_told = not stage or (stage.startswith(LAST_EVALUATION) and not left.startswith("0:00"))
        running = ", ".join(filter(None, (stage, left if is_told else "")))
        status = running if state.status == "running" else status_word(state.status)
        if self._resumes and (begun := state.attempts[-1].begun) is not None:
            status = f"starting for {duration_text(max(0.0, self.now - begun))}"
        line = Table.grid(padding=(0, 2))
        elapsed = duration_text(state.seconds(self.now)) if state.started else "-"
        if state.total_steps is None:
            line.add_row(Text(visible(status)), Text(elapsed))
            return line
        line.add_row(
            Text(f"step {state.steps_text}", style="bold"),
            ProgressBar(total=max(1, state.total_steps), completed=state.step, width=20),
            Text(rate_text(state)),
            *([] if state.simulated_hours is None else [Text(simulated_text(state.simulated_hours))]),
            Text(f"{elapsed} elapsed"),
            Text(visible(status)),
        )
        return line


def _members(state: RunState, names: Mapping[int, str], now: float, narrow: bool) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("worker", no_wrap=True, overflow="ellipsis", max_width=16)
    table.add_column("state", overflow="fold", max_width=24)
    for name in ("step", "loss", "samples/s"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("compute " if narrow else "compute | wait", no_wrap=True)
    table.add_column("sent" if narrow else "sent / received", justify="right", no_wrap=True)
    arriving = newcomers(state)
    names = {**names, **{member.rank: member.name for member in arriving}}
    for member in (*state.members.values(), *arriving):
        status = f"joined, {AWAITS_EXCHANGE}" if state.awaits_exchange(member) else state.status_of(member)
        name = state.name(member.rank, names)
        table.add_row(*_row(member, name, stage_of(member, state, now) or status, narrow))
    return table


def _row(member: MemberState, name: str, status: str, narrow: bool) -> list[RenderableType]:
    traffic = bytes_text(member.total.bytes_sent)
    return [
        Text(visible(name)),
        Text(visible(status), style=_STATUS_STYLES.get(status, "")),
        Text(str(member.step) if member.step else "-"),
        Text(loss_text(member.loss)),
        Text("-" if member.rate is None else throughput_figure(member.rate)),
        time_bar(member, narrow),
        Text(traffic if narrow else f"{traffic} / {bytes_text(member.total.bytes_received)}"),
    ]


def time_bar(member: MemberState, narrow: bool) -> Text:
    """Return a bar of compute and exposed wait, with their shares of the time."""
    if not member.has_worked:
        return Text("-")
    compute, wait, _ = member.shares
    if narrow:
        return Text(share_text(compute), style="green")
    cells = round(compute * BAR_CELLS)
    return Text.assemble(
        ("█" * cells, "green"),
        ("░" * (BAR_CELLS - cells), "yellow"),
        f" {share_text(compute)} | {share_text(wait)}",
    )


class PlainProgress(ProgressDisplay):
    """Lines for logs and pipes: no escape codes, and a bounded number of them.

    Args:
        begun: seconds since the epoch from which the times of the events count; default: the present.
    """

    def __init__(
        self,
        title: str,
        state: RunState | None = None,
        write: Callable[[str], None] = say,
        clock: Callable[[], float] = time.monotonic,
        begun: float | None = None,
    ) -> None:
        super().__init__(title, state or RunState())
        self._begun, self._event_at = begun, 0.0
        self._write = write
        self._clock = clock
        self._start = clock()
        self._due: dict[str, float] = {}
        self._windows: dict[str, tuple[float, int]] = {}
        """By kind of event, when the present window began and how many lines it has."""
        self._dropped, self._newest_dropped = 0, ""

    def __enter__(self) -> ProgressDisplay:
        self._line(self._title)
        return self

    def __exit__(self, *_: object) -> None:
        self._tell_dropped()

    def __call__(self, event: Event) -> None:
        before = self.state
        super().__call__(event)
        if self._begun is not None:  # a machine's clock may be ahead, or behind
            self._event_at = max(self._event_at, min(event.time, time.time()) - self._begun)
        match event:
            case StepEvent():
                if self._is_due("step") and self.state.step > 0:
                    self._line(step_line(self.state))
            case ProgressEvent():
                finished = event.total is not None and event.done >= event.total
                if self._is_due(f"{event.phase} done" if finished else event.phase, once=finished):
                    self._line(figures.progress_line(self.state, event))
            case EvaluationEvent():
                self._line(evaluation_headline(self.state.evaluations[event.split], event.split))
            case SnapshotEvent():
                if event.step != before.snapshot_step:
                    self._bounded(event.kind, snapshot_sentence(event.step))
            case _:
                text = change_line(before, self.state, event)
                if text and isinstance(event, RunEvent):  # never dropped
                    self._line(text)
                elif text:
                    self._bounded(event.kind, text)

    def _is_due(self, kind: str, once: bool = False) -> bool:
        now = self._clock()
        if now < self._due.get(kind, now):
            return False
        self._due[kind] = float("inf") if once else now + PLAIN_INTERVAL
        return True

    def _bounded(self, kind: str, text: str) -> None:
        """Write a line, unless there are many of its kind: a flood of warnings hides no loss."""
        now = self._seconds
        start, count = self._windows.get(kind, (0.0, 0))
        if now - start >= PLAIN_INTERVAL:
            self._tell_dropped()
            start, count = now, 0
        self._windows[kind] = (start, count + 1)
        if count < PLAIN_BURST:
            self._line(text)
        else:
            self._dropped, self._newest_dropped = self._dropped + 1, text

    def _tell_dropped(self) -> None:
        if self._dropped:
            more = f"... and {counted(self._dropped, 'more message')}, kept in events.jsonl"
            self._line(self._newest_dropped if self._dropped == 1 else more)
            self._dropped = 0

    def _line(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # the reader is gone; the run goes on
            self._write(f"[{duration_text(self._seconds)}] {visible(text)}")

    @property
    def _seconds(self) -> float:
        """Since the beginning; by the events, of which past ones come all at once, where these tell."""
        return self._clock() - self._start if self._begun is None else self._event_at


def step_line(state: RunState) -> str:
    """``step 420/1400, loss 0.83, 152.3 samples/s, 1:23 left``."""
    fields = (
        f"step {state.steps_text}",
        "" if state.loss is None else f"loss {loss_text(state.loss)}",
        rate_text(state),
        "" if state.simulated_hours is None else simulated_text(state.simulated_hours),
        time_left_text(state, state.updated or 0.0),
        data_text(state),
        stages_times_text(state),
    )
    return ", ".join(filter(None, fields))


def time_left_text(state: RunState, now: float) -> str:
    """``1:23 left``; empty: too few steps to tell."""
    left = state.time_left(now)
    return f"{duration_text(left.seconds)} left" if left else ""


def change_line(before: RunState, after: RunState, event: Event) -> str:
    """Return the line of an event, in the words of the timeline; empty: it changes nothing."""
    if isinstance(event, RunEvent):
        is_repeated = event.status == before.status and before.started is not None
        reason = "" if event.status == "failed" else event.message  # the error said why
        return "" if is_repeated else run_sentence(event.status, reason)
    if isinstance(event, MemberEvent) and event.status == "left" and before.total_steps == after.step:
        return ""  # it has taken all steps: "done" follows
    entry = timeline_entry(event, before.members.get(-1 if event.member is None else event.member))
    if entry is None or (entry.kind == "machine" and entry.status == "started"):  # that it joined follows
        return ""
    return _line_of(entry, after)


def _line_of(entry: TimelineEntry, state: RunState) -> str:
    words = entry_text(entry, state.name)
    return f"{entry.kind}: {words}" if entry.kind in ("warning", "error") else words
