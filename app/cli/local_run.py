"""A local run in this process: display, signals, outcome."""

from __future__ import annotations

import contextlib
import shutil
import signal
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Protocol

from app.console import say
from app.progress import Progress
from app.report import Ended
from distributed.run.request_desk import LocalMachines, RequestDesk
from profiles.errors import BadInput, ExitCode, MusterError, RunFailed
from training.events import ErrorEvent, Event, RunEvent
from training.local_run import LocalOutcome, LocalRun
from training.plan import RunPlan
from training.run_folder import RunFolder

_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Run(Protocol):
    """What is needed of a run; :class:`training.local_run.LocalRun` is one."""

    def start(self) -> None: ...

    def wait(self) -> LocalOutcome: ...

    def request_stop(self, message: str) -> None: ...

    def kill(self) -> None: ...


StartRun = Callable[[RunPlan, RunFolder, Callable[[Event], None]], Run]


class _Stop:
    """Turns signals into a coordinated stop; a second signal ends everything at once."""

    def __init__(self) -> None:
        self._run: Run | None = None
        self._asked = 0

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self._asked += 1
        if self._run is not None:
            self._act(self._run)

    def watch(self, run: Run) -> None:
        """The run has started: carry out what was asked for meanwhile."""
        self._run = run
        if self._asked:
            self._act(run)

    def _act(self, run: Run) -> None:
        if self._asked > 1:
            run.kill()
            return
        say("stopping: writing a snapshot (once more to stop at once)")
        run.request_stop("stopped by the user")


@contextlib.contextmanager
def _stopped_by(signals: Sequence[int]) -> Iterator[_Stop]:
    stop = _Stop()
    before = {number: signal.signal(number, stop) for number in signals}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run_to_end(
    plan: RunPlan,
    folder: RunFolder,
    progress: Progress,
    *,
    listener: Callable[[Event], None] | None = None,
    start_run: StartRun = LocalRun,
    stop_signals: Sequence[int] = _STOP_SIGNALS,
) -> Ended:
    """Run ``plan`` in ``folder`` (which is closed at the end) and return how it ended.

    A run that ends before anything had begun, because its input cannot be used, leaves no folder behind.

    Raises:
        MusterError: the run could not be started.
    """
    is_new = folder.metadata.attempt == 1
    desks: list[RequestDesk] = []

    def on_event(event: Event) -> None:
        progress(event)
        if listener is not None:
            listener(event)
        for desk in desks:
            desk(event)

    try:
        with folder, _noted_failure(folder), _stopped_by(stop_signals) as stop, progress:
            run = start_run(plan, folder, on_event)
            run.start()
            stop.watch(run)
            desks += _desk_of(run, plan, folder)
            outcome = run.wait()
    except BadInput:
        _forget(folder, is_new)
        raise
    if outcome.exit_code == ExitCode.BAD_INPUT:
        _forget(folder, is_new)
    return Ended(
        plan,
        outcome.run_dir,
        outcome.status,
        ExitCode(outcome.exit_code),
        outcome.message,
        outcome.hint,
        outcome.metrics,
        progress.state,
    )


def _desk_of(run: Run, plan: RunPlan, folder: RunFolder) -> list[RequestDesk]:
    """Let a run obey what is left in its folder, as one on several machines does."""
    if not isinstance(run, LocalRun):
        return []
    desk = RequestDesk(run, folder.path, folder.append, LocalMachines(plan))
    desk.open()
    return [desk]


@contextlib.contextmanager
def _noted_failure(folder: RunFolder) -> Iterator[None]:
    """Leave the reason in the run folder when the run breaks in this process (a full disk, a fault of ours)."""
    try:
        yield
    except Exception as error:  # whatever it is, the folder must say so; it is raised again
        told = error if isinstance(error, MusterError) else RunFailed(str(error))
        with contextlib.suppress(MusterError):
            folder.append(ErrorEvent(message=told.message, hint=told.hint, exit_code=told.exit_code))
            folder.append(RunEvent(status="failed", message=told.message))
            folder.finish("failed", {}, told.message)
        raise


def _forget(folder: RunFolder, is_new: bool) -> None:
    """Remove the folder of a run that never began."""
    if is_new:
        shutil.rmtree(folder.path, ignore_errors=True)
