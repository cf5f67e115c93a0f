"""Speech recognition from the hosts file to the transcript: the machines get code, sounds and model from here."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.muster_runs import Muster, ours
from tests.lab.fixtures import MakeLab, MakeLightLab

sys.path.append(str(Path(__file__).parents[1] / "tasks"))


def train_and_transcribe(lab: Any, folder: Path) -> None:
    from tiny_speech import tiny_whisper, write_clips, write_csv  # imports transformers

    model = tiny_whisper(folder / "tiny")
    for split, count in (("train", 12), ("validation", 4)):
        write_csv(folder / "speech" / f"{split}.csv", write_clips(folder / "speech", count))
    muster = Muster(folder, lab.hosts_file)
    arguments = ["--model", str(model), "--dataset", str(folder / "speech"), "--max-steps", "2", "--batch-size", "2"]
    hosts = ["--hosts", str(lab.hosts_file)]
    trained = muster.run("distributed-train", "demo", *hosts, *arguments, "--threads", "1", "--eval-interval", "0")
    assert trained.returncode == 0, trained.stderr
    assert "WER" in trained.stdout
    assert [ours(host) for host in lab] == [[] for _ in lab]
    written = muster.run("transcribe", "demo", str(folder / "speech" / "audio" / "clip0.wav"))
    assert written.returncode == 0, written.stderr
    assert "clip0.wav" in written.stdout


@pytest.mark.lab
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_three_hosts(make_lab: MakeLab, tmp_path: Path) -> None:
    train_and_transcribe(make_lab("a", "b", "c"), tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_hosts_without_root(make_light_lab: MakeLightLab, tmp_path: Path) -> None:
    train_and_transcribe(make_light_lab("a", "b"), tmp_path)
