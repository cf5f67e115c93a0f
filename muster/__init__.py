"""Muster's public API; everything else is internal.

::

    from muster import LocalTrainer

    trainer = LocalTrainer(model, train_dataset, val_dataset, workers=2)
    model = trainer.fit(strategy="diloco", epochs=3, learning_rate=1e-3)

``import muster`` does not load PyTorch; each name is imported on first access.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from distributed.network_trainer import NetworkTrainer
    from profiles.errors import BadInput, MachinesNotReady, MusterError, RunFailed, StoppedByUser
    from training.local_trainer import LocalTrainer
    from training.session.session import session
    from training.strategies.base import Strategy
    from training.tasks.base import Task
    from training.tasks.custom import CustomJob

_MODULES = {
    "LocalTrainer": "training.local_trainer",
    "NetworkTrainer": "distributed.network_trainer",
    "CustomJob": "training.tasks.custom",
    "session": "training.session.session",
    "Strategy": "training.strategies.base",
    "Task": "training.tasks.base",
    "MusterError": "profiles.errors",
    "BadInput": "profiles.errors",
    "MachinesNotReady": "profiles.errors",
    "RunFailed": "profiles.errors",
    "StoppedByUser": "profiles.errors",
}
"""The module of each public name."""

__all__ = [
    "BadInput",
    "CustomJob",
    "LocalTrainer",
    "MachinesNotReady",
    "MusterError",
    "NetworkTrainer",
    "RunFailed",
    "StoppedByUser",
    "Strategy",
    "Task",
    "session",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'muster' has no attribute '{name}'")
    return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return __all__
