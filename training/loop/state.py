"""The complete state of one member, for snapshots and newcomers, and its synchronisation."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import nn

from profiles.errors import RunFailed
from training.exchange.base import Exchange, JoiningState
from training.exchange.codecs import codec_by_name
from training.exchange.payloads import documents
from training.hardware.device import Precision
from training.numerics.randomness import restore_rng, rng_state
from training.numerics.schedule import RATE_SHARE
from training.optimization.weight_average import WeightAverage
from training.snapshots.optimizer_state import load_optimizer, optimizer_tensors
from training.snapshots.pieces import weight_of
from training.snapshots.snapshot_store import Snapshot
from training.strategies.weights import flatten, unflatten_into

_PIECE = 1 << 20
"""Bytes in one gathered payload."""


def prefixed(prefix: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Put every name under ``prefix/``."""
    return {f"{prefix}/{name}": tensor for name, tensor in tensors.items()}


def tensors_under(prefix: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors under ``prefix/`` without the prefix."""
    return {k.removeprefix(f"{prefix}/"): v for k, v in tensors.items() if k.startswith(f"{prefix}/")}


class TrainingState:
    """Packs and unpacks model, optimizer, loss scale, random state, and the average of the weights if there is one."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        precision: Precision,
        average: WeightAverage | None = None,
    ) -> None:
        self._model, self._optimizer = model, optimizer
        self._average = average or WeightAverage(model, 0.0)
        self._scaler, self._device = precision.scaler, precision.device

    def holds(self, name: str) -> bool:
        """Whether a tensor of a snapshot belongs to what this device holds of the model, or to no part of it."""
        return not (weight := weight_of(name)) or weight in self._names

    @cached_property
    def _names(self) -> set[str]:
        return {name for name, _ in self._model.named_parameters()} | persistent_buffers(self._model).keys()

    @property
    def _trained(self) -> list[tuple[str, nn.Parameter]]:
        return [(name, p) for name, p in self._model.named_parameters() if p.requires_grad]

    @property
    def _optimized(self) -> list[str]:
        """The names of the optimizer's parameters, in its order."""
        names = {id(parameter): name for name, parameter in self._model.named_parameters()}
        return [names.get(id(parameter), "") for group in self._optimizer.param_groups for parameter in group["params"]]

    @property
    def _own_optimizer(self) -> str:
        """The class of an optimizer that the user gave; empty: the options say which."""
        groups = self._optimizer.param_groups
        return type(self._optimizer).__name__ if any(RATE_SHARE in group for group in groups) else ""

    def snapshot(self, step: int, others: Mapping[str, torch.Tensor], state: dict[str, Any]) -> Snapshot:
        """Return the snapshot after ``step`` optimizer steps, with the tensors ``others`` under their names."""
        tensors = self._tensors() | dict(others) | prefixed("rng", rng_state(self._device))
        return Snapshot(step, tensors, {**state, "scaler": self._scaler.state_dict(), "optimizer": self._own_optimizer})

    def restore(self, snapshot: Snapshot) -> None:
        """Restore a snapshot, random state included.

        Raises:
            RunFailed: it lacks a weight that is trained here, or is of another optimizer of the user's.
        """
        missing = {name for name, _ in self._trained} - tensors_under("model", snapshot.tensors).keys()
        if missing:
            message = f"what is here of the snapshot of step {snapshot.step} lacks {min(missing)}"
            raise RunFailed(message, "resume on the machines that hold all parts of it")
        earlier = snapshot.state.get("optimizer", self._own_optimizer)
        if earlier != self._own_optimizer and tuple(snapshot.state.get("part", (0, 1)))[1] == 1:
            before, now = (name or "the one of the options" for name in (earlier, self._own_optimizer))
            hint = "give the same as when it began, or start a new run"
            raise RunFailed(f"the run was trained with another optimizer ({before}) than this one ({now})", hint)
        self.adopt(snapshot)
        restore_rng(tensors_under("rng", snapshot.tensors), self._device)

    def joining(self, others: Mapping[str, torch.Tensor], state: dict[str, Any]) -> JoiningState:
        """Return the joining state of a newcomer; each member keeps its own random state."""
        return JoiningState(self._tensors() | dict(others), {**state, "scaler": self._scaler.state_dict()})

    def _tensors(self) -> dict[str, torch.Tensor]:
        trained = {n: p.detach() for n, p in self._trained}
        return (
            prefixed("model", trained)
            | prefixed("buffers", persistent_buffers(self._model))
            | prefixed("optimizer", optimizer_tensors(self._optimizer, self._optimized))
            | prefixed("ema", self._average.tensors())
        )

    def adopt(self, source: Snapshot | JoiningState) -> None:
        """Take over the state of a snapshot, or the group's as a newcomer.

        Raises:
            RunFailed: it is of another model.
        """
        _fill(dict(self._model.named_parameters()), tensors_under("model", source.tensors))
        _fill(persistent_buffers(self._model), tensors_under("buffers", source.tensors))
        load_optimizer(self._optimizer, tensors_under("optimizer", source.tensors), self._optimized)
        self._average.load(tensors_under("ema", source.tensors))
        self._scaler.load_state_dict(source.state["scaler"])


