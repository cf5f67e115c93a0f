"""``--resume --hosts``: a run of whole models goes on with fewer machines, more, and others."""

from __future__ import annotations

from pathlib import Path

import pytest

from distributed.hosts.file import Hosts, load_hosts, save_hosts
from distributed.hosts.schema import Machine
from distributed.machine.link import MachineLink
from distributed.run.run_machines import continuation, on_others
from tests.distributed.muster_runs import Muster
from tests.distributed.test_preflight import SOUND
from tests.distributed.test_resume_without import on_machines
from tests.lab.fixtures import MakeLightLab
from training.records.events import SnapshotEvent


def links(names: str) -> list[MachineLink]:
    return [MachineLink(Machine(name=name), lambda: pytest.fail("nothing is dialled"), "10.0.0.1") for name in names]


def written(step: int, *live: int) -> list[SnapshotEvent]:
    return [SnapshotEvent(member=r, step=step, path="p", bytes=1, seconds=1.0, live=live) for r in live]


@pytest.mark.parametrize(
    ("machines", "absent", "said"),
    [
        ("ac", (1,), "goes on from the snapshot of step 6 on a, c, without b"),
        ("cbad", (), "goes on from the snapshot of step 6 on a, b, c, d (new)"),
        ("de", (0, 1, 2), "goes on from the snapshot of step 6 on d (new), e (new), without a, b, c"),
    ],
)
def test_what_other_machines_mean_is_told_in_a_line(machines: str, absent: tuple[int, ...], said: str) -> None:
    plan = on_machines("a", "b", "c")
    members = tuple(member.model_copy(update={"name": member.machine}) for member in plan.members)
    plan = plan.model_copy(update={"members": members})
    other = on_others(plan, [(link, SOUND) for link in links(machines)])
    assert other.absent == absent and len(other.first_members) == 3 and other.hash() == plan.hash()
    assert continuation([*written(4, 0, 1, 2), *written(6, 0, 1, 2)], plan, other, {6}) == said


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_run_goes_on_with_fewer_then_more_then_others(make_light_lab: MakeLightLab, tmp_path: Path) -> None:
    lab = make_light_lab("a", "b", "c", "d", "f")
    everybody = load_hosts(lab.hosts_file)

    def hosts_of(names: str) -> Path:
        machines = tuple(machine for machine in everybody.machines if machine.name in names)
        save_hosts(Hosts(machines=machines, ssh_config=everybody.ssh_config), path := tmp_path / f"{names}.json")
        return path

    muster = Muster(tmp_path, hosts_of("abc"), gate=tmp_path / "gate")
    muster.let_pass(5)
    run_id = muster.detach("--max-steps", "60", "--strategy", "allreduce")
    muster.until_step(run_id, 5, members=3)
    assert muster.stop(run_id).returncode == 0
    for names, members, told in (("ac", (0, 2), "on a, c, without b"), ("acd", (0, 2, 3), "d (new)")):
        before = muster.losses(run_id)[-1][0]
        muster.let_pass(8)
        started = muster.run("train", "--resume", run_id, "--hosts", str(hosts_of(names)), "--detach")
        assert started.returncode == 0, started.stderr
        assert f"goes on from the snapshot of step {before} " in started.stderr and told in started.stderr
        muster.until_step(run_id, before + 4)
        assert muster.stop(run_id).returncode == 0
        assert all(muster.losses(run_id, rank)[-1][0] >= before + 4 for rank in members)
    before = muster.losses(run_id, 3)[-1][0]
    muster.let_pass(60)
    done = muster.run("train", "--resume", run_id, "--hosts", str(hosts_of("f")))  # which has no snapshot
    assert done.returncode == 0, done.stderr
    assert f"the snapshot of step {before} comes from " in done.stderr
    assert f"goes on from the snapshot of step {before} on f (new), without a, b, c, d" in done.stderr
    steps = [step for step, _ in muster.losses(run_id, 4)]
    assert steps == [*range(before + 1, 61)]
