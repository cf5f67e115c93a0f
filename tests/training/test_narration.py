"""What a script that trains from Python is told of its run."""

from __future__ import annotations

import pytest

from profiles.files.resolve import profile_from_options
from training.records.events import (
    ElectionEvent,
    EvaluationEvent,
    Event,
    MemberEvent,
    RunEvent,
    StepEvent,
    WarningEvent,
)
from training.run.narration import INTERVAL, RunNarrator


class Told:
    """A narrator whose clock is turned by hand."""

    def __init__(self, **options: object) -> None:
        self.now, self.lines = 0.0, list[str]()
        profile = profile_from_options("p", {"task": "custom", **options})
        self.narrator = RunNarrator(profile, self.lines.append, lambda: self.now)

    def __call__(self, *events: Event) -> list[str]:
        for event in events:
            self.narrator(event)
        return self.lines


def step(number: int, member: int = 0) -> StepEvent:
    times = {"compute": 0.5, "wait": 0.0, "transfer": 0.0}
    return StepEvent(member=member, step=number, epoch=0, loss=0.25, learning_rate=0.1, samples=8, weight=8, **times)


def test_a_run_that_lies_in_its_warm_up_is_warned_of() -> None:
    begun = RunEvent(status="running", total_steps=4)
    assert Told(warmup_steps=50)(begun) == [
        "[0:00] training of 4 steps",
        "[0:00] warning: all of its 4 steps are in the warm-up of 50: the learning rate reaches 8 % of its peak; set "
        "warmup_steps to 0.1, a tenth of the run, or raise epochs",
    ]
    assert Told(warmup_steps=0.1)(begun, begun) == ["[0:00] training of 4 steps"]


def test_steps_are_told_now_and_then_and_the_last_one() -> None:
    told = Told()
    told(RunEvent(status="running", total_steps=9), step(1), step(1, member=1), step(2))
    told.now = INTERVAL
    assert told(step(3), step(4), step(9), RunEvent(status="completed"))[-4:] == [
        "[0:00] step 1/9, loss 0.2500, 16.0 samples/s a worker",
        "[0:10] step 3/9, loss 0.2500, 16.0 samples/s a worker",
        "[0:10] step 9/9, loss 0.2500, 16.0 samples/s a worker",
        "[0:10] completed",
    ]


def test_a_warning_of_every_member_is_told_once() -> None:
    assert Told()(*(WarningEvent(member=rank, message="a\x1b[31m") for rank in range(3))) == [
        "[0:00] warning: a\\x1b[31m"
    ]


@pytest.mark.parametrize(
    ("event", "line"),
    [
        (RunEvent(status="starting", details={"workers": 2}), "[0:00] starting 2 workers"),
        (MemberEvent(status="lost", name="worker-1"), "[0:00] worker-1 is lost; the others go on"),
        (
            ElectionEvent(name="b", term=1, port=7),
            "[0:00] warning: b carries the coordinator from now on: "
            "that before cannot be reached, and the members go on",
        ),
        (
            EvaluationEvent(step=3, split="validation", loss=0.5, metrics={"accuracy": 1}, samples=2, seconds=1),
            "[0:00] step 3, validation: accuracy 1.000, loss 0.5000",
        ),
    ],
)
def test_other_events(event: Event, line: str) -> None:
    assert Told()(event) == [line]
