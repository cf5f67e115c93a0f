"""Measures a task on one machine: ``python -m training.trial.short_run``; arguments as :mod:`training.workers.worker`.

Alone and without any exchange, the trainer of a real run takes a few steps at two batch sizes. Nothing is evaluated and
nothing is saved. Standard output: one JSON object a line, in this order unless something goes wrong::

    {"kind": "progress", "phase": ..., "done": ..., "total": ...}        every now and then
    {"kind": "facts", "system": ..., "device": ..., "cores": ..., "memory_total": ..., "memory_free": ..., ...}
    {"kind": "workload", "trainable": ..., "total": ..., "layers": ..., "samples": ..., "evaluated": {"test": ...}}
    {"kind": "measurement", "batch": ..., "seconds": ..., "spread": ..., "error": ..., "peak": ..., "others": ...}
                                              once a batch size; a very slow machine has one
    {"kind": "evaluation", "seconds": ...}    of one sample; only if the run evaluates
    {"kind": "blocks", "seconds": [...]}      instead of the last two, where the model lies on several devices: of
                                              one sample in each block
    {"kind": "failure", "message": ..., "hint": ...}                     as the last line

The exit code is 0 in either case: the last line reports a failure, and the machine keeps no folder of it.
"""

from __future__ import annotations

import json
import math
import os
import resource
import statistics
import sys
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

import psutil
import torch
from torch import nn

from profiles.errors import ExitCode, MusterError
from profiles.schema import Profile
from training.exchange.base import SoloExchange
from training.hardware.device import select_device, select_precision
from training.hardware.resources import free_cores, granted_cores, quota, threads, total_memory
from training.hardware.sensors import OtherLoad, RunProcesses, battery
from training.loop.trainer import Trainer
from training.records.events import Event, StepEvent
from training.records.plan import RunPlan, read_plan
from training.run.orders import Control
from training.strategies.registry import default_strategy
from training.tasks.base import GroupPosition, Task
from training.tasks.registry import task_from_profile
from training.trial.block_times import block_times
from training.workers.worker import take_over_stdout, worker_arguments

WARM_UP, LEAST_STEPS = 2, 6
"""Steps that do not count, and the least number of steps that do."""
LEAST_SECONDS, MORE_SECONDS, MOST_SECONDS = 2.0, 10.0, 20.0
"""Seconds of the counted steps: at least; at most, if their mean is not known well enough; of all steps of a slow
machine, which takes fewer than :data:`LEAST_STEPS`, but at least one after its first."""
WELL_KNOWN = 0.02
"""Standard error of the mean over the mean."""
_LEAST_BLOCKS = 6
_BLOCK = 0.25
_PERIODS = 5
"""Periods of a quota in a block: a block ends with a step, up to one period early or late."""
_STALL = 3.0
"""Ratio to the median from which a single step was delayed by something outside the run. If there are several, the
machine is like that."""


@dataclass(frozen=True)
class StepTime:
    """A step's time in seconds."""

    seconds: float
    """The mean."""
    spread: float
    """Standard deviation of single steps."""
    error: float
    """Standard error of the mean; 0: unknown."""


class StepTimer:
    """Collects the times of consecutive steps.

    Args:
        period: seconds over which a quota of processor time is counted; 0: there is none.
    """

    def __init__(self, period: float = 0.0) -> None:
        self._period = period
        self._block = max(_BLOCK, _PERIODS * period)
        self._warm_up: list[float] = []
        self._counted: list[float] = []
        self._time = 0.0
        self._begun = 0
        self._begun_at = 0.0
        self._blocks: list[float] = []
        """Mean step of each block."""

    def add(self, seconds: float) -> None:
        """Take the time of one step."""
        if len(self._warm_up) < WARM_UP:
            self._warm_up.append(seconds)
            return
        self._counted.append(seconds)
        self._time += seconds
        if self._time - self._begun_at >= self._block:
            self._blocks.append((self._time - self._begun_at) / (len(self._counted) - self._begun))
            self._begun, self._begun_at = len(self._counted), self._time

    @property
    def enough(self) -> bool:
        """Whether more steps would tell little, or take too long."""
        if len(self._counted) >= LEAST_STEPS and self._time >= LEAST_SECONDS:
            well_known = self._error() <= WELL_KNOWN * self._time / len(self._counted)
            return well_known or self._time >= MORE_SECONDS
        return len(self._warm_up) + len(self._counted) > 1 and self.seconds > MOST_SECONDS

    @property
    def seconds(self) -> float:
        """Seconds of all steps so far."""
        return sum(self._warm_up) + self._time

    def _error(self) -> float:
        """Return the standard error of the mean; infinite where there are too few blocks to tell."""
        count = len(self._blocks)
        return statistics.stdev(self._blocks) / math.sqrt(count) if count >= _LEAST_BLOCKS else math.inf

    def step_time(self) -> StepTime | None:
        """Return the time of a step; ``None`` if none was taken."""
        counted = self._counted or self._warm_up[1:] or self._warm_up
        if not counted:
            return None
        steps = _without_a_stall(_whole_periods(counted, self._period))
        error = self._error()
        return StepTime(statistics.fmean(steps), statistics.pstdev(steps), error if math.isfinite(error) else 0.0)


