"""A run that is stopped where members meet evaluates afterwards what it would have without the stop."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from toy_task import ToyTask, toy_plan

from profiles.errors import ExitCode
from training.records.events import ErrorEvent, EvaluationEvent, Event, StepEvent
from training.records.plan import RunPlan
from training.simulated.members import run_members


def told(folder: Path, plan: RunPlan, stop: int = 0) -> list[Event]:
    """Return the events of a simulated run, all members of which are stopped after this step; 0: after none."""
    events: list[Event] = []
    ordered, ended = threading.Event(), threading.Event()

    def orders() -> Iterator[bytes]:
        for rank in range(plan.world_size) if stop else ():
            yield json.dumps({"rank": rank, "command": "stop", "at_step": stop}).encode()
        ordered.set()
        ended.wait()  # for the end of the orders is a stop, too

    def note(event: Event) -> None:
        events.append(event)
        assert not isinstance(event, StepEvent) or ordered.wait(60)  # nobody gets beyond the step that is named

    task = ToyTask()
    assert run_members(plan, lambda rank: task, folder, folder, note, orders()) is ExitCode.DONE
    ended.set()
    assert not [event for event in events if isinstance(event, ErrorEvent)]
    return events


def figures(events: list[Event]) -> dict[Any, float]:
    losses = {(e.member, e.step): e.loss for e in events if isinstance(e, StepEvent)}
    return losses | {(e.split, e.step): e.metrics["loss"] for e in events if isinstance(e, EvaluationEvent)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "own", "stop"),
    [("diloco", {"sync_interval": 4, "sync_delay": 2}, 6), ("sparta", {"share": 0.2, "interval": 3, "delay": 2}, 5)],
)
def test_where_members_meet_with_exchanges_under_way(
    tmp_path: Path, strategy: str, own: dict[str, Any], stop: int
) -> None:
    chosen = {"strategy": strategy, "owned": {strategy: own}}
    plan = toy_plan(3, {"max_steps": 10}, {"eval_interval": 2, "eval_local": "off"}, strategy=chosen)
    plan = plan.model_copy(update={"engine": "simulated"})
    whole = figures(told(tmp_path / "whole", plan))
    first = figures(told(tmp_path / "again", plan, stop))
    assert first | figures(told(tmp_path / "again", plan.model_copy(update={"resume": True}))) == whole
