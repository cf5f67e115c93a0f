"""From a task's model to the one that a device trains."""

from __future__ import annotations

from torch import nn

from profiles.schema import ModelSettings
from training.hardware.device import Precision, start_training
from training.strategies.weights import refuse_unsuitable
from training.tasks.frozen_base import with_frozen_base


def prepare_model(model: nn.Module, settings: ModelSettings, precision: Precision) -> nn.Module:
    """Return a freshly built model on its device and in training mode, with frozen weights as ``base_precision`` says.

    Raises:
        BadInput: it cannot be held so on this device, or has weights that cannot be trained here.
    """
    refuse_unsuitable(model)
    model = with_frozen_base(model, settings, precision).to(precision.device)
    start_training(model)
    return model
