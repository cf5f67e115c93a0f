from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from profiles.errors import BadInput, ExitCode
from profiles.files.ini import parse_ini
from profiles.files.layers import COMMAND_LINE, merge, override_layer
from profiles.files.library import Library
from profiles.files.resolve import list_profiles, load_profile, profile_from_options, resolve, validate_config

Write = Callable[..., Path]
ORDER = ["DEFAULT", "dataset_defaults", "group:g", "model:m", "dataset:d", "profile:p", "distributed:p", "command line"]
OPTIONS = ["batch_size", "warmup_steps", "max_steps", "snapshot_keep"]
WHOLE = "[profile:p]\nmodel_path = owner/model\ndataset_path = owner/data\n"


@given(st.lists(st.sets(st.sampled_from(OPTIONS)), min_size=len(ORDER), max_size=len(ORDER)))
def test_the_later_section_wins(layers: list[set[str]]) -> None:
    text = ""
    for rank, (section, keys) in enumerate(zip(ORDER[:-1], layers)):
        chosen = "group = g\nmodel = m\ndataset = d\n" if section == "profile:p" else ""
        text += f"[{section}]\n{chosen}" + "".join(f"{key} = {rank + 1}\n" for key in sorted(keys))
    overrides = dict.fromkeys(layers[-1], str(len(ORDER)))
    resolved = resolve(Library(parse_ini(text, Path("/x/config.ini"))), "p", overrides)
    for key in OPTIONS:
        ranks = [rank for rank, keys in enumerate(layers) if key in keys]
        if ranks:
            assert resolved.value(key) == str(ranks[-1] + 1)
            assert resolved.origins[key].section == ORDER[ranks[-1]]
        else:
            assert str(resolved.origins[key]) == "default"


def test_several_groups_apply_in_their_order() -> None:
    text = "[group:a]\nseed = 1\nbatch_size = 1\n[group:b]\nseed = 2\n[profile:p]\ngroup = b, a\n"
    merged = merge(Library(parse_ini(text, Path("c.ini"))), "p", {})
    assert {key: setting.value for key, setting in merged.settings.items()} == {"seed": "1", "batch_size": "1"}


def test_a_model_brings_its_group() -> None:
    text = "[group:g]\nseed = 7\n[model:m]\ngroup = g\n[profile:p]\nmodel = m\n"
    assert merge(Library(parse_ini(text, Path("c.ini"))), "p", {}).settings["seed"].value == "7"


def test_a_model_chosen_on_the_command_line_replaces_the_profiles_path(write: Write) -> None:
    config = write(WHOLE + "[model:m]\nmodel_path = owner/other\n")
    assert load_profile("p", {"model": "m"}, config).profile.model.model_path == "owner/other"


def test_a_model_that_is_not_used_leaves_nothing_behind(write: Write) -> None:
    config = write("[DEFAULT]\nmodel = a\n[model:a]\nmodel_path = o/a\n[model:b]\nseed = 1\n[profile:p]\nmodel = b\n")
    assert load_profile("p", {}, config, complete=False).profile.model.model_path == ""


def test_origins_have_file_section_and_line(write: Write) -> None:
    config = write(WHOLE + "seed = 5\n")
    origin = load_profile("p", {"batch_size": "3"}, config).origins["seed"]
    assert (origin.file, origin.section, origin.line) == (config, "profile:p", 4)
    assert str(origin) == f"{config} [profile:p] line 4"


def test_every_option_has_an_origin(write: Write) -> None:
    resolved = load_profile("p", {"batch_size": "3"}, write(WHOLE))
    assert str(resolved.origins["batch_size"]) == "command line"
    assert str(resolved.origins["seed"]) == "default"
    assert all(resolved.value(name) is not None for name in resolved.origins)


