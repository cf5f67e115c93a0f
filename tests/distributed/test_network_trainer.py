"""Training from Python on other machines: the same face and the same result as on this one, and no pickle."""

from __future__ import annotations

import _thread
import importlib
import os
import subprocess
import sys
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from distributed.hosts.file import RUN_HOSTS, Hosts, Machine, save_hosts
from distributed.launcher import DistributedLauncher
from distributed.network_trainer import NetworkTrainer, with_machine
from distributed.preparation.code_sync import collect
from profiles.errors import BadInput, MachinesNotReady, MusterError, RunFailed
from profiles.files.resolve import profile_from_options
from tests.distributed.muster_runs import REPOSITORY, ours
from tests.lab.fixtures import MakeLightLab
from tests.layouts.machine_folders import on_machines
from tests.layouts.staged_records import plan_of
from tests.waiting import until
from training.local_trainer import LocalTrainer
from training.records.events import ErrorEvent, Event, RunEvent, SnapshotEvent, StepEvent
from training.records.plan import RunPlan
from training.records.run_folder import RunFolder
from training.run.local_plan import plan_local_run

pytestmark = pytest.mark.slow

SOURCE = """
import os, pickle, sys, time
import torch
from torch import nn
from torch.utils.data import TensorDataset
from helper_of_job import WIDTH

if sys.argv[0].endswith("training/workers/worker.py"):
    def refuse(*arguments, **options):
        raise AssertionError("something was unpickled")
    pickle.loads = pickle.load = torch.load = refuse

class Net(nn.Module):
    def __init__(self, width=WIDTH, drop=0.1):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, width), nn.Dropout(drop), nn.Linear(width, 2))

    def forward(self, points):
        return self.layers(points)

class Needy(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.layer = nn.Linear(width, 2)

def build():
    return Net(4)

def points():
    dice = torch.Generator().manual_seed(1)
    places = torch.rand(64, 2, generator=dice)
    return TensorDataset(places, (places.sum(dim=1) > 1).long())

def loss(scores, wanted):
    return nn.functional.cross_entropy(scores, wanted)

def slow_loss(scores, wanted):
    if not os.path.exists(QUICK):
        time.sleep(0.4)
    return loss(scores, wanted)

def collate(samples):
    return torch.stack([s[0] for s in samples]), torch.stack([s[1] for s in samples])

def fails_there():
    raise KeyError("oops")
"""
SCRIPT = """
from distributed.network_trainer import NetworkTrainer
from torch import nn
import torch

class Net(nn.Linear):
    def __init__(self):
        super().__init__(2, 1)

if __name__ == "__main__":
    data = [(torch.ones(2), torch.ones(1))] * 16
    trainer = NetworkTrainer(Net, data, loss="torch.nn.functional:mse_loss", hosts="{hosts}", output_dir="{output}")
    trainer.fit(max_steps=3, batch_size=2, threads=1)
    print(trainer.outcome.status)
"""
OPTIONS: dict[str, Any] = {
    "strategy": "diloco",
    "sync_interval": 3,
    "max_steps": 6,
    "batch_size": 4,
    "threads": 1,
    "seed": 5,
}


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    folder = tmp_path / "user"
    folder.mkdir()
    (folder / "job_of_user.py").write_text(SOURCE.replace("QUICK", repr(str(tmp_path / "quick"))))
    (folder / "helper_of_job.py").write_text("WIDTH = 3\n")
    monkeypatch.syspath_prepend(folder)
    for name in ("job_of_user", "helper_of_job"):
        sys.modules.pop(name, None)
    return importlib.import_module("job_of_user")


