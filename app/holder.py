"""Starting the process that carries a run out: it holds the run folder and outlives whoever started it."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path

from profiles.errors import RunFailed
from training.processes import START_PATIENCE, environment
from training.run_files import is_live, private_file


def start_holder(module: str, run_dir: Path, *arguments: str) -> None:
    """Start ``python -m MODULE RUN_FOLDER ...`` in a session of its own, and wait until it holds the folder.

    Raises:
        RunFailed: it ended before, or took too long and is ended.
    """
    log = run_dir / "logs" / "supervisor.log"
    with open(log, "ab+", opener=private_file) as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", module, str(run_dir.resolve()), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=errors,
            stderr=errors,
            env=environment(0),
            start_new_session=True,
        )
        threading.Thread(target=process.wait, daemon=True).start()  # no zombie, where this process goes on
        deadline = time.monotonic() + START_PATIENCE
        while not is_live(run_dir) and process.poll() != 0:  # one that is at its end already was very quick
            if process.poll() is not None or time.monotonic() > deadline:
                process.kill()  # a run that is said not to have started must not start later
                errors.seek(0)
                said = errors.read().decode(errors="replace").strip().splitlines()
                raise RunFailed(f"the run did not start{f': {said[-1]}' if said else ''}", f"see {log}")
            time.sleep(0.02)
