"""What a person asks of a run, through its folder: a run of real machines that come and go."""

from __future__ import annotations

import itertools
import os
import re
import signal
from pathlib import Path

import pytest

from distributed.hosts.file import RUN_HOSTS, load_hosts, save_hosts
from distributed.hosts.schema import Machine
from tests.distributed.muster_runs import Muster, ours
from tests.lab.fixtures import MakeLightLab
from tests.waiting import until
from training.records.events import MemberEvent, RequestEvent, StepEvent, SyncEvent
from training.run.requests.request_book import Action, leave_request

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
_PATIENCE = 300.0
"""Seconds for a request, as ``ask`` has them: machines are let in one after the other, and each begins a worker."""


class Asked:
    """A run and what was asked of it."""

    def __init__(self, muster: Muster, run_id: str) -> None:
        self.muster = muster
        self.run_id = run_id
        self.folder = muster.folder_of(run_id)

    def answers(self, identity: str) -> list[RequestEvent]:
        events = self.muster.events(self.run_id)
        return [e for e in events if isinstance(e, RequestEvent) and e.request == identity]

    def leave(self, action: Action, machine: str = "", entry: Machine | None = None) -> str:
        return leave_request(self.folder, action, machine, entry)

    def ask(self, action: Action, machine: str = "") -> RequestEvent:
        """Ask, and wait for the end of it."""
        return self.end_of(self.leave(action, machine))

    def end_of(self, identity: str) -> RequestEvent:
        until(lambda: any(e.outcome != "accepted" for e in self.answers(identity)), _PATIENCE)
        return self.answers(identity)[-1]


def test_machines_leave_and_come_back_while_the_run_goes_on(make_light_lab: MakeLightLab, tmp_path: Path) -> None:
    lab = make_light_lab("a", "b", "c", "d")
    save_hosts(lab.hosts("a", "b", "c"), tmp_path / "hosts.json")
    muster = Muster(tmp_path, tmp_path / "hosts.json", pause=0.1)
    run_id = muster.detach("--max-steps", "1000000", "--verify-interval", "10")
    run = Asked(muster, run_id)
    muster.until_step(run_id, 3, members=3)

    assert run.ask("pause").message.startswith("the run is paused after step ")
    assert run.ask("snapshot").outcome == "done"
    assert run.ask("pause").outcome == "refused"
    assert run.ask("resume").outcome == "done"
    assert run.ask("snapshot").message.startswith("of step ")

    dropped = run.ask("drop", "b")
    assert (dropped.outcome, dropped.machine, dropped.message) == ("done", "b", "left after a synchronisation")
    until(lambda: ours(lab["b"]) == [])
    os.kill(lab["c"].pids("training.workers.worker")[0], signal.SIGKILL)
    until(lambda: any(e.status == "lost" and e.name == "c" for e in members(muster, run_id)))
    alone = run.ask("drop", "a")
    assert (alone.outcome, alone.message) == ("refused", "no machine would be left to train (stop the run instead)")
    assert run.ask("add", "a").message == "a already takes part"
    assert "z is not a machine of this run" in run.ask("add", "z").message
    twin = run.end_of(
        run.leave("add", entry=lab.hosts("a").machines[0].model_copy(update={"name": "e", "address": "a"}))
    )
    assert twin.outcome == "refused" and "is the same machine as a" in twin.message

    wanted = [run.leave("add", "b"), run.leave("add", "c"), run.leave("add", entry=lab.hosts("d").machines[0])]
    wanted.append(run.leave("add", entry=Machine(name="desk", address="localhost")))  # without an SSH server
    ends = [run.end_of(identity) for identity in wanted]
    assert [end.outcome for end in ends] == ["done"] * 4, [end.message for end in ends]
    newest = max(step for step, _ in muster.losses(run_id))
    muster.until_step(run_id, newest + 20, members=5)
    assert re.fullmatch(r"the run is stopped: .* step \d+ is kept, 0 steps lost", run.ask("stop").message)
    until(lambda: [ours(host) for host in lab] == [[], [], [], []])
    assert [machine.name for machine in load_hosts(run.folder / RUN_HOSTS).machines] == ["a", "b", "c", "d", "desk"]
    check_the_record(muster, run_id)


def members(muster: Muster, run_id: str) -> list[MemberEvent]:
    return [e for e in muster.events(run_id) if isinstance(e, MemberEvent)]


def check_the_record(muster: Muster, run_id: str) -> None:
    """One that was let go is never called lost, data follow the live members, and all end with the same weights."""
    events = muster.events(run_id)
    assert "lost" not in {e.status for e in events if isinstance(e, MemberEvent) and e.member == 1}
    steps = [e for e in events if isinstance(e, StepEvent)]
    taken = {rank: [e.step for e in steps if e.member == rank] for rank in range(4)}
    assert taken[0] == list(range(1, len(taken[0]) + 1))
    assert min(taken[3]) > max(taken[1][0], 1) and taken[3] == list(range(taken[3][0], taken[3][-1] + 1))
    for rank in (1, 2):
        gaps = [after - before for before, after in itertools.pairwise(taken[rank])]
        assert min(gaps) == 1 and sum(gap > 1 for gap in gaps) == 1
    syncs = [e for e in events if isinstance(e, SyncEvent)]
    hashes = {(e.step, e.weight_hash) for e in syncs}
    assert len(hashes) == len({step for step, _ in hashes})
    assert [len(e.members) for e in syncs if e.step == max(s.step for s in syncs)] == [5] * 5
    before, after = (next(e for e in steps if e.member == 0 and e.step == taken[1][place]) for place in (-12, -11))
    of_all = sum(e.samples for e in steps if e.step == after.step)
    passed = (after.epoch - before.epoch) % 1.0
    assert round(600 * passed) == of_all  # nobody's samples twice, nobody's left out
