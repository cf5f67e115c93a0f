"""Snapshots that machines wrote when nobody heard them any more: what ``stop`` learns of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from app.cli.runs.ask import note_unheard
from app.run_view.run_state import reduce_events
from distributed.agent import files as agent_files
from distributed.agent.requests import ListRemains
from distributed.cleaning.clean import leftovers
from distributed.hosts.file import Hosts
from distributed.hosts.schema import Machine
from distributed.machine.link import MachineLink
from tests.distributed.scripted_connection import Says
from tests.training.toy_task import toy_plan
from training.records.events import ErrorEvent, SnapshotEvent
from training.records.run_folder import RunFolder
from training.snapshots.snapshot_store import Snapshot, SnapshotStore


def _snapshot(step: int, member: int = 0) -> SnapshotEvent:
    return SnapshotEvent(member=member, step=step, path="p", bytes=1, seconds=0.0, live=(0, 1))


def test_a_machine_tells_of_its_whole_snapshots(tmp_path: Path) -> None:
    store = SnapshotStore(tmp_path / "runs" / "run-1" / "1" / "checkpoints" / "member-1", 9)
    for step in (4, 8):
        store.save(Snapshot(step, {"model/w": torch.ones(1)}, {"live": [0, 1]}), "plan")
    (store.directory / "step-00000008" / "state.safetensors").write_bytes(b"cut")
    [told] = agent_files.left(tmp_path, ListRemains("run-1"))["snapshots"]
    event = SnapshotEvent.model_validate({"seconds": 0.0, **told})
    assert (event.member, event.step, event.live) == (1, 4, (0, 1))
    assert event.path == "checkpoints/member-1/step-00000004"


def test_what_a_machine_says_of_snapshots_is_checked() -> None:
    told = [5, {}, {"member": 0, "step": -1}, {"member": 1, "step": 7, "path": "p", "bytes": 1}]
    answer = json.dumps({"processes": [], "snapshots": told}).encode()

    def dial(machine: Machine, *_: object) -> MachineLink:
        return MachineLink(machine, lambda: Says(answer))

    heard: list[SnapshotEvent] = []
    assert leftovers(Hosts(machines=(Machine(name="box"),)), "run-1", dial=dial, on_snapshot=heard.append) == {
        "box": []
    }
    assert [(one.member, one.step) for one in heard] == [(1, 7)]


def test_unheard_snapshots_are_kept_steps(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, toy_plan(2), ["test"])
    for rank in (0, 1):
        folder.append(_snapshot(200, rank))
    folder.close()
    note_unheard(folder.path, [_snapshot(313), _snapshot(200, 1), _snapshot(313, 1)])
    state = reduce_events(folder.events())
    assert state.resume_step == 313
    assert sum(isinstance(event, SnapshotEvent) for event in folder.events()) == 4


@pytest.mark.parametrize(("resumable", "kept"), [(False, None), (True, 150)])
def test_damaged_snapshots_are_not_kept(resumable: bool, kept: int | None) -> None:
    error = ErrorEvent(member=0, message="all 4 snapshots of this run are damaged", resumable=resumable)
    state = reduce_events([_snapshot(150), _snapshot(150, 1), error])
    assert state.resume_step == kept
    assert reduce_events([_snapshot(160), _snapshot(160, 1)], state).resume_step == 160
