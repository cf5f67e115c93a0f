"""The trials of a sweep: each a process of ``train``, on a machine or here, as many at a time as there are slots."""

from __future__ import annotations

import queue
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from app.cli.terminal import heard_by
from app.cli.train.trials import shown_progress
from app.console import say, visible
from profiles.errors import ExitCode, counted
from profiles.quantities import duration_text
from training.records.runs import list_runs, remove_run
from training.run.processes import environment
from training.run.requests.request_book import leave_request

_LOOK = 0.1
_PATIENCE = 60.0
"""Seconds that trials have to stop by themselves."""


@dataclass(frozen=True, eq=False)
class SweepTrial:
    """One run of a sweep."""

    name: str
    options: Mapping[str, str]
    folder: Path
    """The output folder of its run alone."""


@dataclass(frozen=True)
class Slot:
    """What trains one trial at a time."""

    name: str
    arguments: tuple[str, ...]
    """Of ``train``."""


def finished(folder: Path) -> Path | None:
    """Return the completed run in the folder of a trial."""
    return next((run.path for run in list_runs(folder) if run.status == "completed"), None)


@dataclass
class SweepBench:
    """Executes trials; a machine that cannot take part leaves its trial to the others.

    Args:
        arguments: of ``train``, for all trials.
        command: that trains.
    """

    slots: Sequence[Slot]
    arguments: Sequence[str]
    command: Sequence[str] = (sys.executable, "-m", "muster", "train")
    problems: dict[SweepTrial, str] = field(default_factory=dict)
    """Why a trial did not come to its end."""
    stopped: threading.Event = field(default_factory=threading.Event)
    _live: dict[SweepTrial, subprocess.Popen[bytes]] = field(default_factory=dict)
    _waiting: queue.SimpleQueue[SweepTrial] = field(default_factory=queue.SimpleQueue)
    _done: int = 0

    def carry_out(self, trials: Sequence[SweepTrial]) -> None:
        """Execute all; results are in their folders, what went wrong in :attr:`problems`."""
        for trial in trials:
            self._waiting.put(trial)
        count, begun = min(len(self.slots), len(trials)), time.monotonic()
        workers = [threading.Thread(target=self._serve, args=(slot, len(trials))) for slot in self.slots[:count]]
        with heard_by(lambda *_: self.stopped.set()), shown_progress() as progress:
            for worker in workers:
                worker.start()
            while any(worker.is_alive() for worker in workers):
                names = "; ".join(trial.name for trial in list(self._live))
                passed = duration_text(time.monotonic() - begun)
                progress(f"{self._done} of {counted(len(trials), 'trial')} done after {passed}: {names}")
                self.stopped.wait(_LOOK)
                if self.stopped.is_set():
                    self._end()
                    break
            for worker in workers:
                worker.join()
        while not self._waiting.empty():
            self.problems.setdefault(self._waiting.get(), "no machine was left for it")

    def _serve(self, slot: Slot, count: int) -> None:
        while not self.stopped.is_set():
            try:
                trial = self._waiting.get_nowait()
            except queue.Empty:
                return
            code, problem = self._run(slot, trial)
            if code == ExitCode.NOT_READY:
                self.problems[trial] = problem
                self._waiting.put(trial)
                say(visible(f"{slot.name} takes no trial: {problem}"))
                return
            self._done += code == ExitCode.DONE
            if code == ExitCode.DONE:
                self.problems.pop(trial, None)
                say(visible(f"{trial.name}: done on {slot.name}, {self._done} of {counted(count, 'trial')}"))
            elif not self.stopped.is_set():
                self.problems[trial] = problem
                say(visible(f"{trial.name}: {problem}"))

    def _run(self, slot: Slot, trial: SweepTrial) -> tuple[int, str]:
        """Execute a trial; return its exit code and, if it failed, the reason."""
        for earlier in list_runs(trial.folder):
            if not earlier.live:
                remove_run(trial.folder, earlier)
        trial.folder.mkdir(parents=True, exist_ok=True)
        options = [word for name, value in trial.options.items() for word in ("--set", f"{name}={value}")]
        line = [*self.arguments, *slot.arguments, *options, "--output-dir", str(trial.folder)]
        log = trial.folder / "train.log"
        with log.open("wb") as stream:
            process = subprocess.Popen(
                [*self.command, *line],
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
                env=environment(0),
                start_new_session=True,
            )
            self._live[trial] = process
            code = process.wait()
        del self._live[trial]
        errors = [text for text in log.read_text(errors="replace").splitlines() if text.startswith("error: ")]
        return code, errors[-1].removeprefix("error: ") if errors else f"exit code {code}, see {log}"

    def _end(self) -> None:
        """Have the live trials stop, and kill those that do not."""
        for trial, process in list(self._live.items()):
            runs = [run for run in list_runs(trial.folder) if run.live]
            for run in runs:
                leave_request(run.path, "stop")
            if not runs:
                process.terminate()
        end = time.monotonic() + _PATIENCE
        for process in list(self._live.values()):
            try:
                process.wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
