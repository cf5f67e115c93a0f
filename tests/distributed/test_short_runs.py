"""Short runs that start while their machine is still sent the model and the data."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from distributed.agent.requests import ListMissing, MachineRequest, PutFiles
from distributed.measuring import machine_figures, short_runs
from distributed.measuring.machine_figures import Placement, SpeedFigures, StartBarrier
from distributed.measuring.short_runs import ShortRuns
from distributed.preparation.code_sync import folder_tree
from distributed.ssh.errors import SshError
from tests.waiting import until
from training.records.plan import MemberPlan


class EmptyMachine:
    """A machine that has nothing yet, and notes how many trees it has been sent."""

    def __init__(self, name: str, fails_at: int = 0) -> None:
        self.name, self.root, self.trees, self._fails_at = name, "", 0, fails_at

    def put_agent(self) -> None:
        """It is there."""

    def ask(self, request: MachineRequest, payload: Iterable[bytes] = (), **_: Any) -> Any:
        if isinstance(request, ListMissing):
            return {"trees": request.trees, "blobs": request.blobs, "begun": {}}
        assert isinstance(request, PutFiles)
        list(payload)
        self.trees += len(request.trees)
        if self.trees == self._fails_at:
            raise SshError(self.name, "its disk is full")


def files(folder: Path) -> Any:
    trees = {}
    for name in ("dataset", "code"):
        (folder / name).mkdir()
        (folder / name / "file").write_text(name)
        trees[f"inputs/{name}"] = folder_tree(folder / name)
    return SimpleNamespace(trees=trees)


def test_a_program_can_start_before_the_data_are_there(tmp_path: Path) -> None:
    machine, there = EmptyMachine("a"), list[int]()
    machine_figures.bring(cast(Any, machine), files(tmp_path), has_code=lambda: there.append(machine.trees))
    assert (there, machine.trees) == ([1], 2)


def test_a_machine_without_room_for_the_data_ends_its_short_run_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    barrier, full = StartBarrier(), EmptyMachine("full", fails_at=2)
    ended: dict[str, Callable[[], bool]] = {}

    def measured(placement: Placement, _: object, barrier: StartBarrier, *__: object) -> SpeedFigures:
        signals: list[int] = []
        barrier.admit(cast(Any, SimpleNamespace(link=placement.link, signal=signals.append, send=lambda word: None)))
        if placement.link is full:
            until(lambda: bool(signals))
            raise SshError("full", "the short run there ended without figures")
        until(barrier.brought.is_set)
        ended[placement.member.name] = lambda: bool(signals)
        return cast(Any, "figures")

    monkeypatch.setattr(short_runs, "measure_member", measured)
    facts: Any = SimpleNamespace(machine_key="")
    members = [MemberPlan(rank=rank, name=name, batch_size=4) for rank, name in enumerate(("good", "full"))]
    machines = [cast(Any, EmptyMachine("good")), cast(Any, full)]
    placements = [Placement(link, facts, member) for link, member in zip(machines, members, strict=True)]
    blocks: Any = SimpleNamespace(of=lambda link, inputs: inputs, close=lambda: None)
    runs = ShortRuns(placements, files(tmp_path), blocks, barrier, lambda line: None)
    runs.carry_out()
    assert [problem.message for problem in runs.problems] == ["full: its disk is full"]
    assert list(runs.figures) == ["good"] and not ended["good"]()
