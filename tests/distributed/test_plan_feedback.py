from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planner_figures import cluster, job, machine, predict

from app.run_view.run_state import reduce_events
from distributed.planning.documents.cluster import Cluster, MeasurementCache
from distributed.planning.documents.corrections import LARGEST_FACTOR, Corrections, ExchangeCorrection, shrunk_mean
from distributed.planning.documents.document import Candidate, Choice
from distributed.planning.feedback import (
    HALF_LIFE,
    MOST_OBSERVATIONS,
    PredictionComparison,
    compare,
    corrections,
    remember,
)
from distributed.planning.planner import plan
from profiles.errors import BadInput
from training.records.events import Event, MemberEvent, StepEvent

few_examples = settings(max_examples=25, deadline=None)
ratios = st.floats(0.05, 20)
MACHINES = cluster([8.0, 4.0], mbit=100)
JOB = job(10_000_000, batch=8)
EVERY_STEP = Choice(strategy="allreduce", codec="fp32", engine="mesh", members=("a", "b"))
MERGED = Choice(strategy="diloco", codec="mxfp4", engine="mesh", members=("a", "b"), interval=10)
NOW = 1e9


def step(member: int, number: int, compute: float, wait: float, moved: int = 0) -> StepEvent:
    return StepEvent(member=member, step=number, epoch=0, loss=1, learning_rate=1, samples=8, weight=8, compute=compute,
                     wait=wait, transfer=wait, bytes_sent=moved, bytes_received=moved)  # fmt: skip


def run(candidate: Candidate, steps: int, compute: float = 1.0, exchange: float = 1.0) -> list[Event]:
    """A run in which every member's compute and every exchange take so many times what was predicted."""
    choice = candidate.choice
    events: list[Event] = [MemberEvent(member=r, status="ready", name=n) for r, n in enumerate(choice.members)]
    slowest = max(member.busy for member in candidate.members) * compute
    hidden = candidate.exchange - (candidate.step - slowest / compute) * choice.interval
    wait = max(0.0, candidate.exchange * exchange - hidden)
    for rank, member in enumerate(candidate.members):
        member_seconds = member.busy * compute
        for number in range(1, steps + 1):
            if choice.interval == 1:
                events.append(step(rank, number, member_seconds, slowest - member_seconds + wait))
            else:
                exchanges = number % choice.interval == 0
                events.append(
                    step(
                        rank,
                        number,
                        member_seconds,
                        (slowest - member_seconds) * choice.interval + wait if exchanges else 0.0,
                    )
                )
    return events


def compared(candidate: Candidate, events: list[Event]) -> PredictionComparison:
    comparison = compare(candidate, events, JOB.trainable)
    assert comparison is not None
    return comparison


# -------------------------------------------------------------------------------------------------------------- compare


@few_examples
@given(st.sampled_from([EVERY_STEP, MERGED]), st.floats(0.3, 3), st.floats(1, 3))
def test_a_run_tells_by_how_much_it_was_off(choice: Choice, compute: float, exchange: float) -> None:
    candidate = predict(MACHINES, JOB, choice)
    comparison = compared(candidate, run(candidate, 40, compute, exchange))
    assert [member.ratio for member in comparison.members] == pytest.approx([compute] * 2)
    assert comparison.exchange_ratio == pytest.approx(exchange)
    assert comparison.measured_step == pytest.approx(
        comparison.measured_wait + max(member.measured for member in comparison.members)
    )
    assert json.loads(json.dumps(comparison.document()))["ratio"] == round(comparison.ratio, 4)


def test_a_run_as_predicted_has_ratio_one() -> None:
    for choice in (EVERY_STEP, MERGED):
        candidate = predict(MACHINES, JOB, choice)
        assert compared(candidate, run(candidate, 30)).ratio == pytest.approx(1.0)


