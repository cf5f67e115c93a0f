"""Options by the names that ExoGym has for them."""

from __future__ import annotations

import re

import pytest

from profiles.errors import BadInput
from profiles.files.resolve import profile_from_options
from profiles.options import canonical, options_by_name
from profiles.other_names import HINTS


def test_a_hint_names_options_that_there_are() -> None:
    named = {word for hint in HINTS.values() for word in re.findall(r"(?:write|and|,) ([a-z_]+[_.][a-z_.]+)", hint)}
    assert len(named) > 15
    assert {name for name in named if canonical(name) not in options_by_name()} == set()
    assert not HINTS.keys() & options_by_name().keys()


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("H", "write sync_interval"),
        ("lr", "write learning_rate"),
        ("minibatch_size", "gradient_accumulation"),
        ("autocast", "mixed_precision = bf16"),
    ],
)
def test_an_option_of_exogym_gets_the_right_hint(name: str, hint: str) -> None:
    with pytest.raises(BadInput, match=f"unknown option '{name}'") as caught:
        profile_from_options("local", {"task": "custom", name: 3})
    assert hint in caught.value.hint
