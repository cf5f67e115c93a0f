"""Fixtures of this folder: a model, a data set and a profile that cost nothing."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when huggingface_hub is imported

from pathlib import Path

import pytest
from tiny_speech import ProfileMaker, tiny_whisper, write_clips, write_csv

from profiles.schema import Profile, Section


@pytest.fixture(scope="session")
def english_whisper(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_whisper(tmp_path_factory.mktemp("models") / "english")


@pytest.fixture(scope="session")
def multilingual_whisper(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_whisper(tmp_path_factory.mktemp("models") / "multilingual", ("en", "de", "fr"))


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
    """Make a profile from flat options; its cache is in the test's own folder."""

    def make(**options: object) -> Profile:
        options = {"cache_dir": str(tmp_path / "cache"), **options}
        sections: dict[str, dict[str, object]] = {}
        for section, field in Profile.model_fields.items():
            kind = field.annotation
            if isinstance(kind, type) and issubclass(kind, Section):
                sections[section] = {name: options.pop(name) for name in kind.model_fields if name in options}
        assert not options, options
        return Profile(name="test", **sections)

    return make
