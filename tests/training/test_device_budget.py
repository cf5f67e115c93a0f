"""What a step may ask of a GPU: waits of the host, copies and launches, for one worker and for every strategy.

A device that counts stands in for the GPU (``tests/counting/device.py``), so the numbers are exact and need none. Each
wait lets the device run dry, and so does each copy of memory that is not pinned: whoever adds a ``float()`` to the step
exceeds a budget, and the failure names its line. Budgets are those of a member and step; a round of a strategy that
merges weights is shared out over the two steps that it takes. What is trained has the CPU's bits.
"""

from __future__ import annotations

import functools
import json
import math
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from training.strategies.registry import strategies

STEPS = 2
SCALARS, BATCH = 32, 1024
"""Bytes of a loss and some norms, and of all micro-batches of a step."""
ROUNDS: dict[str, Any] = {"sync_interval": STEPS}
ROUND = (0.6 / STEPS, 0.6 / STEPS)
"""Bytes a weight to the host and to the device, of one step of a round of mxfp4."""
SMALL: dict[str, Any] = {"bucket_mb": 0.02}
"""Buckets of which the model fills four."""


@dataclass(frozen=True)
class Budget:
    """At most so much, of a member and step."""

    waits: float
    launches: float
    to_host: float = 0.0
    """Bytes a weight, as the next one."""
    to_device: float = 0.0
    small: int = SCALARS
    """Bytes from and to memory that is not pinned."""
    beside: float = 0.0
    """Waits of a thread that holds nobody up."""
    held: float = math.inf
    """Bytes a weight of the device's memory in use, with activations."""
    held_after: float = math.inf
    """The same when backward has ended: weights, gradients and the optimizer's two vectors are 16."""
    workers: int = 1
    training: Mapping[str, Any] = field(default_factory=dict)
    strategy: Mapping[str, Any] = field(default_factory=dict)
    task_name: str = "Text"
    """Class of ``tests/counting/steps.py``."""
    free: int = 1 << 40
    """Bytes of the device that nobody has."""
    compares: bool = False
    """Whether it is trained on the CPU as well."""


def group(waits: float, launches: float, to_host: float, to_device: float, name: str, **more: Any) -> Budget:
    """Return the budget of a strategy with two members."""
    own, options = {name: more.pop("own")} if "own" in more else {}, more.pop("options", {})
    strategy = {"strategy": name, "verify_interval": 0, "owned": own, **options}
    return Budget(waits, launches, to_host, to_device, workers=2, strategy=strategy, **more)


ALONE = {
    "one worker": Budget(1, 107, held=21, held_after=16.1, compares=True),
    "four micro-batches": Budget(
        1, 461, held=20.5, held_after=16.1, training={"gradient_accumulation": 4, "batch_size": 2}
    ),
    "no clipping": Budget(1, 99, held=21, held_after=16.1, training={"max_grad_norm": 0.0}),
    "a careless task": Budget(1, 107, task_name="Careless"),
}
"""The model has 26 tensors. Of the launches 84 are forward and backward of a batch."""
GROUPS = {
    "allreduce": group(2, 114, 4, 4, "allreduce", own=SMALL, beside=4),
    "allreduce, compared": group(3, 170, 4.1, 4, "allreduce", own=SMALL, beside=4, options={"verify_interval": 1}),
    "allreduce in 16 bits": group(
        2, 122, 2, 2, "allreduce", own=SMALL, beside=4, options={"codec": "bf16"}, compares=True
    ),
    "allreduce, powersgd": group(2, 122, 4, 4, "allreduce", own={**SMALL, "compressor": "powersgd"}, beside=4),
    "zero1": group(4, 119, 6, 6, "zero1", compares=True),
    "demo": group(3, 561, 0.33, 1.3, "demo", small=128, compares=True),
    "sparta": group(4, 151, 0.05, 0.13, "sparta", small=64, compares=True),
    "diloco": group(2.5, 126, *ROUND, "diloco", own=ROUNDS, compares=True),
    "diloco, compared": group(2.5, 126, *ROUND, "diloco", own=ROUNDS, options={"verify_interval": 1}),
    "diloco, overlapped": group(2.5, 128, *ROUND, "diloco", own={**ROUNDS, "sync_delay": 1}, compares=True),
    "diloco, feedback": group(2.5, 139, *ROUND, "diloco", own=ROUNDS, options={"error_feedback": True}, compares=True),
    "diloco, adamw": group(2.5, 130, *ROUND, "diloco", own={**ROUNDS, "outer_optimizer": "adamw"}, compares=True),
    "diloco, a full device": group(2.5, 116, 0.6 / STEPS, 8 / STEPS, "diloco", own=ROUNDS, free=1000, compares=True),
    "diloco, out of memory": group(
        3.5, 116, 8.6 / STEPS, 8.1 / STEPS, "diloco", own=ROUNDS, task_name="Hungry", compares=True
    ),
    "streaming_diloco": group(
        5, 158, *ROUND, "streaming_diloco", own={**ROUNDS, "fragments": 2}, small=64, compares=True
    ),
    "streaming_diloco, rda": group(
        3.5,
        145,
        0.6 / STEPS,
        4.1 / STEPS,
        "streaming_diloco",
        own={**ROUNDS, "fragments": 1, "merge": "rda"},
        small=128,
        options={"error_feedback": True},
        compares=True,
    ),
    "local_sgd": group(1.5, 107, 4 / STEPS, 4 / STEPS, "local_sgd", own=ROUNDS),
    "fedavg": group(1.5, 107, 4 / STEPS, 4 / STEPS, "fedavg", own=ROUNDS),
    "noloco": group(2, 107, 4 / STEPS, 4 / STEPS, "noloco", own=ROUNDS),
    "sparseloco": group(2, 107, 4 / STEPS, 4 / STEPS, "sparseloco", own={**ROUNDS, "force": True}),
}
BUDGETS = ALONE | GROUPS
PASSES = ("backward", "tests/counting/steps.py", "training/optimization/backward.py")
"""Places where activations are held."""
UNCOUNTED = {"async_diloco"}
"""Its members make their steps at their own pace."""


