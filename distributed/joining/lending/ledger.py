"""What ran here for whom, and how long: kept in a file on this computer, for its owner."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from distributed.hosts.joined import joining_folder, one_line, parse_line
from distributed.joining.guard import is_marked
from training.records.run_files import private_file

_LONGEST = 1 << 20
"""Bytes of the file; when it is full, it begins anew, and the full one is kept once."""
_writing = threading.Lock()


@dataclass(frozen=True)
class Loan:
    """A part of a run that this computer has had, or has."""

    pool: str
    """Name of the computer that it was for."""
    lend: str
    run: str
    rank: str
    began: float
    """Seconds since 1970."""
    seconds: float
    """From its begin to its end, or until now."""
    computed: float
    """Processor seconds."""
    is_running: bool = False


class LentPrograms:
    """Keeps account of the programs of a pool.

    Args:
        pool: its name.
    """

    def __init__(self, pool: str, lend: str) -> None:
        self._pool, self._lend = pool, lend
        self._running: dict[int, Loan] = {}

    def account(self, processes: list[psutil.Process]) -> None:
        """Note what runs, and write down what has ended."""
        running = {agent.pid: loan for agent, loan in loans(processes, self._pool, self._lend)}
        for pid in self._running.keys() - running.keys():
            write(self._running[pid])
        self._running = running

    def close(self) -> None:
        """Write down what ran until now. Idempotent."""
        self.account([])


def loans(processes: list[psutil.Process], pool: str, lend: str) -> Iterator[tuple[psutil.Process, Loan]]:
    """Yield the agents among processes, with what each runs; their titles say which run that is."""
    for process in processes:
        with contextlib.suppress(psutil.Error):
            words = process.cmdline()
            if len(words) < 4 or words[-3] != "start" or not words[-4].startswith("/"):
                continue
            began, computed = process.create_time(), 0.0
            for one in (process, *process.children(recursive=True)):
                times = one.cpu_times()
                computed += times.user + times.system
            run, rank = one_line(words[-2]), one_line(words[-1])
            yield process, Loan(pool, lend, run, rank, began, time.time() - began, computed, is_running=True)


def write(loan: Loan) -> None:
    """Add a loan that has ended to the file; where nothing can be written, it is not kept."""
    line = json.dumps({**asdict(loan), "is_running": False}).encode() + b"\n"
    with contextlib.suppress(OSError), _writing:
        path = _file()
        if path.exists() and path.stat().st_size > _LONGEST:
            path.replace(path.with_suffix(".old.jsonl"))
        with open(path, "ab", opener=private_file) as stream:
            stream.write(line)


def ended_loans() -> list[Loan]:
    """Return what has ended, in the order of its end."""
    kept = []
    for path in (_file().with_suffix(".old.jsonl"), _file()):
        with contextlib.suppress(OSError):
            for line in path.read_bytes().splitlines():
                with contextlib.suppress(TypeError):
                    kept.append(Loan(**parse_line(line)))
    return kept


def running_loans(pools: dict[str, tuple[str, str]]) -> list[Loan]:
    """Return what runs now.

    Args:
        pools: name and class of each pool by its identity.
    """
    processes = list(psutil.process_iter())
    return [
        loan
        for identity, (name, lend) in pools.items()
        for _, loan in loans([process for process in processes if is_marked(process, identity)], name, lend)
    ]


def _file() -> Path:
    return joining_folder() / "lent.jsonl"
