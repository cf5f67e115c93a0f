"""Runs of real processes: the Python face, and what happens when one of them dies."""

from __future__ import annotations

import os
import pickle
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import pytest
import torch
from local_runs import Run
from torch import nn
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.data import DataLoader

from app.cli.runs.listing import _cells
from profiles.errors import BadInput, ExitCode, RunFailed, StoppedByUser
from profiles.files.resolve import profile_from_options
from profiles.installation import RUNS_FOLDER
from profiles.schema import Profile
from tests.distributed.muster_runs import JOB
from tests.lab.processes import is_dead, line_of
from tests.preloaded.python import python_itself
from tests.waiting import until
from training.local_trainer import CALLER, OBJECTS, LocalTrainer, write_objects
from training.records.events import ErrorEvent, Event, MemberEvent, SnapshotEvent, StepEvent, SyncEvent, WarningEvent
from training.records.run_folder import RunFolder
from training.records.run_index import other_folders
from training.records.runs import find_model, list_runs
from training.run.local_plan import plan_local_run
from training.run.outcome import RunOutcome
from training.run.requests.request_book import leave_request
from training.tasks.custom import CustomJob

pytestmark = pytest.mark.slow

SPIRALS = Path(__file__).parents[2] / "examples" / "custom" / "spirals.py"


@pytest.mark.parametrize("extra", [lambda: 1, threading.Lock(), weight_norm(nn.Linear(1, 1))])
def test_what_no_worker_can_get_is_refused_in_one_line(extra: Any, tmp_path: Path) -> None:
    model = nn.Linear(4, 1)
    model.extra = extra  # as people keep an activation, or a lock
    with pytest.raises(BadInput, match="^the model or .* cannot reach the workers: .*module level.*") as refused:
        write_objects(CustomJob(model, pairs()), tmp_path)
    assert "\n" not in str(refused.value)


class Typed(nn.Linear):
    """As typed into a notebook."""


