"""All machines of a run lose power at once: it goes on from the newest snapshot that all of them have."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.muster_runs import Muster
from tests.lab.fixtures import MakeLightLab
from tests.lab.light import LightHost
from training.records.events import StepEvent, WarningEvent

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
INTERVAL = 4


def damage_newest(host: LightHost) -> None:
    """Cut a file of the newest snapshot short, as a disk does that had not written all of it, and leave a half of one
    that was being written."""
    (member,) = host.files.glob(".cache/muster/runs/*/*/checkpoints/member-*")
    newest = max(member.glob("step-*"))
    largest = max(newest.iterdir(), key=lambda file: file.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:-1])
    (member / ".writing-step-00000012").mkdir()


@pytest.mark.parametrize("damaged", [False, True])
def test_at_most_an_interval_is_lost(make_light_lab: MakeLightLab, tmp_path: Path, damaged: bool) -> None:
    lab = make_light_lab("a", "b", "c")
    muster = Muster(tmp_path, lab.hosts_file, gate=tmp_path / "gate")
    muster.let_pass(10)
    options = ["--max-steps", "14", "--snapshot-interval", str(INTERVAL), "--snapshot-keep", "2"]
    run_id = muster.detach(*options, "--strategy", "diloco", "--sync-interval", "2")
    muster.until_step(run_id, 10, members=3)
    muster.kill_supervision(run_id)
    for host in lab:
        host.kill()
    if damaged:
        damage_newest(lab["b"])
    for host in lab:
        host.boot()
    muster.let_pass(14)
    done = muster.run("distributed-train", "--resume", run_id)
    assert done.returncode == 0, done.stderr
    for rank in range(3):
        steps = [event.step for event in muster.events(run_id) if isinstance(event, StepEvent) and event.member == rank]
        again = steps[steps.index(10) + 1 :]
        assert again == list(range(5 if damaged else 9, 15)), (rank, steps)
    warnings = [event.message for event in muster.events(run_id) if isinstance(event, WarningEvent)]
    assert any("it is skipped" in line for line in warnings) == damaged, warnings
    assert any(f"{6 if damaged else 2} steps are repeated" in line for line in warnings), warnings
    assert muster.metadata(run_id)["status"] == "completed"