@pytest.mark.parametrize("choice", [EVERY_STEP, MERGED])
def test_plan_dashboard_and_comparison_tell_one_share_of_waiting(choice: Choice) -> None:
    candidate = predict(MACHINES, JOB, choice)
    events = run(candidate, 30 if choice is EVERY_STEP else 40)
    assert 0 < candidate.waiting < 1
    assert compared(candidate, events).measured_share == pytest.approx(candidate.waiting)
    assert compared(candidate, events).predicted_share == candidate.waiting
    assert reduce_events(events).waiting_share == pytest.approx(candidate.waiting)


def test_a_divided_run_is_compared_stage_by_stage() -> None:
    candidate = predict(MACHINES, JOB, EVERY_STEP)
    staged = candidate.model_copy(update={"choice": EVERY_STEP.model_copy(update={"blocks": ((0, 4), (4, 6))})})
    busy = tuple(member.busy * factor for member, factor in zip(candidate.members, (1.0, 2.0)))
    events = [step(0, number, sum(busy), 0.0).model_copy(update={"stages": busy}) for number in range(1, 12)]
    comparison = compared(staged, events)
    assert [member.ratio for member in comparison.members] == pytest.approx([1.0, 2.0])
    assert comparison.measured_step == pytest.approx(sum(busy))
    assert comparison.measured_wait == pytest.approx(min(busy))
    assert compare(staged, [event.model_copy(update={"stages": busy[:1]}) for event in events]) is None


def test_the_warm_up_is_left_out() -> None:
    candidate = predict(MACHINES, JOB, MERGED)
    events = [
        e.model_copy(update={"compute": 100.0}) if isinstance(e, StepEvent) and e.step <= 10 else e
        for e in run(candidate, 34)
    ]
    comparison = compared(candidate, events)
    assert (comparison.steps, round(comparison.ratio, 6)) == (20, 1.0)


@pytest.mark.parametrize(("choice", "steps"), [(EVERY_STEP, 7), (MERGED, 9)])
def test_a_run_that_is_too_short_tells_nothing(choice: Choice, steps: int) -> None:
    candidate = predict(MACHINES, JOB, choice)
    assert compare(candidate, run(candidate, steps)) is None
    assert compare(candidate, []) is None


def test_members_with_a_pace_of_their_own_advance_by_its_mean_and_tell_nothing() -> None:
    choice = Choice(strategy="async_diloco", codec="bf16", engine="mesh", members=("a", "b"), interval=10)
    candidate = predict(cluster([8.0, 0.5], mbit=1e6), JOB, choice)
    assert {member.micro_batch for member in candidate.members} == {
        8
    }  # the slower one takes fewer parts, not smaller ones
    assert candidate.step == pytest.approx(2 / sum(1 / member.busy for member in candidate.members), rel=0.01)
    assert candidate.exposed >= 0
    assert compare(candidate, run(candidate, 30)) is None


def test_a_run_with_other_members_tells_nothing() -> None:
    candidate = predict(MACHINES, JOB, EVERY_STEP)
    events = run(candidate, 20)
    assert compare(candidate, [*events, step(2, 1, 1.0, 0.0)]) is None
    alone = predict(MACHINES, JOB, Choice(strategy="allreduce", codec="fp32", engine="mesh", members=("a",)))
    assert compare(alone, events) is None


def test_steps_after_a_loss_do_not_count() -> None:
    candidate = predict(MACHINES, JOB, EVERY_STEP)
    lonely: list[Event] = [step(0, number, 9.0, 0.0) for number in range(13, 60)]
    assert compared(candidate, [*run(candidate, 12), *lonely]).ratio == pytest.approx(1.0)


def test_bytes_are_those_of_the_member_that_moves_most() -> None:
    candidate = predict(MACHINES, JOB, EVERY_STEP)
    events: list[Event] = [step(rank, number, 1.0, 0.0, moved=500 * rank) for rank in (1, 2) for number in range(1, 20)]
    assert compared(candidate, events).measured_bytes_per_hour == pytest.approx(2000 * 3600)


def test_a_composition_takes_the_mean_of_steps_that_exchange_more_and_less() -> None:
    choice = Choice(strategy="sparta + diloco", codec="fp32", engine="mesh", members=("a", "b"))
    candidate = predict(MACHINES, JOB, choice)
    events: list[Event] = [step(rank, n, 1.0, 5.0 if n % 50 == 0 else 0.0) for rank in (0, 1) for n in range(1, 54)]
    assert compared(candidate, events).measured_step == pytest.approx(1.0 + 5.0 / 50)


