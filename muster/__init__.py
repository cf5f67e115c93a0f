"""Muster's public API; everything else is internal.

::

    from muster import DiLoCo, LocalTrainer

    trainer = LocalTrainer(model, train_dataset, val_dataset, workers=2)
    model = trainer.fit(strategy=DiLoCo(sync_interval=50), epochs=3, learning_rate=1e-3)

``import muster`` does not load PyTorch; each name is imported on first access.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from distributed.network_trainer import NetworkTrainer
    from distributed.pool import Pool
    from profiles.errors import BadInput, MachinesNotReady, MusterError, RunFailed, StoppedByUser
    from training.local_trainer import LocalTrainer
    from training.session.session import session
    from training.strategies.allreduce import AllReduce
    from training.strategies.async_diloco import AsyncDiLoCo
    from training.strategies.base import Strategy
    from training.strategies.demo import Demo
    from training.strategies.diloco import DiLoCo
    from training.strategies.fedavg import FedAvg
    from training.strategies.local_sgd import LocalSGD
    from training.strategies.noloco import NoLoCo
    from training.strategies.sparseloco import SparseLoCo
    from training.strategies.sparta import Sparta
    from training.strategies.streaming_diloco import StreamingDiLoCo
    from training.strategies.zero1 import ZeRO1
    from training.tasks.base import Task
    from training.tasks.custom import CustomJob

_MODULES = {
    "LocalTrainer": "training.local_trainer",
    "NetworkTrainer": "distributed.network_trainer",
    "Pool": "distributed.pool",
    "CustomJob": "training.tasks.custom",
    "session": "training.session.session",
    "Strategy": "training.strategies.base",
    "Task": "training.tasks.base",
    "AllReduce": "training.strategies.allreduce",
    "AsyncDiLoCo": "training.strategies.async_diloco",
    "Demo": "training.strategies.demo",
    "DiLoCo": "training.strategies.diloco",
    "FedAvg": "training.strategies.fedavg",
    "LocalSGD": "training.strategies.local_sgd",
    "NoLoCo": "training.strategies.noloco",
    "SparseLoCo": "training.strategies.sparseloco",
    "Sparta": "training.strategies.sparta",
    "StreamingDiLoCo": "training.strategies.streaming_diloco",
    "ZeRO1": "training.strategies.zero1",
    "MusterError": "profiles.errors",
    "BadInput": "profiles.errors",
    "MachinesNotReady": "profiles.errors",
    "RunFailed": "profiles.errors",
    "StoppedByUser": "profiles.errors",
}
"""The module of each public name."""

__all__ = [
    "AllReduce",
    "AsyncDiLoCo",
    "BadInput",
    "CustomJob",
    "Demo",
    "DiLoCo",
    "FedAvg",
    "LocalSGD",
    "LocalTrainer",
    "MachinesNotReady",
    "MusterError",
    "NetworkTrainer",
    "NoLoCo",
    "Pool",
    "RunFailed",
    "SparseLoCo",
    "Sparta",
    "StoppedByUser",
    "Strategy",
    "StreamingDiLoCo",
    "Task",
    "ZeRO1",
    "session",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'muster' has no attribute '{name}'")
    return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return __all__
