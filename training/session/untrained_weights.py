"""Weights of a script that no optimizer trains: frozen ones, and those of a teacher or an average.

All processes begin with the same. A snapshot has those that the script has changed by itself, as a moving average of
the weights does; of the others it has hashes, since the script brings them again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import torch
import xxhash
from torch import nn

from profiles.errors import RunFailed
from training.exchange.base import Exchange
from training.loop.state import persistent_buffers, prefixed, tensors_under
from training.snapshots.snapshot_store import Snapshot
from training.strategies.weights import flatten, sync_weights

_CPU = torch.device("cpu")
_WITH_NORM = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def frozen_weights(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return the parameters that are frozen, by name."""
    return {name: parameter for name, parameter in module.named_parameters() if not parameter.requires_grad}


def all_weights(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return parameters and persistent buffers, by name."""
    return {**dict(module.named_parameters()), **persistent_buffers(module)}


class UntrainedWeights:
    """Tensors by name, which no optimizer changes."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], exchange: Exchange) -> None:
        self.tensors = dict(tensors)
        self._sync(exchange)
        self._hashes = {name: _hash(tensor) for name, tensor in self.tensors.items()}
        self._initial = self._marks()

    def snapshot(self) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
        """Return the tensors that have changed since the beginning, and hashes of the others."""
        marks = self._marks()
        changed = {name: tensor.detach() for name, tensor in self.tensors.items() if marks[name] != self._initial[name]}
        return changed, {name: value for name, value in self._hashes.items() if name not in changed}

    def restore(self, changed: Mapping[str, torch.Tensor], hashes: Mapping[str, str]) -> None:
        """Restore what :meth:`snapshot` returned.

        Raises:
            RunFailed: the script has brought others.
        """
        others = {name for name, value in hashes.items() if self._hashes.get(name) != value}
        others |= {name for name, value in changed.items() if _shape(self.tensors.get(name)) != _shape(value)}
        if others:
            problem = f"{min(others)}, which is not trained, is not what it was when the run began"
            raise RunFailed(problem, "load it from a file, or call torch.manual_seed() before it is made")
        with torch.no_grad():
            for name, value in changed.items():
                self.tensors[name].copy_(value)
                self._initial[name] = None

    def _sync(self, exchange: Exchange) -> None:
        own = json.dumps([_hash(tensor) for tensor in self.tensors.values()]).encode()
        digests = exchange.gather("weights/untrained", hashlib.blake2b(own, digest_size=16).hexdigest().encode())
        if len(set(digests.values())) > 1:
            for number, tensor in enumerate(self.tensors.values()):
                sync_weights([tensor], exchange, f"weights/untrained/{number}")

    def _marks(self) -> dict[str, Any]:
        """Return what changes with each tensor: its version, and its norm, as ``.data`` has no version."""
        floating = {name: tensor.detach() for name, tensor in self.tensors.items() if tensor.dtype in _WITH_NORM}
        norms = dict(zip(floating, torch._foreach_norm([*floating.values()]) if floating else (), strict=True))
        read = {name: float(norm) for name, norm in norms.items()}
        return {name: (tensor._version, read.get(name)) for name, tensor in self.tensors.items()}


class UntrainedModules:
    """Modules of a script that no optimizer trains, by number."""

    def __init__(self) -> None:
        self._weights: dict[int, UntrainedWeights] = {}

    def add(self, modules: Mapping[int, nn.Module], exchange: Exchange, snapshot: Snapshot | None) -> None:
        """Begin with equal weights on all processes, or with those of a snapshot, for modules that are new."""
        for number, module in modules.items():
            if number in self._weights:
                continue
            self._weights[number] = weights = UntrainedWeights(all_weights(module), exchange)
            if snapshot is not None and str(number) in snapshot.state["untrained"]:
                changed = tensors_under(f"untrained-{number}", snapshot.tensors)
                weights.restore(changed, snapshot.state["untrained"][str(number)])

    def snapshot(self, modules: Mapping[int, nn.Module]) -> tuple[dict[str, torch.Tensor], dict[str, dict[str, str]]]:
        """Return the tensors that have changed, by their names in a snapshot, and hashes of the others by number."""
        tensors: dict[str, torch.Tensor] = {}
        hashes: dict[str, dict[str, str]] = {}
        for number in modules.keys() & self._weights.keys():
            changed, hashes[str(number)] = self._weights[number].snapshot()
            tensors |= prefixed(f"untrained-{number}", changed)
        return tensors, hashes


def _hash(tensor: torch.Tensor) -> str:
    """Return 16 hex digits of XXH3 over the values in fp32: snapshots have them."""
    return xxhash.xxh3_64_hexdigest(flatten([tensor], _CPU).numpy().data)


def _shape(tensor: torch.Tensor | None) -> torch.Size | None:
    return None if tensor is None else tensor.shape
