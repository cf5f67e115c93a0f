"""The shipped demo from the hosts file to the transcript: the machines get code, sounds and model from here."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.muster_runs import REPOSITORY, Muster, ours
from tests.lab.fixtures import MakeLab, MakeLightLab
from training.tasks.outputs.predictions import BEFORE, FOLDER, NAME, read_predictions
from training.tasks.outputs.showcase import NAME as SHOWCASE
from training.tasks.outputs.showcase import read_showcase

SOUND = REPOSITORY / "examples" / "spoken_commands" / "test.csv"
SHORTER = (
    "--strategy",
    "allreduce",
    "--max-steps",
    "3",
    "--max-train-samples",
    "48",
    "--max-eval-samples",
    "8",
    "--batch-size",
    "4",
)


def train_and_transcribe(lab: Any, folder: Path) -> None:
    muster = Muster(folder, lab.hosts_file)
    hosts = ["--hosts", str(lab.hosts_file)]
    trained = muster.run(
        "distributed-train", "demo-scratch", *hosts, *SHORTER, "--threads", "1", "--eval-interval", "0"
    )
    assert trained.returncode == 0, trained.stderr
    assert "WER" in trained.stdout
    assert [ours(host) for host in lab] == [[] for _ in lab]
    (run,) = (folder / "output").iterdir()
    heard = {name: read_predictions(run / FOLDER / name) for name in (BEFORE, NAME)}
    assert [len(found) for found in heard.values()] == [8, 8]
    shown = read_showcase(run / FOLDER / SHOWCASE)
    assert shown is not None and shown.of == 8 and all(one.sound for one in shown.samples)
    sound = SOUND.parent / next(line for line in SOUND.read_text().split(",") if line.endswith(".opus"))
    written = muster.run("transcribe", "demo-scratch", str(sound), "--json")
    assert written.returncode == 0, written.stderr
    said = json.loads(written.stdout)
    assert folder / said["model"] == run / "model"
    assert [(each["file"], each["error"]) for each in said["transcripts"]] == [(str(sound), "")]


@pytest.mark.lab
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_hosts(make_lab: MakeLab, tmp_path: Path) -> None:
    train_and_transcribe(make_lab("a", "b"), tmp_path)


@pytest.mark.skipif(
    sys.platform == "linux" and os.geteuid() == 0, reason="the same run goes over the lab's network here"
)
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_hosts_without_root(make_light_lab: MakeLightLab, tmp_path: Path) -> None:
    train_and_transcribe(make_light_lab("a", "b"), tmp_path)
