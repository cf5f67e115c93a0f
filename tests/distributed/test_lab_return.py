"""A machine whose cable was pulled comes back by itself: what it did meanwhile arrives once, and it trains on.

Two terminals watch it, and see its stop."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.muster_runs import Muster, ours
from tests.lab.fixtures import MakeLab
from tests.waiting import until
from training.records.events import MemberEvent, StepEvent

pytestmark = [pytest.mark.lab, pytest.mark.slow, pytest.mark.timeout(600)]


def test_a_machine_that_was_cut_off_trains_again_when_it_is_back(make_lab: MakeLab, tmp_path: Path) -> None:
    lab = make_lab("a", "b")
    muster = Muster(tmp_path, lab.hosts_file, pause=0.1)
    try:
        run_id = muster.detach("--max-steps", "5000")
        terminals = [muster.popen("attach", run_id) for _ in range(2)]
        muster.until_step(run_id, 5, members=2)
        lab["b"].cut()
        until(lambda: "lost" in states(muster, run_id))
        lab["b"].mend()
        before = muster.losses(run_id)[-1][0]
        muster.until_step(run_id, before + 20, members=2)
        stopped = muster.run("stop", run_id)
        assert stopped.returncode == 0, stopped.stderr
        snapshot, *left = stopped.stdout.splitlines()
        assert snapshot.startswith("stopped; the snapshot of step ") and snapshot.endswith(" is kept, 0 steps lost")
        assert left == ["a: nothing left running", "b: nothing left running"]
        assert [ours(host) for host in lab] == [[], []]
        assert [state for state in states(muster, run_id) if state in ("lost", "joined")] == [
            "joined",
            "lost",
            "joined",
        ]
        after = steps(muster, run_id)
        assert len(after) == len(set(after))
        shown = [terminal.communicate(timeout=60)[1] for terminal in terminals]
        assert [terminal.returncode for terminal in terminals] == [130, 130]
        assert all(text.count("the run was stopped") == 1 and text.count("a joined") == 1 for text in shown)
    finally:
        muster.leave_nothing()


def steps(muster: Muster, run_id: str) -> list[int]:
    return [e.step for e in muster.events(run_id) if isinstance(e, StepEvent) and e.member == 1]


def states(muster: Muster, run_id: str) -> list[str]:
    return [e.status for e in muster.events(run_id) if isinstance(e, MemberEvent) and e.member == 1]
