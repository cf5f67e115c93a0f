"""A disk that fills up while a run goes on: one line that says whose and what to do, nothing half-written."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.distributed.muster_runs import Muster, ours
from tests.lab.fixtures import MakeLab
from tests.lab.lab import Lab
from tests.lab.spec import HostSpec
from training.records.events import WarningEvent
from training.records.run_folder import RunFolder

pytestmark = [pytest.mark.lab, pytest.mark.slow, pytest.mark.timeout(240)]

FULL_AT, SNAPSHOT_AT, LAST = 7, 10, 20
ROOM_MB = 260
"""More than the check before a run asks for."""


@pytest.fixture
def small_output(tmp_path: Path) -> Iterator[Path]:
    """A folder for runs on a disk of its own, of 3 MB."""
    output = tmp_path / "output"
    output.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(output)], check=True)
    yield output
    subprocess.run(["umount", "-l", str(output)], check=True)


def begin(lab: Lab, folder: Path) -> tuple[Muster, str]:
    """Start a run that stands still after FULL_AT steps, before its first snapshot."""
    muster = Muster(folder, lab.hosts_file, gate=lab.folder / "gate")
    muster.let_pass(FULL_AT)
    run_id = muster.detach("--max-steps", str(LAST), "--snapshot-interval", str(SNAPSHOT_AT))
    muster.until_step(run_id, FULL_AT, members=2)
    return muster, run_id


def fill(path: Path) -> None:
    """Write until the disk takes no more."""
    subprocess.run(["dd", "if=/dev/zero", f"of={path}", "bs=4k"], capture_output=True)


def test_a_machine_whose_disk_is_full_is_named_and_trains_on(make_lab: MakeLab, tmp_path: Path) -> None:
    lab = make_lab("a", HostSpec("b", home_mb=ROOM_MB))
    muster, run_id = begin(lab, tmp_path)
    lab["b"].run(["dd", "if=/dev/zero", "of=/root/fill", "bs=1M"])
    muster.let_pass(LAST)
    ended = muster.wait_for_end(run_id)
    assert ended.returncode == 0, ended.stderr
    events = RunFolder.open(muster.folder_of(run_id)).events()
    said = next(event.message for event in events if isinstance(event, WarningEvent) and event.member == 1)
    assert said.startswith(f"b: the snapshot of step {SNAPSHOT_AT} cannot be written to ")
    assert said.endswith("the disk is full (free some space); training goes on, and no snapshot was written yet")
    assert [muster.losses(run_id, rank)[-1][0] for rank in (0, 1)] == [LAST, LAST]
    assert lab["b"].run(["find", "/root/.cache/muster/runs", "-path", "*checkpoints/*", "-type", "f"]).stdout == ""
    assert [ours(host) for host in lab] == [[], []]


def test_where_the_run_is_written_down_the_disk_is_full(make_lab: MakeLab, tmp_path: Path, small_output: Path) -> None:
    lab = make_lab("a", "b")
    muster, run_id = begin(lab, tmp_path)
    fill(small_output / "fill")
    muster.let_pass(LAST)
    ended = muster.wait_for_end(run_id)
    assert ended.returncode == 1 and "Traceback" not in ended.stderr
    error, hint = ended.stderr.strip().splitlines()[-2:]
    assert error.startswith("error: ") and error.endswith(": the disk is full") and run_id in error
    assert hint.startswith("hint: ")  # that space is to be freed can only be read where the disk still took it
    assert [ours(host) for host in lab] == [[], []]
    folder = RunFolder.open(muster.folder_of(run_id))  # whole, as it was last written
    assert not folder.model.exists() and folder.plan().run_id == run_id
    assert not (folder.path / "completed").exists()
    (small_output / "fill").unlink()
    resumed = muster.run("distributed-train", "--resume", run_id)
    assert resumed.returncode == 0, resumed.stderr
    steps = [step for step, _ in muster.losses(run_id)]
    assert steps == sorted(set(steps)) and steps[-1] == LAST  # none is repeated
