"""The whole script of a run: what happens when, from the start to the end. Pure; who plays it gives the clock."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from app.demo.beats import Beat, in_order
from app.demo.opening import opening
from app.demo.training_script import TrainingScript
from training.events import EvaluationEvent, StepEvent
from training.plan import RunPlan

ENDING = 0.4


@dataclass(frozen=True)
class Script:
    """A scripted run."""

    beats: list[Beat]
    """In order of time."""
    ends: float
    """Seconds after the start at which the run is completed."""
    metrics: dict[str, Any]
    """What its ``metrics.json`` says."""


def script_of(plan: RunPlan, seed: int) -> Script:
    """Return the script of a run with this plan: the same for the same plan and seed."""
    start = opening(plan, seed)
    training = TrainingScript(plan, seed, max(beat.at for beat in start))
    beats = in_order([*start, *training.write()])
    ends = beats[-1].at + ENDING
    return Script(beats, ends, metrics_of(beats, ends))


def metrics_of(beats: list[Beat], seconds: float) -> dict[str, Any]:
    """Return the figures at the end of a run that said these beats."""
    before: dict[str, dict[str, float]] = {}
    after: dict[str, dict[str, float]] = {}
    samples = steps = 0
    for beat in beats:
        if isinstance(beat.what, EvaluationEvent):
            (after if beat.what.step else before)[beat.what.split] = dict(beat.what.metrics)
        elif isinstance(beat.what, StepEvent):
            samples, steps = samples + beat.what.samples, max(steps, beat.what.step)
    return {
        "before": before,
        "after": after,
        "steps": steps,
        "samples": samples,
        "seconds": seconds,
        "samples_per_second": samples / seconds if seconds else 0.0,
        "lost_members": [],
    }
