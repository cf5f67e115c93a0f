"""A trained model that is evaluated or writes texts: whole, or in stages on the devices of this machine.

Of several workers this process is the one with the last stage, which leads; the others are
``python -m training.inference.in_use --plan PLAN --rank 0 --run-dir DIR --secrets DIR``. Standard output of such a one:
``{"ready": true}`` when it can join, or ``{"error": ..., "hint": ...}``; standard input: the :class:`Rendezvous`.
"""

from __future__ import annotations

import contextlib
import json
import signal
import sys
import tempfile
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from profiles.errors import ExitCode, MusterError, RunFailed
from profiles.schema import Profile
from training.exchange.links.certificates import issue_run_certificates
from training.exchange.torch_backend.store_server import StoreServer
from training.records.plan import RunPlan, read_plan
from training.run.local_plan import plan_local_run
from training.run.processes import SubprocessWorker
from training.workers.worker import Rendezvous, join_devices, leave, take_over_stdout, worker_arguments

if TYPE_CHECKING:
    from torch import nn

    from training.hardware.device import Precision
    from training.layouts.staged import StagedModel
    from training.tasks.base import Task

_MODULE = "training.inference.in_use"
_HERE = "127.0.0.1"


@contextlib.contextmanager
def model_in_use(
    task: Task, profile: Profile, workers: int = 1, build: Callable[[], nn.Module] | None = None
) -> Iterator[tuple[nn.Module, Precision]]:
    """Yield a trained model in evaluation mode, on its device, and the precision to compute it in.

    Args:
        task: of the profile; it may be unprepared.
        profile: names the model, the kind of device and the mixed precision.
        workers: of this machine, which hold the model together.
        build: reads the whole model; default: as the task does for a training.

    Raises:
        BadInput: the model cannot be read, or not be cut into so many stages.
        RunFailed: another worker failed.
    """
    if workers == 1:
        precision = _precision_for(task, profile, profile.training.device, 0)
        yield (build or task.build_model)().eval().to(precision.device), precision
        return
    run = profile.run.model_copy(update={"layout": "pipeline"})
    plan = plan_local_run(profile.model_copy(update={"run": run}), workers)
    with _others(plan) as meeting, _stage(plan, workers - 1, task, *meeting) as (layout, precision):
        layout.model.eval()
        with layout.leading():
            yield layout.model, precision


def model_for(owner: object, profile: Profile, workers: int) -> nn.Module:
    """Return the model of :func:`model_in_use`, which stays in use as long as ``owner`` does."""
    from training.tasks.registry import task_from_profile  # imports torch

    stack = contextlib.ExitStack()
    model, _ = stack.enter_context(model_in_use(task_from_profile(profile), profile, workers))
    weakref.finalize(owner, stack.close)
    return model


@contextlib.contextmanager
def _others(plan: RunPlan) -> Iterator[tuple[Rendezvous, Path]]:
    """Start the workers of all stages but the last; yield where to meet them, and the folder with the keys.

    Raises:
        MusterError: one of them failed; it is its error.
    """
    ranks = range(len(plan.processes))
    with tempfile.TemporaryDirectory(prefix="muster-stages-") as folder, StoreServer() as store:
        secrets, path = Path(folder) / "secrets", Path(folder) / "plan.json"
        issue_run_certificates(secrets, plan.run_id, ranks, [_HERE])
        for rank in ranks:
            store.admit(secrets / f"member-{rank}")
        path.write_text(plan.model_dump_json())
        rendezvous, log = Rendezvous("", store=f"{_HERE}:{store.port}"), Path(folder) / "log"
        arguments = ["--plan", str(path), "--run-dir", folder, "--secrets", str(secrets)]
        with log.open("ab") as errors:
            workers = [
                SubprocessWorker(_MODULE, [*arguments, "--rank", str(rank)], plan.process(rank).device.threads, errors)
                for rank in ranks[:-1]
            ]
        lines = [worker.lines() for worker in workers]
        try:
            if not all(_is_ready(next(output, b"{}")) for output in lines):
                reason = (log.read_text(errors="replace").strip().splitlines() or ["it wrote nothing"])[-1]
                raise RunFailed(f"a worker with a stage of the model did not start: {reason}")
            for worker in workers:
                worker.send(rendezvous._asdict())
            with _losses_as_failures():
                yield rendezvous, secrets
        except RunFailed:  # this process has lost another, which may have said why
            for output in lines:
                _is_ready(next(output, b"{}"))
            raise
        finally:
            for worker in workers:
                worker.signal(signal.SIGKILL)
                worker.exit_code()


@contextlib.contextmanager
def _losses_as_failures() -> Iterator[None]:
    """Raise a :class:`RunFailed` where a worker with a stage is lost."""
    from training.exchange.base import ExchangeError  # imports torch

    try:
        yield
    except ExchangeError as error:
        message = f"a worker of this machine that holds a part of the model ended: {error}"
        raise RunFailed(message, "try it again; if memory is short, with more workers or smaller batches") from error


def _is_ready(line: bytes) -> bool:
    """Whether a worker says that it can join.

    Raises:
        RunFailed: it says why it cannot go on.
    """
    message: dict[str, Any] = json.loads(line)
    if "error" in message:
        raise RunFailed(message["error"], message["hint"])
    return "ready" in message


def _precision_for(task: Task, profile: Profile, kind: str, index: int) -> Precision:
    from training.hardware.device import Precision, select_device, select_precision  # imports torch

    device = task.device = select_device(kind, index)
    return Precision(select_precision(profile.training.mixed_precision, device, task.bf16_is_faster), device)


@contextlib.contextmanager
def _stage(
    plan: RunPlan, rank: int, task: Task, rendezvous: Rendezvous, secrets: Path
) -> Iterator[tuple[StagedModel, Precision]]:
    """Join the others and read this process's stage; leave them in the end."""
    device = plan.process(rank).device
    precision = _precision_for(task, plan.profile, device.kind, device.index)
    with contextlib.closing(
        cast("StagedModel", join_devices(plan, rank, rendezvous, secrets, precision.device))
    ) as layout:
        layout.build(task, plan.profile, precision)
        yield layout, precision


def main() -> int:
    """Hold one stage and follow the leader until it ends."""
    arguments, output = worker_arguments(_MODULE), take_over_stdout()
    try:
        plan = read_plan(arguments.plan)
        from training.tasks.registry import task_from_profile  # imports torch

        task = task_from_profile(plan.profile)
        print(json.dumps({"ready": True}), file=output, flush=True)
        rendezvous = Rendezvous(**json.loads(sys.stdin.buffer.readline()))
        with _stage(plan, arguments.rank, task, rendezvous, arguments.secrets) as (layout, _):
            layout.follow()
    except MusterError as error:
        print(json.dumps({"error": error.message, "hint": error.hint}), file=output, flush=True)
        return int(error.exit_code)
    return int(ExitCode.DONE)


if __name__ == "__main__":
    leave(main())