def test_members_whose_steps_are_long_and_short_by_turns_take_the_mean_of_both() -> None:
    """A member that is first after one exchange is last after the next; measured so over 100 Mbit/s."""
    candidate = predict(MACHINES, JOB, EVERY_STEP)
    turns = {rank: [0.21 if (number + rank) % 2 else 0.26 for number in range(1, 11)] for rank in (1, 2)}
    events: list[Event] = [
        step(rank, number, seconds, 0.0, moved=500) for rank in turns for number, seconds in enumerate(turns[rank], 1)
    ]
    comparison = compared(candidate, events)
    assert comparison.measured_step == pytest.approx(0.235)
    assert comparison.measured_bytes_per_hour == pytest.approx(1000 * 3600 / 0.235)


# ------------------------------------------------------------------------------------------------------------- remember


@few_examples
@given(st.lists(ratios, max_size=20))
def test_a_factor_is_drawn_towards_one_and_bounded(observed: list[float]) -> None:
    factor = shrunk_mean(observed, [1.0] * len(observed))
    assert 1 / LARGEST_FACTOR <= factor <= LARGEST_FACTOR
    plain = (
        math.exp(
            sum(math.log(min(LARGEST_FACTOR, max(1 / LARGEST_FACTOR, ratio))) for ratio in observed) / len(observed)
        )
        if observed
        else 1.0
    )
    assert abs(math.log(factor)) <= abs(math.log(plain)) + 1e-12


@pytest.mark.slow
@few_examples
@given(st.lists(st.tuples(ratios, ratios), max_size=5), st.sampled_from([EVERY_STEP, MERGED]))
def test_what_is_learnt_brings_the_prediction_closer(
    tmp_path_factory: pytest.TempPathFactory, runs: list[tuple[float, float]], choice: Choice
) -> None:
    cache = MeasurementCache(tmp_path_factory.mktemp("cache"))
    truth = max((abs(math.log(c)) for c, _ in runs), default=0.0)
    for compute, exchange in runs:
        candidate = predict(MACHINES, JOB, choice)
        remember(MACHINES, compared(candidate, run(candidate, 30, compute, exchange)), cache, NOW)
    learnt = corrections(MACHINES, JOB, cache, NOW)
    assert abs(math.log(learnt.compute.get("a", 1.0))) <= truth + 1e-9
    corrected = predict(MACHINES, JOB, choice, learnt)
    plain = predict(MACHINES, JOB, choice)
    assert corrected.members[0].seconds == pytest.approx(plain.members[0].seconds * learnt.compute.get("a", 1.0))
    assert corrected.exchange == pytest.approx(plain.exchange * corrected.exchange_correction)


def test_the_same_run_again_and_again_is_predicted_in_the_end(tmp_path: Path) -> None:
    cache = MeasurementCache(tmp_path)
    errors = []
    truth = run(predict(MACHINES, JOB, EVERY_STEP), 30, 1.4, 1.8)
    for _ in range(8):
        candidate = predict(MACHINES, JOB, EVERY_STEP, corrections(MACHINES, JOB, cache, NOW))
        comparison = compared(candidate, truth)
        errors.append(abs(math.log(comparison.ratio)))
        remember(MACHINES, comparison, cache, NOW)
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 0.15 * errors[0]


def test_another_strategy_takes_the_compute_only(tmp_path: Path) -> None:
    cache = MeasurementCache(tmp_path)
    candidate = predict(MACHINES, JOB, EVERY_STEP)
    remember(MACHINES, compared(candidate, run(candidate, 30, 2.0, 2.0)), cache, NOW)
    learnt = corrections(MACHINES, JOB, cache, NOW)
    assert learnt.exchange_factor(("a", "b"), "diloco", "mesh") == 1.0
    assert learnt.exchange_factor(("a", "b"), "allreduce", "mesh") == pytest.approx(math.sqrt(2))
    assert learnt.compute.get("b", 1.0) == pytest.approx(math.sqrt(2))


