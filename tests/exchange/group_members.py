"""Processes that are members of a ``torch.distributed`` group, for one case after the other."""

from __future__ import annotations

import multiprocessing
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import parallel_cases
import torch

from training.exchange.certificates import issue_run_certificates

multiprocessing.set_forkserver_preload(["torch"])


def _serve(pipe: Connection) -> None:
    torch.set_num_threads(1)
    while True:
        arguments = pipe.recv()
        try:
            pipe.send((True, parallel_cases.run(*arguments)))
        except Exception as error:  # noqa: BLE001 - told to the test
            pipe.send((False, f"{type(error).__name__}: {error}"))


class Members:
    """Four processes that carry out one case after the other."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._runs = 0
        issue_run_certificates(folder / "certificates", "run", range(4), ["127.0.0.1"])
        self.pipes: list[Connection] = []
        self.processes: list[Any] = []
        for _ in range(4):
            self._start(len(self.pipes))

    def _start(self, place: int) -> None:
        context: Any = multiprocessing.get_context("forkserver" if sys.platform == "linux" else "spawn")
        here, there = context.Pipe()
        process = context.Process(target=_serve, args=(there,))
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
        assert self.pipes[rank].poll(100), f"{case}: rank {rank} gave no answer"
        good, found = self.pipes[rank].recv()
        return good, found

    def send(self, case: str, backend: str, world: int) -> None:
        """Have the first ``world`` members begin a case: a function's name, or ``module:function``."""
        self._runs += 1
        for rank, pipe in enumerate(self.pipes[:world]):
            store, certificates = self.folder / f"store-{self._runs}", self.folder / "certificates"
            pipe.send((case, backend, rank, world, str(store), str(certificates)))

    def replace(self, rank: int) -> int:
        """Put a new process where one has ended; return how that ended."""
        process = self.processes[rank]
        process.join(60)
        assert process.exitcode is not None, f"rank {rank} does not end"
        self._start(rank)
        return int(process.exitcode)

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()
