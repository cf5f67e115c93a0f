"""``--resume --allow-missing``: a run goes on without a machine that broke, and with it again when it is back."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from distributed.hosts.file import RUN_HOSTS, Hosts, load_hosts
from distributed.hosts.schema import Machine
from distributed.machine.link import MachineLink
from distributed.run.run_machines import links_of, on_present, rollback_warning
from profiles.errors import BadInput
from tests.distributed.muster_runs import Muster
from tests.distributed.test_preflight import SOUND
from tests.lab.fixtures import MakeLightLab
from tests.training.toy_task import toy_plan
from training.records.events import MemberEvent, SnapshotEvent
from training.records.plan import RunPlan


def links_to(*machines: Machine) -> list[MachineLink]:
    return [MachineLink(machine, lambda: pytest.fail("nothing is dialled"), "10.0.0.1") for machine in machines]


def _written(step: int, *live: int) -> list[SnapshotEvent]:
    return [SnapshotEvent(member=r, step=step, path="p", bytes=1, seconds=1.0, live=live) for r in live]


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_run_goes_on_without_a_machine_and_later_with_it(make_light_lab: MakeLightLab, tmp_path: Path) -> None:
    lab = make_light_lab("a", "b", "c")
    muster = Muster(tmp_path, lab.hosts_file, gate=tmp_path / "gate")
    muster.let_pass(5)
    run_id = muster.detach("--max-steps", "60", "--snapshot-interval", "50", "--strategy", "allreduce")
    muster.until_step(run_id, 5, members=3)
    stopped = muster.stop(run_id)
    assert stopped.returncode == 0 and f"train --resume {run_id}" in stopped.stderr, stopped.stderr
    lab["c"].stop_sshd()
    hosts = load_hosts(muster.folder_of(run_id) / RUN_HOSTS)

    refused = muster.run("distributed-train", "--resume", run_id)
    assert refused.returncode == 3 and "--allow-missing" in refused.stderr

    muster.let_pass(20)
    started = muster.run("distributed-train", "--resume", run_id, "--allow-missing", "--detach")
    assert started.returncode == 0 and "continuing without c" in started.stderr, started.stderr
    before = muster.losses(run_id, 2)[-1][0]
    muster.until_step(run_id, before + 20, members=2)
    assert load_hosts(muster.folder_of(run_id) / RUN_HOSTS) == hosts
    lost = [e for e in muster.events(run_id) if isinstance(e, MemberEvent) and e.status == "lost"]
    assert lost[-1].name == "c"
    muster.stop(run_id)
    assert muster.losses(run_id, 2)[-1][0] == before

    lab["c"].start_sshd()
    muster.let_pass(60)
    done = muster.run("distributed-train", "--resume", run_id)
    assert done.returncode == 0, done.stderr
    assert muster.losses(run_id, 2)[-1][0] == 60 and "lost" not in muster.metadata(run_id)["metrics"]
    steps = [step for step, _ in muster.losses(run_id)]
    assert steps == list(range(1, 61))


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_detached_start_that_dies_at_once_says_why(make_light_lab: MakeLightLab, tmp_path: Path) -> None:
    muster = Muster(tmp_path, make_light_lab("a", "b").hosts_file)
    with socket.create_server(("", 0)) as taken:
        port = f"coordinator_port={taken.getsockname()[1]}"
        words = muster.train("--max-steps", "4", "--set", port, "--set", "strategy=allreduce", "--detach")
        started = muster.run(*words)
    assert started.returncode == 2, started.stderr
    assert "cannot listen on" in started.stderr or "without --detach, which says why" in started.stderr
    assert "runs in the background" not in started.stderr


def on_machines(*names: str) -> RunPlan:
    plan = toy_plan(len(names))
    members = tuple(member.on_device(machine=names[member.rank]) for member in plan.members)
    return plan.model_copy(update={"members": members})


def test_who_is_absent_is_known_by_its_machine() -> None:
    plan = on_machines("a", "a", "b", "c")
    there = [(link, SOUND) for link in links_to(Machine(name="c"), Machine(name="b"))]
    assert on_present(plan, there[1:]).absent == (0, 1, 3)
    assert on_present(plan, there).absent == (0, 1)


def test_a_hosts_record_that_lost_a_machine_is_refused_in_words() -> None:
    with pytest.raises(BadInput, match="3 members, and hosts.json of its folder does not name c"):
        links_of(on_machines("a", "b", "c"), links_to(Machine(name="b"), Machine(name="a")))


def test_a_supervisor_that_takes_a_run_over_reaches_the_machine_that_was_added() -> None:
    plan = on_machines("a", "b", "c")
    grown = plan.model_copy(update={"members": plan.members[:2], "added": plan.members[2:]})
    there = links_to(*(Machine(name=name) for name in "cab"))
    assert list(links_of(grown, there)) == ["a", "b", "c"]
    with pytest.raises(BadInput, match="does not name c"):
        links_of(grown, there[1:])


def test_an_absent_machine_carries_no_coordinator() -> None:
    plan = on_machines("a", "b")
    there = plan.members[0].on_device(coordinator_address="10.0.0.2")
    update = {"members": (there, plan.members[1]), "coordinator": "b", "absent": (1,)}
    present = plan.model_copy(update=update).without_absent_coordinator("")
    assert present.members[0].lead.coordinator_address == "" and present.coordinator == ""
    assert [present.is_local(process) for process in present.processes] == [False, False]


def test_it_is_said_where_only_absent_machines_hold_the_newest_snapshot() -> None:
    plan = toy_plan(3)
    events = [*_written(4, 0, 1, 2), *_written(6, 2)]
    assert rollback_warning(events, plan, ()) == ""
    assert rollback_warning(events, plan, (1,)) == ""
    told = rollback_warning(events, plan, (2,))
    assert "snapshot of step 6" in told and "from step 4" in told


def test_a_hosts_file_keeps_the_machines_that_are_not_there() -> None:
    from distributed.preparation.prepare import updated_hosts

    hosts = Hosts(machines=(Machine(name="a"), Machine(name="b")))
    (link,) = links_to(Machine(name="b", found_at="10.0.0.7"))
    assert [m.found_at for m in updated_hosts(hosts, [link]).machines] == ["", "10.0.0.7"]
