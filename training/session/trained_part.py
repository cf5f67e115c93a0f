"""What one optimizer of a script's session trains: modules, how members merge them, and their part of a snapshot."""

from __future__ import annotations

import contextlib
import inspect
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from profiles.errors import BadInput, RunFailed
from training.exchange.base import Exchange
from training.hardware.device import Precision
from training.loop.last_step import LastStep
from training.loop.state import TrainingState, persistent_buffers, prefixed, synchronise_buffers, tensors_under
from training.loop.update import StepFigures, Update
from training.numerics.compression_ratio import CompressionRatio
from training.records.events import SyncEvent
from training.session.packed_state import pack_state, unpack_state
from training.session.untrained_weights import UntrainedWeights, frozen_weights
from training.snapshots.snapshot_store import Snapshot
from training.strategies.base import Strategy, StrategyContext
from training.strategies.weights import holding_mean, refuse_unsuitable, sync_weights

_guards: weakref.WeakKeyDictionary[torch.optim.Optimizer, Any] = weakref.WeakKeyDictionary()
"""What refuses a step of an optimizer outside of its session; an earlier session has no say any more."""


class TrainedPart:
    """The modules of one optimizer.

    Args:
        number: of the part, from 0.
        modules: that hold the optimizer's weights.
        exchange: of this part alone.

    Raises:
        BadInput: the strategy is an optimizer itself, and this one would change what it does; or the optimizer computes
            the loss itself; or a module has weights that cannot be trained here.
    """

    def __init__(
        self,
        number: int,
        modules: Sequence[nn.Module],
        optimizer: torch.optim.Optimizer,
        kind: type[Strategy],
        context: StrategyContext,
        exchange: Exchange,
        device: torch.device,
    ) -> None:
        if kind.replaces_optimizer and not _is_plain(optimizer):
            hint = "make torch.optim.SGD(model.parameters(), lr=...) without momentum, or take another strategy"
            raise BadInput(
                f"{kind.name} is an optimizer itself: {type(optimizer).__name__} would change its steps", hint
            )
        closure = inspect.signature(optimizer.step).parameters.get("closure")
        if closure is not None and closure.default is closure.empty:
            problem = f"{type(optimizer).__name__} computes the loss itself, several times in a step"
            raise BadInput(problem, "take an optimizer whose step() needs no closure, such as AdamW")
        self.modules = modules
        self.module = modules[0] if len(modules) == 1 else nn.ModuleList(modules)
        self.optimizer, self.exchange, self._prefix = optimizer, exchange, f"part-{number}" if number else ""
        refuse_unsuitable(self.module)
        self.parameters = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
        self.strategy = kind(context)
        self.strategy.set_optimizer(optimizer)
        self.compression = CompressionRatio(self.parameters, exchange)
        self.steps = 0
        precision, self._last_step = Precision(None, device), LastStep(self.module, device, kind)
        self._update = Update(
            self.parameters, precision, optimizer, self.strategy, exchange, self._last_step, context.max_grad_norm
        )
        self._state = TrainingState(self.module, optimizer, precision)
        self._has_begun = self._may_step = False
        if optimizer in _guards:
            _guards.pop(optimizer).remove()
        _guards[optimizer] = optimizer.register_step_pre_hook(self._refuse_step)

    @property
    def learning_rate(self) -> float:
        return float(self.optimizer.param_groups[0]["lr"])

    def attach(self, snapshot: Snapshot | None) -> None:
        """Begin with equal weights on all processes, or with those of a snapshot.

        Raises:
            RunFailed: the snapshot is of other modules.
        """
        self.frozen = UntrainedWeights(frozen_weights(self.module), self.exchange)
        if snapshot is None:
            sync_weights(self.parameters, self.exchange, "weights/start")
            synchronise_buffers(self.module, self.exchange, "start")
            return self.strategy.attach(self.module, self.exchange)
        self.strategy.attach(self.module, self.exchange)
        state = snapshot.state["parts"].get(self._prefix)
        if state is None:
            raise RunFailed("the snapshot has fewer optimizers than the script", "resume with the script that wrote it")
        tensors = tensors_under(self._prefix, snapshot.tensors) if self._prefix else snapshot.tensors
        random = {name: tensor for name, tensor in snapshot.tensors.items() if name.startswith("rng/")}
        self._state.restore(Snapshot(snapshot.step, tensors | random, state))
        self.frozen.restore(tensors_under("frozen", tensors), state["frozen"])
        self.steps = int(state["steps"])
        groups = unpack_state(tensors["groups"])
        if len(groups) != len(self.optimizer.param_groups):
            problem = f"the snapshot has {len(groups)} parameter groups, and the optimizer of the script another number"
            raise RunFailed(problem, "resume with the script that wrote it")
        for group, values in zip(self.optimizer.param_groups, groups, strict=True):
            for name, value in values.items():
                if isinstance(value, torch.Tensor) and isinstance(group.get(name), torch.Tensor):
                    group[name].copy_(value)
                else:
                    group[name] = value
        self.strategy.load(tensors_under("strategy", tensors), state["strategy"])

    def snapshot(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """Return the part's tensors by their names in a snapshot, and its state by the name of the part."""
        groups = [
            {name: value for name, value in group.items() if name not in ("params", "param_names")}
            for group in self.optimizer.param_groups
        ]
        packed = {"groups": pack_state(groups, type(self.optimizer).__name__)}
        changed, hashes = self.frozen.snapshot()
        tensors = prefixed("strategy", self.strategy.tensors()) | packed | prefixed("frozen", changed)
        state = {"steps": self.steps, "strategy": self.strategy.state(), "frozen": hashes}
        joining = self._state.joining(tensors, state)
        tensors = prefixed(self._prefix, joining.tensors) if self._prefix else joining.tensors
        return tensors, {self._prefix: joining.state}

    def begin_step(self) -> None:
        """Begin a step, unless one has begun; before its first backward."""
        if not self._has_begun:
            self._has_begun = True
            self._last_step.begin()
            self.strategy.begin_step(self.steps, 1.0)

    def step(
        self, losses: list[torch.Tensor], problem_of: Callable[[float], str]
    ) -> tuple[StepFigures, SyncEvent | None]:
        """Make a step with the gradients that are there; return its figures, and what the strategy reports of it.

        Args:
            losses: of the step's backward passes; their sum is its loss.
            problem_of: raises for a loss that is not finite; else returns an empty text.

        Raises:
            BadInput: there was no backward pass, or a weight is trained that was frozen.
        """
        if not self._has_begun:
            problem = "step() without session.backward() since the last step of this optimizer"
            raise BadInput(problem, "write session.backward(loss) for loss.backward()")
        if any(tensor.requires_grad for tensor in self.frozen.tensors.values()):
            problem = "a weight that was frozen in prepare() is trained: the processes would not merge it"
            raise BadInput(problem, "freeze it after prepare(), for the steps in which it is not trained")
        sent = self.exchange.traffic.bytes_sent
        self._may_step = True
        figures = self._update.run(losses, problem_of)
        self._may_step = self._has_begun = False
        self.steps += 1
        self._last_step.stage = "ending"
        report = self.strategy.end_step()
        self._last_step.stage = "between"
        self.compression.step(self.exchange.traffic.bytes_sent - sent)
        return figures, report

    @property
    def has_gradients(self) -> bool:
        """Whether any weight has a gradient."""
        return any(parameter.grad is not None for parameter in self.parameters)

    @contextlib.contextmanager
    def merged(self) -> Iterator[None]:
        """Hold the mean of all processes in weights and buffers; afterwards this one's. A collective."""
        buffers = persistent_buffers(self.module)
        before = {name: buffer.clone() for name, buffer in buffers.items()}
        with holding_mean(self.parameters, self.exchange, "session/weights"):
            synchronise_buffers(self.module, self.exchange, "session")
            try:
                yield
            finally:
                for name, value in before.items():
                    buffers[name].copy_(value)

    def _refuse_step(self, optimizer: torch.optim.Optimizer, arguments: object, options: object) -> None:
        if not self._may_step:
            raise RunFailed("the script steps its optimizer by itself", "write session.step() for optimizer.step()")


def _is_plain(optimizer: torch.optim.Optimizer) -> bool:
    return isinstance(optimizer, torch.optim.SGD) and not any(group["momentum"] for group in optimizer.param_groups)
