"""A model whose stages lie on several hosts, and whose hosts go one by one, through the real command line."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import safetensors.torch
import torch

from tests.distributed.muster_runs import Muster, ours
from tests.lab.capture import Capture
from tests.lab.fixtures import MakeLab
from tests.lab.lab import Lab
from tests.lab.light import LightLab
from tests.lab.processes import signal_all
from tests.waiting import until
from training.layouts.messages import MAGIC
from training.records.events import ErrorEvent, StepEvent, WarningEvent
from training.records.plan import read_plan

pytestmark = [pytest.mark.lab, pytest.mark.slow, pytest.mark.timeout(600)]

STEPS, SNAPSHOT, SAMPLES, WORDS, WIDTH = 30, 12, 12, 512, 32
JOB = """
import itertools
import time
import torch
from torch import nn
from training.tasks.custom import CustomJob

class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(4, {width})
        block = lambda: nn.Sequential(nn.LayerNorm({width}), nn.Linear({width}, {width}), nn.Tanh())
        self.blocks = nn.ModuleList(block() for _ in range(6))
        self.leave = nn.Linear({width}, 1)

    def forward(self, inputs):
        hidden = self.enter(inputs)
        for block in self.blocks:
            hidden = block(hidden)
        return self.leave(hidden)

def build():
    torch.manual_seed(3)
    inputs = torch.randn(96, {words}, 4)
    pairs = list(zip(inputs, inputs.sum(2, keepdim=True).sin(), strict=True))
    return CustomJob(Deep(), pairs, pairs[:12], loss)

micro_batches = itertools.count()

def loss(outputs, wanted):
    if outputs.requires_grad:
        step = next(micro_batches) // {in_step} + 1
        while step > int(open({gate!r}).read() or 0):
            time.sleep(0.01)
    return nn.functional.mse_loss(outputs, wanted)
