"""PyTorch's own suite for process groups, which its wheel ships: one test after the other in processes that stay.

The suite is told that it tests gloo, and gets the mesh as ``launch`` gives it, or gloo itself. It starts processes of
its own for each test and meets in files that it polls; here three ranks carry out all of them, with a group of their
own each, and meet in memory.
"""

from __future__ import annotations

import contextlib
import faulthandler
import itertools
import multiprocessing
import os
import sys
import tempfile
import traceback
import unittest
import warnings
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

WORLD = 3
_SECONDS = 60.0
"""For one test."""
REFUSED = {
    "test_get_backend": "it is called muster, not gloo",
    "test_send_recv_any_source": "a message is received from a rank that is named",
    "test_send_recv_any_source_autograd_profiler": "a message is received from a rank that is named",
    "test_send_recv_any_source_torch_profiler": "a message is received from a rank that is named",
}
"""What gloo passes and the mesh does not, and why."""


def names() -> list[str]:
    """Return the tests of the suite, most of which are skipped without GPUs."""
    _set_environment(Path(tempfile.gettempdir()))
    with warnings.catch_warnings():  # what it loads is deprecated in part
        warnings.simplefilter("ignore")
        from torch.testing._internal.distributed import distributed_test as theirs

    return [name for name in dir(theirs.DistributedTest._DistTestBase) if name.startswith("test_")]


def _set_environment(folder: Path) -> None:
    os.environ |= {
        "BACKEND": "gloo",
        "WORLD_SIZE": str(WORLD),
        "TEMP_DIR": str(folder),
        "MASTER_ADDR": "127.0.0.1",
        "MUSTER_LISTEN": "127.0.0.1",
        "GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0",
        "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": str(int(_SECONDS)),
    }


def _serve(pipe: Connection, rank: int, meeting: Any, folder: Path) -> None:
    """Carry out tests as one rank until nobody asks for more."""
    with open(folder / f"rank-{rank}.log", "a") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    _set_environment(folder)
    os.environ["RANK"] = str(rank)
    import torch.distributed as dist

    import training.exchange.torch_backend.process_group  # noqa: F401 - registers the backend
    from training.script import script_start

    torch: Any = sys.modules["torch"]
    torch.set_num_threads(1)
    faulthandler.enable()
    script_start.install_backend(dist)
    store_numbers = itertools.count()

    def environment_store(seconds: float) -> dist.Store:
        """In the place of the run's own, which ``env://`` means under ``launch``."""
        return dist.FileStore(f"{case.file_name}-{next(store_numbers)}", WORLD)

    script_start._store = environment_store
    from torch.testing._internal.common_utils import set_rng_seed
    from torch.testing._internal.distributed import distributed_test as theirs

    class Case(theirs.TestDistBackend, theirs.DistributedTest._DistTestBase):  # type: ignore[name-defined,misc]
        def _barrier(self, *args: object, **kwargs: object) -> None:
            meeting.wait(_SECONDS)

    pipe.send("ready")
    while True:
        name, backend, store_path = pipe.recv()
        os.environ["MUSTER_BACKEND"] = "auto" if backend == "muster" else "script"
        set_rng_seed()
        case: Any = Case(name)
        case.rank, case.file_name = rank, store_path
        problem = ""
        store_numbers = itertools.count()
        try:
            seconds = timedelta(seconds=theirs.CUSTOM_PG_TIMEOUT.get(name, theirs.default_pg_timeout))
            dist.init_process_group("gloo", f"file://{store_path}", seconds, WORLD, rank)
            meeting.wait(_SECONDS)
            getattr(case, name)()
            meeting.wait(_SECONDS)
        except (unittest.SkipTest, SystemExit) as skipped:
            problem = f"skipped: {skipped}"
        except BaseException as error:  # noqa: BLE001 - told to the test
            problem = f"rank {rank}: {''.join(traceback.format_exception(error)[-4:])}"
        pipe.send(problem)
        with contextlib.suppress(Exception):
            dist.destroy_process_group()


class Ranks:
    """Three processes that carry out the suite's tests; made anew after a test that failed."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._runs = folder, 0
        for name in ("test_dir", "init_dir", "barrier"):  # where the suite's own processes would meet
            (folder / name).mkdir()
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []

    def run(self, name: str, backend: str) -> str:
        """Return what is wrong, or ``skipped: ...``, or an empty text."""
        if not self._processes:
            self._start()
        self._runs += 1
        for pipe in self._pipes:
            pipe.send((name, backend, str(self._folder / f"store-{self._runs}")))
        problem = next((answer for answer in self._answers() if answer), "")
        if problem and not problem.startswith("skipped"):
            self.close()
        return problem

    def _start(self) -> None:
        context: Any = multiprocessing.get_context("forkserver" if sys.platform == "linux" else "spawn")
        meeting = context.Barrier(WORLD)
        for rank in range(WORLD):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(there, rank, meeting, self._folder), daemon=True)
            process.start()
            there.close()
            self._pipes.append(here)
            self._processes.append(process)
        assert self._answers() == ["ready"] * WORLD

    def _answers(self) -> list[str]:
        """Return what each rank says, or only what is wrong with the first one that says so."""
        answers: dict[Any, str] = {}
        while len(answers) < WORLD:
            ready = wait([pipe for pipe in self._pipes if pipe not in answers], _SECONDS + 30)
            if not ready:
                return ["no answer in time"]
            for pipe in ready:
                try:
                    answers[pipe] = pipe.recv()  # type: ignore[union-attr]
                except EOFError:
                    answers[pipe] = "a rank has ended"
                if answers[pipe].startswith(("rank", "a rank")):
                    return [answers[pipe]]
        return list(answers.values())

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        self._processes, self._pipes = [], []
