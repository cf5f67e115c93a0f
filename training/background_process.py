"""The process that carries a run out: it holds the run folder and outlives whoever started it.

It is started before anybody knows its run, so that it imports meanwhile, and is told the folder on its input.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from profiles.errors import RunFailed
from training.processes import START_PATIENCE, environment
from training.run_files import is_live, private_file

_REPOSITORY = Path(__file__).resolve().parents[1]


class BackgroundProcess:
    """``python -m MODULE ARGUMENTS``, whose ``main`` begins with :func:`told_run`.

    It ends by itself when this process ends before :meth:`start`.

    Args:
        patience: seconds until it must hold its run folder.
    """

    def __init__(self, module: str, *arguments: str, patience: float = START_PATIENCE) -> None:
        self._patience = patience
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed by dismiss() and start()
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=self._errors,
            env={**environment(0), "PYTHONPATH": environment(0)["PYTHONPATH"] or str(_REPOSITORY)},
            start_new_session=True,
        )

    def dismiss(self) -> None:
        """End it: there is no run for it. Idempotent."""
        self._process.kill()
        self._process.communicate()
        self._errors.close()

    def start(self, run_dir: Path) -> None:
        """Give it its run, and wait until it holds the folder; it outlives this process and its terminal.

        Raises:
            RunFailed: it ended before, or took too long and is ended.
        """
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError), self._process.stdin as words:
            words.write(os.fsencode(run_dir.resolve()))
        threading.Thread(target=self._process.wait, daemon=True).start()  # no zombie, where this process goes on
        end = time.monotonic() + self._patience
        with self._errors:
            while not is_live(run_dir):
                if not run_dir.is_dir() or self._process.poll() == 0:
                    return  # it was very quick: the folder tells how it ended
                if self._process.poll() is not None or time.monotonic() > end:
                    self._process.kill()  # a run of which this process says that it did not start must not start later
                    raise self._failure(_log_of(run_dir))
                time.sleep(0.01)

    def _failure(self, log: Path) -> RunFailed:
        """Return why it did not start; what it said before it knew its log goes there."""
        self._errors.seek(0)
        with open(log, "ab+", opener=private_file) as kept:
            kept.write(self._errors.read())
            kept.seek(0)
            said = kept.read().decode(errors="replace").strip().splitlines()
        return RunFailed(f"the run did not start{f': {said[-1]}' if said else ''}", f"see {log}")


def told_run() -> Path | None:
    """Wait in a background process for the folder of its run; ``None``: whoever might have needed it does not.

    The terminal's signals are ignored from now on, and what is written goes to the run's log.
    """
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    words = sys.stdin.buffer.read()
    if not words:
        return None
    path = Path(os.fsdecode(words))
    log = os.open(_log_of(path), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    return path


def _log_of(run_dir: Path) -> Path:
    return run_dir / "logs" / "supervisor.log"
