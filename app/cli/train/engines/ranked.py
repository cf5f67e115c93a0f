"""``train`` under torchrun, or an engine that sets its variables: the processes that it has started train together."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from app.cli.train.request import TrainRequest
from app.cli.train.start import distributed_train
from profiles.errors import BadInput, ExitCode
from training.ranked.engine_process import EngineProcess
from training.records.events import Event
from training.records.plan import RunPlan
from training.records.run_folder import RunFolder
from training.run.run_controller import RunController


def train_as_rank(request: TrainRequest) -> ExitCode | None:
    """Train as one of the processes that an engine has started; ``None``: no engine has started this one.

    Raises:
        MusterError: the variables of the engine contradict each other or the request, or nothing was started.
    """
    process = EngineProcess.of_environment()
    if process is None:
        return None
    refused = {
        "--hosts": "hosts" in request.overrides,
        "--local": request.overrides.get("workers", str(process.world_size)) != str(process.world_size),
        "--simulate": bool(request.overrides.get("simulate")),
        "--cluster": bool(request.overrides.get("cluster")),
        "--detach": request.detach,
        "--dashboard": request.dashboard,
    }
    if option := next((name for name, is_given in refused.items() if is_given), ""):
        message = f"{option} does not go with the {process.world_size} processes that an engine has started"
        raise BadInput(message, "leave it out; or unset WORLD_SIZE, if no engine has started this")
    from training.ranked.ranks import Ranks, serve  # PyTorch

    if process.rank > 0:
        return serve(process)
    overrides = {**request.overrides, "workers": str(process.world_size)}
    with Ranks(process) as ranks:

        def start_run(plan: RunPlan, folder: RunFolder, on_event: Callable[[Event], None]) -> RunController:
            return RunController(plan, folder, on_event, ranks.starter(plan, folder), ranks.address)

        request = dataclasses.replace(request, overrides=overrides)
        ranks.code = distributed_train(request, start_run, ranks.placed)
        return ranks.code
