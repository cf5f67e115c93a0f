"""How often a run evaluates, and on how many samples: the part of its time that is not spent on steps."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from distributed.planning.documents.cluster import Bytes, Document, Name
from profiles.optimisation import EvaluationSettings

SampleCounts = Annotated[dict[Name, Bytes], Field(max_length=64)]
"""Samples of an evaluation by split."""


class EvaluationPlan(Document):
    """The evaluations of a run: of all splits before the first step, if asked for, and after the last one; of the
    validation split at an interval between them."""

    samples: SampleCounts = Field(default_factory=dict)
    interval: Bytes = 0
    """Steps; 0: none between the first step and the last one."""
    share: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Of the run, between two evaluations, where the interval is given as one; 0: it is in steps."""
    before: bool = False
    local: Literal["auto", "on", "off"] = "auto"
    """Whether members evaluate their own weights too, except before the first step; ``auto``: if theirs always
    differ."""

    @classmethod
    def of(cls, settings: EvaluationSettings, samples: SampleCounts) -> EvaluationPlan:
        """Return the evaluations that a profile asks for."""
        before, local = settings.eval_before, settings.eval_local
        share = settings.eval_interval % 1 if settings.eval_interval < 1 else 0.0
        return cls(samples=samples, interval=int(settings.eval_interval), share=share, before=before, local=local)

    def samples_after_start(self, steps: int) -> int:
        """Return the samples of all evaluations of so many steps, without those before the first one."""
        interval = max(1, round(self.share * steps)) if self.share else self.interval
        periodic = max(0, steps - 1) // interval if interval else 0
        return sum(self.samples.values()) + periodic * self.samples.get("validation", 0)

    def samples_in(self, steps: int) -> int:
        """Return the samples of all evaluations of so many steps."""
        return self.samples_after_start(steps) + (sum(self.samples.values()) if self.before else 0)
