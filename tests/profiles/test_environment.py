"""Options as environment variables."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from profiles.errors import BadInput
from profiles.files.environment import environment_layer, misspelt_variables, options_of_environment, variable_of
from profiles.files.resolve import list_profiles, load_profile, profile_from_options, save_profile
from profiles.options import options

Write = Callable[..., Path]
TEXTS = "[profile:p]\ntask = causal_lm\nmodel_path = owner/model\ndataset_path = owner/data\nlearning_rate = 0.1\n"


def test_a_variable_stands_between_the_files_and_the_command_line(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MUSTER_LEARNING_RATE", "0.2")
    monkeypatch.setenv("MUSTER_EPOCHS", "")
    config = write(TEXTS)
    resolved = load_profile("p", {}, config)
    assert resolved.profile.training.learning_rate == 0.2
    assert str(resolved.origins["learning_rate"]) == "variable MUSTER_LEARNING_RATE"
    assert resolved.origins["epochs"].section == "default", "an empty variable sets nothing"
    assert load_profile("p", {"learning_rate": "0.3"}, config).profile.training.learning_rate == 0.3


def test_options_of_a_strategy_and_references_have_variables(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MUSTER_STRATEGY", "diloco")
    monkeypatch.setenv("MUSTER_SYNC_INTERVAL", "7")
    monkeypatch.setenv("MUSTER_MODEL", "tiny")
    config = write(TEXTS + "[model:tiny]\nmodel_path = owner/tiny\n")
    resolved = load_profile("p", {}, config)
    assert (resolved.value("diloco.sync_interval"), resolved.value("model_path")) == ("7", "owner/tiny")
    monkeypatch.setenv("MUSTER_DILOCO_SYNC_INTERVAL", "8")
    with pytest.raises(BadInput, match="set twice: 8 and 7"):
        load_profile("p", {}, config)


def test_a_bad_value_names_its_variable_and_one_that_the_job_does_not_read_is_passed_over(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = write(TEXTS)
    monkeypatch.setenv("MUSTER_FREEZE_ENCODER", "true")
    load_profile("p", {}, config)
    monkeypatch.setenv("MUSTER_LEARNING_RATE", "fast")
    with pytest.raises(BadInput, match='variable MUSTER_LEARNING_RATE learning_rate = "fast"'):
        load_profile("p", {}, config)
    assert [entry.error for entry in list_profiles(config)] == [""], "profiles are listed as they are"
    save_profile("q", {"learning_rate": "0.5", "model_path": "owner/model", "dataset_path": "owner/data"}, config)


def test_each_option_has_a_variable_of_its_own_and_none_that_muster_uses_itself() -> None:
    names = [variable_of(spec.name) for spec in options()] + [
        variable_of(spec.alias) for spec in options() if spec.alias
    ]
    assert len(names) == len(set(names))
    sources = [path.read_text() for room in ("app", "distributed", "training", "profiles") for path in _files_of(room)]
    internal = {word for text in sources for word in text.split('"') if word.startswith("MUSTER_") and word.isupper()}
    assert "MUSTER_PLAN" in internal and not internal & {*names}
    assert options_of_environment(dict.fromkeys(internal, "x")) == {}
    assert misspelt_variables(dict.fromkeys(internal, "x")) == {}


def test_what_looks_like_an_option_is_named_and_other_programs_variables_are_left_alone() -> None:
    typed = ("MUSTER_LERNING_RATE", "MUSTER_LR", "MUSTER_learning_rate", "MUSTER_DATA_SET")
    others = ("MUSTER_SNAPSHOTS", "MUSTER_HOME", "MUSTER_API_KEY", "MUSTER_EPOCHS", "LERNING_RATE")
    hints = misspelt_variables(dict.fromkeys((*typed, *others), "1") | {"MUSTER_EPOCS": " "})
    right = "did you mean MUSTER_LEARNING_RATE?"
    assert hints == dict(zip(typed, (right, "write learning_rate", right, "did you mean MUSTER_DATASET?"), strict=True))


def test_a_job_without_a_profile_reads_variables_as_others_do(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("FREEZE_ENCODER", "true"), ("DATASET", "/data"), ("MODEL", "a:b"), ("GROUP", "fast")):
        monkeypatch.setenv(f"MUSTER_{name}", value)
    given = {"task": "custom", "model_path": "own:build"}
    profile = profile_from_options("custom", given, environment_layer())
    assert (profile.model.model_path, profile.data.dataset_path) == ("own:build", "/data")
    monkeypatch.setenv("MUSTER_LEARNING_RATE", "fast")
    with pytest.raises(BadInput, match='variable MUSTER_LEARNING_RATE learning_rate = "fast"'):
        profile_from_options("custom", given, environment_layer())
    with pytest.raises(BadInput, match="this job has no profile"):
        profile_from_options("custom", {**given, "group": "fast"})


def _files_of(room: str) -> list[Path]:
    return [*(Path(__file__).parents[2] / room).rglob("*.py")]
