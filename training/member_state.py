"""The complete state of one member, for snapshots and for newcomers, and how members agree on it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from training.buffers import persistent_buffers
from training.checkpoint import Snapshot, load_optimizer, optimizer_tensors, restore_rng, rng_state
from training.exchange.base import Anchor, Exchange
from training.named_tensors import part, prefixed
from training.strategies.agreement import taken_from, usual
from training.strategies.flat import flatten, unflatten_into, weight_hash


class MemberState:
    """Packs and unpacks model, optimizer, loss scale and random state."""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler, device: torch.device
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._scaler = scaler
        self._device = device

    def snapshot(self, step: int, others: Mapping[str, torch.Tensor], state: dict[str, Any]) -> Snapshot:
        """Return the snapshot after ``step`` optimizer steps; ``others`` go with it as they are named."""
        tensors = self._tensors() | dict(others) | prefixed("rng", rng_state(self._device))
        return Snapshot(step, tensors, {**state, "scaler": self._scaler.state_dict()})

    def restore(self, snapshot: Snapshot) -> None:
        """Take a snapshot back, random state included."""
        self._adopt(snapshot.tensors, snapshot.state)
        restore_rng(part("rng", snapshot.tensors), self._device)

    def anchor(self, others: Mapping[str, torch.Tensor], state: dict[str, Any]) -> Anchor:
        """Return what a newcomer needs; random state stays each member's own."""
        return Anchor(self._tensors() | dict(others), {**state, "scaler": self._scaler.state_dict()})

    def adopt(self, anchor: Anchor) -> None:
        """Take over the group's state as a newcomer."""
        self._adopt(anchor.tensors, anchor.state)

    def _tensors(self) -> dict[str, torch.Tensor]:
        trained = {n: p.detach() for n, p in self._model.named_parameters() if p.requires_grad}
        return (
            prefixed("model", trained)
            | prefixed("buffers", persistent_buffers(self._model))
            | prefixed("optimizer", optimizer_tensors(self._optimizer))
        )

    @torch.no_grad()
    def _adopt(self, tensors: Mapping[str, torch.Tensor], state: Mapping[str, Any]) -> None:
        parameters = dict(self._model.named_parameters())
        for name, value in part("model", tensors).items():
            parameters[name].copy_(value)
        buffers = persistent_buffers(self._model)
        for name, value in part("buffers", tensors).items():
            buffers[name].copy_(value)
        load_optimizer(self._optimizer, part("optimizer", tensors))
        self._scaler.load_state_dict(dict(state["scaler"]))


def longest_vector(model: nn.Module) -> int:
    """Return a bound for the elements of anything that members of a run exchange at once; equal on all of them."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    values = [*trained, *persistent_buffers(model).values()]
    return sum(value.numel() for value in values) + len(values) + 1024


def equalise_weights(parameters: list[nn.Parameter], exchange: Exchange, name: str) -> None:
    """Make all members start from the weights that most have, or the lowest rank's; sent only where hashes differ."""
    flat = flatten(parameters)
    hashes = exchange.gather(f"weights/{name}", weight_hash(flat).encode())
    if len(set(hashes.values())) > 1:
        same, _ = taken_from(usual(hashes), flat, exchange, f"weights/{name}/mend")
        unflatten_into(parameters, same)
