"""What one member says of its share of an evaluation cannot break or stop the others'."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from profiles.optimisation import EvaluationSettings
from tests.training.memory_exchange import RoomExchange, together
from tests.training.toy_task import ToyTask
from training.data.batches import Samples
from training.exchange.base import SoloExchange
from training.hardware.device import Precision
from training.loop import evaluation
from training.loop.evaluation import Evaluator
from training.records.events import EvaluationEvent
from training.tasks.base import Batch

CPU = torch.device("cpu")
LIAR = 1


def evaluator(member: RoomExchange, warnings: list[str], **named: int) -> Evaluator:
    task = ToyTask()
    task.prepare(lambda *_: None)
    samples, settings = Samples(task, 0, CPU, 0.0, "here"), EvaluationSettings()
    model, precision = task.build_model(), Precision(None, CPU)
    return Evaluator(samples, model, precision, member, settings, 4, warn=warnings.append, **named)


def evaluated(lie: bytes, again: int = 0, heeds: bool = True) -> tuple[list[EvaluationEvent | None], list[str]]:
    """Return what three members, of whom one says ``lie`` each time, have measured, and who was warned of what."""
    warnings: list[str] = []

    def body(member: RoomExchange) -> Any:
        if member.rank == LIAR:
            return [member.gather("a lie", lie) for _ in range(again + 1)]
        own = evaluator(member, warnings)
        tries = range(again + 1)
        return [own.evaluate("validation", 7, {0: 4, 1: 4, 2: 4}, number, heeds) for number in tries][-1]

    found = together(3, Whatever(body))[0]
    return [found[0], found[2]], warnings


class Whatever:
    """Lets all operations of one number meet, whatever the liar calls them."""

    def __init__(self, body: Any) -> None:
        self._body = body

    def __call__(self, member: RoomExchange) -> Any:
        member._next_operation = lambda name, members: (f"x:{self._count(member)}", tuple(members or ()))
        return self._body(member)

    def _count(self, member: RoomExchange) -> int:
        member.operations += 1
        return member.operations


def said(**sums: float) -> bytes:
    return json.dumps({"loss_sum": 1.0, "weight": 3.0, "samples": 3.0} | sums).encode()


LIES = {
    "so that all weights make nothing": said(weight=-7.0),
    "more samples than there are": said(samples=4.0),
    "fewer than none": said(samples=-1.0),
    "beyond all numbers": said(weight=1e299),
    "no number": said(weight=float("nan")),
    "no document": b"\xff",
}


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
def test_impossible_figures_are_left_out_and_told(lie: bytes) -> None:
    found, warnings = evaluated(lie)
    for event in found:
        assert event is not None and event.samples == 7 and event.loss is not None and event.loss > 0
    assert warnings == ["member 1 reported no valid figures in time; the evaluation goes on without that part"]


class _LearnsSome(ToyTask):
    def weight(self, batch: Batch) -> float:
        return float((batch["x"][:, 0] > 0).sum())

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        learnt = batch["x"][:, 0] > 0
        return nn.functional.mse_loss(model(batch["x"][learnt]), batch["y"][learnt])


def test_a_batch_without_weight_takes_no_part_in_a_loss() -> None:
    task = _LearnsSome()
    task.prepare(lambda *_: None)
    samples, model = Samples(task, 0, CPU, 0.0, "here"), task.build_model()
    event = Evaluator(samples, model, Precision(None, CPU), SoloExchange(), EvaluationSettings(), 1).evaluate(
        "validation", 7, {0: 1}
    )
    assert event is not None and event.loss is not None
    assert math.isfinite(event.loss) and event.samples == 10


def test_a_loss_that_is_no_number_is_told_as_it_is() -> None:
    found, warnings = evaluated(said(loss_sum=float("nan")))
    assert [event is not None and event.loss for event in found] == [None, None] and warnings == []


def test_a_long_share_is_told_in_parts() -> None:
    """So a member that is slow is in time for every round, and the sums are those of one round."""
    whole = together(2, lambda member: evaluator(member, []).evaluate("validation", 7, {0: 1, 1: 4}))[0][0]
    names: list[str] = []

    def body(member: RoomExchange) -> EvaluationEvent | None:
        gather = member.gather
        member.gather = lambda name, payload: names.append(name) or gather(name, payload)  # type: ignore[method-assign]
        return evaluator(member, [], round_size=1).evaluate("validation", 7, {0: 1, 1: 4})

    parts = list(together(2, body)[0].values())
    assert all(found.metrics == pytest.approx(whole.metrics) for found in parts)
    assert {found.samples for found in parts} == {10}
    assert sorted(names) == sorted([f"eval/validation/7/{part}" for part in range(2)] * 2)


def test_who_is_not_heard_of_in_time_is_named() -> None:
    warnings: list[str] = []
    alone = together(1, lambda member: evaluator(member, warnings).evaluate("validation", 7, {0: 4, 1: 4}))[0]
    assert alone[0].samples == 5
    assert warnings == ["member 1 reported no valid figures in time; the evaluation goes on without that part"]


def test_who_says_again_and_again_that_it_stops_is_not_heeded() -> None:
    assert evaluated(b"null")[0] == [None, None]
    for found, _ in (evaluated(b"null", again=1), evaluated(b"null", heeds=False)):
        assert all(event is not None and event.samples >= 6 for event in found)


@pytest.mark.parametrize(
    ("first", "later", "counts"),
    [
        (0.5, 0.01, [1, 4, 8]),  # a GPU loads its programs with the first sample
        (1.0, 0.7, [1, 4]),  # eight would take 5.6 s
        (9.0, 0.7, [1]),
    ],
)
def test_the_time_of_a_sample_is_measured_with_as_many_as_are_quick(
    first: float, later: float, counts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    now, evaluated = [0.0], list[int]()

    def sums(split: str, indices: range) -> None:
        now[0] += later * len(indices) if evaluated else first
        evaluated.append(len(indices))

    measured: Any = SimpleNamespace(_batch_size=8, _task=SimpleNamespace(evaluation={"test": range(20)}), _sums=sums)
    monkeypatch.setattr(evaluation.time, "monotonic", lambda: now[0])
    assert Evaluator.seconds_per_sample(measured, "test") == pytest.approx(first if len(counts) == 1 else later)
    assert evaluated == counts
