"""A local run in this process: display, signals, outcome."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from typing import Protocol

from app.console import say
from app.progress import Progress
from app.report import Ended
from distributed.run.request_desk import LocalMachines, RequestDesk
from training.events import Event
from training.local_run import LocalRun
from training.outcome import RunOutcome, noted_failure
from training.plan import RunPlan
from training.run_folder import RunFolder
from training.stopping import Stoppable, stopped_by

_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Run(Stoppable, Protocol):
    """What is needed of a run; :class:`training.local_run.LocalRun` is one."""

    def start(self) -> None: ...

    def wait(self) -> RunOutcome: ...


StartRun = Callable[[RunPlan, RunFolder, Callable[[Event], None]], Run]


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
    desks: list[RequestDesk] = []

    def on_event(event: Event) -> None:
        progress(event)
        if listener is not None:
            listener(event)
        for desk in desks:
            desk(event)

    with folder, noted_failure(folder), stopped_by(stop_signals, say) as stop, progress:
        run = start_run(plan, folder, on_event)
        run.start()
        stop.watch(run)
        desks += _desk_of(run, plan, folder)
        outcome = run.wait()
    return Ended(**vars(outcome), plan=plan, state=progress.state)


def _desk_of(run: Run, plan: RunPlan, folder: RunFolder) -> list[RequestDesk]:
    """Let a run obey what is left in its folder, as one on several machines does."""
    if not isinstance(run, LocalRun):
        return []
    desk = RequestDesk(run, folder.path, folder.append, LocalMachines(plan))
    desk.open()
    return [desk]
