from __future__ import annotations

import subprocess
import sys

import pytest

from profiles.declarations import Section, declare, nearest, option, withdraw
from profiles.errors import BadInput
from profiles.files.resolve import profile_from_options
from profiles.options import OptionSpec, canonical, check_value, options, options_by_name
from profiles.schema import Profile


def test_names_are_unique_over_all_sections() -> None:
    assert len(options_by_name()) == len(options())


def test_an_alias_takes_no_name_of_another_option() -> None:
    class Greedy(Section):
        rate: float = option(1.0, "a rate", alias="learning_rate")

    declare("strategy", "greedy", "takes a name", Greedy)
    try:
        with pytest.raises(ValueError, match="'learning_rate' is an option of training and of greedy"):
            options()
    finally:
        withdraw("strategy", "greedy")
    assert canonical("learning_rate") == "learning_rate"


def test_epochs_are_shown_without_needless_digits() -> None:
    epochs, rate = options_by_name()["epochs"], options_by_name()["learning_rate"]
    assert [epochs.shown(text) for text in ("0.9896", "3.0", "")] == ["0.99", "3", ""]
    assert rate.shown("7e-05") == "7e-05"


@pytest.mark.parametrize("spec", options(), ids=lambda spec: spec.name)
def test_every_option_is_declared_whole(spec: OptionSpec) -> None:
    assert len(spec.help) > 5
    assert check_value(spec.name, spec.default) is None
    assert bool(spec.choices) == (spec.type == "choice")


@pytest.mark.parametrize("spec", [spec for spec in options() if spec.bounds], ids=lambda spec: spec.name)
def test_bounds_are_kept(spec: OptionSpec) -> None:
    for kind, bound in spec.bounds.items():
        step = 1 if spec.type == "integer" else 1e-6 * max(1.0, abs(bound))
        outside = {"gt": bound, "ge": bound - step, "lt": bound, "le": bound + step}[kind]
        text = str(int(outside)) if spec.type == "integer" else repr(outside)
        assert str(check_value(spec.name, text)).startswith("too "), (kind, text)


def test_a_spec_in_words() -> None:
    spec = options_by_name()["learning_rate"]
    assert (spec.section, spec.type, spec.default, spec.limits) == ("training", "number", "0.0001", "> 0, <= 10")
    assert options_by_name()["tuning"].limits == "one of full, lora"


def test_text_and_flags_come_from_a_file_as_words() -> None:
    profile = profile_from_options("p", {"from_scratch": "Yes", "language": "en", "learning_rate": "2e-3"})
    assert (profile.model.from_scratch, profile.model.language, profile.training.learning_rate) == (True, "en", 2e-3)


def test_infinity_is_no_number() -> None:
    with pytest.raises(BadInput, match="not a number"):
        profile_from_options("p", {"weight_decay": "inf"})


def test_a_profile_survives_json() -> None:
    profile = profile_from_options("p", {"codec": "topk:0.03", "shares": "2, 1"})
    assert Profile.model_validate_json(profile.model_dump_json()) == profile
    assert profile.run.shares == "2,1"


@pytest.mark.parametrize(("word", "found"), [("Batch_Sise", "batch_size"), ("xyzzy", None), ("", None)])
def test_nearest(word: str, found: str | None) -> None:
    assert nearest(word, options_by_name()) == found


@pytest.mark.slow
def test_loading_profiles_loads_nothing_heavy() -> None:
    code = (
        "import sys, profiles.files.resolve; profiles.files.resolve.list_profiles();"
        "print({'torch', 'numpy', 'transformers', 'textual', 'paramiko', 'typer'} & set(sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True).stdout == b"set()\n"
