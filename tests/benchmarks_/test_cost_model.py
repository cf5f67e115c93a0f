"""The formulas against figures worked out by hand."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

_SPEC = importlib.util.spec_from_file_location(
    "cost_model", Path(__file__).resolve().parents[2] / "benchmarks" / "cost_model.py"
)
assert _SPEC is not None and _SPEC.loader is not None
cost_model = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(cost_model)

HUNDRED = 11.9e6
"""Payload of a link of 100 Mbit/s, bytes a second."""


def test_ring_moves_all_but_the_own_part_twice() -> None:
    assert cost_model.ring(HUNDRED, 4, 100) == pytest.approx(1.5)
    assert cost_model.ring(HUNDRED, 2, 100, latency=0.01, pieces=3) == pytest.approx(1.06)


def test_star_is_as_long_as_one_payload_until_the_hubs_link_carries_several() -> None:
    assert cost_model.star(HUNDRED, 100) == pytest.approx(1.0)
    assert cost_model.star(HUNDRED, 100, latency=0.01, hub_streams=3) == pytest.approx(3.02)


def test_backward_hides_a_part_of_a_per_step_exchange() -> None:
    assert cost_model.per_step(1.0, 0.3) == 1.0
    assert cost_model.per_step(1.0, 1.4) == pytest.approx(2.0)


def test_periodic_pays_the_exchange_once_an_interval() -> None:
    assert cost_model.periodic(1.0, 5.0, 50) == pytest.approx(1.1)


def test_mxfp4_is_four_bits_and_a_scale_a_block() -> None:
    assert cost_model.payload(32, "mxfp4") == 17
