"""A run of this machine in the background: ``python -m app.cli.background`` carries it out.

Whoever shows it reads its folder, and whoever commands it leaves a request there, as for a run on several machines.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path

from app.cli.local_run import run_to_end
from app.cli.train import TrainRequest, prepared
from app.progress import PlainProgress
from app.run_state import RunState
from profiles.errors import ExitCode, MusterError
from training.background_process import BackgroundProcess, told_run
from training.run_folder import RunFolder


def start_in_background(request: TrainRequest) -> Path:
    """Start or resume a run of this machine; it outlives this process and its terminal. Return its folder.

    Raises:
        MusterError: nothing was started.
    """
    _, folder = prepared(request)
    folder.close()
    BackgroundProcess("app.cli.background").start(folder.path)
    return folder.path


def main() -> int:
    """Carry out the run that this process is told; how it ended is in its folder."""
    path = told_run()
    if path is None:
        return ExitCode.DONE
    try:
        plan = RunFolder.open(path).plan()  # before the folder is held: who started this waits for that
        unseen = PlainProgress("", RunState(), write=lambda line: None)
        run_to_end(plan, RunFolder.take_over(path), unseen, stop_signals=(signal.SIGTERM,))
    except MusterError as error:
        print(f"{error.message}; {error.hint}" if error.hint else error.message, file=sys.stderr)
        return int(error.exit_code)
    return ExitCode.DONE


if __name__ == "__main__":
    sys.exit(main())
