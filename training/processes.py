"""A started worker process, seen from the process that started it."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any, BinaryIO, Protocol

from training.bounded import LONGEST_LINE
from training.events import Event

REPOSITORY = Path(__file__).resolve().parent.parent
START_PATIENCE = 120.0
"""Seconds for a process that is alive to begin: its imports take seconds, on a busy machine many times as long."""


class Worker(Protocol):
    """What the run needs of a worker's process."""

    pid: int
    end_reason: str
    """Why it ended, where its exit code does not say it."""

    def send(self, message: dict[str, Any]) -> None:
        """Write one message; a worker that is gone is not an error here."""
        ...

    def lines(self) -> Iterator[bytes]:
        """Event lines until the process ends."""
        ...

    def told(self, event: Event) -> Event:
        """Take note of what it said, and return it as the run tells it."""
        ...

    def exit_code(self) -> int:
        """Wait for the end; negative: killed by that signal."""
        ...

    def signal(self, number: int) -> None:
        """Send a signal to the process and to what it started."""
        ...


WAITING = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0"}
"""Variables of OpenMP, where a person has set none: threads that wait sleep. By default they spin, and where others use
the machine too they spin away the time of the thread that they wait for: a step takes 3 to 30 times as long."""


def thread_limits(threads: int) -> dict[str, str]:
    """Return the variables that bound the threads of a process; 0: not bounded."""
    return {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)} if threads else {}


def environment(threads: int) -> dict[str, str]:
    """Environment of a local process of a run: the packages findable, threads bounded, no warnings of forks.

    ``PYTHONSAFEPATH`` (Python 3.11): no module of the folder that one happens to be in hides another.
    """
    path = os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    own = {**WAITING, **os.environ, **thread_limits(threads)}
    return {**own, "PYTHONPATH": path, "PYTHONSAFEPATH": "1", "TOKENIZERS_PARALLELISM": "false"}


@contextlib.contextmanager
def _inheriting(defaults: Mapping[str, str]) -> Iterator[None]:
    """Let a process that is started meanwhile have variables that this one has not: ``spawn`` takes no others."""
    added = {name: value for name, value in defaults.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


def bounded_lines(stream: IO[bytes]) -> Iterator[bytes]:
    """Yield the lines of a stream; one that is longer than any event comes in pieces."""
    return iter(lambda: stream.readline(LONGEST_LINE), b"")


class SubprocessWorker:
    """``python -m training.worker`` in a session of its own, so that Ctrl-C reaches only the starter."""

    end_reason = ""

    def __init__(self, arguments: list[str], threads: int, log: BinaryIO) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "training.worker", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env=environment(threads),
            start_new_session=True,
        )
        self.pid = self._process.pid

    def send(self, message: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError, ValueError):
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()

    def lines(self) -> Iterator[bytes]:
        assert self._process.stdout is not None
        yield from bounded_lines(self._process.stdout)

    def told(self, event: Event) -> Event:
        return event

    def exit_code(self) -> int:
        code = self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):
                if stream is not None:
                    stream.close()
        return code

    def signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)


class SpawnedWorker:
    """A ``multiprocessing`` child (spawn) that gets in-memory objects of the caller; local by nature."""

    end_reason = ""

    def __init__(self, target: Any, arguments: tuple[Any, ...]) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection: Connection[Any, Any]
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=target, args=(theirs, *arguments))
        with _inheriting(WAITING):
            self._process.start()
        theirs.close()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def send(self, message: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):
            self._connection.send_bytes(json.dumps(message).encode())

    def lines(self) -> Iterator[bytes]:
        with contextlib.suppress(EOFError, OSError):
            while True:
                yield self._connection.recv_bytes()

    def told(self, event: Event) -> Event:
        return event

    def exit_code(self) -> int:
        self._process.join()
        self._connection.close()
        assert self._process.exitcode is not None
        return self._process.exitcode

    def signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)


class HubProcess:
    """``python -m training.exchange.hub_main``: says its port on stdout, ends when its standard input closes."""

    def __init__(self, config: Path, log: BinaryIO) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "training.exchange.hub_main", "--config", str(config)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env=environment(1),
            start_new_session=True,
        )

    def lines(self) -> Iterator[bytes]:
        """Lines of standard output: first ``{"port": N}``, then events."""
        assert self._process.stdout is not None
        with self._process.stdout as stream:
            yield from bounded_lines(stream)

    def send(self, message: dict[str, Any]) -> None:
        """Write one message; see :mod:`training.exchange.hub_main`."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError, ValueError):
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()

    def stop(self, timeout: float = 5.0) -> None:
        """Close its input and wait; kill it if it does not end."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def exit_code(self) -> int:
        """Wait for the end and return the exit code."""
        return self._process.wait()
