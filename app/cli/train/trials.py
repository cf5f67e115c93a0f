"""The runs of a comparison: planning them, finding those already done, and executing the others in parallel.

All members of a run take turns in one process. The folder of a comparison holds ordinary runs; one that is completed
and has the same plan, but for its threads, is not run again.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path

from app.cli.terminal import heard_by
from app.cli.train.local_run import RunHandle, StartRun
from app.console import diagnostics, interactive, say, visible
from distributed.planning.simulated import Machines
from profiles.errors import BadInput, ExitCode, MusterError, counted
from profiles.quantities import duration_text
from profiles.schema import Profile
from training.hardware.resources import whole_cores
from training.records.events import Event, RunEvent, StepEvent
from training.records.plan import RunPlan, read_plan
from training.records.run_folder import RunFolder
from training.records.runs import list_runs, remove_run, summarise
from training.run.local_plan import plan_local_run
from training.run.outcome import RunOutcome, noted_failure
from training.run.run_controller import RunController

_LOOK = 0.1
_STEPS_OF_A_CURVE = 10
"""Default number of evaluations of a run with a known number of steps."""


@dataclass(frozen=True, eq=False)
class Trial:
    """One run of a comparison."""

    strategy: str
    seed: int
    plan: RunPlan

    @property
    def name(self) -> str:
        return f"{self.strategy}, seed {self.seed}"

    @property
    def key(self) -> str:
        """Key that is equal for runs with the same result."""
        return _key(self.plan)


def _key(plan: RunPlan) -> str:
    members = tuple(member.on_device(threads=0) for member in plan.members)
    return plan.model_copy(update={"members": members}).hash()


def trials_of(profile: Profile, members: int, seeds: int, jobs: int, *, evaluations_chosen: bool) -> list[Trial]:
    """Return the runs of the profile's strategy, one per seed.

    Nothing stops early and no snapshots are kept. All members see as many samples as with any other strategy.

    Args:
        members: of a run; those of the profile's file of machines, where it names one.
        evaluations_chosen: the evaluation interval was set explicitly; otherwise a run of a known number of steps is
            evaluated at least ten times.

    Raises:
        BadInput: the strategy refuses the job.
    """
    interval = profile.evaluation.eval_interval  # a share stays one
    if not evaluations_chosen and profile.training.max_steps and not 0 < interval < 1:
        max_interval = max(1, profile.training.max_steps // _STEPS_OF_A_CURVE)
        interval = min(interval, max_interval) if interval else max_interval
    changes = {
        "evaluation": {"eval_interval": interval, "early_stopping_patience": 0},
        "snapshot": {"snapshot_interval": 0},
        "run": {"trackers": "", "shares": ""},
    }
    sections = {name: getattr(profile, name).model_copy(update=change) for name, change in changes.items()}
    threads = profile.training.threads or max(1, whole_cores() // jobs)
    machines = Machines.read(Path(profile.run.cluster)) if profile.run.cluster else None
    trials = []
    for number in range(seeds):
        seed = profile.training.seed + number
        training = profile.training.model_copy(update={"seed": seed})
        chosen = profile.model_copy(update={**sections, "training": training})
        plan = plan_local_run(chosen, len(machines.names) if machines else members, simulated=True)
        plan = machines.with_clock(plan) if machines else plan
        members_with_threads = tuple(member.on_device(threads=threads) for member in plan.members)
        trials.append(
            Trial(plan.profile.strategy.strategy, seed, plan.model_copy(update={"members": members_with_threads}))
        )
    return trials


def whole_runs(folder: Path, trials: Sequence[Trial]) -> dict[Trial, Path]:
    """Return the folders of runs already completed, and remove those that an earlier comparison left unfinished."""
    trial_by_key = {trial.key: trial for trial in trials}
    folder_by_trial: dict[Trial, Path] = {}
    for summary in list_runs(folder):
        with contextlib.suppress(BadInput):  # a damaged one belongs to no trial
            trial = trial_by_key.get(_key(read_plan(summary.path / "plan.json")))
            if trial is not None and summary.status == "completed":
                folder_by_trial.setdefault(trial, summary.path)
            elif trial is not None and not summary.live:
                remove_run(folder, summary)
    return folder_by_trial


@dataclass
class Bench:
    """Executes runs, several in parallel; a signal ends those in progress, and completed ones are kept.

    Args:
        folder: of the comparison.
        jobs: number of parallel runs.
        command: the command line, for the runs' metadata.
    """

    folder: Path
    jobs: int
    command: Sequence[str] = ()
    start_run: StartRun = RunController
    refused: dict[str, str] = field(default_factory=dict)
    """Reason why a strategy gets no more runs, by its name."""
    stopped: threading.Event = field(default_factory=threading.Event)
    _live: dict[Trial, RunHandle] = field(default_factory=dict)
    _steps: dict[Trial, tuple[int, int]] = field(default_factory=dict)
    """Steps done and total steps of the runs in progress."""
    _guard: threading.Lock = field(default_factory=threading.Lock)

    def carry_out(self, trials: Sequence[Trial]) -> dict[Trial, Path]:
        """Execute all runs and return the folders of those that completed.

        Raises:
            MusterError: one of them could not be started, for a reason not due to its strategy.
        """
        folder_by_trial: dict[Trial, Path] = {}
        with (
            ThreadPoolExecutor(self.jobs) as pool,
            heard_by(lambda *_: self.stopped.set()),
            shown_progress() as progress,
        ):
            begun = time.monotonic()
            under_way = {pool.submit(self._run_trial, trial): trial for trial in trials}
            try:
                while under_way:
                    for done in wait(under_way, _LOOK).done:
                        trial = under_way.pop(done)
                        if (path := done.result()) is not None:
                            folder_by_trial[trial] = path
                            say(visible(f"{trial.name}: done, {len(folder_by_trial)} of {counted(len(trials), 'run')}"))
                    progress(self._status_line(len(folder_by_trial), len(trials), time.monotonic() - begun))
                    if self.stopped.is_set():
                        self._end()
            except BaseException:
                self.stopped.set()
                self._end()
                raise
        return folder_by_trial

    def _status_line(self, done: int, total: int, passed: float) -> str:
        with self._guard:
            steps = dict(self._steps)
        share = done + sum(step / step_count for step, step_count in steps.values())
        left = f", {duration_text(passed / share * (total - share))} left" if share else ""
        current = "; ".join(f"{trial.name}, step {step} of {step_count}" for trial, (step, step_count) in steps.items())
        return f"{done} of {counted(total, 'run')} done{left}{': ' if current else ''}{current}"

    def _end(self) -> None:
        with self._guard:
            for run in self._live.values():
                run.kill()

    def _run_trial(self, trial: Trial) -> Path | None:
        """Execute one run and return its folder; ``None`` if it did not complete."""
        if self.stopped.is_set() or trial.strategy in self.refused:
            return None
        held = RunFolder.create(self.folder, trial.plan, list(self.command))
        try:
            outcome = self._outcome(trial, held)
        except BadInput as error:
            outcome = RunOutcome("failed", held.path, {}, ExitCode.BAD_INPUT, error.message)
        finally:
            with self._guard:
                self._live.pop(trial, None)
                self._steps.pop(trial, None)
        if outcome.status == "completed":
            return held.path
        if self.stopped.is_set():
            with contextlib.suppress(MusterError):  # the next comparison removes it
                remove_run(self.folder, summarise(held.path))
        else:
            self.refused[trial.strategy] = outcome.message or outcome.status
        return None

    def _outcome(self, trial: Trial, held: RunFolder) -> RunOutcome:
        def hear(event: Event) -> None:
            if isinstance(event, RunEvent) and event.total_steps:
                self._note(trial, 0, event.total_steps)
            elif isinstance(event, StepEvent) and not event.member:
                self._note(trial, event.step)

        with held, noted_failure(held):
            run = self.start_run(trial.plan, held, hear)
            run.start()
            with self._guard:
                self._live[trial] = run
            if self.stopped.is_set():
                run.kill()
            outcome = run.wait()
            for watched in run.members.workers.values() if isinstance(run, RunController) else ():
                watched.process.exit_code()  # wait until the process is gone
        return outcome

    def _note(self, trial: Trial, step: int, total: int = 0) -> None:
        with self._guard:
            if total or trial in self._steps:
                self._steps[trial] = (step, total or self._steps[trial][1])


@contextlib.contextmanager
def shown_progress() -> Iterator[Callable[[str], None]]:
    """Yield a function that updates a status line on a terminal; elsewhere it does nothing."""
    if not interactive():
        yield lambda text: None
        return
    from rich.text import Text

    with diagnostics().status("") as status:
        yield lambda text: status.update(Text(visible(text)[: max(20, diagnostics().width - 4)]))