@torch.no_grad()
def _fill(tensors: Mapping[str, torch.Tensor], values: Mapping[str, torch.Tensor]) -> None:
    """Copy values, which may come from another machine, into the tensors of the same names."""
    for name, value in values.items():
        if name not in tensors or tensors[name].shape != value.shape:  # which a copy would spread over all of them
            shape = list(tensors[name].shape) if name in tensors else "none"
            message = f"the state to go on from has {name} of shape {list(value.shape)}, and the model here {shape}"
            raise RunFailed(message, "resume on the machines that trained it, with the same model")
        tensors[name].copy_(value)


def check_finite(
    parameters: Sequence[torch.Tensor], name: str, step: int, describe_snapshot: Callable[[], str]
) -> None:
    """Refuse weights with an element that is NaN or infinite: both show in the largest magnitudes, read in one copy.

    Args:
        name: of this machine.
        describe_snapshot: returns a sentence on the newest snapshot.

    Raises:
        RunFailed: there is one.
    """
    non_empty = [parameter.detach() for parameter in parameters if parameter.numel()]
    largest = torch._foreach_norm(non_empty, math.inf) if non_empty else ()
    if non_empty and not bool(torch.stack([value.float() for value in largest]).isfinite().all()):
        hint = "lower learning_rate, or set mixed_precision = off"
        raise RunFailed(f"the weights of {name} are not finite after step {step}; {describe_snapshot()}", hint)


def longest_vector(model: nn.Module) -> int:
    """Return a bound for the elements of any vector that members exchange; equal on all of them."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    values = [*trained, *persistent_buffers(model).values()]
    return sum(value.numel() for value in values) + len(values) + 1024


def persistent_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the buffers that belong to a model's state, by name."""
    saved = model.state_dict(keep_vars=True).keys()
    return {name: buffer for name, buffer in model.named_buffers() if name in saved}


def synchronise_buffers(model: nn.Module, exchange: Exchange, name: str) -> None:
    """Average the floating-point buffers in which members differ; equal ones keep their bits."""
    buffers = {n: b for n, b in persistent_buffers(model).items() if b.is_floating_point()}
    if exchange.engine == "solo" or not buffers:
        return
    mine = {n: hashlib.blake2b(_bytes(b), digest_size=8).hexdigest() for n, b in buffers.items()}
    payloads = exchange.gather(f"buffers/{name}/hashes", json.dumps(mine).encode())
    hashes = documents(payloads).values()
    different = [n for n in buffers if len({str(theirs.get(n)) for theirs in hashes}) > 1]
    wide = [buffers[n] for n in different if buffers[n].dtype == torch.float64]
    narrow = [buffers[n] for n in different if buffers[n].dtype != torch.float64]
    if narrow:
        result = exchange.mean(f"buffers/{name}", flatten(narrow), 1.0, codec_by_name("fp32"))
        if result.weight:  # else no member's are finite, and each keeps its own
            unflatten_into(narrow, result.mean)
    for number, buffer in enumerate(wide):
        _average_wide(buffer, exchange, f"buffers/{name}/{number}")


@torch.no_grad()
def _average_wide(buffer: torch.Tensor, exchange: Exchange, name: str) -> None:
    """Average a buffer of 64 bits, for which the exchange's own mean of 32 bits is too coarse."""
    raw, flat = _bytes(buffer), torch.empty(buffer.numel(), dtype=buffer.dtype)
    for start in range(0, len(raw), _PIECE):
        payloads = exchange.gather(f"{name}/{start}", raw[start : start + _PIECE])
        complete = [
            payloads[rank] for rank in sorted(payloads) if len(payloads[rank]) == len(raw[start : start + _PIECE])
        ]
        contributions = [torch.frombuffer(bytearray(piece), dtype=buffer.dtype) for piece in complete]
        local = torch.frombuffer(bytearray(raw[start : start + _PIECE]), dtype=buffer.dtype)
        finite = [values for values in contributions if bool(values.isfinite().all())]
        offset = start // buffer.element_size()
        flat[offset : offset + local.numel()] = torch.stack(finite).mean(0) if finite else local
    buffer.copy_(flat.view_as(buffer))


def _bytes(buffer: torch.Tensor) -> bytes:
    flat = buffer.detach().to("cpu").contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
