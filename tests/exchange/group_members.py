"""Processes that are members of a ``torch.distributed`` group, for one case after the other."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import sys
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import parallel_cases
import torch

from training.exchange.links.certificates import issue_run_certificates

multiprocessing.set_forkserver_preload(["torch"])

_CLONE_NEWNET = 0x40000000


def _move(pid: int, address: str) -> None:
    """Put this process into the network namespace of another, where its interface ``eth0`` has that address."""
    with open(f"/proc/{pid}/ns/net") as namespace:
        if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")
    os.environ.update(MUSTER_LISTEN=address, GLOO_SOCKET_IFNAME="eth0")


def _serve(pipe: Connection, place: tuple[int, str] | None) -> None:
    if place is not None:
        _move(*place)
    torch.set_num_threads(1)
    while True:
        arguments = pipe.recv()
        try:
            pipe.send((True, parallel_cases.run(*arguments)))
        except Exception as error:  # noqa: BLE001 - told to the test
            pipe.send((False, f"{type(error).__name__}: {error}"))


class Members:
    """Four processes that carry out one case after the other.

    Args:
        places: in whose network namespace each is, by a process there, and that one's address.
    """

    def __init__(self, folder: Path, places: Sequence[tuple[int, str]] = ()) -> None:
        self.folder = folder
        self._places = places
        self._runs = 0
        self._owing: set[int] = set()
        """Who has not answered yet."""
        addresses = ["127.0.0.1", *(address for _, address in places)]
        issue_run_certificates(folder / "certificates", "run", range(4), addresses)
        self.pipes: list[Connection] = []
        self.processes: list[Any] = []
        for _ in range(4):
            self._start(len(self.pipes))

    def _start(self, place: int) -> None:
        context: Any = multiprocessing.get_context("forkserver" if sys.platform == "linux" else "spawn")
        here, there = context.Pipe()
        process = context.Process(target=_serve, args=(there, self._places[place] if self._places else None))
        process.start()
        there.close()
        self.pipes[place : place + 1] = [here]
        self.processes[place : place + 1] = [process]

    def run(self, case: str, backend: str, world: int) -> list[Any]:
        """Return what each member found."""
        self.send(case, backend, world)
        answers = [self.answer(rank, case) for rank in range(world)]
        assert all(good for good, _ in answers), [told for good, told in answers if not good]
        return [found for _, found in answers]

    def answer(self, rank: int, case: str) -> tuple[bool, Any]:
        """Return whether one member came to the case's end, and what it found, or its error."""
        assert self.pipes[rank].poll(300), f"{case}: rank {rank} gave no answer"
        good, found = self.pipes[rank].recv()
        self._owing.discard(rank)
        return good, found

    def send(self, case: str, backend: str, world: int) -> None:
        """Have the first ``world`` members begin a case: a function's name, or ``module:function``.

        Who still owes the answer to a case that was given up is replaced: or it would be taken for that of this one.
        """
        for rank in sorted(self._owing):
            self.processes[rank].kill()
            self.replace(rank)
        self._runs += 1
        self._owing = set(range(world))
        for rank, pipe in enumerate(self.pipes[:world]):
            store, certificates = self.folder / f"store-{self._runs}", self.folder / "certificates"
            pipe.send((case, backend, rank, world, str(store), str(certificates)))

    def replace(self, rank: int) -> int:
        """Put a new process where one has ended; return how that ended."""
        process = self.processes[rank]
        process.join(60)
        assert process.exitcode is not None, f"rank {rank} does not end"
        self._start(rank)
        self._owing.discard(rank)
        return int(process.exitcode)

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()
