"""From a task to the model that a member trains."""

from __future__ import annotations

from torch import nn

from profiles.schema import ModelSettings
from training.hardware.device import Precision, start_training
from training.tasks.base import Task
from training.tasks.frozen_base import with_frozen_base


def build_model(task: Task, settings: ModelSettings, precision: Precision) -> nn.Module:
    """Return a task's model on its device and in training mode, with frozen weights as ``base_precision`` says.

    Raises:
        BadInput: the model cannot be read, or not be held so on this device.
    """
    model = with_frozen_base(task.build_model(), settings, precision).to(precision.device)
    start_training(model)
    return model
