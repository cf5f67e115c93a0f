"""What one machine makes of a task: ``python -m training.short_run``, with the arguments of :mod:`training.worker`.

Alone and without any exchange: the trainer of a real run takes a few steps at two batch sizes. Nothing is evaluated and
nothing is kept. Standard output: one JSON object a line, in this order unless something goes wrong::

    {"kind": "facts", "system": ..., "device": ..., "cores": ..., "memory_total": ..., "memory_free": ..., ...}
    {"kind": "workload", "trainable": ..., "total": ..., "layers": ..., "samples": ...}
    {"kind": "measurement", "batch": ..., "seconds": ..., "spread": ..., "peak": ...}   once a batch size
    {"kind": "failure", "message": ..., "hint": ...}                     as the last line

The exit code is 0 in either case: whoever asked has the line, and the machine keeps no folder of it.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import psutil
import torch
from torch import nn

from profiles.errors import MusterError
from training.control import Control
from training.events import StepEvent, _Event
from training.exchange.solo import SoloExchange
from training.plan import RunPlan, read_plan
from training.precision import select_device
from training.tasks.base import Task
from training.tasks.registry import task_from_profile
from training.trainer import Trainer

WARM_UP, STEPS, MOST_STEPS = 2, 6, 60
"""Steps at one batch size: not counted, counted at least, counted at most."""
LEAST_SECONDS, MOST_SECONDS = 3.0, 20.0
"""Of the counted steps at one batch size: a processor that others use is not equally fast in every second. A slow
machine takes fewer steps, but one after its warm-up."""
_STALL = 3.0
"""A step so much longer than the usual one was held up by something that a run is not."""
_DEFAULT_LAYERS = 12

Tell = Callable[[dict[str, Any]], None]


class ShortRun(Trainer):
    """A run that ends without an evaluation and without a model."""

    def _finish(self) -> None:
        """Nothing is kept."""


class _EnoughTime(Exception):
    """The steps that were taken have to do."""


class _Steps:
    """Takes the events of a short run, and ends it when its time is over."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def __call__(self, event: _Event) -> None:
        if isinstance(event, StepEvent):
            self.seconds.append(event.compute)
            counted = self.seconds[WARM_UP:]
            enough = len(counted) >= STEPS and sum(counted) > LEAST_SECONDS
            if enough or (len(self.seconds) > 1 and sum(self.seconds) > MOST_SECONDS):
                raise _EnoughTime

    @property
    def warm(self) -> list[float]:
        """Seconds of the steps that count."""
        counted = self.seconds[WARM_UP:] or self.seconds[1:] or self.seconds
        usual = statistics.median(counted) if counted else 0.0
        return [seconds for seconds in counted if seconds <= _STALL * usual]


