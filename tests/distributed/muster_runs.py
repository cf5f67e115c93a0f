"""Runs on lab hosts through the real command line, small enough for a laptop: a custom job that imports only torch."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil

from tests.lab.processes import end
from tests.waiting import until
from training.records.events import Event, RequestEvent, StepEvent, SyncEvent, UnknownEvent, from_line
from training.records.run_files import is_live

REPOSITORY = Path(__file__).resolve().parents[2]
PATIENCE = 180.0

JOB = """
import itertools
import time
import torch
from torch import nn
from torch.utils.data import TensorDataset
from training.tasks.custom import CustomJob

def build():
    dice = torch.Generator().manual_seed(1)
    points = torch.rand(600, 2, generator=dice)
    wanted = (points.sum(dim=1) > 1).long()
    return CustomJob({model}, TensorDataset(points, wanted), TensorDataset(points[:60], wanted[:60]), loss)

steps = itertools.count(1)

def loss(scores, wanted):
    time.sleep({pause})
    if {gate!r} and scores.requires_grad:
        step = next(steps)
        while step > int(open({gate!r}).read() or 0):
            time.sleep(0.01)
    return nn.functional.cross_entropy(scores, wanted)
"""


class Record:
    """The events of a run that goes on: each is parsed once, however often they are asked for."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "events.jsonl"
        self._events: list[Event] = []
        self._size = 0

    def events(self) -> list[Event]:
        if self._path.exists():
            with self._path.open("rb") as stream:
                stream.seek(self._size)
                whole, newline, _ = stream.read().rpartition(b"\n")
            self._size += len(whole + newline)
            self._events += [from_line(line) for line in whole.splitlines()]
        return self._events


class Muster:
    """The command line in a folder of its own.

    Args:
        pause: seconds that a step takes at least.
        gate: file in which :meth:`let_pass` writes how far the run may go; all machines must see it.
        model: what is trained.
        python: what the commands are given to; this Python, preloaded, if empty.
    """

    def __init__(
        self,
        folder: Path,
        hosts_file: Path,
        pause: float = 0.0,
        gate: Path | None = None,
        model: str = "nn.Linear(2, 2)",
        python: str = "",
    ) -> None:
        self.folder = folder
        self.hosts_file = hosts_file
        self.job = folder / "job.py"
        self.job.write_text(JOB.format(pause=pause, gate=str(gate or ""), model=model))
        self.gate = gate
        self.python = python or sys.executable
        self._records: dict[str, Record] = {}
        folder.chmod(0o755)

    def train(self, *arguments: str) -> list[str]:
        """Return the arguments of a training of the small job."""
        options = {"task": "custom", "model-path": f"{self.job}:build", "batch-size": "8", "threads": "1", "seed": "3"}
        flags = [word for name, value in options.items() for word in (f"--{name}", value)]
        return ["distributed-train", "nanogpt", "--hosts", str(self.hosts_file), *flags, *arguments]

    def let_pass(self, step: int) -> None:
        """Let all members go on to the end of this step."""
        assert self.gate is not None
        self.gate.write_text(str(step))

    def popen(self, *arguments: str, **options: Any) -> subprocess.Popen[str]:
        command = [self.python, str(REPOSITORY / "cli_typer.py"), *arguments]
        pipe = subprocess.PIPE
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        given = {"stdin": subprocess.DEVNULL, **options}
        return subprocess.Popen(command, cwd=self.folder, stdout=pipe, stderr=pipe, text=True, env=environment, **given)

    def run(self, *arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
        with self.popen(*arguments, **options) as process:
            stdout, stderr = process.communicate(timeout=PATIENCE)
        return subprocess.CompletedProcess(arguments, process.returncode, stdout, stderr)

    def detach(self, *arguments: str, **options: Any) -> str:
        """Start a run in the background and return its id."""
        started = self.run(*self.train(*arguments), "--detach", **options)
        assert started.returncode == 0, started.stderr
        return started.stdout.strip()

    def wait_for_end(self, run_id: str) -> subprocess.CompletedProcess[str]:
        return self.run("attach", run_id)

    def folder_of(self, run_id: str) -> Path:
        return next((self.folder / "output").glob(f"{run_id}*"))

    def events(self, run_id: str) -> list[Event]:
        record = self._records.setdefault(run_id, Record(self.folder_of(run_id)))
        return [e for e in record.events() if not isinstance(e, UnknownEvent)]

    def until_step(self, run_id: str, step: int, members: int = 1) -> None:
        """Wait until the first ``members`` members have taken this step.

        Raises:
            AssertionError: they have not, in time; holds what the run told last.
        """
        try:
            for rank in range(members):
                until(lambda: any(s >= step for s, _ in self.losses(run_id, rank)), PATIENCE)  # noqa: B023 - at once
        except AssertionError as error:
            told = [event for event in self.events(run_id) if not isinstance(event, StepEvent | SyncEvent)]
            error.add_note("\n".join(map(repr, told[-30:])))
            raise

    def stop(self, run_id: str) -> subprocess.CompletedProcess[str]:
        """Stop a run that waits at the gate. It goes on step by step: the order to stop, which comes later than the
        request is written down, finds it before its end."""
        assert self.gate is not None
        asked, allowed = self._stop_requests(run_id), int(self.gate.read_text())
        with self.popen("stop", run_id) as process:
            until(lambda: process.poll() is not None or self._stop_requests(run_id) > asked, PATIENCE)
            while process.poll() is None:
                taken, allowed = len(self.losses(run_id)), allowed + 1
                self.let_pass(allowed)
                until(lambda: process.poll() is not None or len(self.losses(run_id)) > taken, PATIENCE)  # noqa: B023 - at once
            stdout, stderr = process.communicate()
        return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)

    def _stop_requests(self, run_id: str) -> int:
        return sum(isinstance(event, RequestEvent) and event.action == "stop" for event in self.events(run_id))

    def losses(self, run_id: str, member: int = 0) -> list[tuple[int, float]]:
        events = self.events(run_id)
        return [(e.step, e.loss) for e in events if isinstance(e, StepEvent) and e.member == member]

    def metadata(self, run_id: str) -> dict[str, Any]:
        return dict(json.loads((self.folder_of(run_id) / "metadata.json").read_text()))

    def supervisor(self, run_id: str) -> int:
        """Return the process that holds the run; 0: it takes it just now."""
        return int((self.folder_of(run_id) / "run.lock").read_text() or 0)

    def kill_supervision(self, run_id: str) -> None:
        """Kill the supervisor of a run, and first what would start another one."""
        watchers = [p for p in psutil.process_iter() if _watches(p, self.folder_of(run_id))]
        for watcher in watchers:
            end(watcher.pid, signal.SIGTERM)  # after SIGKILL a preloaded copy would live a moment longer
        with contextlib.suppress(psutil.NoSuchProcess):
            psutil.Process(self.supervisor(run_id)).kill()

    def leave_nothing(self) -> None:
        """End what a failed test has left."""
        for lock in (self.folder / "output").glob("*/run.lock"):
            if is_live(lock.parent):
                self.kill_supervision(lock.parent.name)


def _watches(process: psutil.Process, folder: Path) -> bool:
    with contextlib.suppress(psutil.Error):
        words = process.cmdline()
        return "distributed.run.watcher" in words and str(folder) in words
    return False


def ours(host: Any) -> list[int]:
    """Return the processes of runs on a host: workers, agents, stubs."""
    return list(host.pids("training.workers.worker", "agent.py"))
