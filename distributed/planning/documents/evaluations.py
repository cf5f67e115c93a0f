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
    before: bool = False
    local: Literal["auto", "on", "off"] = "auto"
    """Whether members evaluate their own weights too, except before the first step; ``auto``: if theirs always
    differ."""

    @classmethod
    def of(cls, settings: EvaluationSettings, samples: SampleCounts) -> EvaluationPlan:
        """Return the evaluations that a profile asks for."""
        before, local = settings.eval_before, settings.eval_local
        return cls(samples=samples, interval=settings.eval_interval, before=before, local=local)

    def samples_after_start(self, steps: int) -> int:
        """Return the samples of all evaluations of so many steps, without those before the first one."""
        periodic = max(0, steps - 1) // self.interval if self.interval else 0
        return sum(self.samples.values()) + periodic * self.samples.get("validation", 0)

    def samples_in(self, steps: int) -> int:
        """Return the samples of all evaluations of so many steps."""
        return self.samples_after_start(steps) + (sum(self.samples.values()) if self.before else 0)