def batch_sizes(batch: int) -> tuple[int, int]:
    """Return the sizes to measure, the smaller first: the peak of memory never falls within a process."""
    return (max(1, batch // 2), max(2, batch))


def plan_for(plan: RunPlan, batch: int) -> RunPlan:
    """Return the plan of a short run alone: one micro-batch a step, no evaluation, no snapshot."""
    profile = plan.profile
    changes = {
        "training": {"max_steps": WARM_UP + MOST_STEPS, "gradient_accumulation": 1, "batch_size": batch},
        "evaluation": {"eval_before": False, "eval_interval": 0},
        "snapshot": {"snapshot_interval": 0},
        "strategy": {"strategy": "allreduce"},
    }
    sections = {name: getattr(profile, name).model_copy(update=change) for name, change in changes.items()}
    member = plan.members[0].model_copy(update={"batch_size": batch, "rank": 0})
    return plan.model_copy(update={"profile": profile.model_copy(update=sections), "members": (member,)})


def measure(plan: RunPlan, task: Task, batch: int, device: torch.device, tell: Tell) -> nn.Module:
    """Take the steps at one batch size, tell what they cost, and return the model."""
    steps = _Steps()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    with tempfile.TemporaryDirectory(prefix="muster-short-run-") as folder:
        trainer = ShortRun(plan_for(plan, batch), 0, task, SoloExchange(), steps, Control(), Path(folder))
        try:
            trainer.run()
        except _EnoughTime:
            pass
    if steps.warm:
        figures = {"seconds": statistics.fmean(steps.warm), "spread": statistics.pstdev(steps.warm)}
        tell({"kind": "measurement", "batch": batch, **figures, "peak": peak_memory(device)})
    return trainer.model


def peak_memory(device: torch.device) -> int:
    """Return the bytes in use at the highest, on the device that trains."""
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
    """Return what the machine is, without what this process itself takes of it."""
    memory, battery = psutil.virtual_memory(), psutil.sensors_battery() if hasattr(psutil, "sensors_battery") else None
    free, total = memory.available + psutil.Process().memory_info().rss, memory.total
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
    return {
        "kind": "facts",
        "system": {"linux": "linux", "darwin": "darwin"}.get(sys.platform, "windows"),
        "device": device.type,
        "cores": free_cores(),
        "memory_total": int(total),
        "memory_free": int(min(free, total)),
        "on_mains": battery is None or bool(battery.power_plugged),
    }


def free_cores() -> float:
    """Return the cores this process may use: what the system grants, and the quota of its control group."""
    granted = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        groups = Path("/proc/self/cgroup").read_text()
    except OSError:
        return float(granted)
    return min([float(granted), *(quota for line in groups.splitlines() if (quota := _quota(line)) > 0)])


def _quota(line: str) -> float:
    """Return the cores that a line of ``/proc/self/cgroup`` allows; 0 for no limit."""
    _, controllers, place = [*line.split(":", 2), "", ""][:3]
    try:
        if not controllers:
            limit, _, period = Path(f"/sys/fs/cgroup{place}/cpu.max").read_text().partition(" ")
            return float(limit) / float(period) if limit != "max" else 0.0
        if "cpu" in controllers.split(","):
            folder = Path(f"/sys/fs/cgroup/cpu{place}")
            limit, period = ((folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
            return max(0.0, float(limit) / float(period))
    except (OSError, ValueError, ZeroDivisionError):
        return 0.0
    return 0.0


def workload(model: nn.Module, samples: int) -> dict[str, Any]:
    """Return what only the loaded model and data can tell."""
    parameters = list(model.parameters())
    return {
        "kind": "workload",
        "trainable": sum(one.numel() for one in parameters if one.requires_grad),
        "total": sum(one.numel() for one in parameters),
        "layers": blocks(model) or _DEFAULT_LAYERS,
        "samples": samples,
    }


def blocks(model: nn.Module) -> int:
    """Return how many blocks a model has: the members of its outermost lists of modules."""
    lists = {name: len(module) for name, module in model.named_modules() if isinstance(module, nn.ModuleList)}
    return sum(count for name, count in lists.items() if not any(name.startswith(f"{other}.") for other in lists))


def carry_out(plan: RunPlan, tell: Tell) -> None:
    """Measure the plan's task on this machine.

    Raises:
        MusterError: the task cannot be trained here.
    """
    member = plan.members[0]
    if member.threads:
        torch.set_num_threads(member.threads)
    device = select_device(member.device, member.device_index)
    told = facts(device)
    task = task_from_profile(plan.profile)
    task.prepare(lambda phase, done, total: tell({"kind": "progress", "phase": phase, "done": done, "total": total}))
    tell(told)
    for number, batch in enumerate(batch_sizes(member.batch_size)):
        model = measure(plan, task, batch, device, tell)
        if not number:
            tell(workload(model, len(task.train)))
        del model


def main() -> NoReturn:
    """Measure; every failure becomes one line."""
    parser = argparse.ArgumentParser(prog="python -m training.short_run")
    for name in ("--plan", "--rank", "--run-dir", "--secrets"):
        parser.add_argument(name, required=True)
    arguments = parser.parse_args()
    lines = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def tell(document: dict[str, Any]) -> None:
        lines.write(json.dumps(document) + "\n")
        lines.flush()

    try:
        carry_out(read_plan(Path(arguments.plan)), tell)
    except MusterError as error:
        tell({"kind": "failure", "message": error.message, "hint": error.hint})
    except Exception as error:  # noqa: BLE001 - the process boundary: whoever asked must hear of it
        traceback.print_exc()
        tell(
            {"kind": "failure", "message": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}", "hint": ""}
        )
    os._exit(0)  # threads of libraries must not delay the end


if __name__ == "__main__":
    main()
