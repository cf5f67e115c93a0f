"""A model on three hosts whose run goes on without one of them, by itself and when it is resumed."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest
import torch

from tests.distributed.muster_runs import ours
from tests.distributed.test_lab_pipeline import Pipeline
from tests.lab.fixtures import MakeLightLab
from tests.lab.processes import signal_all
from tests.waiting import until
from training.records.events import StepEvent, WarningEvent
from training.records.plan import read_plan

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
STEPS = 60


def test_a_run_goes_on_without_a_host_and_then_without_another(make_light_lab: MakeLightLab, tmp_path: Path) -> None:
    lab = make_light_lab("a", "b", "c")
    muster = Pipeline(tmp_path, lab, STEPS)
    whole = muster.whole()
    muster.let_pass(5)
    run_id = muster.detach(*muster.options, "--layout", "pipeline", "--snapshot-interval", "3")
    muster.until_step(run_id, 5)
    copies = [f".cache/muster/runs/{run_id}/{rank}/checkpoints/member-0-stage-2/step-00000003" for rank in (0, 2)]
    until(lambda: all((lab[name].files / copy).is_dir() for name, copy in zip("ac", copies)))
    muster.let_pass(4)
    killed = time.time()
    signal_all(lab["b"].pids("training.workers.worker"), signal.SIGKILL)
    until(lambda: muster.losses(run_id)[-1][0] >= 7)  # from the snapshot of step 3 on
    again = next(e for e in muster.events(run_id) if isinstance(e, StepEvent) and e.step == 4 and e.time > killed)
    print(f"{again.time - killed:.1f} s from the loss to the end of the next step")
    assert any("b is lost; the run goes on with a, c" in e.message for e in muster.events(run_id)
               if isinstance(e, WarningEvent))  # fmt: skip
    assert {device.machine for device in read_plan(muster.folder_of(run_id) / "plan.json").members[0].devices} == {
        *"ac"
    }
    with muster.popen("stop", run_id) as stop:
        muster.until_request(run_id, "stop")
        muster.let_pass(STEPS)
        assert "0 steps lost" in stop.communicate(timeout=120)[0]
    lab["c"].stop_sshd()
    resumed = muster.run("distributed-train", "--resume", run_id, "--allow-missing")
    assert resumed.returncode == 0, resumed.stderr
    expected = dict(muster.losses(whole))
    for step, loss in muster.losses(run_id):
        assert loss == pytest.approx(expected[step], rel=1e-6, abs=1e-7)  # the loss of float32 logits is no more exact
    assert muster.losses(run_id)[-1][0] == STEPS
    weights, wanted = muster.weights(run_id), muster.weights(whole)
    assert weights.keys() == wanted.keys()
    for name, weight in weights.items():
        torch.testing.assert_close(weight, wanted[name], rtol=0, atol=1e-6)
    assert not [path for name in "ab" for path in lab[name].files.glob(".cache/muster/runs/*")]
    lab["c"].start_sshd()
    until(lambda: [ours(host) for host in lab] == [[], [], []])
