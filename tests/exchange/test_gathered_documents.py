"""What one member gathers cannot break the others."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from training.exchange.payloads import documents, figures_by_rank


@pytest.mark.parametrize("evil", [b"", b"null", b"[1]", b"\xff", b"[" * 100_000, b"7"])
def test_who_says_something_else_is_left_out(evil: bytes) -> None:
    assert documents({1: b'{"a": 1}', 0: evil}) == {1: {"a": 1}}


def test_figures_are_numbers_that_fit() -> None:
    said = {0: b'{"loss": 1, "n": 1' + b"0" * 400 + b', "x": "1", "y": true, "z": [1]}', 1: b'{"loss": NaN}'}
    first, second = figures_by_rank(said).values()
    assert first == {"loss": 1.0} and math.isnan(second["loss"])


@pytest.mark.slow
@given(
    st.binary(max_size=40) | st.recursive(st.none() | st.floats() | st.text(), st.lists).map(json.dumps).map(str.encode)
)
def test_nothing_raises(payload: bytes) -> None:
    figures_by_rank({0: payload})
