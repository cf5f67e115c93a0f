"""The processes of a run, seen from the one that started them, and the time that their phases of a start take.

A background process carries a run out: it holds the run folder and outlives its parent. It is started before its run is
known, so that it imports meanwhile, and reads the path of the folder from its input.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import psutil

from profiles.errors import RunFailed
from profiles.installation import TOP, training_code, training_python
from training.records.bounded_fields import LONGEST_LINE
from training.records.events import Event, TimingEvent
from training.records.run_files import is_live, private_file

RUN_VARIABLE = "MUSTER_RUN_ID"
"""Environment variable with the run's id, in a launched script and in all that it starts."""
START_PATIENCE = 120.0
"""Seconds for a process that is alive to begin: its imports take seconds, on a busy machine many times as long."""
UNREACHED = "could not be reached"
"""Beginning of the reason for which a process on another machine is given up that nothing was heard of."""


class NumberedLine(bytes):
    """An event line of a worker with an agent."""

    number: int | None = None
    """Its number there."""

    @classmethod
    def of(cls, text: str, number: int) -> NumberedLine:
        line = cls(text.encode())
        line.number = number
        return line


class Channel(Protocol):
    """Interface of any process of a run."""

    def send(self, message: dict[str, Any]) -> None:
        """Write one message; a process that is gone is not an error here."""
        ...

    def lines(self) -> Iterator[bytes]:
        """Yield the lines that it writes, until it ends."""
        ...

    def exit_code(self) -> int:
        """Wait for the end; negative: killed by that signal."""
        ...


class Worker(Channel, Protocol):
    """Interface of a worker's process."""

    pid: int
    end_reason: str
    """Why it ended, if its exit code does not tell."""

    def note_event(self, event: Event) -> Event:
        """Process an event that the worker reported; return the event as the run records it."""
        ...

    def signal(self, number: int) -> None:
        """Send a signal to the process and to what it started."""
        ...


PROCESS_DEFAULTS = {
    "OMP_WAIT_POLICY": "PASSIVE",
    "GOMP_SPINCOUNT": "0",
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
}
"""Variables of a process that trains, unless the user has set them.

OpenMP's threads sleep while they wait. By default they spin, and on a busy machine take the time of the thread that
they wait for: a step takes 3 to 30 times as long. CUDA's allocator grows its segments, so that batches of many lengths
leave few holes in the memory of a GPU; without CUDA nothing reads that.
"""


def thread_limits(threads: int) -> dict[str, str]:
    """Return the variables that bound the threads of a process; 0: not bounded."""
    return {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)} if threads else {}


