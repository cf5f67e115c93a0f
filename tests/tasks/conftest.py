"""Fixtures of this folder: a model, a data set and a profile that cost nothing."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when huggingface_hub is imported

import shutil
from pathlib import Path

import pytest
import torch
from tiny_speech import Prepared, ProfileMaker, learn, silent, tiny_whisper, write_clips, write_csv

from profiles.schema import DataSettings, ModelSettings, Profile, Section
from speech.whisper.task import WhisperTask
from training.tasks.pretrained import PROXIES


@pytest.fixture(scope="session")
def english_whisper(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_whisper(tmp_path_factory.mktemp("models") / "english")


@pytest.fixture(scope="session")
def multilingual_whisper(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_whisper(tmp_path_factory.mktemp("models") / "multilingual", ("en", "de", "fr"))


@pytest.fixture
def no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub's name does not resolve, and there is no proxy that could know it."""
    for name in PROXIES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_ENDPOINT", "https://hub.invalid")


@pytest.fixture
def speech_folder(tmp_path: Path) -> Path:
    """Eight clips to train on, two to evaluate on."""
    folder = tmp_path / "speech"
    rows = write_clips(folder, 10)
    write_csv(folder / "train.csv", rows[:8])
    write_csv(folder / "validation.csv", rows[8:])
    return folder


@pytest.fixture
def make_profile(tmp_path: Path) -> ProfileMaker:
    """Make a profile from flat options (paths as they are); its cache is in the test's own folder."""

    def make(**options: object) -> Profile:
        given = {"cache_dir": tmp_path / "cache", **options}
        options = {name: str(value) if isinstance(value, Path) else value for name, value in given.items()}
        sections: dict[str, dict[str, object]] = {}
        for section, field in Profile.model_fields.items():
            kind = field.annotation
            if isinstance(kind, type) and issubclass(kind, Section):
                sections[section] = {name: options.pop(name) for name in kind.model_fields if name in options}
        assert not options, options
        return Profile(name="test", **sections)

    return make


@pytest.fixture
def prepared(make_profile: ProfileMaker, english_whisper: Path, speech_folder: Path) -> Prepared:
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
