"""Ways to train as rows: their figures fit each other."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.wizard.plain.plain_words import way_words
from app.wizard.services.forecasting import Forecast, ranked
from distributed.measuring.machine_figures import SpeedFigures
from distributed.measuring.measure import MeasurementResult
from distributed.planning.documents.document import Workload
from distributed.planning.planner import plan
from profiles.errors import BadInput
from profiles.schema import Profile
from tests.distributed.planner_figures import TINY, cluster, job, machine, measured_pair, speeds


@settings(max_examples=12, deadline=None)
@given(speeds, st.floats(20, 1000), st.sampled_from([0, 1, 70, 5000]), st.sampled_from([0, 16]))
def test_what_is_faster_takes_less_time_whatever_ends_the_run(
    machines: list[float], mbit: float, steps: int, global_batch: int
) -> None:
    """In a job of so many steps a group sees more samples than one machine: the length of its run compares nothing."""
    planning = plan(cluster(machines, mbit), job(1_000_000, steps=steps, global_batch=global_batch))
    rows = ranked(planning, None).ways
    fastest = next(row for row in rows if row.choice.alone and row.candidate.useful_speed_up == pytest.approx(1.0))
    assert fastest.same_loss_seconds == pytest.approx(fastest.seconds, rel=0.1, abs=2 * fastest.candidate.step)
    for row in rows:
        assert row.same_loss_seconds * row.candidate.useful_speed_up == pytest.approx(fastest.same_loss_seconds)


def test_a_row_says_how_much_its_run_sees() -> None:
    planning = plan(cluster([8.0, 8.0]), job(1_000_000, steps=100))
    rows = ranked(planning, None).ways
    group = next(row for row in rows if not row.choice.alone)
    alone = next(row for row in rows if row.choice.alone)
    assert group.candidate.global_batch == 2 * alone.candidate.global_batch
    assert group.candidate.steps == alone.candidate.steps == 100
    assert group.seconds >= alone.seconds and group.same_loss_seconds < alone.same_loss_seconds
    assert f"100 steps of {group.candidate.global_batch} samples" in way_words(group)


@pytest.mark.parametrize(
    ("strategy", "interval", "said"),
    [
        ("streaming_diloco", 2, "merging every 2 steps: this way has 4 fragments"),
        ("sparseloco", 100, "this way needs 100 exchanges, and 6000 steps have 60"),
    ],
)
def test_an_interval_that_the_strategy_refuses_cannot_be_chosen(strategy: str, interval: int, said: str) -> None:
    work = Workload(trainable=TINY, total=TINY, samples=32_000)
    figures = [SpeedFigures(machine=machine(name), workload=work) for name in "ab"]
    found = MeasurementResult(["a", "b"], [measured_pair()], figures)
    wanted = job(steps=6000, strategy=strategy, texts=True, max_loss_increase=0.5)
    forecast = Forecast(Profile(name="p"), (), found, plan(found.figures.cluster, wanted))
    assert forecast.planning is not None
    group = next(index for index, one in enumerate(forecast.planning.ranking) if not one.choice.alone)
    assert forecast.with_interval(group, 40).interval == 40
    with pytest.raises(BadInput, match=said):
        forecast.with_interval(group, interval)