@pytest.fixture(scope="module")
def counted() -> Callable[[Mapping[str, Budget]], dict[str, Any]]:
    """What all cases of a table ask for, by name: counted in one process, once."""

    @functools.cache
    def of(names: tuple[str, ...]) -> dict[str, Any]:
        options = ("workers", "training", "strategy", "task_name", "free", "compares")
        cases = [{option: getattr(BUDGETS[name], option) for option in options} for name in names]
        command = [sys.executable, "-m", "tests.counting.steps", json.dumps(cases)]
        done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2])
        assert done.returncode == 0, done.stderr
        return dict(zip(names, json.loads(done.stdout.splitlines()[-1]), strict=True))

    return lambda table: of(tuple(table))


def excess(budget: Budget, found: Mapping[str, Any]) -> str:
    """Return what is above the budget, by place; empty: nothing."""
    if "error" in found:
        return str(found["error"])
    each, weights = STEPS * budget.workers, found["weights"]
    allowed = {
        "waits": budget.waits,
        "waits_beside": budget.beside,
        "launches": budget.launches,
        "pageable": budget.small,
        "to_host": budget.to_host * weights + SCALARS,
        "to_device": budget.to_device * weights + BATCH,
        "races": 0,
    }
    totals = {kind: sum(found[kind].values()) / each for kind in allowed}
    held = {
        place: bytes_ / weights
        for place, bytes_ in found["held"].items()
        if bytes_ > (budget.held if place.startswith(PASSES) else budget.held_after) * weights
    }
    return "\n".join(
        f"{kind}: {total:g} a step, not {allowed[kind]:g}: "
        + ", ".join(f"{number / each:g} at {place}" for place, number in found[kind].items())
        for kind, total in totals.items()
        if total > allowed[kind]
    ) + "".join(f"\nheld: {bytes_:.2f} bytes a weight at {place}" for place, bytes_ in held.items())


@pytest.mark.parametrize("case", [name for name, budget in ALONE.items() if budget.task_name == "Text"])
def test_one_worker_stays_within_its_budget(case: str, counted: Any) -> None:
    found = counted(ALONE)[case]
    assert not excess(ALONE[case], found)
    assert found["same"]


def test_what_a_careless_task_does_is_named(counted: Any) -> None:
    case = "a careless task"
    said = excess(ALONE[case], counted(ALONE)[case])
    assert said.startswith("waits: 2 a step, not 1: 1 at tests/counting/steps.py:")
    assert "races: 1 a step, not 0: 1 at tests/counting/steps.py:" in said


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("case", GROUPS)
def test_a_member_of_a_group_stays_within_its_budget(case: str, counted: Any) -> None:
    found = counted(GROUPS)[case]
    assert not excess(GROUPS[case], found)
    assert found["same"]


def test_every_strategy_has_a_budget() -> None:
    assert {budget.strategy["strategy"] for budget in GROUPS.values()} | UNCOUNTED == set(strategies())