@pytest.mark.parametrize("file", [None, "<stdin>"])
def test_what_an_interactive_session_defines_is_refused_and_what_it_imports_is_not(
    file: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = ModuleType("__main__")
    session.__file__ = file
    monkeypatch.setitem(sys.modules, "__main__", session)
    write_objects(CustomJob(Typed(4, 1), pairs(), loss=nn.functional.mse_loss), tmp_path)
    assert "init_main_from_path" not in pickle.loads((tmp_path / CALLER).read_bytes())
    monkeypatch.setattr(Typed, "__module__", "__main__")
    with pytest.raises(BadInput, match="Typed is defined in an interactive session: .*py file"):
        write_objects(CustomJob(Typed(4, 1), pairs()), tmp_path)


def pairs() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(64, 4, generator=generator)
    return list(zip(inputs, inputs.sum(1, keepdim=True), strict=True))


@pytest.fixture
def started_cold(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes are started as a user's are; in the other tests they are copies of a preloaded one."""
    monkeypatch.setattr(sys, "executable", python_itself())


def test_fit_returns_the_trained_model_and_tells_how_far_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = LocalTrainer(nn.Linear(4, 1), pairs(), pairs(), loss=nn.functional.mse_loss, output_dir=tmp_path)
    options: dict[str, Any] = {"streaming_diloco.sync_interval": 10, "streaming_diloco.merge": "rda"}
    model = trainer.fit("streaming_diloco", max_steps=120, learning_rate=0.05, batch_size=8, **options)
    assert trainer.outcome is not None
    assert trainer.outcome.metrics["after"]["validation"]["loss"] < 0.1
    assert nn.functional.mse_loss(model(torch.ones(1, 4)), torch.tensor([[4.0]])).item() < 1.0
    assert tmp_path in other_folders(RUNS_FOLDER)  # so `runs list` has the run, wherever the script was started
    told = capsys.readouterr().err
    assert all(part in told for part in ("training of 120 steps", "step 120/120, loss ", "validation: ", "completed"))


class Planned(LocalTrainer):
    """Says how many workers it would start."""

    def _run(self, profile: Profile, job: CustomJob) -> RunOutcome:
        raise RunFailed(f"{profile.run.workers} workers")


@pytest.mark.parametrize(("made", "fitted", "workers"), [({}, {}, 2), ({"workers": 3}, {}, 3), ({}, {"workers": 4}, 4)])
def test_workers_may_be_given_where_it_is_made_or_to_fit(
    made: dict[str, int], fitted: dict[str, int], workers: int
) -> None:
    with pytest.raises(RunFailed, match=f"{workers} workers"):
        Planned(nn.Linear(4, 1), pairs(), loss=nn.functional.mse_loss, **made).fit(**fitted)


def test_a_loader_says_how_large_batches_are_unless_fit_does() -> None:
    class Sized(LocalTrainer):
        def _run(self, profile: Profile, job: CustomJob) -> RunOutcome:
            sizes = profile.training.batch_size, profile.evaluation.eval_batch_size
            raise RunFailed(f"{sizes} of {type(job.train).__name__} and {len(job.validation)}")

    loaders = [DataLoader(pairs(), batch_size=size, shuffle=size > 4) for size in (16, 4)]
    with pytest.raises(RunFailed, match=r"\(16, 4\) of list and 64"):
        Sized(nn.Linear(4, 1), *loaders, loss=nn.functional.mse_loss).fit()
    with pytest.raises(RunFailed, match=r"\(8, 4\)"):
        Sized(nn.Linear(4, 1), *loaders, loss=nn.functional.mse_loss).fit(batch_size=8)


def test_a_fit_that_broke_off_goes_on_with_the_losses_of_an_uninterrupted_one(tmp_path: Path) -> None:
    events: list[Event] = []

    def break_off(event: Event) -> None:
        if isinstance(event, StepEvent) and event.step == 50:  # all have met there, so their first ones are written
            raise KeyError("a fault of the script")

    options: dict[str, Any] = {"strategy": "diloco", "max_steps": 60, "sync_interval": 10, "snapshot_interval": 20}

    def trainer(on_event: Callable[[Event], None]) -> LocalTrainer:
        model = nn.Linear(4, 1)
        model.load_state_dict({"weight": torch.zeros(1, 4), "bias": torch.zeros(1)})
        loss = nn.functional.mse_loss
        return LocalTrainer(model, pairs(), loss=loss, output_dir=tmp_path, on_event=on_event)

    whole = trainer(events.append)
    whole.fit(**options)
    with pytest.raises(KeyError):
        trainer(break_off).fit(**options)
    broken = max(tmp_path.iterdir(), key=lambda run: run.stat().st_ctime_ns)
    assert RunFolder.open(broken).metadata.status == "failed"
    again: list[Event] = []
    rest = trainer(again.append)
    rest.fit(resume=broken.name[:20])
    resumed = losses(again)
    assert len(resumed) in (40, 80)  # from step 20 or 40, of two members
    assert resumed == {key: loss for key, loss in losses(events).items() if key in resumed}
    assert rest.outcome is not None
    assert rest.outcome.metrics["attempts"] == 2


def losses(events: list[Event]) -> dict[tuple[int | None, int], float]:
    return {(event.member, event.step): event.loss for event in events if isinstance(event, StepEvent)}


def test_a_resumed_fit_takes_no_other_options_and_no_run_of_others(tmp_path: Path) -> None:
    trainer = LocalTrainer(nn.Linear(4, 1), pairs(), loss=nn.functional.mse_loss, output_dir=tmp_path)
    with pytest.raises(BadInput, match="no other strategy"):
        trainer.fit("diloco", resume="20261121", max_steps=3)
    with pytest.raises(BadInput, match="no run '20261121'"):
        trainer.fit(resume="20261121")
    plan = plan_local_run(profile_from_options("spirals", {"task": "custom", "model_path": "a:b"}), 1)
    with RunFolder.create(tmp_path, plan, []) as folder:
        folder.append(SnapshotEvent(step=3, path="checkpoints/member-0", bytes=1, seconds=0.1))
    with pytest.raises(BadInput, match="is of profile 'spirals', not of a LocalTrainer"):
        trainer.fit(resume=folder.path)


def test_views_of_one_tensor_travel_with_it_once(tmp_path: Path) -> None:
    write_objects(CustomJob(nn.Linear(2, 2), list(torch.zeros(1000, 250))), tmp_path)  # 1 MB
    assert (tmp_path / OBJECTS).stat().st_size < 2_000_000
    written = torch.load(tmp_path / OBJECTS, weights_only=False)  # objects of this test, not only weights
    assert len(written.train) == 1000


def test_an_unknown_option_is_refused(tmp_path: Path) -> None:
    trainer = LocalTrainer(nn.Linear(4, 1), pairs(), loss=nn.functional.mse_loss, output_dir=tmp_path)
    with pytest.raises(BadInput, match="learning_rate"):
        trainer.fit(learning_rat=0.1)


WIDE = "nn.Sequential(nn.Linear(2, 4096), nn.Linear(4096, 2))"
"""More numbers than engine nccl sends over the mesh's links."""


@pytest.mark.parametrize("engine", ["mesh", "nccl"])
def test_the_others_go_on_when_a_worker_is_killed(tmp_path: Path, engine: str) -> None:
    job, gate = tmp_path / "job.py", tmp_path / "gate"
    job.write_text(JOB.format(pause=0.0, gate=str(gate), model=WIDE))
    gate.write_text("10")
    options = {"max_steps": 30, "strategy": "allreduce", "engine": engine}
    run = Run(tmp_path / "output", workers=3, model_path=f"{job}:build", **options)
    until(lambda: run.step() == 10)
    os.kill(run.pids[0], signal.SIGKILL)
    gate.write_text("30")
    run.end()
    assert run.outcome.status == "completed"
    assert run.outcome.metrics["lost_members"] == [0]
    assert (run.outcome.run_dir / "model" / "model.safetensors").exists()
    last = [e for e in run.events if isinstance(e, SyncEvent)][-1]
    assert last.members == [1, 2]


def test_a_run_goes_on_when_its_coordinator_is_killed(tmp_path: Path) -> None:
    run = Run(tmp_path, max_steps=100_000, strategy="allreduce")
    until(lambda: run.step() > 10)
    coordinator = next(
        child
        for child in psutil.Process().children(True)
        if not is_dead(child.pid) and "training.exchange.group.coordinator_main" in line_of(child.pid)
    )
    coordinator.kill()
    until(lambda: any("started again" in e.message for e in run.events if isinstance(e, WarningEvent)))
    began = run.step()
    until(lambda: run.step() > began + 100)
    run.run.request_stop("test")
    run.end()
    assert run.outcome.exit_code == ExitCode.STOPPED
    assert not [e for e in run.events if isinstance(e, MemberEvent) and e.status == "lost"]


def test_a_stop_comes_after_the_same_step_and_loses_nothing(tmp_path: Path) -> None:
    run = Run(tmp_path, max_steps=100_000, strategy="diloco", sync_interval=20)
    until(lambda: run.step() > 30)
    run.run.request_stop("test")
    run.end()
    assert run.outcome.exit_code == ExitCode.STOPPED
    newest = {e.member: e.step for e in run.events if isinstance(e, SnapshotEvent)}
    assert set(newest) == {0, 1}
    assert set(newest.values()) == {run.step()}
    assert run.outcome.message == f"the snapshot of step {run.step()} is kept, 0 steps lost"


def test_a_run_that_fails_before_its_first_step_says_so_in_its_folder(tmp_path: Path) -> None:
    run = Run(tmp_path, model_path="nowhere.nothing:build")
    run.end()
    assert run.outcome.exit_code == ExitCode.BAD_INPUT
    assert "nowhere" in run.outcome.message
    assert RunFolder.open(run.outcome.run_dir).metadata.error_message == run.outcome.message


def test_both_engines_give_the_same_bits(tmp_path: Path) -> None:
    job, hashes = tmp_path / "job.py", []
    job.write_text(JOB.format(pause=0.0, gate="", model=WIDE.replace("4096", "16384")))
    options = {"max_steps": 40, "strategy": "diloco", "sync_interval": 10, "codec": "mxfp4"}
    for engine in ("mesh", "nccl"):
        run = Run(tmp_path, model_path=f"{job}:build", engine=engine, **options)
        run.end()
        assert run.outcome.status == "completed", run.outcome.message
        hashes.append([e.weight_hash for e in run.events if isinstance(e, SyncEvent) and e.member == 0])
    assert len(hashes[0]) == 4
    assert hashes[0] == hashes[1]


def test_a_fit_obeys_the_requests_that_others_leave_in_its_folder(tmp_path: Path) -> None:
    asked, cells = list[str](), list[dict[str, str]]()

    def ask_once(event: Event) -> None:
        if isinstance(event, StepEvent) and not asked:
            (path,) = tmp_path.glob("*-local")
            (run,) = list_runs(tmp_path)
            cells.append(_cells(run))
            asked.append(leave_request(path, "stop"))

    trainer = LocalTrainer(
        nn.Linear(4, 1), pairs(), loss=nn.functional.mse_loss, output_dir=tmp_path, workers=1, on_event=ask_once
    )
    with pytest.raises(StoppedByUser, match="0 steps lost"):
        trainer.fit(max_steps=1_000_000)
    ((profile, trained),) = [(row["profile"], row["trained"]) for row in cells]
    assert re.fullmatch(r"local( \(.*\))?", profile) and re.fullmatch(r"\d+:\d\d", trained)  # while it trains
    with pytest.raises(BadInput, match=r"resume it with: fit\(resume="):
        find_model(tmp_path, "local")


@pytest.mark.usefixtures("started_cold")
def test_a_failed_fit_says_why(tmp_path: Path) -> None:
    poisoned = [(x, y * float("nan")) for x, y in pairs()]
    trainer = LocalTrainer(nn.Linear(4, 1), poisoned, loss=nn.functional.mse_loss, output_dir=tmp_path, workers=1)
    with pytest.raises(RunFailed, match="nan in step 1"):
        trainer.fit(max_steps=5)
    assert trainer.outcome is not None
    errors = [e for e in RunFolder.open(trainer.outcome.run_dir).events() if isinstance(e, ErrorEvent)]
    assert len(errors) == 1


def test_ctrl_c_during_fit_loses_no_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What nothing catches ends the script with one line and the exit code of Ctrl-C, without a traceback."""
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    steps: list[int] = []

    def interrupt(event: Event) -> None:
        if isinstance(event, StepEvent):
            steps.append(event.step)
            if (event.member, event.step) == (0, 20):  # once: a second press ends the run without a snapshot
                os.kill(os.getpid(), signal.SIGINT)

    loss = nn.functional.mse_loss
    trainer = LocalTrainer(nn.Linear(4, 1), pairs(), loss=loss, output_dir=tmp_path, on_event=interrupt)
    with pytest.raises(StoppedByUser, match="0 steps lost") as stopped:
        trainer.fit(strategy="diloco", max_steps=100_000, sync_interval=10, snapshot_interval=0)
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        sys.excepthook(stopped.type, stopped.value, stopped.tb)
    assert ended.value.code == 130 and capsys.readouterr().err == f"{stopped.value}\n"
    assert trainer.outcome is not None and trainer.outcome.metrics["kept_step"] == max(steps)


RANDOM_JOB = """
import random
import numpy as np, torch
from torch import nn

class Noisy:
    def __len__(self): return 64
    def __getitem__(self, index):
        x = torch.full((4,), index / 64) + 0.1 * torch.randn(4) + 0.1 * float(np.random.randn())
        return x, x.sum(0, keepdim=True) + 0.1 * random.random()

def build():
    model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Dropout(0.3), nn.Linear(16, 1))
    return model, Noisy(), Noisy(), nn.functional.mse_loss
"""


def test_two_members_with_random_data_and_dropout_go_on_exactly(tmp_path: Path) -> None:
    job = tmp_path / "random_job.py"
    job.write_text(RANDOM_JOB)
    options = {"model_path": f"{job}:build", "max_steps": 24, "snapshot_interval": 12, "strategy": "allreduce"}
    whole = Run(tmp_path / "whole", **options, eval_interval=5)
    whole.end()
    rest = Run(tmp_path / "rest", whole.outcome.run_dir / "checkpoints", **options, eval_interval=5)
    rest.end()
    assert [run.outcome.status for run in (whole, rest)] == ["completed"] * 2
    losses = [
        {(e.member, e.step): e.loss for e in run.events if isinstance(e, StepEvent) and e.step > 12}
        for run in (whole, rest)
    ]
    assert len(losses[0]) == 24
    assert losses[0] == losses[1]
    assert min(e.step for e in rest.events if isinstance(e, StepEvent)) == 13


def test_a_script_without_a_guard_is_told_of_it(tmp_path: Path) -> None:
    script = tmp_path / "script" / "script.py"
    script.parent.mkdir()
    script.write_text(
        "import torch\nfrom training.local_trainer import LocalTrainer\ndata = [(torch.ones(2), torch.ones(1))] * 4\n"
        "LocalTrainer(torch.nn.Linear(2, 1), data, loss=torch.nn.functional.mse_loss, workers=1).fit(max_steps=1)\n"
    )
    where = {**os.environ, "PYTHONPATH": str(SPIRALS.parents[2])}
    done = subprocess.run([sys.executable, script], cwd=tmp_path, env=where, capture_output=True, text=True, timeout=60)
    assert done.returncode and 'put what calls fit() under: if __name__ == "__main__":' in done.stderr