def test_age_and_another_model_count_less(tmp_path: Path) -> None:
    cache = MeasurementCache(tmp_path)
    candidate = predict(MACHINES, JOB, EVERY_STEP)
    remember(MACHINES, compared(candidate, run(candidate, 30, 2.0)), cache, NOW)
    fresh, old = (corrections(MACHINES, JOB, cache, at).compute.get("a", 1.0) for at in (NOW, NOW + HALF_LIFE))
    other_model = corrections(MACHINES, JOB.model_copy(update={"trainable": 5}), cache, NOW).compute.get("a", 1.0)
    assert 1.0 < other_model < old < fresh < 2.0


def test_machines_are_known_by_their_keys(tmp_path: Path) -> None:
    cache = MeasurementCache(tmp_path)
    original = Cluster(machines=(machine("a", identity="K1"), machine("b", identity="K2")), links=MACHINES.links)
    renamed = Cluster(machines=(machine("x", identity="K1"), machine("a", identity="K3")))
    candidate = predict(original, JOB, EVERY_STEP)
    remember(original, compared(candidate, run(candidate, 30, 2.0)), cache, NOW)
    learnt = corrections(renamed, JOB, cache, NOW)
    assert (learnt.compute.get("x", 1.0) > 1.0, learnt.compute.get("a", 1.0)) == (True, 1.0)


def test_a_history_has_an_end(tmp_path: Path) -> None:
    cache = MeasurementCache(tmp_path)
    candidate = predict(MACHINES, JOB, EVERY_STEP)
    comparison = compared(candidate, run(candidate, 30, 2.0))
    for number in range(2 * MOST_OBSERVATIONS):
        remember(MACHINES, comparison, cache, NOW + number)
    assert all(path.read_text().count('"ratio"') == 2 * MOST_OBSERVATIONS for path in tmp_path.iterdir())


@pytest.mark.parametrize("text", ["", "{}", '{"measured_at": 1, "document": {"observations": [{"ratio": -1}]}}'])
def test_a_spoilt_file_is_as_none(tmp_path: Path, text: str) -> None:
    cache = MeasurementCache(tmp_path)
    candidate = predict(MACHINES, JOB, EVERY_STEP)
    remember(MACHINES, compared(candidate, run(candidate, 30, 2.0)), cache, NOW)
    for path in tmp_path.iterdir():
        path.write_text(text)
    assert corrections(MACHINES, JOB, cache, NOW) == Corrections()


def test_a_cache_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    candidate = predict(MACHINES, JOB, EVERY_STEP)
    comparison = compared(candidate, run(candidate, 30))
    with pytest.raises(BadInput):
        remember(MACHINES, comparison, MeasurementCache(tmp_path / "file"), NOW)


# ------------------------------------------------------------------------------------------------------ corrected plans


def test_without_corrections_a_plan_is_as_it_was() -> None:
    assert plan(MACHINES, JOB, None, Corrections()) == plan(MACHINES, JOB)


def test_a_machine_that_proved_slow_gets_less_to_do() -> None:
    slow = Corrections(compute={"a": 2.0})
    batches = [member.micro_batch for member in predict(MACHINES, JOB, EVERY_STEP, slow).members]
    assert batches == [member.micro_batch for member in predict(cluster([4.0, 4.0], mbit=100), JOB, EVERY_STEP).members]


def test_an_exchange_that_proved_slow_can_change_the_plan() -> None:
    fast = cluster([8.0, 8.0], mbit=1000)
    strategy_and_engine = {"strategy": "diloco", "engine": "mesh"}
    learnt = Corrections(
        exchange=tuple(ExchangeCorrection(machine=name, factor=3.0, **strategy_and_engine) for name in "ab")
    )
    merged = MERGED.model_copy(update={"codec": "bf16"})
    assert predict(fast, JOB, merged, learnt).step > predict(fast, JOB, merged).step
    assert predict(fast, JOB, EVERY_STEP, learnt).step == predict(fast, JOB, EVERY_STEP).step
