"""Model names and folders that cannot be used end in one line."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import GPT2Config

from profiles.errors import BadInput
from speech.whisper.languages import language_code
from speech.whisper.model import WhisperModelWrapper
from speech.whisper.task import WhisperTask
from tests.tasks.tiny_tasks import ProfileMaker
from training.tasks import pretrained as hub
from training.tasks.registry import task_from_profile


def wrapper_of(make_profile: ProfileMaker, folder: Path | str) -> WhisperModelWrapper:
    return WhisperModelWrapper(make_profile(model_path=str(folder)).model)


@pytest.fixture
def copied(english_whisper: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(english_whisper, tmp_path / "copied"))


@pytest.mark.parametrize("path", ["", "./no/such", "/no/such/folder", "a b", "one/two/three"])
def test_no_such_folder(make_profile: ProfileMaker, path: str) -> None:
    with pytest.raises(BadInput, match="no model was given|no such folder"):
        wrapper_of(make_profile, path)


@pytest.mark.usefixtures("no_hub")
def test_unknown_name_without_a_network_is_told_at_once(make_profile: ProfileMaker) -> None:
    with pytest.raises(BadInput, match="model nobody/nothing: no such folder, and the hub cannot be reached"):
        wrapper_of(make_profile, "nobody/nothing")
    with pytest.raises(BadInput, match=r"profile whisper-scratch .* 30 s\)"):
        wrapper_of(make_profile, "openai/whisper-tiny")


@pytest.mark.usefixtures("no_hub")
def test_hub_that_does_not_resolve_is_not_reachable(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not hub.is_hub_reachable()
    monkeypatch.setenv("HF_ENDPOINT", "https://localhost")
    assert hub.is_hub_reachable()


def test_name_the_hub_does_not_have(make_profile: ProfileMaker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "https://localhost")
    with pytest.raises(BadInput, match="model nobody/nothing not found on the hub"):
        hub.read_checked(
            "nobody/nothing", "model", lambda local: (_ for _ in ()).throw(OSError("404: no such repository"))
        )


def test_model_of_another_kind(make_profile: ProfileMaker, tmp_path: Path) -> None:
    GPT2Config().save_pretrained(tmp_path)
    with pytest.raises(BadInput, match="is of type 'gpt2', not whisper"):
        wrapper_of(make_profile, tmp_path)


def test_folder_without_a_config(make_profile: ProfileMaker, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="no config.json in this folder"):
        wrapper_of(make_profile, tmp_path)


def test_config_that_is_no_json(make_profile: ProfileMaker, copied: Path) -> None:
    (copied / "config.json").write_text("{")
    with pytest.raises(BadInput, match="cannot be read"):
        wrapper_of(make_profile, copied)


@pytest.mark.parametrize("harm", [Path.unlink, lambda weights: os.truncate(weights, 1000)], ids=["gone", "cut"])
def test_folder_without_whole_weights(make_profile: ProfileMaker, copied: Path, harm: Callable[[Path], None]) -> None:
    wrapper = wrapper_of(make_profile, copied)
    harm(copied / "model.safetensors")
    with pytest.raises(BadInput, match="model .* cannot be read"):
        wrapper.build()


def test_weights_that_git_has_not_fetched(make_profile: ProfileMaker, copied: Path) -> None:
    wrapper = wrapper_of(make_profile, copied)
    (copied / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 9\n")
    with pytest.raises(BadInput, match="model.safetensors: a Git LFS pointer .*git lfs pull"):
        wrapper.build()


@pytest.mark.parametrize(
    ("file", "change", "said"),
    [
        ("config.json", {"encoder_layers": 2}, "its weights lack model.encoder.layers.1"),
        ("preprocessor_config.json", {"feature_size": 80}, "its feature extractor gives 80 mels, but it takes 16"),
    ],
)
def test_parts_of_other_shapes(
    make_profile: ProfileMaker, copied: Path, file: str, change: dict[str, int], said: str
) -> None:
    (copied / file).write_text(json.dumps({**json.loads((copied / file).read_text()), **change}))
    with pytest.raises(BadInput, match=said):
        wrapper_of(make_profile, copied).build()


@pytest.mark.parametrize(("name", "code"), [("German", "de"), ("de", "de"), ("mandarin", "zh"), (" EN ", "en")])
def test_language_names_and_codes(name: str, code: str) -> None:
    assert language_code(name) == code


def test_registry_knows_the_tasks(make_profile: ProfileMaker, english_whisper: Path) -> None:
    assert isinstance(task_from_profile(make_profile(model_path=str(english_whisper))), WhisperTask)


def test_registry_refuses_what_it_does_not_know(make_profile: ProfileMaker) -> None:
    profile = make_profile()
    unknown = profile.model_copy(update={"model": profile.model.model_copy(update={"task": "vision"})})
    with pytest.raises(BadInput, match="there is no task 'vision'"):
        task_from_profile(unknown)
