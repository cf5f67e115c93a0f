"""The machine that started a run loses power: the others train on, and it finds the run again when it is back."""

from __future__ import annotations

import contextlib
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from distributed.hosts.file import save_hosts
from distributed.hosts.schema import Machine
from tests.distributed.muster_runs import Muster, ours
from tests.lab.fixtures import MakeLightLab
from tests.lab.keeper import MARK
from tests.lab.light import LightLab
from tests.lab.terminal import CLI
from tests.waiting import until
from training.records.events import ElectionEvent, StepEvent

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def lose_power(muster: Muster, run_id: str) -> None:
    """Kill everything of a run on the machine that started it: supervisor, coordinator, agent and worker."""
    muster.kill_supervision(run_id)
    killed: list[tuple[bool, psutil.Process]] = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            words = process.cmdline()
            if run_id in " ".join(words) and MARK not in process.environ():
                killed.append((any(word.endswith("agent.py") for word in words), process))
    for _, process in sorted(killed, key=lambda entry: entry[0]):  # agents last: a worker is to see none of them end
        with contextlib.suppress(psutil.Error):
            process.kill()


def trained(lab: LightLab, run_id: str) -> list[bool]:
    """Whether each host has the model."""
    return [any(host.files.glob(f".cache/muster/runs/{run_id}/*/model/model.safetensors")) for host in lab]


def test_the_others_train_to_the_end_and_keep_the_model_for_it(make_light_lab: MakeLightLab, tmp_path: Path) -> None:
    lab = make_light_lab("b", "c")
    hosts = lab.hosts()
    starter = Machine(name="a", address="localhost", python=sys.executable)
    save_hosts(hosts.model_copy(update={"machines": (starter, *hosts.machines)}), lab.hosts_file)
    muster = Muster(tmp_path, lab.hosts_file, gate=tmp_path / "gate")
    muster.let_pass(5)
    run_id = muster.detach("--max-steps", "12", "--lease", "4")
    muster.until_step(run_id, 5, members=3)
    lose_power(muster, run_id)
    with ThreadPoolExecutor(1) as pool:
        watching = pool.submit(lab["b"].run, [sys.executable, CLI, "attach", "--output", "none"], timeout=300.0)
        muster.let_pass(12)
        until(lambda: trained(lab, run_id) == [True, True], 300.0)
        seen = watching.result()
    assert seen.returncode == 0 and "from now on" in seen.stderr, seen.stderr
    assert muster.metadata(run_id)["status"] == "running"  # its folder knows of nothing
    ended = muster.wait_for_end(run_id)
    assert ended.returncode == 0, ended.stderr
    events = muster.events(run_id)
    for member in (1, 2):
        steps = [e.step for e in events if isinstance(e, StepEvent) and e.member == member]
        assert steps == sorted(set(steps)) and steps[0] == 1 and steps[-1] == 12
    assert any(isinstance(event, ElectionEvent) for event in events)
    assert muster.metadata(run_id)["metrics"]["lost_members"] == [0]
    assert (muster.folder_of(run_id) / "model" / "model.safetensors").is_file()
    until(lambda: [ours(host) for host in lab] == [[], []])
    assert [list(host.files.glob(".cache/muster/runs/*")) for host in lab] == [[], []]
