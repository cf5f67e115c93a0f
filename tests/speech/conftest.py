"""Fixtures of this folder: a model, a data set and a task that cost nothing."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when huggingface_hub is imported

import shutil
from pathlib import Path

import pytest
import torch
from tiny_speech import Prepared, tiny_whisper, write_clips, write_csv, write_splits

from profiles.schema import DataSettings, ModelSettings, Profile
from speech.whisper.task import WhisperTask
from tests.tasks.tiny_tasks import ProfileMaker, learn, make_profile, no_hub, silent  # noqa: F401 - fixtures


@pytest.fixture(scope="session")
def english_whisper(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(1)  # else its weights follow from the tests before
    return tiny_whisper(tmp_path_factory.mktemp("models") / "english")


@pytest.fixture(scope="session")
def multilingual_whisper(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(1)
    return tiny_whisper(tmp_path_factory.mktemp("models") / "multilingual", ("en", "de", "fr"))


@pytest.fixture
def speech_folder(tmp_path: Path) -> Path:
    """Eight clips to train on, two to evaluate on."""
    return write_splits(tmp_path / "speech")


@pytest.fixture
def prepared(make_profile: ProfileMaker, english_whisper: Path, speech_folder: Path) -> Prepared:  # noqa: F811 - a fixture
    """Make a task of flat options and prepare it: the English model on ``speech_folder``, where they name no others."""

    def make(**options: object) -> WhisperTask:
        task = WhisperTask(make_profile(**{"model_path": english_whisper, "dataset_path": speech_folder, **options}))
        task.prepare(silent)
        return task

    return make


@pytest.fixture(scope="session")
def trained_whisper(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data set of four words, with a model that has learnt them from random weights in ``model``."""
    folder = tmp_path_factory.mktemp("trained")
    for split in ("train", "validation"):
        write_csv(folder / f"{split}.csv", write_clips(folder, 4))
    settings = ModelSettings(model_path=str(tiny_whisper(folder / "base")), from_scratch=True)
    data = DataSettings(dataset_path=str(folder), cache_dir=str(folder / "cache"))
    task = WhisperTask(Profile(name="test", model=settings, data=data))
    task.prepare(silent)
    torch.manual_seed(0)
    model = task.build_model().train()
    batch = task.collate([task.train[i] for i in range(4)], None)
    learn(task, model, [batch] * 120, 1e-2)
    (folder / "model").mkdir()
    task.save(model, folder / "model")
    return folder


@pytest.fixture
def adapter(prepared: Prepared, trained_whisper: Path, tmp_path: Path) -> Path:
    """A folder with adapters of that model, not merged."""
    options = {"model_path": trained_whisper / "model", "dataset_path": trained_whisper}
    task = prepared(tuning="lora", lora_merge=False, **options)
    (tmp_path / "adapter").mkdir()
    task.save(task.build_model(), tmp_path / "adapter")
    return tmp_path / "adapter"


@pytest.fixture
def misheard(trained_whisper: Path, tmp_path: Path) -> Path:
    """A copy of that data set in which the transcript of ``clip1``, "two", is wrong."""
    data = tmp_path / "data"
    shutil.copytree(trained_whisper, data, ignore=shutil.ignore_patterns("model", "base", "cache"))
    table = (data / "train.csv").read_text().replace("clip1,audio/clip1.wav,two", "clip1,audio/clip1.wav,four")
    (data / "train.csv").write_text(table)
    return data
