"""How long a supervisor looks for members that may carry the run on without it, and how it leaves it to them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from distributed.run.cut_off import CUT_OFF, CutOff
from distributed.supervisor import _leave_to_members
from profiles.files.resolve import profile_from_options
from training.records.events import WarningEvent
from training.records.run_folder import RunFolder
from training.run.local_plan import plan_local_run


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


@pytest.mark.parametrize(("away", "members"), [(1, 2), (2, 4)])
def test_half_of_the_members_may_go_on_if_the_coordinator_is_with_them(away: int, members: int) -> None:
    cut_off = CutOff(lambda line: None, lambda: None)
    assert cut_off.judge(away, members, True) and not cut_off.judge(away, members, False)
    assert not cut_off.judge(away, members + 1, True)


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