"""


class Pipeline(Muster):
    """Trains a model of six blocks; the steps that may pass are counted from a worker's start, in micro-batches, of
    which a step has two for each stage."""

    def __init__(self, folder: Path, lab: Lab | LightLab, steps: int, stages: int = 3) -> None:
        super().__init__(folder, lab.hosts_file, gate=lab.folder / "gate")
        self.steps = steps
        self.options = ("--max-steps", str(steps), "--batch-size", str(SAMPLES), "--max-grad-norm", "0.5",
                        "--eval-interval", "1000")  # the bytes that are counted are those of steps  # fmt: skip
        self.job.write_text(JOB.format(width=WIDTH, words=WORDS, gate=str(self.gate), in_step=2 * stages))

    def weights(self, run_id: str) -> dict[str, torch.Tensor]:
        return safetensors.torch.load_file(self.folder_of(run_id) / "model" / "model.safetensors")

    def whole(self) -> str:
        """Train the same in one process of this machine; return the run."""
        words = self.train(*self.options)
        words[2:4] = ["--local", "1"]
        self.let_pass(6 * self.steps)
        done = self.run(*words)
        assert done.returncode == 0, done.stderr
        (folder,) = (self.folder / "output").iterdir()
        return folder.name[:20]

    def goes_on(self, run_id: str, steps: int) -> int:
        """Resume a run, which then waits after some steps; return the last one."""
        self.let_pass(steps)
        newest = max(step for step, _ in self.losses(run_id))
        resumed = self.run("distributed-train", "--resume", run_id, "--detach")
        assert resumed.returncode == 0, resumed.stderr
        self.until_step(run_id, newest + steps)
        return newest + steps

    def stop_with_snapshot(self, run_id: str) -> None:
        """Stop a run that waits; its next attempt waits nowhere."""
        assert "0 steps lost" in self.stop(run_id).stdout
        self.let_pass(self.steps)

    def assert_same_as(self, whole: str, run_id: str) -> None:
        """Compare a run with one of the whole model: its losses, those of repeated steps too, and its weights."""
        expected = dict(self.losses(whole))
        for step, loss in self.losses(run_id):
            assert loss == pytest.approx(expected[step], rel=1e-6, abs=1e-7)  # float32 logits give it no more exactly
        assert {step for step, _ in self.losses(run_id)} == expected.keys()
        weights, wanted = self.weights(run_id), self.weights(whole)
        assert weights.keys() == wanted.keys()
        for name, weight in weights.items():
            torch.testing.assert_close(weight, wanted[name], rtol=0, atol=1e-6)


@pytest.fixture
def pipeline(tmp_path: Path, make_lab: MakeLab) -> Iterator[tuple[Lab, Pipeline]]:
    lab = make_lab("a", "b", "c")
    muster = Pipeline(tmp_path, lab, STEPS)
    yield lab, muster
    muster.leave_nothing()


def test_three_hosts_hold_one_model_through_a_stop_and_two_losses(pipeline: tuple[Lab, Pipeline]) -> None:
    """One host is lost and the run goes on by itself; another is away when it is resumed."""
    lab, muster = pipeline
    whole = muster.whole()
    muster.let_pass(3)
    run_id = muster.detach(*muster.options, "--layout", "pipeline", "--snapshot-interval", str(SNAPSHOT))
    muster.until_step(run_id, 3)
    muster.stop_with_snapshot(run_id)
    with Capture(lab["b"]._cable) as wire:
        step = muster.goes_on(run_id, 4)
    assert wire.holds(b"SSH-2.0")
    assert not wire.holds(MAGIC)  # with which every message of a stage begins
    as_much_is_sent_as_theory_says(lab, muster, run_id, step)
    without_the_middle_one_it_goes_on(lab, muster, run_id)
    muster.stop_with_snapshot(run_id)
    lab["c"].stop_sshd()
    resumed = muster.run("distributed-train", "--resume", run_id, "--allow-missing")
    assert resumed.returncode == 0, resumed.stderr
    muster.assert_same_as(whole, run_id)
    assert not [path for name in "ab" for path in lab[name].files.glob(".cache/muster/runs/*")]
    lab["c"].start_sshd()
    until(lambda: [ours(host) for host in lab] == [[], [], []])


def as_much_is_sent_as_theory_says(lab: Lab, muster: Pipeline, run_id: str, step: int) -> None:
    """Let ten steps pass, with the snapshot among them, and count the bytes that the middle host sends."""
    sent = lab["b"].traffic().sent
    muster.let_pass(14)
    muster.until_step(run_id, step + 10)
    copy = f".cache/muster/runs/{run_id}/{{}}/checkpoints/member-0-stage-2/step-{SNAPSHOT:08}"
    until(lambda: all((lab[name].files / copy.format(rank)).is_dir() for name, rank in (("a", 0), ("c", 2))))
    sent = lab["b"].traffic().sent - sent
    activations_and_gradients = 2 * 4 * SAMPLES * WORDS * WIDTH
    copies = 2 * 3 * 4 * 2 * (WIDTH + 3) * WIDTH  # of two blocks and their moments, to both others
    expected = 10 * activations_and_gradients + copies
    assert sent == pytest.approx(expected, rel=0.02)  # what stages send ahead of the next step is less


def without_the_middle_one_it_goes_on(lab: Lab, muster: Pipeline, run_id: str) -> None:
    """Kill the worker of the middle host, and let the others repeat a step at least."""
    killed = time.time()
    signal_all(lab["b"].pids("training.workers.worker"), signal.SIGKILL)
    muster.let_pass(4)

    def repeated() -> list[StepEvent]:
        return [e for e in muster.events(run_id) if isinstance(e, StepEvent) and e.time > killed]

    until(repeated)
    assert repeated()[0].step == SNAPSHOT + 1
    print(f"{repeated()[0].time - killed:.1f} s from the loss to the end of the next step")
    events = muster.events(run_id)
    warned = [event.message for event in events if isinstance(event, WarningEvent)]
    assert any(f"b is lost; the run goes on with a, c from the snapshot of step {SNAPSHOT}" in line for line in warned)
    errors = [event for event in events if isinstance(event, ErrorEvent)]
    assert errors and any("b-stage-2" in event.message for event in errors)
    assert max(event.time for event in errors) - killed < 30.0  # 0.03 s on a machine that has time
    devices = read_plan(muster.folder_of(run_id) / "plan.json").members[0].devices
    assert {device.machine for device in devices} == {*"ac"}
