"""A run of this machine: in this process, or in one that outlives it (``python -m app.cli.train.local_run``).

A run in the background is watched by reading its folder, and controlled by requests left there, like a run on several
machines.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Sequence
from typing import Protocol

from app.cli.runs.attach import STOPPING_SCRIPT
from app.cli.terminal import STOP_SIGNALS
from app.console import say
from app.progress import PlainProgress, ProgressDisplay
from app.run_view.view import EndedRun
from profiles.bootstrap import end_process
from profiles.errors import ExitCode, MusterError
from training.records.events import Event
from training.records.plan import RunPlan
from training.records.run_folder import RunFolder
from training.run.outcome import RunOutcome, noted_failure
from training.run.processes import run_from_stdin
from training.run.requests.request_server import LocalRequests
from training.run.run_controller import RunController
from training.run.stopping import Stoppable, stopped_by


class RunHandle(Stoppable, Protocol):
    """Interface of a run; :class:`training.run.run_controller.RunController` implements it."""

    def start(self) -> None: ...

    def wait(self) -> RunOutcome: ...


StartRun = Callable[[RunPlan, RunFolder, Callable[[Event], None]], RunHandle]


def run_to_end(
    plan: RunPlan,
    folder: RunFolder,
    progress: ProgressDisplay,
    *,
    start_run: StartRun = RunController,
    stop_signals: Sequence[int] = STOP_SIGNALS,
) -> EndedRun:
    """Run ``plan`` in ``folder`` (which is closed at the end) and return how it ended.

    Raises:
        MusterError: the run could not be started.
    """
    requests = LocalRequests(progress)
    tell = say if plan.launch is None else lambda line: say(STOPPING_SCRIPT)
    with folder, noted_failure(folder), stopped_by(stop_signals, tell) as stop, progress:
        run = start_run(plan, folder, requests)
        run.start()
        stop.watch(run)
        if isinstance(run, RunController):
            requests.open(run)
        outcome = run.wait()
    of_run = run.plan if isinstance(run, RunController) else plan  # a launched script may have opened a session
    return EndedRun.of(outcome, of_run, progress.state)


def main() -> int:
    """Execute the run whose folder this process was given; its outcome is recorded there."""
    path = run_from_stdin()
    if path is None:
        return ExitCode.DONE
    try:
        plan = RunFolder.open(path).plan()  # before the folder is held: who started this waits for that
        unseen = PlainProgress("", write=lambda line: None)
        run_to_end(plan, RunFolder.take_over(path), unseen, stop_signals=(signal.SIGTERM,))
    except MusterError as error:
        print(f"{error.message}; {error.hint}" if error.hint else error.message, file=sys.stderr)
        return int(error.exit_code)
    return ExitCode.DONE


if __name__ == "__main__":
    end_process(main())
