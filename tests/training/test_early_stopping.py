from __future__ import annotations

from training.loop.evaluation import add_sums
from training.loop.position import EarlyStopping


def test_stops_after_patience_results_without_progress() -> None:
    stopping = EarlyStopping(patience=2, min_delta=0.0)
    assert stopping.update(1.0, 10)
    assert not stopping.update(1.0, 20)
    assert not stopping.should_stop
    assert not stopping.update(1.2, 30)
    assert stopping.should_stop
    assert stopping.best_step == 10


def test_progress_smaller_than_min_delta_does_not_count() -> None:
    stopping = EarlyStopping(patience=1, min_delta=0.1)
    stopping.update(1.0, 10)
    assert not stopping.update(0.95, 20)
    assert stopping.should_stop


def test_patience_zero_never_stops() -> None:
    stopping = EarlyStopping(patience=0, min_delta=0.0)
    for step in range(10):
        stopping.update(1.0, step)
    assert not stopping.should_stop


def test_state_survives_a_snapshot_even_without_a_result() -> None:
    stopping = EarlyStopping(patience=3, min_delta=0.0)
    copy = EarlyStopping(patience=3, min_delta=0.0)
    copy.load(stopping.to_state(), {})
    assert copy == stopping
    stopping.update(0.5, 7)
    copy.load(stopping.to_state(), {})
    assert copy == stopping


def test_sums_add_key_by_key() -> None:
    assert add_sums([{"a": 1.0}, {"a": 2.0, "b": 3.0}]) == {"a": 3.0, "b": 3.0}
