"""``train --on slurm``: the same command line in a job of SLURM, followed and stopped from here."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import uuid
from collections.abc import Mapping
from pathlib import Path

from app.cli.terminal import STOP_SIGNALS
from app.console import say
from profiles.errors import BadInput, ExitCode, counted

_PORTS = range(15_000, 30_000)
"""Of the ranks' meeting point; each job has its own, below those that systems give away."""


def is_task(variables: Mapping[str, str] = os.environ) -> bool:
    """Whether srun has started this process."""
    return bool(variables.get("SLURM_STEP_LAUNCHER_PORT"))


def variables_of_torchrun(variables: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return what torchrun would set for a task of srun.

    Raises:
        BadInput: SLURM does not say where the first node is.
    """
    nodes = variables["SLURM_STEP_NODELIST"]
    first = _asked("scontrol", "show", "hostnames", nodes).partition("\n")[0] or nodes
    address = re.search(r"NodeAddr=(\S+)", _asked("scontrol", "show", "node", first))
    if address is None:
        raise BadInput(f"SLURM does not tell the address of {first}", f"see: scontrol show node {first}")
    number = int(variables["SLURM_JOB_ID"]) * 31 + int(variables["SLURM_STEP_ID"])
    return {
        "RANK": variables["SLURM_PROCID"],
        "WORLD_SIZE": variables["SLURM_STEP_NUM_TASKS"],
        "LOCAL_RANK": variables["SLURM_LOCALID"],
        "MASTER_ADDR": address[1],
        "MASTER_PORT": str(_PORTS[number % len(_PORTS)]),
    }


def submit(nodes: int) -> ExitCode:
    """Run this command line on so many nodes, a process on each, and follow it to its end.

    Ctrl-C, or SIGTERM, stops the run with a snapshot; a second one cancels the job. A job that still waits for its
    nodes is cancelled at once. What else srun shall know stands in its own variables, such as ``SLURM_PARTITION``.

    Raises:
        BadInput: SLURM is not here, or ``nodes`` is below 1.
    """
    if nodes < 1:
        raise BadInput(f"--nodes {nodes}: at least one", "leave it out: 2")
    if shutil.which("srun") is None:
        raise BadInput(
            "--on slurm: srun is not on this computer", "log in to a node of the cluster, and start it there"
        )
    name = f"muster-{uuid.uuid4().hex[:8]}"
    tasks = [] if os.environ.get("SLURM_NTASKS_PER_NODE") else ["--ntasks-per-node", "1"]
    words = ["srun", "--job-name", name, "--nodes", str(nodes), *tasks, "--kill-on-bad-exit=1", *_command_line()]
    say(f"in a job of SLURM on {counted(nodes, 'node')}, named {name}")
    stops = 0
    with subprocess.Popen(words, start_new_session=True) as job:  # Ctrl-C of the terminal is not srun's

        def stop(number: int, frame: object) -> None:
            nonlocal stops
            stops += 1
            is_running = "RUNNING" in _asked("squeue", "--noheader", "--format=%T", "--name", name)
            gently = ["--signal=INT"] if is_running and stops == 1 else []
            _asked("scancel", *gently, "--name", name)

        before = {number: signal.signal(number, stop) for number in STOP_SIGNALS}
        try:
            code = job.wait()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
    if stops:
        return ExitCode.STOPPED
    return ExitCode(code) if code in [*ExitCode] else ExitCode.RUN_FAILED


def _command_line() -> list[str]:
    """Return the words that start this command again, elsewhere."""
    program = Path(sys.argv[0]).resolve()
    start = ["-m", program.parent.name] if program.name == "__main__.py" else [str(program)]
    return [sys.executable, *start, *sys.argv[1:]]


def _asked(*words: str) -> str:
    """Return what a program of SLURM answers, or nothing."""
    return subprocess.run(words, capture_output=True, text=True, timeout=60, check=False).stdout
