"""Processes of a script as threads of this one, which meet over real links on loopback."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

from profiles.files.resolve import profile_from_options
from profiles.schema import Profile
from tests.waiting import PATIENCE
from training.exchange.base import Exchange, SoloExchange
from training.exchange.links.certificates import issue_run_certificates
from training.exchange.links.listener import Identity, Listener
from training.exchange.mean.fixed_group import FixedGroup
from training.exchange.mean.mesh import Mesh
from training.records.events import Emit, Event
from training.records.launched_script import LaunchedScript
from training.records.plan import MemberPlan, RunPlan
from training.run.orders import Control
from training.session.launched_run import LaunchedRun
from training.session.session import Session

T = TypeVar("T")


@dataclass
class Processes:
    """Two processes of one script.

    Args:
        folder: for their keys, and of the run.
    """

    folder: Path
    events: list[list[Event]] = field(default_factory=lambda: [[], []])
    attempt: int = 1

    def __post_init__(self) -> None:
        issue_run_certificates(self.folder / "keys", "run", range(2), ["127.0.0.1"])
        identities = (Identity("run", rank, self.folder / "keys" / f"member-{rank}") for rank in range(2))
        self.listeners = [Listener("127.0.0.1", identity) for identity in identities]
        self._meshes: list[Mesh] = []
        self._groups = [0, 0]

    def run(self, script: Callable[[Session], T], profile: Profile, keeps: bool = False) -> list[T]:
        """Run a script in both; raise what it raised.

        Args:
            keeps: whether they have a run, and so snapshots.
        """
        results: dict[int, T] = {}
        errors: list[BaseException] = []

        def body(rank: int) -> None:
            try:
                results[rank] = script(Session(profile, self._of_rank(rank, keeps), partial(self._connect, rank)))
            except BaseException as error:  # noqa: BLE001 - raised again by whoever waits
                errors.append(error)

        threads = [threading.Thread(target=body, args=(rank,), daemon=True) for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
        if errors:
            raise errors[0]
        return [results[rank] for rank in range(2)]

    def _of_rank(self, rank: int, keeps: bool) -> LaunchedRun:
        emit = self.events[rank].append
        return recorded(self.folder, rank, 2, self.attempt, emit) if keeps else LaunchedRun(rank, 2, emit=emit)

    def _connect(self, rank: int, run: LaunchedRun) -> Exchange:
        self._groups[rank] += 1
        addresses = {number: [listener.address] for number, listener in enumerate(self.listeners)}
        mesh = Mesh.form(self.listeners[rank], f"group {self._groups[rank]}", addresses)
        self._meshes.append(mesh)
        return FixedGroup(mesh)

    def close(self) -> None:
        for mesh in self._meshes:
            mesh.give_up()
        for listener in self.listeners:
            listener.close()


def recorded(folder: Path, rank: int, world_size: int, attempt: int, emit: Emit) -> LaunchedRun:
    """A run of a script, in ``folder/run``; resumed from the second attempt on."""
    members = tuple(MemberPlan(rank=number, name=f"rank-{number}", batch_size=1) for number in range(world_size))
    plan = RunPlan(
        run_id="run", profile=Profile(name="train"), members=members, engine="mesh", attempt=attempt,
        launch=LaunchedScript(script="train.py"), resume=attempt > 1,
    )  # fmt: skip
    return LaunchedRun(rank, world_size, plan, folder / "run", emit, Control())


def options(**values: object) -> Profile:
    """The options of a session."""
    usual = {"task": "custom", "strategy": "allreduce", "max_grad_norm": 0, "device": "cpu"}
    return profile_from_options("session", usual | values)


def alone(**values: object) -> Session:
    """A session of one process."""
    return Session(options(**values), LaunchedRun(), lambda run: SoloExchange())


def alone_in_run(folder: Path, attempt: int = 1, **values: object) -> Session:
    """A session of one process that has a run, and so snapshots."""
    run = recorded(folder, 0, 1, attempt, lambda event: None)
    return Session(options(**values), run, lambda run: SoloExchange())
