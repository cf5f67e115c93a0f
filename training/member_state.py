"""The complete state of one member, for snapshots and for newcomers, and how members agree on it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from training.checkpoint import Snapshot, load_optimizer, optimizer_tensors, restore_rng, rng_state
from training.exchange.base import Anchor, Exchange
from training.exchange.codecs import codec_by_name
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
            | prefixed("buffers", _persistent_buffers(self._model))
            | prefixed("optimizer", optimizer_tensors(self._optimizer))
        )

    @torch.no_grad()
    def _adopt(self, tensors: Mapping[str, torch.Tensor], state: Mapping[str, Any]) -> None:
        parameters = dict(self._model.named_parameters())
        for name, value in part("model", tensors).items():
            parameters[name].copy_(value)
        buffers = _persistent_buffers(self._model)
        for name, value in part("buffers", tensors).items():
            buffers[name].copy_(value)
        load_optimizer(self._optimizer, part("optimizer", tensors), {})
        self._scaler.load_state_dict(dict(state["scaler"]))


def prefixed(prefix: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Put every name under ``prefix/``."""
    return {f"{prefix}/{name}": tensor for name, tensor in tensors.items()}


def part(prefix: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors under ``prefix/`` without the prefix."""
    return {k.removeprefix(f"{prefix}/"): v for k, v in tensors.items() if k.startswith(f"{prefix}/")}


def _persistent_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    saved = model.state_dict(keep_vars=True).keys()
    return {name: buffer for name, buffer in model.named_buffers() if name in saved}


def equalise_weights(parameters: list[nn.Parameter], exchange: Exchange, name: str) -> None:
    """Make all members start from the lowest rank's weights, sent only where the hashes differ."""
    flat = flatten(parameters)
    hashes = exchange.gather(f"weights/{name}", weight_hash(flat).encode())
    if len(set(hashes.values())) > 1:
        weight = float(exchange.rank == min(hashes))
        result = exchange.mean(f"weights/{name}/mend", flat, weight, codec_by_name("fp32"))
        unflatten_into(parameters, result.mean)


def synchronise_buffers(model: nn.Module, exchange: Exchange, name: str) -> None:
    """Average floating-point buffers (running statistics of batch norm) over the members."""
    buffers = [b for b in _persistent_buffers(model).values() if b.is_floating_point()]
    if exchange.engine != "solo" and buffers:
        result = exchange.mean(f"buffers/{name}", flatten(buffers), 1.0, codec_by_name("fp32"))
        unflatten_into(buffers, result.mean)
