"""Launch of a real run: saves and plans it, hands it to its supervisor, and follows it until the first step is done."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from app.follow import Follower
from app.run_view.metrics import phase_progress_text
from app.trackers.notify import failed_start_notified
from app.trackers.tracking import checked_trackers, start_trackers
from app.wizard.services.forecasting import Forecast
from app.wizard.services.machines import trust_in
from app.wizard.services.outside import Outside
from app.wizard.services.plan import Saving, saving
from app.wizard.state.launch_records import LaunchProgress, LaunchRow
from app.wizard.state.records import ItemStatus, Tell
from app.wizard.state.state import PlanRequest
from distributed.hosts.file import load_hosts
from distributed.launcher import DistributedLauncher, PlannedRun, PlanOptions
from distributed.preparation.preflight import NotReady
from distributed.preparation.prepare import PrepareOptions
from profiles.errors import MusterError, RunFailed
from profiles.installation import program_words
from profiles.run_settings import tracker_names
from training.records.events import ErrorEvent, Event, MemberEvent, ProgressEvent, StepEvent
from training.records.plan import RunPlan
from training.records.run_folder import log_stem
from training.tasks.published_models import usable_profile

See = Callable[[LaunchProgress], None]
STEPS = ("checked", "code and data", "program", "joined", "first step")
_CHECKED, _BROUGHT, _STARTED, _JOINED, _TRAINS = range(1, len(STEPS) + 1)
_LOG_LINES = 12
_LONGEST_LOG = 65_536


def launch(request: PlanRequest, see: See, tell: Tell, config: Path | None, outside: Outside) -> Path:
    """Save and start the run in the background, and return its run folder once every member has completed a step.

    Raises:
        NotReady: a machine cannot take part; its row has the cause.
        RunFailed: the run ended before its first step.
        BadInput: an option is invalid; nothing was started.
    """
    saved = saving(request, config)
    names = [machine.name for machine in saved.hosts.machines]
    saved.write(config)
    see(refused(names, ()))
    try:
        path, plan = start(saved, request, tell, config, outside)
    except NotReady as error:
        see(refused(names, error.problems))
        raise
    outside.close()  # the run has connections of its own
    return follow(path, plan, see)


def start(
    saved: Saving, request: PlanRequest, tell: Tell, config: Path | None, outside: Outside
) -> tuple[Path, RunPlan]:
    """Plan and start a saved run, as its command line does.

    Raises:
        MusterError: nothing was started.
    """
    with failed_start_notified(saved.name):
        path, planned = _started(saved, request, tell, config, outside)
    start_trackers(path, tracker_names(planned.plan.profile.run.trackers))
    return path, planned.plan


def _started(
    saved: Saving, request: PlanRequest, tell: Tell, config: Path | None, outside: Outside
) -> tuple[Path, PlannedRun]:
    profile = usable_profile(saved.name, {}, config).profile
    checked_trackers(profile.run.trackers)
    hosts = load_hosts(saved.hosts_file).only([machine.name for machine in saved.hosts.machines])
    trust = trust_in(request.answers.fingerprints)
    previous = outside.recent(hosts, profile.model.task, trust)
    prepare_options = PrepareOptions(tell, trust, dial=outside.dial, previous=previous)
    plan_options = PlanOptions(planning=saved.planning)
    launcher = DistributedLauncher(hosts, profile, prepare_options, plan_options)
    planned = launcher.plan()
    if saved.planning is not None and isinstance(request.planning, Forecast):
        planned = replace(planned, figures=request.planning.measurements.figures)
    return launcher.start(planned, [program_words()[-1], *saved.arguments]), planned


def follow(path: Path, plan: RunPlan, see: See) -> Path:
    """Report the progress of each member until all of them train; return ``path``.

    Raises:
        RunFailed: the run ended before that.
    """
    follower, grid = Follower(path), Grid(plan)
    shown: LaunchProgress | None = None
    for event in follower.events():
        if event is not None:
            grid.take(event)
        launch = grid.launch(path, follower.now())
        if launch != shown:
            see(launch)
            shown = launch
        if grid.ready:
            return path
    outcome = follower.outcome()
    if outcome.status == "completed":  # so short that its end was read first
        return path
    raise RunFailed(outcome.message or "the run ended before its first step", outcome.hint or f"see {path / 'logs'}")


class Grid:
    """Progress of each member's start, computed from the run's events."""

    def __init__(self, plan: RunPlan) -> None:
        self.names = [member.name for member in plan.members]
        self.done = [_CHECKED] * plan.world_size
        self.problems: dict[int, tuple[str, str]] = {}
        self._phases: dict[int, tuple[ProgressEvent, ProgressEvent]] = {}
        """First and newest report of what each member prepares."""

    def take(self, event: Event) -> None:
        """Apply one event."""
        if isinstance(event, ProgressEvent) and event.phase == "machines" and event.done == event.total:
            self.done = [max(count, _BROUGHT) for count in self.done]
        rank, reached = event.member, _reached(event)
        if rank is None or not 0 <= rank < len(self.done):
            return
        self.done[rank] = max(self.done[rank], reached)
        if isinstance(event, ProgressEvent):
            begun = self._phases.get(rank, (event, event))[0]
            self._phases[rank] = (begun if begun.phase == event.phase else event, event)
        elif reached:
            self._phases.pop(rank, None)
        if isinstance(event, ErrorEvent):
            self.problems.setdefault(rank, (event.message, event.hint))
        elif isinstance(event, MemberEvent) and event.status in ("failed", "lost"):
            self.problems.setdefault(rank, (event.message or event.status, ""))

    @property
    def ready(self) -> bool:
        """Whether every member has completed a step."""
        return all(count == _TRAINS for count in self.done)

    def launch(self, path: Path, now: float) -> LaunchProgress:
        """Return the progress at the Unix time ``now``."""
        rows = []
        for rank, (name, count) in enumerate(zip(self.names, self.done)):
            problem = self.problems.get(rank)
            status = ItemStatus.FAILED if problem else ItemStatus.OK if count == _TRAINS else ItemStatus.WORKING
            row = _row(name, count, status, problem, tail(path / "logs", name) if problem else ())
            rows.append(row if problem else replace(row, phase=self._phase(rank, now)))
        return LaunchProgress(STEPS, tuple(rows), str(path))

    def _phase(self, rank: int, now: float) -> str:
        if rank not in self._phases:
            return ""
        begun, newest = self._phases[rank]
        return phase_progress_text(begun, newest, now)


def _reached(event: Event) -> int:
    if isinstance(event, StepEvent):
        return _TRAINS
    if isinstance(event, MemberEvent):
        return {"started": _STARTED, "ready": _JOINED, "joined": _JOINED}.get(event.status, 0)
    return 0


def _row(
    name: str, done: int, now: ItemStatus, problem: tuple[str, str] | None, log: tuple[str, ...] = ()
) -> LaunchRow:
    waiting = [ItemStatus.WAITING] * (len(STEPS) - done - 1)
    cells = (*[ItemStatus.OK] * done, *([now, *waiting] if done < len(STEPS) else []))
    cause, fix = problem or ("", "")
    return LaunchRow(name, name, cells, log, status=now, cause=cause, fix=fix)


def tail(logs: Path, member: str) -> tuple[str, ...]:
    """Return the last lines of a member's newest log."""
    names = re.compile(rf"{re.escape(log_stem(member))}(\.\d+)?\.log")
    log_files = [path for path in logs.glob("*.log") if names.fullmatch(path.name)]
    if not log_files:
        return ()
    newest = max(log_files, key=lambda path: path.stat().st_mtime)
    with newest.open("rb") as stream:
        stream.seek(max(0, newest.stat().st_size - _LONGEST_LOG))
        lines = stream.read().decode(errors="replace").splitlines()
    return tuple(line for line in lines if line.strip())[-_LOG_LINES:]


def refused(names: Sequence[str], problems: Sequence[MusterError]) -> LaunchProgress:
    """Return rows with every problem at its machine; without problems yet, all machines are being checked."""
    rows = []
    for name in names:
        problem_here = next(((problem.problem, problem.hint) for problem in problems if problem.machine == name), None)
        rows.append(
            _row(
                name,
                0,
                ItemStatus.FAILED if problem_here else ItemStatus.OK if problems else ItemStatus.WORKING,
                problem_here,
            )
        )
    return LaunchProgress(STEPS, tuple(rows))
