from __future__ import annotations

import json
from pathlib import Path

import pytest

from profiles.errors import BadInput
from profiles.files.library import CONFIG
from profiles.files.resolve import list_profiles, load_profile, validate_config
from training.strategies.registry import check_strategy
from training.tasks.published_models import SCRIPTS

WHISPER = ["whisper-tiny-lora", "whisper-small-lora", "whisper-small-full", "whisper-large-v3-lora", "whisper-distil"]


def test_the_shipped_config_is_whole() -> None:
    assert validate_config() == []
    shipped = [entry for entry in list_profiles() if entry.source == CONFIG]
    assert [entry.name for entry in shipped] == [
        "demo",
        "demo-scratch",
        "whisper-scratch",
        *WHISPER,
        "instruct-lora",
        "nanogpt",
    ]
    assert all(entry.description for entry in shipped)
    warm_ups = {entry.name: load_profile(entry.name, complete=False).profile.training.warmup_steps for entry in shipped}
    assert all(share < 1 for share in warm_ups.values()), f"longer than a run on few recordings: {warm_ups}"


@pytest.mark.parametrize("name", ["demo-scratch", "nanogpt"])
def test_profiles_that_run_as_they_are_have_their_files(name: str) -> None:
    profile = load_profile(name).profile
    assert Path(profile.model.model_path, "config.json").is_file()
    assert Path(profile.data.dataset_path).exists()


def test_the_demo_is_a_fine_tune_and_stands_on_its_own_where_nothing_can_be_had() -> None:
    demo = load_profile("demo")
    stand_in = load_profile(demo.stand_in).profile
    assert demo.profile.model.model_path in SCRIPTS
    assert demo.profile.data.dataset_path == stand_in.data.dataset_path
    assert (demo.profile.model.from_scratch, stand_in.model.from_scratch) == (False, True)


def test_training_from_scratch_on_own_recordings_needs_no_hub() -> None:
    profile = load_profile("whisper-scratch", {"dataset": "/"}).profile
    extractor = json.loads(Path(profile.model.model_path, "preprocessor_config.json").read_text())
    assert (profile.model.from_scratch, extractor["chunk_length"]) == (True, 30)


@pytest.mark.parametrize("name", WHISPER)
def test_fine_tuning_asks_for_the_users_data(name: str) -> None:
    with pytest.raises(BadInput, match="pass --dataset FOLDER"):
        load_profile(name)
    assert load_profile(name, {"dataset": "/"}).profile.model.model_path.startswith("openai/whisper-")


@pytest.mark.parametrize("name", ["demo", "demo-scratch", "whisper-scratch", *WHISPER, "instruct-lora", "nanogpt"])
def test_every_profile_leaves_the_strategy_to_the_planner_or_names_a_known_one(name: str) -> None:
    strategy = load_profile(name, complete=False).profile.strategy.strategy
    assert strategy == "auto" or check_strategy(strategy)


def test_the_hosts_example_is_json() -> None:
    example = json.loads((CONFIG.parent / "distributed_hosts.json.example").read_text())
    assert {"master", "workers", "ssh_user"} <= set(example)
