"""The runs of ``plan_accuracy.py``: which hosts, links, quotas, model and strategy each has."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distributed.planning.documents.document import Choice
from distributed.planning.simulated import choice_of
from profiles.files.resolve import load_profile
from profiles.schema import Profile

HERE = Path(__file__).resolve().parent
NAMES = ("a", "b", "c", "d")
QUOTAS = {
    "equal": (0.24, 0.24, 0.24, 0.24),
    "3:1": (0.36, 0.12, 0.36, 0.12),
    "mixed": (0.4, 0.2, 0.1, 0.04),
}
"""Cores of each host."""
BATCHES = {"small": 8, "large": 8, "many": 32, "computed": 32, "wide": 64}
EMULATED = ("small", "large", "many")
"""Their device is not the processor, which the machines' figures cannot know."""
INTERVAL = 10
MEET_EVERY = 4
WAYS: dict[str, dict[str, Any]] = {
    "allreduce": {"codec": "bf16"},
    "diloco": {"codec": "mxfp4"},
    "streaming_diloco": {},
    "sparseloco": {"sparseloco.force": "true"},
    "sparta": {},
    "demo": {},
    "noloco": {},
    "async_diloco": {"async_diloco.meet_every": MEET_EVERY},
    "fedavg": {},
    "local_sgd": {},
    "zero1": {},
    "sparta + diloco": {},
}
"""Options of each strategy, whose payload is that of its defaults."""
EVERY_STEP = ("allreduce", "sparta", "demo", "zero1")
ROUNDS = 3
"""Of a periodic run; the first is not counted."""
SECONDS = 20.0
"""How long the steps of a run with an exchange in every step are to take in all."""
FEWEST, MOST, SKIPPED = 9, 24, 3
"""Its steps, and how many of them are not counted."""


@dataclass(frozen=True)
class Cell:
    """One run."""

    hosts: int
    mbit: float
    quota: str
    size: str
    strategy: str
    interval: int = INTERVAL

    @property
    def names(self) -> tuple[str, ...]:
        return NAMES[: self.hosts]

    @property
    def place(self) -> tuple[Any, ...]:
        """What its strategies are compared in."""
        return (self.hosts, self.mbit, self.quota, self.size)

    @property
    def choice(self) -> Choice:
        if self.hosts == 1:
            return Choice(strategy="allreduce", codec="fp32", engine="mesh", members=self.names)
        return choice_of(self.profile(1000), self.names)

    @property
    def period(self) -> int:
        """After how many steps everything comes again."""
        return 1 if self.hosts == 1 or self.strategy in EVERY_STEP else self.interval

    @property
    def stretch(self) -> int:
        """How many steps members make at their own pace; 0: none."""
        return MEET_EVERY * self.interval if self.strategy == "async_diloco" and self.hosts > 1 else 0

    def steps(self, predicted: float) -> int:
        """Return how many are run."""
        if self.period > 1:
            return 2 * self.stretch or self.period * ROUNDS
        return min(MOST, max(FEWEST, round(SECONDS / predicted)))

    @property
    def skipped(self) -> int:
        """Steps at the begin of a run that are not counted."""
        return self.stretch or (self.period if self.period > 1 else SKIPPED)

    def options(self, steps: int) -> dict[str, Any]:
        """Return the options of the profile."""
        way = WAYS[self.strategy] if self.hosts > 1 else {"codec": "fp32"}
        if self.period > 1:
            way = way | {"sync_interval": self.period}
        return options(self.size) | {"strategy": self.strategy, "engine": "mesh", "max_steps": steps} | way

    def profile(self, steps: int) -> Profile:
        return load_profile("nanogpt", texts(self.options(steps))).profile


def options(size: str) -> dict[str, Any]:
    """Return what makes the task."""
    return {
        "task": "custom",
        "model_path": f"{HERE / 'plan_job.py'}:{size}",
        "batch_size": BATCHES[size],
        "gradient_accumulation": 1,
        "threads": 1,
        "max_steps": 1000,
        "warmup_steps": 1,
        "eval_interval": 0,
        "eval_before": "false",
        "snapshot_interval": 0,
        "verify_interval": 0,
        "output_dir": "/root/runs",
    }


def texts(given: dict[str, Any]) -> dict[str, str]:
    """Return options as a command line gives them."""
    return {key: str(value) for key, value in given.items()}
