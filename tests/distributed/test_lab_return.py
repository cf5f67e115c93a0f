"""A machine whose cable was pulled comes back: what it did meanwhile arrives once, and it may train again."""

from __future__ import annotations

from pathlib import Path

import pytest

from distributed.run.requests import leave_request
from tests.distributed.muster_runs import Muster, ours
from tests.lab.fixtures import MakeLab
from tests.waiting import until
from training.events import MemberEvent, RequestEvent, StepEvent

pytestmark = [pytest.mark.lab, pytest.mark.slow, pytest.mark.timeout(240)]


def test_a_machine_that_was_cut_off_and_is_back_trains_again(make_lab: MakeLab, tmp_path: Path) -> None:
    lab = make_lab("a", "b")
    muster = Muster(tmp_path, lab.hosts_file, pause=0.05)
    try:
        run_id = muster.detach("--max-steps", "5000")
        muster.until_step(run_id, 5, members=2)
        lab["b"].cut()
        until(lambda: "lost" in states(muster, run_id))
        lab["b"].mend()
        until(lambda: "b is lost" in warnings(muster, run_id))  # its own words: what it did meanwhile is here
        before = steps(muster, run_id)
        assert before == list(range(1, len(before) + 1))
        identity = leave_request(muster.folder_of(run_id), "add", "b")
        until(lambda: outcome(muster, run_id, identity) in ("done", "refused"))
        assert outcome(muster, run_id, identity) == "done"
        muster.until_step(run_id, before[-1] + 20, members=2)
        assert muster.run("stop", run_id).returncode == 0
        after = steps(muster, run_id)
        assert len(after) == len(set(after)) and after[len(before)] > before[-1]
        assert [ours(host) for host in lab] == [[], []]
    finally:
        muster.leave_nothing()


def steps(muster: Muster, run_id: str) -> list[int]:
    return [e.step for e in muster.events(run_id) if isinstance(e, StepEvent) and e.member == 1]


def states(muster: Muster, run_id: str) -> list[str]:
    return [e.status for e in muster.events(run_id) if isinstance(e, MemberEvent) and e.member == 1]


def warnings(muster: Muster, run_id: str) -> str:
    return " ".join(str(getattr(e, "message", "")) for e in muster.events(run_id) if e.kind == "warning")


def outcome(muster: Muster, run_id: str, identity: str) -> str:
    answers = [e for e in muster.events(run_id) if isinstance(e, RequestEvent) and e.request == identity]
    return answers[-1].outcome if answers else ""
