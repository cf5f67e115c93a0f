"""What an engine tells a process that it has started, and where its processes meet: torchrun's variables and store."""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any, NamedTuple

from profiles.errors import BadInput, RunFailed
from training.run.processes import RUN_VARIABLE

_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_MEETING_SECONDS = 600.0
"""Until all processes must have come: an engine may start its nodes minutes apart."""


class EngineProcess(NamedTuple):
    """One of the processes that an engine has started for a run."""

    rank: int
    world_size: int
    local_rank: int
    """Its number on its machine."""
    attempt: str = "0"
    """How often torchrun has started the processes again."""

    @classmethod
    def of_environment(cls, variables: Mapping[str, str] = os.environ) -> EngineProcess | None:
        """Return this process as its engine calls it; ``None``: no engine has started it, or it alone.

        A script that ``launch`` has started has these variables too, and is none.

        Raises:
            BadInput: a variable is no number, or they contradict each other.
        """
        if variables.get(RUN_VARIABLE) or not all(variables.get(name) for name in _VARIABLES):
            return None
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
        numbers = [variables.get(name) or "0" for name in names]
        if wrong := [f"{name}={text}" for name, text in zip(names, numbers, strict=True) if not text.isdecimal()]:
            raise BadInput(f"{wrong[0]}: no number from 0", "start it with torchrun, or unset RANK and WORLD_SIZE")
        rank, world_size, local_rank = map(int, numbers)
        if rank >= world_size:
            raise BadInput(f"RANK={rank} is not below WORLD_SIZE={world_size}", "ranks are 0, 1, ... WORLD_SIZE - 1")
        attempt = variables.get("TORCHELASTIC_RESTART_COUNT") or "0"
        return cls(rank, world_size, local_rank, attempt) if world_size > 1 else None

    @property
    def machine(self) -> str:
        """Name of its machine, which processes on one machine share."""
        return socket.gethostname().partition(".")[0]


class EngineStore:
    """The store of the engine, in which the first rank says where the others find it.

    Raises:
        RunFailed: it cannot be reached.
    """

    def __init__(self, process: EngineProcess) -> None:
        from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # torch exports it without saying so
        from torch.distributed.rendezvous import rendezvous

        seconds = timedelta(seconds=_MEETING_SECONDS)
        with _explained():
            store, _, _ = next(rendezvous("env://", process.rank, process.world_size, timeout=seconds))
        self._store = PrefixStore(f"muster/{process.attempt}", store)

    def publish(self, meeting: dict[str, Any]) -> None:
        """Say where the first rank is."""
        with _explained():
            self._store.set("meeting", json.dumps(meeting))

    def meeting(self) -> dict[str, Any]:
        """Wait until the first rank has said where it is."""
        with _explained():
            answer: dict[str, Any] = json.loads(self._store.get("meeting"))
        return answer


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    """Raise what torch's stores raise as a failure of the run that names where they are."""
    try:
        yield
    except (RuntimeError, ValueError) as error:  # of torch's stores, all of them
        where = ":".join(os.environ.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT"))
        reason = str(error).strip().partition("\n")[0]
        raise RunFailed(
            f"the rank's meeting point {where} does not answer: {reason}", "see the first rank's output"
        ) from error
