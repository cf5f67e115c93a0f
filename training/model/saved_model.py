"""The model in a run folder: saved by the member that delivers it, and by others in case that member is lost."""

from __future__ import annotations

import shutil
from pathlib import Path

from safetensors import SafetensorError
from torch import nn

from profiles.errors import MusterError
from training.tasks.base import Task


def save_model(task: Task, model: nn.Module, run_dir: Path) -> None:
    """Save a trained model into a run folder.

    Raises:
        MusterError, OSError: it cannot be written.
    """
    directory = run_dir / "model"
    directory.mkdir(parents=True, exist_ok=True)
    task.save(model, directory)


def save_copy(task: Task, model: nn.Module, run_dir: Path) -> str:
    """Save a model that is needed only if the machine that delivers it is lost; return the error, empty if it was
    saved."""
    try:
        save_model(task, model, run_dir)
    except (MusterError, OSError, RuntimeError, SafetensorError) as error:
        shutil.rmtree(run_dir / "model", ignore_errors=True)
        return f"cannot keep a copy of the model: {error}"
    return ""
