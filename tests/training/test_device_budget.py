"""What a step may ask of a GPU: waits of the host, copies and launches, for one worker and for every strategy.

A device that counts stands in for the GPU (``tests/counting/device.py``), so the numbers are exact and need none. Each
wait lets the device run dry, each byte that is not pinned makes one more: whoever adds a ``float()`` to the step
exceeds a budget, and the failure names its line. Budgets are those of a member and step; a round of a strategy that
merges weights is shared out over the four steps that it takes.
"""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

STEPS = 4
ROUNDS: dict[str, Any] = {"sync_interval": STEPS}


@dataclass(frozen=True)
class Budget:
    """At most so much, of a member and step."""

    waits: float
    launches: float
    to_host: float = 0.0
    """Bytes a weight, as the next two."""
    to_device: float = 0.0
    pageable: float = 0.0
    workers: int = 2
    training: dict[str, Any] = field(default_factory=dict)
    strategy: dict[str, Any] = field(default_factory=dict)


SCALARS, BATCH = 32, 1024
"""Bytes of a loss and some norms, and of all micro-batches of a step."""
ALONE: dict[str, Budget] = {
    "one worker": Budget(1, 107, workers=1),
    "four micro-batches": Budget(1, 461, workers=1, training={"gradient_accumulation": 4, "batch_size": 2}),
    "no clipping": Budget(1, 100, workers=1, training={"max_grad_norm": 0.0}),
}
"""The model has 26 tensors; forward and backward of one batch are 84 of the launches."""
GROUPS: dict[str, Budget] = {}
BUDGETS = ALONE | GROUPS


@pytest.fixture(scope="module")
def counted() -> Callable[[Mapping[str, Budget]], dict[str, Any]]:
    """What all cases of a table ask for, by name: counted in one process, once."""

    @functools.cache
    def of(names: tuple[str, ...]) -> dict[str, Any]:
        budgets = [BUDGETS[name] for name in names]
        cases = [{"workers": one.workers, "training": one.training, "strategy": one.strategy} for one in budgets]
        command = [sys.executable, "-W", "ignore", "-m", "tests.counting.steps", json.dumps(cases)]
        done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2])
        assert done.returncode == 0, done.stderr
        return dict(zip(names, json.loads(done.stdout.splitlines()[-1]), strict=True))

    return lambda table: of(tuple(table))


def check(budget: Budget, found: Mapping[str, Any]) -> None:
    each, weights = STEPS * budget.workers, found["weights"]
    allowed = {
        "waits": budget.waits,
        "launches": budget.launches,
        "pageable": budget.pageable * weights + SCALARS,
        "to_host": budget.to_host * weights + SCALARS,
        "to_device": budget.to_device * weights + BATCH,
        "races": 0,
    }
    for kind, most in allowed.items():
        total = sum(found[kind].values()) / each
        places = "\n".join(f"  {place}: {number / each:g}" for place, number in found[kind].items())
        assert total <= most, f"{kind}: {total:g} a step instead of {most:g}, by place:\n{places}"


@pytest.mark.parametrize("case", ALONE)
def test_one_worker_stays_within_its_budget(case: str, counted: Any) -> None:
    check(ALONE[case], counted(ALONE)[case])


@pytest.mark.slow
@pytest.mark.parametrize("case", GROUPS)
def test_a_member_of_a_group_stays_within_its_budget(case: str, counted: Any) -> None:
    check(GROUPS[case], counted(GROUPS)[case])
