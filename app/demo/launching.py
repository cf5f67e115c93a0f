"""The Launch screen of a scripted run: read from its folder until the first step is made."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from app.demo.pace import Pace
from app.wizard.state import Launch, LaunchRow, Status
from profiles.errors import RunFailed
from training.events import Event, MemberEvent, ProgressEvent, RunEvent, StepEvent, TimingEvent
from training.plan import RunPlan
from training.run_files import is_live
from training.run_folder import RunFolder

COLUMNS = ("connected", "code and data", "program", "features", "joined", "first step")
_POLL = 0.15
_BROUGHT = 2
"""Columns that ``progress`` events of the run fill: connected, and code and data."""


def follow_start(path: Path, plan: RunPlan, see: Callable[[Launch], None], pace: Pace) -> None:
    """Tell ``see`` how far the start has come, until every member made a step.

    Raises:
        RunFailed: the run ended before.
    """
    shown: Launch | None = None
    while not pace.closed:
        live = is_live(path)
        events = list(RunFolder.open(path).events())
        launch = launch_of(events, plan, str(path))
        if launch != shown:
            see(launch)
            shown = launch
        if launch.status is Status.OK:
            return
        if not live:
            raise RunFailed("the scripted run ended before its first step", f"see {path / 'logs'}")
        pace.work(_POLL)


def launch_of(events: Iterable[Event], plan: RunPlan, run: str) -> Launch:
    """Return what a start looks like after these events."""
    done = [0] * plan.world_size
    lines: list[str] = []
    for event in events:
        if isinstance(event, ProgressEvent) and event.member is None:
            for rank in range(min(event.done, plan.world_size)):
                done[rank] = max(done[rank], _BROUGHT)
        reached = _reached(event)
        if event.member is not None and reached:
            done[event.member] = max(done[event.member], reached)
        if isinstance(event, TimingEvent):
            who = "" if event.member is None else f"{plan.members[event.member].name}: "
            lines.append(f"{who}{event.part} {event.seconds:.1f} s")
    rows = tuple(_row(plan.members[rank].name, count) for rank, count in enumerate(done))
    ready = all(count == len(COLUMNS) for count in done)
    return Launch(COLUMNS, rows, tuple(lines[-5:]), run, status=Status.OK if ready else Status.WORKING)


def _reached(event: Event) -> int:
    match event:
        case MemberEvent(status="started"):
            return 3
        case TimingEvent(part="worker: data"):
            return 4
        case MemberEvent(status="ready") | RunEvent(status="running"):
            return 5
        case StepEvent():
            return 6
    return 0


def _row(name: str, done: int) -> LaunchRow:
    cells = [Status.OK] * done + [Status.WORKING] * (done < len(COLUMNS))
    cells += [Status.WAITING] * (len(COLUMNS) - len(cells))
    status = Status.OK if done == len(COLUMNS) else Status.WORKING
    return LaunchRow(name, name, status, cells=tuple(cells))