def refused(tmp_path: Path, model: Any, data: Any = (1.0, 2.0), **settings: Any) -> str:
    """Return why a job is refused; nothing has been started, asked or written then."""
    output = tmp_path / "output"
    (tmp_path / "hosts.json").write_text('{"master": "nobody@192.0.2.1", "workers": []}')
    trainer = NetworkTrainer(model, data, hosts=tmp_path / "hosts.json", output_dir=output, **settings)
    with pytest.raises(BadInput) as caught:
        trainer.fit()
    assert not output.exists() or list(output.iterdir()) == []
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_an_error_names_its_machine_if_the_plan_has_it() -> None:
    options = {"task": "custom", "model_path": "a:b"}
    plan = plan_local_run(profile_from_options("p", options), 2)
    assert with_machine(ErrorEvent(member=1, message="out of memory"), plan) == "worker-1: out of memory"
    for member in (None, -1, 2):  # the last one came while the run was on
        assert with_machine(ErrorEvent(member=member, message="out of memory"), plan) == "out of memory"


def test_a_run_that_failed_without_a_word_points_to_its_logs(
    tmp_path: Path, job: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_local_run(profile_from_options("network", {"task": "custom", "model_path": "a:b"}), 1)
    with RunFolder.create(tmp_path, plan, []) as folder:
        folder.append(SnapshotEvent(step=3, path="checkpoints/member-0", bytes=1, seconds=0.1))
        (folder.path / "job").mkdir()
        save_hosts(Hosts(machines=(Machine(name="a"),)), folder.path / RUN_HOSTS)

    def breaks(path: Path, *_: object) -> None:
        with RunFolder.resume(path, plan, []) as again:
            for status in ("starting", "running", "failed"):
                again.append(RunEvent(status=status))
            again.finish("failed", {})

    monkeypatch.setattr("distributed.resuming.resume_run", breaks)
    trainer = NetworkTrainer(job.build, job.points, hosts=tmp_path / "none.json", output_dir=tmp_path)
    with pytest.raises(RunFailed) as caught:
        trainer.fit(resume=folder.path)
    assert caught.value.hint == f'see {folder.path / "logs"}; resume with: fit(resume="{folder.path}")'


def test_a_model_on_machines_is_resumed_on_those_of_the_hosts_file(
    tmp_path: Path, job: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = on_machines(plan_of(2, task="custom", model_path="a:b"), "a", "b")
    with RunFolder.create(tmp_path, plan, [], run_type="distributed") as folder:
        (folder.path / "job").mkdir()
        save_hosts(Hosts(machines=(Machine(name="a"), Machine(name="b"))), folder.path / RUN_HOSTS)
    save_hosts(Hosts(machines=(Machine(name="b"), Machine(name="c"))), tmp_path / "others.json")
    given: list[Hosts] = []

    def resume_run(path: Path, plan: RunPlan, options: Any, command: Any, hosts: Hosts) -> None:
        given.append(hosts)
        raise BadInput("enough")

    monkeypatch.setattr("distributed.resuming.resume_run", resume_run)
    monkeypatch.setattr(NetworkTrainer, "profile_name", plan.profile.name)
    trainer = NetworkTrainer(job.build, job.points, hosts=tmp_path / "others.json", output_dir=tmp_path)
    with pytest.raises(BadInput, match="enough"):
        trainer.fit(resume=folder.path)
    assert [machine.name for machine in given[0].machines] == ["b", "c"]


def test_what_no_import_finds_is_refused(tmp_path: Path, job: ModuleType) -> None:
    assert refused(tmp_path, lambda: nn.Linear(2, 2)).startswith("model is a lambda: no import finds it")
    assert "loss is defined inside a function" in refused(tmp_path, job.Net(), loss=closure())
    assert "collate is a partial object" in refused(tmp_path, job.Net(), collate=__import__("functools").partial(sum))
    assert "train_dataset is defined inside a function" in refused(tmp_path, job.build, closure())
    assert "loss: " not in refused(tmp_path, job.build, loss="job_of_user:absent")


def closure() -> Any:
    def inside(output: Any, target: Any) -> None: ...

    return inside


def test_a_model_that_its_class_does_not_give_again_is_refused(tmp_path: Path, job: ModuleType) -> None:
    hint = "give model as a function (or module:name) that takes nothing and returns it"
    said = refused(tmp_path, job.Needy(2))
    assert said == f"the class of the model, Needy, needs width: no other machine can build it again ({hint})"
    assert "layers.1.p is 0.3, and then 0.1" in refused(tmp_path, job.Net(drop=0.3))
    assert "size mismatch" in refused(tmp_path, job.Net(7))
    assert "needs width" in refused(tmp_path, job.Needy)


def test_samples_that_cannot_be_sent_are_refused(tmp_path: Path, job: ModuleType) -> None:
    said = refused(tmp_path, job.Net(), [(torch.ones(2), object())])
    assert said.startswith("train_dataset: sample 0 holds a value of type builtins.object")


def test_auto_is_chosen_by_measuring_the_very_job(
    tmp_path: Path, job: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str, list[str], list[str]]] = []

    def plan(launcher: DistributedLauncher) -> Any:
        inputs = collect(plan_local_run(launcher.profile, 2))
        files = [sorted(inputs.trees[place].files) for place in ("inputs/user", "inputs/dataset")]
        seen.append((launcher.profile.strategy.strategy, *files))
        raise BadInput("enough")

    monkeypatch.setattr(DistributedLauncher, "plan", plan)
    assert refused(tmp_path, job.build, job.points, loss=job.loss) == "enough"
    assert seen == [("auto", ["helper_of_job.py", "job_of_user.py"], ["job.json"])]


@pytest.mark.slow
@pytest.mark.timeout(600)
class TestOnMachines:
    def test_the_result_is_that_of_the_local_trainer(
        self, make_light_lab: MakeLightLab, tmp_path: Path, job: Any
    ) -> None:
        lab = make_light_lab("a", "b")
        torch.manual_seed(0)
        weights = job.Net().state_dict()
        results, events = [], list[Event]()
        for kind, settings in (
            (LocalTrainer, {"workers": 2}),
            (NetworkTrainer, {"hosts": lab.hosts_file, "on_event": events.append}),
        ):
            model = job.Net()
            model.load_state_dict(weights)
            given = {"loss": job.loss, "collate": job.collate, "output_dir": tmp_path / "output", **settings}
            trainer: Any = kind(model, job.points(), job.points(), **given)
            results.append(trainer.fit(**OPTIONS))
            assert trainer.outcome.metrics["after"]["validation"]["loss"] > 0
        for name, value in results[0].state_dict().items():
            assert torch.equal(value, results[1].state_dict()[name])
            assert not torch.equal(value, weights[name])
        folder = RunFolder.open(trainer.outcome.run_dir)
        assert folder.metadata.run_type == "distributed"
        assert sum(isinstance(event, StepEvent) for event in events) == 12
        assert not (trainer.outcome.run_dir / "job").exists()
        assert [ours(host) for host in lab] == [[], []]

    def test_functions_are_called_there(self, make_light_lab: MakeLightLab, tmp_path: Path, job: Any) -> None:
        lab = make_light_lab("a")
        given: dict[str, Any] = {"loss": job.loss, "output_dir": tmp_path / "output"}
        local = LocalTrainer(job.build, job.points, workers=1, **given).fit(**OPTIONS)
        module = str(tmp_path / "user" / "job_of_user.py")
        there = NetworkTrainer(f"{module}:build", f"{module}:points", hosts=lab.hosts_file, **given).fit(**OPTIONS)
        assert all(torch.equal(a, b) for a, b in zip(local.parameters(), there.parameters()))
        failing = NetworkTrainer(job.build, job.fails_there, hosts=lab.hosts_file, **given)
        with pytest.raises(
            BadInput, match=r"^a: train_dataset: job_of_user:fails_there failed: KeyError: 'oops' \(job_of_user"
        ):
            failing.fit(**OPTIONS)
        statuses = ["completed", "completed", "failed"]
        until(lambda: sorted(RunFolder.open(p).metadata.status for p in (tmp_path / "output").iterdir()) == statuses)

    def test_ctrl_c_stops_the_run_everywhere_and_it_can_be_resumed(
        self, make_light_lab: MakeLightLab, tmp_path: Path, job: Any
    ) -> None:
        lab = make_light_lab("a")
        pressed = threading.Event()

        def press(event: Event) -> None:
            if isinstance(event, StepEvent) and event.step >= 3 and not pressed.is_set():
                pressed.set()
                _thread.interrupt_main()

        steps = {"max_steps": 80, "batch_size": 4, "threads": 1}  # more than half a minute, until it is to be quick
        given: dict[str, Any] = {"loss": job.slow_loss, "hosts": lab.hosts_file, "on_event": press}
        with pytest.raises(KeyboardInterrupt):
            NetworkTrainer(job.build, job.points(), output_dir=tmp_path / "output", **given).fit(**steps)
        (folder,) = (tmp_path / "output").iterdir()
        assert RunFolder.open(folder).metadata.status == "cancelled"
        inputs = collect(RunFolder.open(folder).plan())  # what a resumed run takes
        assert sorted(inputs.trees["inputs/user"].files) == ["helper_of_job.py", "job_of_user.py"]
        assert "job.json" in inputs.trees["inputs/dataset"].files
        until(lambda: ours(lab["a"]) == [])
        (tmp_path / "quick").touch()
        resumed = NetworkTrainer(job.build, job.points(), output_dir=tmp_path / "output", **given).fit(resume=folder)
        assert {e.step for e in RunFolder.open(folder).events() if isinstance(e, StepEvent)} == set(range(1, 81))
        local = LocalTrainer(job.build, job.points(), loss=job.loss, workers=1, output_dir=tmp_path / "local")
        assert all(torch.equal(a, b) for a, b in zip(local.fit(**steps).parameters(), resumed.parameters()))

    def test_a_script_brings_what_it_defines(self, make_light_lab: MakeLightLab, tmp_path: Path) -> None:
        lab = make_light_lab("a")
        (tmp_path / "script").mkdir()
        script = tmp_path / "script" / "my_training.py"
        script.write_text(SCRIPT.format(hosts=lab.hosts_file, output=tmp_path / "output"))
        command = [sys.executable, str(script)]
        environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120, cwd=tmp_path)
        assert done.stdout == "completed\n", done.stderr

    def test_a_machine_that_is_not_ready_is_named(self, make_light_lab: MakeLightLab, tmp_path: Path, job: Any) -> None:
        lab = make_light_lab("a")
        hosts = tmp_path / "hosts.json"
        hosts.write_text(lab.hosts_file.read_text().replace(sys.executable, "/no/python"))
        with pytest.raises(MusterError, match="^a: no Python there: /no/python") as caught:
            NetworkTrainer(job.build, job.points, hosts=hosts, output_dir=tmp_path / "output").fit()
        assert caught.value.exit_code == MachinesNotReady.exit_code
        assert list((tmp_path / "output").iterdir()) == []


def test_a_script_without_a_guard_is_refused(tmp_path: Path) -> None:
    script = tmp_path / "script" / "unguarded.py"
    script.parent.mkdir()
    source = SCRIPT.format(hosts="hosts.json", output="output").replace('if __name__ == "__main__":', "if True:")
    script.write_text(source)
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(script)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120, cwd=tmp_path)
    assert "model is defined in unguarded.py, which would train again wherever it is imported" in done.stderr


def test_an_object_and_its_name_are_both_taken(tmp_path: Path, job: ModuleType) -> None:
    for model in (job.build, "job_of_user:build", f"{tmp_path}/user/job_of_user.py:build", job.Net()):
        trainer = NetworkTrainer(model, TensorDataset(torch.ones(2, 2)), hosts=tmp_path / "none.json")
        with pytest.raises(BadInput, match="no such hosts file"):
            trainer.fit()