def test_names_are_kept(write: Write) -> None:
    profile = load_profile("p", {"model": "m", "dataset": "some/data"}, write(WHOLE + "[model:m]\n")).profile
    assert (profile.name, profile.model_name, profile.dataset_name) == ("p", "m", "some/data")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("learning_rate = fast", 'config.ini [profile:p] learning_rate = "fast": not a number (peak learning rate'),
        ("learning_rate = 11", 'learning_rate = "11": too large (peak learning rate'),
        ("learning_rate = nan", "not a number"),
        ("epochs = inf", "not a number"),
        ("batch_size =", 'batch_size = "": not a whole number'),
        ("batch_size = 0", "too small"),
        ("from_scratch = maybe", "not true or false"),
        ("lr_schedule = cosin", "not a choice, did you mean 'cosine'?"),
        ("optimizer = adam", "not a choice, did you mean 'adamw'? (one of adamw, sgd, muon"),
        ("optimizer = job.py:", "or file.py:function"),
        ("lr_decay_share = 0", "too small"),
        ("codec = topk:2", "topk:SHARE"),
        ("shares = 2,-1", "one for each worker"),
        ("engine = nccl\ntransport = tls", "does not encrypt: set engine = mesh"),
        ("sync_delay = 50", "must be below sync_interval (50)"),
        ("freeze_encoder = yes\ntask = causal_lm", "does not read it, only whisper"),
        ("from_scratch = yes\ntuning = lora", "use tuning = full"),
        ("base_precision = int8", "set tuning = lora"),
        ("task = custom\nmodel_path = model", "module:factory"),
        (
            "learning_rat = 1",
            "config.ini line 2 [profile:p]: unknown option 'learning_rat' (did you mean 'learning_rate'?)",
        ),
        ("Seed = 1", "unknown option 'Seed' (did you mean 'seed'?)"),
        ("zzzzz = 1", "docs/reference/options.md"),
        (
            "model = whisper-smal",
            "neither a [model:NAME] section nor a path or hub name (did you mean 'whisper-small'?)",
        ),
        ("dataset = nowhere", "neither a [dataset:NAME] section nor"),
        ("group = lorra", "there is no group 'lorra' (did you mean 'lora'?)"),
    ],
)
def test_bad_entries(line: str, message: str, write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    config = write(f"[profile:p]\n{line}\n[model:whisper-small]\n[group:lora]\n")
    monkeypatch.chdir(config.parent)
    with pytest.raises(BadInput, match=re.escape(message)) as caught:
        load_profile("p", {}, config)
    assert caught.value.exit_code is ExitCode.BAD_INPUT
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[profil:p]\n", "line 1: unknown section [profil:p] (did you mean 'profile:p'?)"),
        ("[whatever]\n", "known: [DEFAULT], [dataset_defaults], [group:NAME]"),
        ("[DEFAULT:x]\n", "write [DEFAULT]"),
        ("[profile]\n", "write [profile:NAME]"),
        ("[profile:../x]\n", "'../x' cannot be the name of a profile"),
        ("[profile:p]\n[distributed:pp]\n", "[distributed:pp] has no [profile:pp] in this file (did you mean 'p'?)"),
        ("[profile:p]\n[model:m]\nmodel = x\n", "line 3 [model:m]: 'model' cannot be set here"),
    ],
)
def test_bad_sections(text: str, message: str, write: Write) -> None:
    assert message in " ".join(validate_config(write(text)))


def test_a_mistake_elsewhere_does_not_stop_a_profile(write: Write) -> None:
    config = write(WHOLE + "[profile:other]\nbatch_size = none\n")
    assert load_profile("p", {}, config).profile.name == "p"
    assert [entry.error != "" for entry in list_profiles(config)] == [False, True]


def test_validation_finds_values_that_a_later_section_hides(write: Write) -> None:
    config = write("[DEFAULT]\nseed = x\n" + WHOLE + "seed = 1\n")
    assert load_profile("p", {}, config).profile.training.seed == 1
    assert validate_config(config) == [
        f'{config} [DEFAULT] seed = "x": not a whole number (seed of weights, '
        "order and augmentation; for the same run again on several machines also balance = off, >= 0, < 4294967296)"
    ]


def test_validation_does_not_judge_half_a_pair(write: Write) -> None:
    assert (
        validate_config(write("[group:slow]\nsync_delay = 80\n" + WHOLE + "sync_interval = 100\ngroup = slow\n")) == []
    )


@pytest.mark.parametrize(
    ("name", "message"),
    [("q", "there is no profile 'q'"), ("starte", "did you mean 'starter'?"), ("../x", "there is no profile")],
)
def test_an_unknown_profile(name: str, message: str, write: Write) -> None:
    with pytest.raises(BadInput, match=re.escape(message)):
        load_profile(name, {}, write("[profile:starter]\n"))


