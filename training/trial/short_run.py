"""Measures a task on one machine: ``python -m training.trial.short_run``; arguments as :mod:`training.workers.worker`.

Alone and without any exchange, the trainer of a real run takes a few steps at two batch sizes. Nothing is evaluated and
nothing is saved. Standard output: one JSON object a line, in this order unless something goes wrong::

    {"kind": "progress", "phase": ..., "done": ..., "total": ..., "left": seconds}       every now and then; some
                                              have no "left"
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

import contextlib
import json
import math
import os
import resource
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

import psutil
import torch
from torch import nn

from profiles.errors import ExitCode, MusterError, counted
from profiles.schema import Profile
from training.exchange.base import SoloExchange
from training.hardware.device import select_device, select_precision
from training.hardware.resources import free_cores, granted_cores, quota, threads, total_memory
from training.hardware.sensors import OtherLoad, RunProcesses, battery
from training.loop.trainer import Trainer
from training.numerics.schedule import run_steps
from training.records.events import Event, StepEvent
from training.records.plan import RunPlan, read_plan
from training.run.orders import Control
from training.strategies.registry import default_strategy
from training.tasks.base import GroupPosition, Task
from training.tasks.registry import import_code, task_from_profile
from training.trial.block_times import block_times
from training.trial.step_timer import MOST_SECONDS, StepTimer
from training.workers.worker import take_over_stdout, worker_arguments

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
    """Takes the events of a short run, reports how long it probably goes on, and ends it when there are enough steps.

    Args:
        run_steps: steps of the run that is planned; 0: not known.
        later: batch sizes that are measured afterwards.
    """

    def __init__(self, batch: int, tell: Tell, run_steps: int, later: Sequence[int]) -> None:
        limit = quota()
        period = limit.period if limit is not None and limit.cores < granted_cores() else 0.0
        self.timer = StepTimer(period, run_steps)
        self._batch, self._tell, self._later = batch, tell, later
        self._told_at = -math.inf

    def __call__(self, event: Event) -> None:
        if isinstance(event, StepEvent):
            self.timer.add(event.compute)
            if self.timer.enough:
                raise _EnoughTime
            if self.timer.seconds - self._told_at >= 1.0:
                self._told_at = self.timer.seconds
                left = max(0.0, self.timer.expected() - self.timer.seconds)
                left += sum(self.timer.expected(batch / self._batch) for batch in self._later)
                self._tell(_steps_phase(self._batch) | {"left": left})


def _steps_phase(batch: int) -> dict[str, Any]:
    return {"kind": "progress", "phase": f"measuring steps of {counted(batch, 'sample')}", "done": 0, "total": None}


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


def measure(
    plan: RunPlan,
    task: Task,
    batch: int,
    device: torch.device,
    tell: Tell,
    run_steps: int = 0,
    later: Sequence[int] = (),
) -> tuple[Trainer, float]:
    """Take the steps at one batch size, report their cost, and return the trainer and the seconds of all steps.

    Args:
        run_steps: steps of the run that is planned; 0: not known.
        later: batch sizes that are measured afterwards.
    """
    tell(_steps_phase(batch))
    steps, others = _Steps(batch, tell, run_steps, later), OtherLoad(RunProcesses(plan.run_id).seconds)
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


Measure = Callable[[RunPlan, Task, int, torch.device, Tell, int, Sequence[int]], tuple[Trainer, float]]


def _steps_of_run(plan: RunPlan, samples: int) -> int:
    """Return the steps of the run of all members of a plan over a data set."""
    training = plan.profile.training
    batch = training.gradient_accumulation * sum(member.batch_size for member in plan.members)
    return run_steps(samples, batch, training.epochs, training.drop_last, training.max_steps).steps


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
        wait: called after all imports, before the task reads its files and computes.
        measured: measures it at one batch size.

    Raises:
        MusterError: the task cannot be trained here.
    """
    member = plan.members[0]
    torch.set_num_threads(threads(member.lead.threads, torch.get_num_threads()))
    device = select_device(member.lead.kind, member.lead.index)
    machine_facts = facts(device)
    with contextlib.suppress(ImportError):  # which the task itself then explains
        import_code(plan.profile.model.task)
    wait()
    tell({"kind": "progress", "phase": "reading the data", "done": 0, "total": None})
    sizes = batch_sizes(member.batch_size)
    # Any number of broken samples is tolerated: in a small selection their share is a matter of luck.
    profile = plan.profile_of(0)
    task = task_of(profile.model_copy(update={"data": profile.data.model_copy(update={"max_broken_share": 1.0})}))
    task.group_position = GroupPosition(rank, plan.world_size)
    task.device = device
    samples = task.prepare_subset(
        lambda phase, done, total: tell({"kind": "progress", "phase": phase, "done": done, "total": total}),
        max(SAMPLES, 2 * sizes[-1]),
    )
    tell(machine_facts)
    if profile.run.layout == "pipeline":
        return _measure_blocks(task, profile, device, samples, tell)
    steps = _steps_of_run(plan, samples)
    for number, batch in enumerate(sizes):
        trainer, seconds = measured(plan, task, batch, device, tell, steps, sizes[number + 1 :])
        if not number:
            figures = workload(trainer.model, samples, task)
            tell(figures)
        if batch == sizes[-1] or seconds > MOST_SECONDS:  # twice the samples would take too long for planning
            if figures["evaluated"]:
                tell({"kind": "progress", "phase": "measuring an evaluation", "done": 0, "total": None})
                tell(evaluation(trainer))
            break
        del trainer


def _measure_blocks(task: Task, profile: Profile, device: torch.device, samples: int, tell: Tell) -> None:
    """Measure the model block by block, and report its figures."""
    tell({"kind": "progress", "phase": "measuring the blocks of the model", "done": 0, "total": None})
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