def _whole_periods(steps: list[float], period: float) -> list[float]:
    """Return the steps up to the one that ends nearest to the end of a period counted from the first step: a quota
    lets a process run equally long in any stretch of whole periods."""
    total = sum(steps)
    if period <= 0 or total < 2 * _PERIODS * period:
        return steps
    best, off, end, length = len(steps), math.inf, total, len(steps)
    while length and end > total - period:
        if abs(end - period * round(end / period)) < off:
            best, off = length, abs(end - period * round(end / period))
        length -= 1
        end -= steps[length]
    return steps[:best]


def _without_a_stall(steps: list[float]) -> list[float]:
    usual = statistics.median(steps)
    held_up = [seconds for seconds in steps if seconds > _STALL * usual]
    return [seconds for seconds in steps if seconds <= _STALL * usual] if len(held_up) == 1 else steps


MOST_STEPS = 100_000
"""Limit of the steps at one batch size; the timer ends them sooner."""
SAMPLES = 128
"""Least number of samples that are prepared, at least twice the larger batch: preparing a large data set takes
hours."""
_DEFAULT_LAYERS = 12

Tell = Callable[[dict[str, Any]], None]


class ShortRun(Trainer):
    """A run that ends without an evaluation and without a model."""

    def _finish(self) -> ExitCode:
        """Save nothing."""
        return ExitCode.DONE


class _EnoughTime(Exception):
    """The steps taken so far suffice."""


class _Steps:
    """Takes the events of a short run, and ends it when there are enough steps."""

    def __init__(self) -> None:
        limit = quota()
        self.timer = StepTimer(limit.period if limit is not None and limit.cores < granted_cores() else 0.0)

    def __call__(self, event: Event) -> None:
        if isinstance(event, StepEvent):
            self.timer.add(event.compute)
            if self.timer.enough:
                raise _EnoughTime


