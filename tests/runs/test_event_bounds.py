"""What anybody writes as an event is refused with ValueError, or is an event that can be written again."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from training.records.bounded_fields import LONGEST_LINE, LONGEST_TEXT
from training.records.events import ErrorEvent, EvaluationEvent, StepEvent, from_line, to_line

STEP = {
    "kind": "step", "step": 1, "epoch": 0.5, "loss": 1.0, "learning_rate": 0.1, "samples": 1, "weight": 1.0,
    "compute": 0.1, "wait": 0.0, "transfer": 0.0,
}  # fmt: skip
EVALUATION = {"kind": "evaluation", "step": 1, "split": "test", "loss": 1.0, "metrics": {"wer": 0.5}, "samples": 1}
MACHINE = {"kind": "machine", "cpu_percent": 1.0, "memory_used": 1, "memory_total": 1, "meters": ["gpu"]}
KNOWN: list[dict[str, Any]] = [
    STEP,
    MACHINE,
    {**EVALUATION, "seconds": 1.0},
    {"kind": "run", "status": "running", "total_steps": 1, "details": {}},
    {"kind": "member", "status": "ready", "name": "a"},
    {"kind": "progress", "phase": "x", "done": 1},
    {"kind": "timing", "part": "x", "seconds": 1.0},
    {"kind": "error", "message": "x"},
    {"kind": "request", "request": "x", "action": "x", "outcome": "done"},
    {
        "kind": "sync",
        "step": 1,
        "round": 1,
        "bytes_sent": 1,
        "bytes_received": 1,
        "seconds": 1,
        "wait": 1,
        "members": [],
    },
    {"kind": "snapshot", "step": 1, "path": "x", "bytes": 1, "seconds": 1},
    {"kind": "of a later version"},
]
SPECIAL = st.sampled_from(
    [math.nan, math.inf, -math.inf, 10**400, -(10**15), 10**15, "\ud800", "\x1b[2J", "", -1, 1e308]
)
VALUES = st.recursive(
    SPECIAL | st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


@given(known=st.sampled_from(KNOWN), data=st.data())
def test_any_values_are_refused_or_can_be_written_again(known: dict[str, Any], data: st.DataObject) -> None:
    fields = st.sampled_from([*known, "member", "seq", "time", "v", "more"])
    line = json.dumps({**known, **data.draw(st.dictionaries(fields, VALUES, max_size=3))})
    try:
        event = from_line(line)
    except ValueError:
        return
    again = to_line(event)
    assert to_line(from_line(again)) == again


@given(line=st.binary(max_size=200) | st.text(max_size=100))
def test_any_line_is_an_event_or_a_value_error(line: str | bytes) -> None:
    try:
        to_line(from_line(line))
    except ValueError:
        return


@pytest.mark.parametrize(
    "change",
    [
        {"step": 10**15},
        {"step": -1},
        {"loss": math.nan},
        {"compute": math.inf},
        {"samples": 10**400},
        {"weight": 1e300},
    ],
)
def test_impossible_figures_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        from_line(json.dumps({**STEP, **change}))


@pytest.mark.parametrize(
    "line",
    [
        '{"kind":"warning","message":"\\ud800"}',
        '{"kind":' + "[" * 100_000,
        json.dumps({"kind": "x", "x": "y" * LONGEST_LINE}),
    ],
)
def test_impossible_lines_are_refused(line: str) -> None:
    with pytest.raises(ValueError):
        from_line(line)


def test_what_an_honest_member_cannot_help_is_told_without_the_figure() -> None:
    evaluation = EvaluationEvent(
        step=1, split="test", loss=math.nan, metrics={"wer": math.nan, "cer": 0.5}, samples=1, seconds=1
    )
    read = from_line(to_line(evaluation))
    assert isinstance(read, EvaluationEvent) and read.loss is None and read.metrics == {"cer": 0.5}
    step = from_line(json.dumps(STEP)).model_copy(update={"grad_norm": math.inf})  # fp16 has passed over this step
    read = from_line(to_line(step))
    assert isinstance(read, StepEvent) and read.grad_norm is None


def test_a_message_is_cut_and_stays_writable() -> None:
    """File names may hold bytes that are no UTF-8; an error about one must still be told."""
    error = ErrorEvent(message="cannot read \udcff.wav" + "!" * 10_000)
    assert error.message.startswith("cannot read ?.wav") and len(error.message) == LONGEST_TEXT
    assert from_line(to_line(error)) == error
