"""Predictions are those that were recorded: they change only where somebody means it."""

from __future__ import annotations

import json

import pytest
from prediction_grid import RECORDED, cells, compact


@pytest.mark.slow
def test_predictions_are_the_recorded_ones() -> None:
    recorded = json.loads(RECORDED.read_text())
    predicted = json.loads(json.dumps({name: compact(cell) for name, cell in cells().items()}))
    assert predicted.keys() == recorded.keys()
    assert [name for name in predicted if predicted[name] != recorded[name]] == []
