"""Options of strategies: flat names mean the chosen strategy's, and what the chosen one does not read is refused."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from profiles.errors import BadInput
from profiles.files.resolve import load_profile, profile_from_options, save_profile
from profiles.schema import Profile

OWN = f"{__file__}:Mine"


class Mine:
    """Not looked at before a run."""


def interval(profile: Profile, strategy: str) -> int:
    return int(profile.strategy.owned[strategy].model_dump()["sync_interval"])


@pytest.mark.parametrize(
    ("strategy", "set_for"),
    [
        ("auto", ["diloco"]),
        ("streaming_diloco", ["streaming_diloco"]),
        ("sparta + local_sgd", ["local_sgd"]),
        ("fedavg+diloco", ["diloco", "fedavg"]),
        (OWN, ["diloco"]),
    ],
)
def test_a_flat_name_means_the_option_of_what_is_chosen(strategy: str, set_for: list[str]) -> None:
    profile = profile_from_options("p", {"strategy": strategy, "sync_interval": 20})
    every = ("diloco", "fedavg", "local_sgd", "noloco", "sparseloco", "streaming_diloco")
    assert [name for name in every if interval(profile, name) == 20] == set_for


@pytest.mark.parametrize(
    ("strategy", "option", "hint"),
    [
        ("streaming_diloco", "diloco.sync_interval", "write streaming_diloco.sync_interval = 20"),
        ("sparta", "sync_interval", "write sparta.interval = 20"),
        ("sparta + diloco", "noloco.sync_interval", "write diloco.sync_interval = 20"),
        ("zero1", "sync_interval", "leave it out"),
    ],
)
def test_what_the_chosen_strategy_does_not_read_is_refused(strategy: str, option: str, hint: str) -> None:
    said = f'options {option} = "20": an option of .*, which strategy = {re.escape(strategy)} does not read .{hint}'
    with pytest.raises(BadInput, match=said):
        profile_from_options("p", {"strategy": strategy, option: 20})


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("error_feedback = true\nstrategy = noloco", 'error_feedback = "true": has no effect with noloco'),
        ("error_feedback = true\nstrategy = sparta + noloco", "has no effect with sparta"),
        ("error_feedback = true\nstrategy = fedavg\nfedavg.island_size = 2", "has no effect with islands"),
        ("codec = mxfp4\nstrategy = diloco + sparta", 'codec = "mxfp4": codec = mxfp4 is made for differences'),
    ],
)
def test_what_a_strategy_refuses_is_refused_before_any_machine_is_asked(given: str, said: str, tmp_path: Path) -> None:
    config = tmp_path / "config.ini"
    config.write_text(f"[profile:p]\nmodel = a/b\ndataset = /d\n{given}\n")
    with pytest.raises(BadInput, match=re.escape(said)) as caught:
        load_profile("p", config=config)
    assert caught.value.option in given and caught.value.hint and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "given",
    [
        {"strategy": "sparta + diloco", "error_feedback": True},
        {"strategy": "auto", "error_feedback": True, "codec": "mxfp4"},
        {"strategy": OWN, "error_feedback": True},
        {"strategy": "allreduce", "allreduce.compressor": "dgc", "codec": "fp32"},  # as a plan for one machine says
    ],
)
def test_what_some_part_or_machine_can_use_is_taken(given: dict[str, object]) -> None:
    assert profile_from_options("p", given).strategy.strategy == given["strategy"]


@pytest.mark.parametrize("strategy", ["auto", OWN, f"sparta + {OWN}"])
def test_what_is_open_or_ones_own_takes_options_of_all(strategy: str) -> None:
    assert interval(profile_from_options("p", {"strategy": strategy, "noloco.sync_interval": 20}), "noloco") == 20


def test_one_option_by_two_names_is_set_once() -> None:
    given = {"strategy": "noloco", "sync_interval": 20, "noloco.sync_interval": 30}
    with pytest.raises(BadInput, match=r"'noloco.sync_interval' is set twice: 20 and 30"):
        profile_from_options("p", given)


CONFIG = """
[DEFAULT]
sync_interval = 9
sparta.share = 0.1
[profile:inherits]
strategy = local_sgd
[profile:own]
strategy = diloco
diloco.outer_lr = 0.5
fedavg.fraction = 0.5
[profile:diloco]
strategy = diloco
sync_interval = 7
diloco.outer_lr = 0.5
[profile:earlier]
strategy = allreduce
sync_interval = 7
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    (tmp_path / "config.ini").write_text(CONFIG)
    return tmp_path / "config.ini"


def load(name: str, config: Path, **overrides: str) -> Profile:
    return load_profile(name, overrides, config, complete=False).profile


def test_a_profiles_own_section_is_refused_and_what_it_inherits_is_not(config: Path) -> None:
    assert interval(load("inherits", config), "local_sgd") == 9
    with pytest.raises(BadInput, match=r'\[profile:own\] fedavg.fraction = "0.5": an option of fedavg, .* diloco'):
        load("own", config)


def test_who_changes_the_strategy_is_not_blamed_for_the_profile(config: Path) -> None:
    assert interval(load("diloco", config, strategy="local_sgd"), "local_sgd") == 7
    with pytest.raises(BadInput, match="write --set sparseloco.sync_interval=5"):
        load("diloco", config, **{"strategy": "sparseloco", "diloco.sync_interval": "5"})


def test_files_of_earlier_versions_stay_readable(config: Path) -> None:
    assert load("earlier", config).strategy.strategy == "allreduce"
    with pytest.raises(BadInput, match="command line sync_interval"):
        load("earlier", config, sync_interval="3")


def test_a_saved_profile_holds_what_its_strategy_reads(config: Path) -> None:
    save_profile("mine", {"strategy": "noloco", "sync_interval": "4"}, config)
    assert interval(load("mine", config), "noloco") == 4
    with pytest.raises(BadInput, match="an option of diloco"):
        save_profile("other", {"strategy": "noloco", "diloco.sync_interval": "4"}, config)
