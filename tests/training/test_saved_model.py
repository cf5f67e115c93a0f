"""Who saves the model of a run: the member that delivers it, and those that could in its place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from memory_exchange import RoomExchange, together
from torch import nn
from toy_task import ToyTask, toy_plan

from profiles.errors import RunFailed
from tests.training.group import run_member
from training.records.events import WarningEvent
from training.run.orders import Control


class OneFullDisk(ToyTask):
    """Cannot save on the second member."""

    rank = 0

    def save(self, model: nn.Module, directory: Path) -> None:
        (directory / "weights").touch()
        if self.rank == 1:
            raise RunFailed("the disk is full", "free some space")


@pytest.mark.slow
@pytest.mark.parametrize("own_folders", [True, False])
def test_members_with_folders_of_their_own_all_save_the_model(tmp_path: Path, own_folders: bool) -> None:
    plan = toy_plan(3)
    members = tuple(m.on_device(machine=m.name if own_folders else "") for m in plan.members)
    plan = plan.model_copy(update={"members": members})

    def body(exchange: RoomExchange) -> Any:
        task = OneFullDisk()
        task.rank = exchange.rank
        folder = tmp_path / str(exchange.rank)
        return run_member(plan, exchange.rank, exchange, task, folder, Control(), [])

    members = list(together(3, body)[0].values())
    assert [member.error for member in members] == [None] * 3
    saved = [(tmp_path / str(rank) / "model" / "weights").exists() for rank in range(3)]
    assert saved == [True, False, own_folders]
    warnings = [e.message for member in members for e in member.events if isinstance(e, WarningEvent)]
    assert any("cannot keep a copy of the model: the disk is full" in one for one in warnings) is own_folders