@pytest.mark.parametrize(
    ("have", "message"),
    [
        ("dataset_path = o/d", "names no model (pass --set model="),
        ("model_path = o/m", "names no data set (pass --dataset FOLDER"),
    ],
)
def test_an_incomplete_profile_says_what_to_pass(have: str, message: str, write: Write) -> None:
    config = write(f"[profile:p]\n{have}\n")
    with pytest.raises(BadInput, match=re.escape(message)):
        load_profile("p", {}, config)
    assert load_profile("p", {}, config, complete=False).profile.name == "p"


def test_a_custom_task_needs_no_data_set(write: Write) -> None:
    assert load_profile("p", {}, write("[profile:p]\ntask = custom\nmodel_path = mine:build\n"))


def test_a_saved_profile_is_found_and_inherits_from_the_config(write: Write) -> None:
    config = write(
        "[DEFAULT]\nseed = 3\n[model:m]\nmodel_path = o/m\n", mine="[profile:mine]\nmodel = m\ndataset = o/d\n"
    )
    profile = load_profile("mine", {}, config).profile
    assert (profile.training.seed, profile.model.model_path) == (3, "o/m")


def test_a_name_in_two_files_names_both(write: Write) -> None:
    config = write(WHOLE, mine=WHOLE)
    with pytest.raises(BadInput, match=r"\[profile:p\] is in .*config\.ini and in .*saved/mine\.ini"):
        load_profile("p", {}, config)


def test_a_broken_saved_file_stops_only_itself(write: Write) -> None:
    config = write(WHOLE, mine="nonsense\n")
    assert load_profile("p", {}, config).profile.name == "p"
    assert "is not 'key = value'" in list_profiles(config)[-1].error
    with pytest.raises(BadInput, match="is not 'key = value'"):
        load_profile("mine", {}, config)


def test_a_saved_file_cannot_change_the_defaults(write: Write) -> None:
    assert "for config.ini only" in validate_config(write(WHOLE, mine="[DEFAULT]\nseed = 1\n"))[0]


def test_lists_have_descriptions_and_needs(write: Write) -> None:
    entry = list_profiles(write("[profile:p]\ndescription = it is; fine\nmodel_path = o/m\n"))[0]
    assert (entry.name, entry.description, entry.error, entry.needs) == ("p", "it is; fine", "", "dataset")


def test_paths_of_a_file_are_relative_to_it(write: Write, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    config = write("[profile:p]\nmodel_path = o/m\ndataset = data\noutput_dir = runs\ncache_dir = ~/c\n")
    profile = load_profile("p", {}, config).profile
    assert profile.data.dataset_path == str(tmp_path / "data")
    assert profile.run.output_dir == str(tmp_path / "runs")
    assert profile.data.cache_dir == str(Path.home() / "c")


def test_paths_of_the_command_line_are_relative_to_here(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here" / "data").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")
    profile = load_profile("p", {"dataset": "data", "model": "./none"}, write(WHOLE)).profile
    assert profile.data.dataset_path == str(tmp_path / "here" / "data")
    assert profile.model.model_path == str(tmp_path / "here" / "none")


def test_a_mistyped_strategy_is_refused_before_any_machine_is_asked(write: Write) -> None:
    config = write("[profile:p]\nmodel = a/b\ndataset = /d\nstrategy = diloc\n")
    with pytest.raises(BadInput, match=r"strategy = \"diloc\": unknown strategy 'diloc'.*did you mean 'diloco'"):
        load_profile("p", config=config)
    assert validate_config(config)


def test_an_unknown_override() -> None:
    with pytest.raises(BadInput, match=re.escape("command line: unknown option 'learning_rte' (did you mean")):
        override_layer({"learning_rte": "1"}, COMMAND_LINE)


def test_a_profile_from_options() -> None:
    profile = profile_from_options("local", {"task": "custom", "batch_size": 4, "eval_before": False})
    assert (profile.training.batch_size, profile.evaluation.eval_before) == (4, False)


def test_a_profile_from_bad_options() -> None:
    with pytest.raises(BadInput, match=re.escape('options batch_size = "none": not a whole number')):
        profile_from_options("local", {"batch_size": "none"})