def environment(threads: int, code: Path = TOP) -> dict[str, str]:
    """Environment of a local process of a run: the packages findable, threads bounded, no warnings of forks.

    ``PYTHONSAFEPATH`` (Python 3.11): modules of the current folder hide no others.
    """
    path = os.pathsep.join([str(code), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    variables = {**PROCESS_DEFAULTS, **os.environ, **thread_limits(threads)}
    return {**variables, "PYTHONPATH": path, "PYTHONSAFEPATH": "1", "TOKENIZERS_PARALLELISM": "false"}


class _Module:
    """``python -m MODULE``, which reads and writes lines, in its own session, so that Ctrl-C reaches only its
    parent."""

    def __init__(
        self, module: str, arguments: list[str], threads: int, log: BinaryIO, variables: Mapping[str, str] | None = None
    ) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env={**(variables or {}), **environment(threads)},
            start_new_session=True,
        )
        self.pid = self._process.pid
        assert self._process.stdin is not None and self._process.stdout is not None
        self._input, self._output = self._process.stdin, self._process.stdout
        self._read = False

    def send(self, message: dict[str, Any]) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._input.write(json.dumps(message).encode() + b"\n")
            self._input.flush()

    def lines(self) -> Iterator[bytes]:
        self._read = True
        return self._lines()

    def _lines(self) -> Iterator[bytes]:
        with self._output as stream:
            yield from iter(lambda: stream.readline(LONGEST_LINE), b"")  # a line longer than any event comes in pieces

    def exit_code(self) -> int:
        """Wait for its end. Its output is closed by the thread that reads it."""
        code = self._process.wait()
        for stream in (self._input,) if self._read else (self._input, self._output):
            with contextlib.suppress(OSError):
                stream.close()
        return code

    def signal(self, number: int) -> None:
        """Send a signal to the process and to what it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)


class SubprocessWorker(_Module):
    """``python -m training.workers.worker``, or another module with the same protocol."""

    end_reason = ""

    def note_event(self, event: Event) -> Event:
        return event


class CoordinatorProcess(_Module):
    """``python -m training.exchange.group.coordinator_main``: writes its port to stdout, ends on SIGTERM.

    Args:
        waits: read the configuration after the first line that is sent.
    """

    def __init__(self, config: Path, log: BinaryIO, waits: bool = False) -> None:
        words = ["--config", str(config), *(["--wait"] if waits else [])]
        super().__init__("training.exchange.group.coordinator_main", words, 1, log)

    def end_input(self) -> None:
        """Leave it to its members: it ends when the last of them has left."""
        with contextlib.suppress(OSError):
            self._input.close()

    def stop(self, timeout: float = 5.0) -> None:
        """Terminate it and wait; kill it after ``timeout`` seconds."""
        self.signal(signal.SIGTERM)
        self.end_input()
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.signal(signal.SIGKILL)
            self._process.wait()


class BackgroundProcess:
    """``python -m MODULE ARGUMENTS``, whose ``main`` begins with :func:`run_from_stdin`.

    It ends by itself when this process ends before :meth:`start`.

    Args:
        patience: seconds until it must hold its run folder.
        trains: whether it needs the training packages, which a light core has in a separate environment.
    """

    def __init__(self, module: str, *arguments: str, patience: float = START_PATIENCE, trains: bool = False) -> None:
        self._patience = patience
        python = training_python() if trains else ""
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed by dismiss() and start()
        self._process = subprocess.Popen(
            [python or sys.executable, "-m", module, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=self._errors,
            env=environment(0, training_code() if python else TOP),
            start_new_session=True,
        )

    def dismiss(self) -> None:
        """Kill it, as there is no run for it. Idempotent."""
        self._process.kill()
        self._process.communicate()
        self._errors.close()

    def start(self, run_dir: Path) -> None:
        """Send it its run, and wait until it holds the folder; it outlives this process and its terminal.

        Raises:
            RunFailed: it ended too early, or took too long and was killed.
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
                    self._process.kill()  # a run that is reported as not started must not start later
                    raise self._failure(run_dir / "logs" / "supervisor.log")
                time.sleep(0.01)

    def _failure(self, log: Path) -> RunFailed:
        """Return why it did not start; its early error output is added to its log."""
        self._errors.seek(0)
        with open(log, "ab+", opener=private_file) as stream:
            stream.write(self._errors.read())
            stream.seek(0)
            lines = stream.read().decode(errors="replace").strip().splitlines()
        return RunFailed(f"the run did not start{f': {lines[-1]}' if lines else ''}", f"see {log}")


def run_from_stdin(log: str = "supervisor.log") -> Path | None:
    """Wait in a background process for the folder of its run; ``None``: it is not needed.

    From now on the terminal's signals are ignored, and output goes to a log of the run.
    """
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    words = sys.stdin.buffer.read()
    if not words:
        return None
    path = Path(os.fsdecode(words))
    try:
        log_file = os.open(path / "logs" / log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    except FileNotFoundError:  # somebody has removed it
        log_file = os.open(os.devnull, os.O_WRONLY)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (log_file, 1), (log_file, 2)):
        os.dup2(source, target)
    return path


_DYING = 10.0
"""Seconds to wait for killed processes to end."""


def processes_of(run_id: str, rank: int | None = None) -> list[psutil.Process]:
    """Return the processes of a run, or of the script of one rank, on this machine: workers are found by their command
    line, a launched script and everything it has started by their environment."""
    matching = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):  # gone meanwhile, or somebody else's
            words = " ".join(process.cmdline())
            variables = process.environ() if words else {}
            worker = rank is None and run_id in words and " -m training." in words
            if worker or (variables.get(RUN_VARIABLE) == run_id and rank in (None, int(variables.get("RANK", -1)))):
                matching.append(process)
    return matching


def end_processes(run_id: str, rank: int | None = None) -> list[str]:
    """Kill the processes of :func:`processes_of`; return those that do not end."""
    end = time.monotonic() + _DYING
    while (left := processes_of(run_id, rank)) and time.monotonic() < end:
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill()
        time.sleep(0.05)
    names = []
    for process in left:
        with contextlib.suppress(psutil.Error):
            names.append(f"{process.pid} {process.name()}")
    return names


class PhaseTimer:
    """Measures consecutive phases.

    Args:
        emit: takes the event of every phase.
        whole_process: the first phase begins with this process, not now, and the CPU seconds are those of all its
            threads, not of the calling one.
    """

    def __init__(self, emit: Callable[[TimingEvent], object], whole_process: bool = True) -> None:
        self._emit = emit
        self._time = time.time() - (process_age() if whole_process else 0.0)
        self._clock = time.process_time if whole_process else time.thread_time
        self._cpu = 0.0 if whole_process else time.thread_time()

    def end(self, phase: str) -> None:
        """End a phase and begin the next one."""
        now, cpu = time.time(), self._clock()
        self._emit(TimingEvent(time=now, part=phase, seconds=max(now - self._time, 0.0), cpu=cpu - self._cpu))
        self._time, self._cpu = now, cpu


def process_age() -> float:
    """Return the seconds since this process was started."""
    if sys.platform == "linux":  # psutil adds a boot time in whole seconds
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        return max(time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"), 0.0)
    return max(time.time() - psutil.Process().create_time(), 0.0)