def batch_sizes(batch: int) -> tuple[int, int]:
    """Return the sizes to measure, the smaller first: the peak of memory never falls within a process."""
    return (max(1, batch // 2), max(2, batch))


def plan_for(plan: RunPlan, batch: int) -> RunPlan:
    """Return the plan of a short run alone: one micro-batch a step, no evaluation, no snapshot, and no compiler, whose
    start would take longer than the run."""
    profile = plan.profile
    changes = {
        "training": {"max_steps": MOST_STEPS, "gradient_accumulation": 1, "batch_size": batch, "compile": "off"},
        "evaluation": {"eval_before": False, "eval_interval": 0},
        "snapshot": {"snapshot_interval": 0},
        "strategy": {"strategy": default_strategy()},
    }
    sections = {name: getattr(profile, name).model_copy(update=change) for name, change in changes.items()}
    member = plan.members[0].model_copy(update={"batch_size": batch, "rank": 0})
    return plan.model_copy(update={"profile": profile.model_copy(update=sections), "members": (member,)})


def measure(plan: RunPlan, task: Task, batch: int, device: torch.device, tell: Tell) -> tuple[Trainer, float]:
    """Take the steps at one batch size, report their cost, and return the trainer and the seconds of all steps."""
    tell({"kind": "progress", "phase": f"trying steps of {batch} samples", "done": 0, "total": None})
    steps, others = _Steps(), OtherLoad(RunProcesses(plan.run_id).seconds)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    with tempfile.TemporaryDirectory(prefix="muster-short-run-") as folder:
        trainer = ShortRun(plan_for(plan, batch), 0, task, SoloExchange(), steps, Control(), Path(folder))
        try:
            trainer.run()
        except _EnoughTime:
            pass
    if (step_time := steps.timer.step_time()) is not None:
        load = {"peak": peak_memory(device), "others": others.share() or 0.0}
        tell({"kind": "measurement", "batch": batch, **asdict(step_time), **load})
    return trainer, steps.timer.seconds


def evaluation(trainer: Trainer) -> dict[str, Any]:
    """Return the cost of evaluating one sample: of a training sample, where no others were prepared."""
    task = trainer.task
    task.evaluation = task.evaluation or {"validation": task.train}
    split = "validation" if "validation" in task.evaluation else next(iter(task.evaluation))
    return {"kind": "evaluation", "seconds": trainer.evaluator.seconds_per_sample(split)}


def peak_memory(device: torch.device) -> int:
    """Return the peak of bytes in use on the training device."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_reserved(device))
    if device.type == "mps":
        return int(torch.mps.driver_allocated_memory())
    try:  # Linux; ru_maxrss would begin with the peak of the parent process
        status = Path("/proc/self/status").read_text()
        return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM"))
    except (OSError, StopIteration):
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024


def facts(device: torch.device) -> dict[str, Any]:
    """Return the facts of the machine; memory of this process counts as free."""
    memory, power = psutil.virtual_memory(), battery()
    free, total = memory.available + psutil.Process().memory_info().rss, total_memory()[0]
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
    return {
        "kind": "facts",
        "system": {"linux": "linux", "darwin": "darwin"}.get(sys.platform, "windows"),
        "device": device.type,
        "cores": free_cores(),
        "memory_total": int(total),
        "memory_free": int(min(free, total)),
        "bf16": device.type == "cuda" and select_precision("auto", device) is not None,
        "on_mains": power is None or bool(power.power_plugged),
    }


def workload(model: nn.Module, samples: int, task: Task) -> dict[str, Any]:
    """Return the facts that need the loaded model and data."""
    parameters = list(model.parameters())
    return {
        "kind": "workload",
        "trainable": sum(parameter.numel() for parameter in parameters if parameter.requires_grad),
        "total": sum(parameter.numel() for parameter in parameters),
        "layers": blocks(model) or _DEFAULT_LAYERS,
        **_samples(task, samples),
    }


def _samples(task: Task, samples: int) -> dict[str, Any]:
    evaluated = {split: len(data) for split, data in task.evaluation.items()} | dict(task.evaluation_sizes)
    return {"samples": samples, "evaluated": evaluated}


def blocks(model: nn.Module) -> int:
    """Return the number of blocks of a model: the members of its outermost module lists."""
    lists = {name: len(module) for name, module in model.named_modules() if isinstance(module, nn.ModuleList)}
    return sum(count for name, count in lists.items() if not any(name.startswith(f"{other}.") for other in lists))


Measure = Callable[[RunPlan, Task, int, torch.device, Tell], tuple[Trainer, float]]


def carry_out(
    plan: RunPlan,
    tell: Tell,
    wait: Callable[[], object] = lambda: None,
    rank: int = 0,
    *,
    task_of: Callable[[Profile], Task] = task_from_profile,
    measured: Measure = measure,
) -> None:
    """Measure the task of the plan's first member on this machine.

    Args:
        rank: of the member in the run.
        wait: called after all imports, before anything is computed.
        measured: measures it at one batch size.

    Raises:
        MusterError: the task cannot be trained here.
    """
    member = plan.members[0]
    torch.set_num_threads(threads(member.lead.threads, torch.get_num_threads()))
    device = select_device(member.lead.kind, member.lead.index)
    machine_facts = facts(device)
    tell({"kind": "progress", "phase": "looking through the data", "done": 0, "total": None})
    sizes = batch_sizes(member.batch_size)
    # Any number of broken samples is tolerated: in a small selection their share is a matter of luck.
    profile = plan.profile_of(0)
    task = task_of(profile.model_copy(update={"data": profile.data.model_copy(update={"max_broken_share": 1.0})}))
    task.group_position = GroupPosition(rank, plan.world_size)
    wait()
    task.device = device
    samples = task.prepare_subset(
        lambda phase, done, total: tell({"kind": "progress", "phase": phase, "done": done, "total": total}),
        max(SAMPLES, 2 * sizes[-1]),
    )
    tell(machine_facts)
    if profile.run.layout == "pipeline":
        return _measure_blocks(task, profile, device, samples, tell)
    for number, batch in enumerate(sizes):
        trainer, seconds = measured(plan, task, batch, device, tell)
        if not number:
            figures = workload(trainer.model, samples, task)
            tell(figures)
        if batch == sizes[-1] or seconds > MOST_SECONDS:  # twice the samples would take too long for planning
            if figures["evaluated"]:
                tell({"kind": "progress", "phase": "an evaluation", "done": 0, "total": None})
                tell(evaluation(trainer))
            break
        del trainer


def _measure_blocks(task: Task, profile: Profile, device: torch.device, samples: int, tell: Tell) -> None:
    """Measure the model block by block, and report its figures."""
    tell({"kind": "progress", "phase": "blocks of the model", "done": 0, "total": None})
    times = block_times(task, profile, device)
    counts = {"trainable": times.trainable, "total": times.total, "layers": len(times.seconds)}
    tell({"kind": "workload", **counts, **_samples(task, samples)})
    tell({"kind": "blocks", "seconds": times.seconds})


def main(wait: Callable[[], object] = lambda: None) -> NoReturn:
    """Measure; every failure becomes one line."""
    arguments = worker_arguments("training.trial.short_run")
    lines = take_over_stdout()

    def tell(document: dict[str, Any]) -> None:
        lines.write(json.dumps(document) + "\n")
        lines.flush()

    try:
        carry_out(read_plan(arguments.plan), tell, wait, arguments.rank)
    except MusterError as error:
        tell({"kind": "failure", "message": error.message, "hint": error.hint})
    except Exception as error:  # noqa: BLE001 - the process boundary: the caller must hear of it
        traceback.print_exc()
        message = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        tell({"kind": "failure", "message": message, "hint": ""})
    os._exit(0)  # threads of libraries must not delay the end


if __name__ == "__main__":
    main()
