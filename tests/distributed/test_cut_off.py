"""How long a supervisor looks for members that may carry the run on without it, and how it leaves it to them."""

from __future__ import annotations

import io
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from distributed.run.cut_off import CUT_OFF, SEPARATED, CutOff
from distributed.supervision import Supervisor
from distributed.supervisor import _leave_to_members
from profiles.files.resolve import profile_from_options
from training.exchange.coordinator_protocol import Configuration, Report, Standing
from training.exchange.group.coordinator_state import CoordinatorConfig, quorum_of
from training.exchange.group.election import Neighbour
from training.exchange.group.quorum import next_term
from training.records.events import SyncEvent, WarningEvent
from training.records.plan import RunPlan
from training.records.run_folder import RunFolder
from training.run.local_plan import plan_local_run
from training.run.meeting_point import Elected, MeetingPoint


def test_it_looks_for_them_for_some_minutes_and_starts_anew_when_most_are_back() -> None:
    now, warnings, left = [0.0], list[str](), list[float]()
    cut_off = CutOff(warnings.append, lambda: left.append(now[0]), lambda: now[0])
    assert not cut_off.judge(1, 3, True) and not cut_off.judge(0, 0, True)
    now[0] = 10 * CUT_OFF  # asked again for the first time since
    assert cut_off.judge(2, 3, False) and not left
    now[0] += CUT_OFF - 1.0
    assert not cut_off.judge(0, 3, False)
    now[0] += 2.0
    assert cut_off.judge(3, 3, False) and cut_off.judge(3, 3, False) and not left
    now[0] += CUT_OFF
    assert cut_off.judge(3, 3, False) and left == [now[0]]
    assert len(warnings) == 2 and "3 of 3 members" in warnings[1]


def test_members_that_synchronise_long_after_the_cut_are_the_ones_that_go_on() -> None:
    """Where another machine's coordinator knows who counts, as after an election."""
    now, left = [0.0], list[float]()
    cut_off = CutOff(lambda line: None, lambda: left.append(now[0]), lambda: now[0])
    assert cut_off.judge(2, 3, False)
    for seconds, connected, is_cut_off in ((5.0, 0.0, True), (SEPARATED, 50.0, True), (10.0, 0.0, False)):
        now[0] += seconds
        cut_off.note_sync(connected)
        assert cut_off.judge(2, 3, False) is is_cut_off
    now[0] += CUT_OFF
    assert not cut_off.judge(2, 3, False) and not left
    assert not cut_off.judge(1, 3, False) and cut_off.judge(2, 3, False)


def test_whoever_synchronises_must_be_connected() -> None:
    told = list[float]()
    workers = [
        SimpleNamespace(ended=False, is_connected=rank < 1, attached=7.0, assignment=SimpleNamespace(rank=rank))
        for rank in (0, 1)
    ]
    supervisor: Any = SimpleNamespace(
        _start_watch=lambda event: None,
        _requests=None,
        _workers=workers,
        _cut_off=SimpleNamespace(note_sync=told.append),
    )
    counts = {"step": 1, "round": 1, "bytes_sent": 1, "bytes_received": 1}
    for rank in (1, 0):
        Supervisor._watch(supervisor, SyncEvent(member=rank, seconds=1.0, wait=0.0, members=[0, 1], **counts))
    assert told == [7.0]


@pytest.mark.parametrize(("away", "members"), [(1, 2), (2, 4)])
def test_half_of_the_members_may_go_on_if_the_coordinator_is_with_them(away: int, members: int) -> None:
    cut_off = CutOff(lambda line: None, lambda: None)
    assert cut_off.judge(away, members, True) and not cut_off.judge(away, members, False)
    assert not cut_off.judge(away, members + 1, True)


@pytest.mark.parametrize(("decide", "is_cut_off"), [(None, True), ((0, 1), False), ((0, 3, 4), True)])
def test_machines_without_which_the_others_train_by_now_are_not_looked_for(
    decide: tuple[int, ...] | None, is_cut_off: bool
) -> None:
    """Three of five were lost one after another; a worker that cannot be reached has not ended for long."""
    workers = [
        SimpleNamespace(ended=False, is_connected=rank < 2, assignment=SimpleNamespace(rank=rank)) for rank in range(5)
    ]
    supervisor: Any = SimpleNamespace(
        _run=SimpleNamespace(meeting_point=SimpleNamespace(elected=None, committed=decide)),
        _workers=workers,
        _start_watch=SimpleNamespace(begun=True),
        _coordinator=None,
        _cut_off=CutOff(lambda line: None, lambda: None),
    )
    assert Supervisor._is_cut_off(supervisor) is is_cut_off


def test_who_decides_is_what_the_coordinator_has_written_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RunPlan, "elects", property(lambda plan: True))
    plan = plan_local_run(profile_from_options("text", {"model_path": "tiny"}), 3)
    folder = RunFolder.create(tmp_path, plan, [])
    point = MeetingPoint(plan, folder, lambda name: io.BytesIO(), lambda lines: None)
    assert point.committed is None
    quorum = quorum_of(CoordinatorConfig(**point._config(range(3))))
    quorum.begin(range(3))
    mesh, group = Configuration.of(2, (0, 2)), [Neighbour(rank, Standing(report=Report(epoch=1))) for rank in (0, 2)]
    quorum.form(mesh, group)
    assert point.committed == (0, 1, 2)
    quorum.note_full(Report(committed=mesh))
    assert point.committed == (0, 2)
    point.elected = Elected(2, next_term(0, 2), 7)
    assert point.committed is None
    folder.close()


def test_the_run_can_be_taken_up_from_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def leave(code: int) -> None:
        raise SystemExit(code)

    monkeypatch.setattr(os, "_exit", leave)
    plan = plan_local_run(profile_from_options("text", {"model_path": "tiny"}), 2)
    folder = RunFolder.create(tmp_path, plan, [])
    (folder.secrets / "key").touch()
    with pytest.raises(SystemExit):
        _leave_to_members(folder)  # does what cannot be returned from
    assert not folder.live and (folder.secrets / "key").is_file()
    (event,) = folder.events()
    assert isinstance(event, WarningEvent) and f"attach {plan.run_id}" in event.message
