"""Which settings follow the memory: those that nobody has chosen."""

from __future__ import annotations

from pathlib import Path

import pytest

from profiles.errors import BadInput
from profiles.files.layers import fittable_settings
from profiles.files.resolve import load_profile, profile_from_options, save_profile, validate_config
from profiles.optimisation import TrainingSettings
from profiles.schema import Profile

ALL = {"batch_size", "eval_batch_size", "gradient_checkpointing", "tuning", "base_precision", "learning_rate"}
START = "[group:shared]\nbatch_size = 4\n[profile:p]\ngroup = shared\nmodel = a/b\ndataset = /d\n"


def opened(tmp_path: Path, lines: str = "", **given: str) -> set[str]:
    (tmp_path / "config.ini").write_text(START + lines)
    return set(fittable_settings(load_profile("p", given, tmp_path / "config.ini").profile))


def test_what_a_group_says_may_follow_the_memory(tmp_path: Path) -> None:
    assert opened(tmp_path) == ALL


@pytest.mark.parametrize("option", ["batch_size", "gradient_accumulation"])
def test_what_a_profile_or_the_command_line_says_stays(tmp_path: Path, option: str) -> None:
    assert opened(tmp_path, f"{option} = 2\n") == ALL - {"batch_size"}
    assert opened(tmp_path, **{option: "2"}) == ALL - {"batch_size"}


def test_a_profile_may_leave_open_what_it_sets(tmp_path: Path) -> None:
    lines = "batch_size = 2\ntuning = full\nfit_memory = batch_size, learning_rate\n"
    assert opened(tmp_path, lines) == {"batch_size", "learning_rate"}
    assert opened(tmp_path, lines, batch_size="1") == {"learning_rate"}
    assert opened(tmp_path, lines, fit_memory="off") == set()
    with pytest.raises(BadInput, match="fit_memory"):
        opened(tmp_path, "fit_memory = everything\n")


def test_a_list_is_read_back_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "config.ini").write_text(f"{START}fit_memory = tuning, , batch_size\n")
    profile = load_profile("p", {}, tmp_path / "config.ini").profile
    assert profile.run.fit_memory == "batch_size, tuning"
    assert Profile.model_validate_json(profile.model_dump_json()) == profile


def test_a_saved_profile_keeps_what_was_left_open(tmp_path: Path) -> None:
    opened(tmp_path)
    config = tmp_path / "config.ini"
    values = {"model_path": "/m", "dataset_path": "/d", "batch_size": "4", "fit_memory": "batch_size, tuning"}
    save_profile("mine", values, config)
    assert set(fittable_settings(load_profile("mine", {}, config).profile)) == {"batch_size", "tuning"}


def test_without_files_what_is_given_stays() -> None:
    assert fittable_settings(Profile(name="p", training=TrainingSettings(batch_size=2))) == ALL - {"batch_size"}
    assert set(fittable_settings(profile_from_options("p", {"tuning": "full"}))) == ALL - {"tuning"}


def test_auto_takes_back_what_was_set_and_leaves_it_open(tmp_path: Path) -> None:
    lines = "gradient_checkpointing = true\nlearning_rate = 2e-5\neval_batch_size = auto\n"
    assert opened(tmp_path, lines) == ALL - {"gradient_checkpointing", "learning_rate"}
    assert opened(tmp_path, lines, gradient_checkpointing="auto") == ALL - {"learning_rate"}
    profile = load_profile("p", {"gradient_checkpointing": "auto"}, tmp_path / "config.ini").profile
    assert (profile.model.gradient_checkpointing, profile.evaluation.eval_batch_size) == (False, 0)
    assert opened(tmp_path, f"{lines}fit_memory = batch_size\n") == {"batch_size", "eval_batch_size"}
    assert opened(tmp_path, lines, fit_memory="off") == set()


def test_auto_is_no_problem_where_a_file_is_checked(tmp_path: Path) -> None:
    (tmp_path / "config.ini").write_text(f"{START}gradient_checkpointing = auto\nmax_steps = auto\n")
    problems = validate_config(tmp_path / "config.ini")
    assert len(problems) == 1 and "max_steps" in problems[0]
