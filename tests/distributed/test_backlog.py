"""What workers have told nobody, as their supervisor was gone, and what ``--resume`` makes of it."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import pytest

from distributed import resuming
from distributed.agent.requests import Start
from distributed.agent.spool import Spool
from distributed.hosts.file import RUN_HOSTS, Hosts, save_hosts
from distributed.hosts.schema import Machine
from distributed.preparation.prepare import PrepareOptions
from distributed.resuming import resume_run
from distributed.run.backlog import LeftAlone, since_supervisor
from profiles.errors import BadInput
from tests.distributed.scripted_connection import far_machine
from tests.distributed.test_preflight import SOUND
from tests.distributed.test_resume_without import links_to, on_machines
from tests.lab.processes import end
from training.records.events import Event, MemberEvent, RunEvent, StepEvent, WarningEvent, to_line
from training.records.plan import RunPlan
from training.records.run_folder import RunFolder

BEGAN = time.time() - 7 * 86_400
"""A week ago."""
NOTHING = LeftAlone([], False, [])
ELSEWHERE = Hosts(machines=(Machine(name="elsewhere"),))


def step(member: int, number: int, line: int | None = None) -> StepEvent:
    times = {"compute": 0.1, "wait": 0.0, "transfer": 0.0}
    counts = {"samples": 4, "weight": 4.0, "epoch": 0.0, "loss": 1.0, "learning_rate": 0.1}
    moment = {"time": BEGAN + number + member / 10, "member": member, "line": line}
    return StepEvent.model_validate({**times, **counts, **moment, "step": number})


@pytest.fixture
def plan() -> RunPlan:
    """Of two members on one machine."""
    return on_machines("far", "far")


@pytest.fixture
def path(plan: RunPlan, tmp_path: Path) -> Path:
    """Folder of a run whose supervisor was killed after the first step."""
    started = [MemberEvent(member=rank, status="started", line=1, time=BEGAN) for rank in (0, 1)]
    begun = [RunEvent(status="starting", time=BEGAN), *started, RunEvent(status="running", time=BEGAN)]
    events = [*begun, step(0, 1, line=2), step(1, 1, line=2)]
    with RunFolder.create(tmp_path, plan, ["test"]) as folder:
        for event in events:
            folder.append(event)
        folder.begin("running")
        save_hosts(Hosts(machines=(far_machine(tmp_path).machine,)), folder.path / RUN_HOSTS)
    return folder.path


def leave_records(root: Path, plan: RunPlan, rank: int, *events: Event, code: int = 130) -> None:
    """An agent has ended, and left these events of its worker and the worker's end."""
    folder = root / "far" / "runs" / plan.run_id / str(rank)
    folder.mkdir(parents=True)
    spool = Spool(folder / "spool")
    for event in events:
        spool.append({"event": to_line(event)})
    spool.append({"log": "some words"})
    spool.append({"end": code, "why": ""})


def test_what_nobody_has_heard_is_told_once_in_the_order_of_time(plan: RunPlan, path: Path, tmp_path: Path) -> None:
    begun = MemberEvent(status="started"), step(0, 1)
    alone = WarningEvent(message="nobody hears this", time=BEGAN + 2.5)
    leave_records(tmp_path, plan, 0, *begun, step(0, 2), alone, RunEvent(status="running"), step(0, 3))
    leave_records(tmp_path, plan, 1, *begun, step(0, 2), step(0, 2), step(0, 3))  # one step twice, which cannot be
    link = far_machine(tmp_path)
    working, is_completed, events = since_supervisor(RunFolder.open(path), [link])
    assert (working, is_completed) == ([], False)
    assert [(e.member, e.step) for e in events if isinstance(e, StepEvent)] == [(0, 2), (1, 2), (0, 3), (1, 3)]
    assert [e.message for e in events if isinstance(e, WarningEvent)] == ["nobody hears this"] and len(events) == 5
    with RunFolder.take_over(path) as folder:
        for event in events:
            folder.append(event)
        assert since_supervisor(folder, [link]) == NOTHING  # it is live
    assert since_supervisor(RunFolder.open(path), [link]) == NOTHING


def test_a_run_that_was_completed_without_its_supervisor_is_known(plan: RunPlan, path: Path, tmp_path: Path) -> None:
    leave_records(tmp_path, plan, 0, MemberEvent(status="started"), step(0, 1), MemberEvent(status="done"), code=0)
    assert since_supervisor(RunFolder.open(path), [far_machine(tmp_path)]).is_completed
    with RunFolder.take_over(path) as folder:
        folder.finish("failed", {})
    assert since_supervisor(RunFolder.open(path), [far_machine(tmp_path)]) == NOTHING


@pytest.mark.parametrize(("may_take_up", "hosts"), [(True, None), (False, None), (True, ELSEWHERE)])
def test_workers_that_train_on_are_not_ended_for_a_new_attempt(
    may_take_up: bool, hosts: Hosts | None, plan: RunPlan, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = far_machine(tmp_path)
    argv = ["{python}", "-c", "input()"]
    link.ask(Start(plan.run_id, "0", argv, {}, files={}, links={}, lease=60.0, grace=0.0, defaults={}))
    processes = json.loads((tmp_path / "far" / "runs" / plan.run_id / "0" / "agent.json").read_text())
    lines, before = list[str](), (path / "metadata.json").read_bytes()
    there = [link] if hosts is None else links_to(*hosts.machines)
    monkeypatch.setattr(resuming, "prepare", lambda *_: [(one, SOUND) for one in there])
    monkeypatch.setattr(resuming, "take_up", lambda path: may_take_up)
    options = PrepareOptions(tell=lines.append, dial=lambda *_: link)
    try:
        if may_take_up:
            resume_run(path, plan, options, ["test"], hosts)
            assert lines[0] == "far trained on without this computer" and len(lines) == (1 if hosts is None else 2)
        else:
            with pytest.raises(BadInput, match="still trains on far") as refused:
                resume_run(path, plan, options, ["test"])
            assert "lease of 30 s" in refused.value.hint
        assert (path / "metadata.json").read_bytes() == before
    finally:
        end(processes["worker"], signal.SIGKILL)
        end(processes["agent"], signal.SIGKILL)
