"""Run folders for tests of what is made of a run afterwards."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from profiles.files.resolve import profile_from_options
from training.records.events import Event, RunEvent
from training.records.plan import Status
from training.records.run_folder import RunFolder
from training.run.local_plan import plan_local_run


def write_run(
    output: Path,
    events: Iterable[Event],
    *,
    name: str = "p",
    task: str = "custom",
    status: Status = "completed",
    **metadata: Any,
) -> Path:
    """Write a run of two workers that has ended."""
    options = {"task": task, "model_path": "a.b:c", "strategy": "allreduce"}
    plan = plan_local_run(profile_from_options(name, options), 2)
    with RunFolder.create(output, plan, ["cli_typer.py", "distributed-train", name]) as folder:
        folder.append(RunEvent(status="starting", time=0))
        for event in events:
            folder.append(event)
        folder.append(RunEvent.model_validate({"status": status, "time": 100}))
        folder.finish(status, {"samples_per_second": 12.5}, metadata.pop("error_message", ""))
        folder.update_metadata(**metadata)
        return folder.path
