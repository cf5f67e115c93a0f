"""A run of one member that is resumed on other machines: which snapshot they have all parts of, and the new cut."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from planner_figures import joined, machine

from app.cli.train.request import TrainRequest
from app.cli.train.start import hosts_file_of
from distributed import resuming
from distributed.agent import run_folders
from distributed.agent.requests import ListSnapshots, RemoveRun
from distributed.hosts.file import RUN_HOSTS, Hosts, load_hosts, save_hosts
from distributed.hosts.schema import Machine
from distributed.machine.link import MachineLink
from distributed.planning.documents.document import Figures, Workload
from distributed.planning.feedback import FIGURES
from distributed.preparation.preflight import Ready
from distributed.preparation.prepare import PrepareOptions
from distributed.resuming import HeldPart, covered_step, recut, resume_run
from profiles.errors import BadInput
from tests.distributed.test_preflight import SOUND
from tests.layouts.machine_folders import on_machines
from tests.layouts.staged_records import plan_of, tied_llama
from tests.training.toy_task import toy_plan
from training.records.plan import RunPlan
from training.records.run_folder import RunFolder
from training.snapshots.snapshot_store import Snapshot, SnapshotStore

CUSTOM: dict[str, Any] = {"task": "custom", "model_path": "tests.layouts.deep_model:deep_job"}


@pytest.fixture
def plan() -> RunPlan:
    """Of a model on machines a, b and c."""
    return on_machines(plan_of(3, **CUSTOM), *"abc").model_copy(update={"resume": True, "attempt": 2})


def part(step: int, number: int, of: int = 3, course: tuple[tuple[int, int], ...] = ((1, 0),)) -> HeldPart:
    return HeldPart(step=step, part=(number, of), course=course)


class Holder(MachineLink):
    """A machine that has these parts."""

    def __init__(self, name: str, *parts: HeldPart) -> None:
        super().__init__(Machine(name=name), lambda: pytest.fail("nothing is dialled"), "10.0.0.1")
        self._parts = parts

    def ask(self, request: Any, payload: Any = (), timeout: float | None = 60.0) -> dict[str, Any]:
        return {"snapshots": [*(part.model_dump(mode="json") for part in self._parts), {"step": "?"}]}


def ready(*links: MachineLink) -> list[Ready]:
    return [(link, SOUND) for link in links]


def test_a_machine_reports_all_parts_that_it_has(tmp_path: Path) -> None:
    for number, folder in enumerate(("member-0", "member-0-stage-2")):
        store = SnapshotStore(tmp_path / "runs" / "run-1" / "1" / "checkpoints" / folder, 9)
        state = {"live": [0], "part": [number, 3], "course": [[1, 0]]}
        store.save(Snapshot(4, {"model/w": torch.ones(1)}, state), "plan")
    reported = run_folders.held(tmp_path, ListSnapshots("run-1"))["snapshots"]
    parts = sorted((HeldPart.model_validate(entry) for entry in reported), key=lambda held: held.part)
    assert parts == [part(4, 0), part(4, 1)]


def test_what_earlier_attempts_left_is_removed(tmp_path: Path) -> None:
    for run, rank in (("run-1", "0"), ("run-1", "1"), ("run-2", "0")):
        (tmp_path / "runs" / run / rank / "checkpoints").mkdir(parents=True)
    (tmp_path / "runs" / "run-1" / "1" / "agent.sock").touch()
    run_folders.remove(tmp_path, RemoveRun("run-1"))
    run_folders.remove(tmp_path, RemoveRun("run-3"))
    left = sorted(str(path.parent.relative_to(tmp_path / "runs")) for path in tmp_path.glob("runs/*/*/checkpoints"))
    assert left == ["run-1/1", "run-2/0"]


def test_the_newest_step_with_all_parts() -> None:
    again = ((1, 0), (2, 4))
    held = {
        "a": [part(4, 0), part(8, 0), part(6, 0, 2, again)],
        "b": [part(4, 1), part(4, 2), part(8, 1), part(8, 2)],
    }
    assert covered_step(held) == 8
    assert covered_step({"b": held["b"]}) is None
    held["b"].append(part(6, 1, 2, again))  # of a later attempt, which gave the steps from 4 on up
    assert covered_step(held) == 6


@pytest.mark.parametrize("names", ["ab", "cab", "b", "dcba"])
def test_the_model_is_cut_anew_over_the_machines(names: str, plan: RunPlan, tmp_path: Path) -> None:
    machines = ready(*(Holder(name) for name in names))
    run = plan.profile.run.model_copy(update={"stages": 3})  # by hand, when it was started
    plan = plan.model_copy(update={"profile": plan.profile.model_copy(update={"run": run})})
    held = {name: [part(4, number) for number in range(3)] if name == "b" else [] for name in names}
    cut = recut(plan, machines, held, tmp_path, lambda line: None)
    assert [device.machine for device in cut.members[0].devices] == [*names]
    assert cut.profile.run.layout == ("pipeline" if len(names) > 1 else "replicate")
    assert (cut.hash(), cut.run_id, cut.attempt, cut.resume) == (plan.hash(), plan.run_id, 2, True)


@pytest.mark.parametrize(("names", "layout"), [("abc", "shard"), ("ac", "pipeline"), ("a", "replicate")])
def test_shards_lie_as_before_on_the_same_machines(names: str, layout: str, plan: RunPlan, tmp_path: Path) -> None:
    run = plan.profile.run.model_copy(update={"layout": "shard"})
    plan = plan.model_copy(update={"profile": plan.profile.model_copy(update={"run": run})})
    held = {name: [part(4, number) for number in range(3)] for name in names}
    cut = recut(plan, ready(*map(Holder, names)), held, tmp_path, lambda line: None)
    assert ("".join(cut.machines), cut.profile.run.layout) == (names, layout)


@pytest.mark.parametrize(("gigabytes", "blocks"), [(8.0, [(0, 4), (4, 6)]), (0.2, None)])
def test_the_figures_of_the_run_cut_it_by_speed_and_memory(
    gigabytes: float, blocks: list[tuple[int, int]] | None, tmp_path: Path
) -> None:
    plan = on_machines(plan_of(3, **tied_llama(tmp_path, blocks=6, lines=5)), *"abc")
    members = [machine(name, memory_total=int(gigabytes * 1e9), blocks=(seconds,) * 6)
               for name, seconds in zip("abc", (0.1, 0.1, 0.2))]  # fmt: skip
    workload = Workload(trainable=10_000, total=10_000, samples=100)
    Figures(cluster=joined(members), workload=workload).write(tmp_path / FIGURES)
    machines, held = ready(Holder("a"), Holder("c")), {"a": [part(4, 0), part(4, 1)], "c": [part(4, 2)]}
    if blocks is None:
        with pytest.raises(BadInput, match="nothing fits these machines"):
            recut(plan, machines, held, tmp_path, lambda line: None)
        return
    cut = recut(plan, machines, held, tmp_path, lambda line: None).members[0]
    assert sorted((device.machine, device.blocks) for device in cut.devices) == [*zip("ac", blocks)]


def files_of(run_dir: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in run_dir.iterdir() if path.is_file()}


def test_machines_without_a_whole_snapshot_change_nothing(
    plan: RunPlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with RunFolder.create(tmp_path, plan, ["test"]) as folder:
        save_hosts(Hosts(machines=tuple(Machine(name=name) for name in "abc")), folder.path / RUN_HOSTS)
    before = files_of(folder.path)
    links = Holder("a", part(4, 0), part(6, 0)), Holder("c", part(4, 2), part(4, 0))
    monkeypatch.setattr(resuming, "prepare", lambda *_: ready(*links))
    with pytest.raises(BadInput, match="of step 6, which has 3 parts, they have a: 1 "):
        resume_run(folder.path, plan, PrepareOptions(allow_missing=True), ["test"])
    assert files_of(folder.path) == before


def test_a_run_goes_on_with_the_machines_of_another_file(
    plan: RunPlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with RunFolder.create(tmp_path, plan, ["test"]) as folder:
        save_hosts(Hosts(machines=tuple(Machine(name=name) for name in "abc")), folder.path / RUN_HOSTS)
    holder = Holder("b", *(part(4, number) for number in range(3)))
    monkeypatch.setattr(resuming, "prepare", lambda *_: ready(holder, Holder("d")))
    started: list[Path] = []
    monkeypatch.setattr(resuming.BackgroundProcess, "__init__", lambda *_: None)
    monkeypatch.setattr(resuming.BackgroundProcess, "start", lambda _, path: started.append(path))
    hosts = Hosts(machines=(Machine(name="b"), Machine(name="d")))
    resume_run(folder.path, plan, PrepareOptions(), ["test"], hosts)
    assert started == [folder.path]
    assert RunFolder.open(folder.path).plan().machines == ("b", "d")
    assert [machine.name for machine in load_hosts(folder.path / RUN_HOSTS).machines] == [*"abcd"]


def test_machines_without_a_snapshot_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = toy_plan(2)
    with RunFolder.create(tmp_path, plan, ["test"]) as folder:
        save_hosts(Hosts(machines=(Machine(name="a"), Machine(name="b"))), folder.path / RUN_HOSTS)
    monkeypatch.setattr(resuming, "prepare", lambda *_: ready(Holder("c")))
    options = PrepareOptions(dial=lambda machine, *_: Holder(machine.name))
    with pytest.raises(BadInput, match="none of these machines has a part of a snapshot of run .*: c"):
        resume_run(folder.path, plan, options, ["test"], Hosts(machines=(Machine(name="c"),)))


def test_a_run_of_machines_is_not_resumed_on_this_one_because_its_hosts_file_is_missing(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path, toy_plan(2), ["test"], run_type="distributed") as folder:
        request = TrainRequest(resume=str(folder.path), overrides={})
        with pytest.raises(BadInput, match="is of other machines, and .*hosts.json with their addresses is missing"):
            hosts_file_of(request)
        folder.finish("completed", {})
    assert hosts_file_of(request) is None  # that it is completed is said later


def test_a_run_of_workers_of_this_machine_takes_no_hosts_file(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path, plan_of(2, **CUSTOM), ["test"]) as folder:
        request = TrainRequest(resume=str(folder.path), overrides={"hosts": "a,b"})
        with pytest.raises(BadInput, match="is of workers of this machine"):
            hosts_file_of(request)
        save_hosts(Hosts(machines=(Machine(name="a"),)), folder.path / RUN_HOSTS)
        assert hosts_file_of(request) == Path("a,b")
