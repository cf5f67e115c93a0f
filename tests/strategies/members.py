"""A member of a group as the trainer makes its steps, and no more: model, optimizer and a strategy of any name."""

from __future__ import annotations

import copy
import json
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from profiles.schema import StrategySettings
from tests.strategies.settings import strategy_settings
from training.exchange.base import Exchange, JoiningState
from training.loop.state import prefixed, tensors_under
from training.records.events import SyncEvent
from training.strategies.base import StrategyContext
from training.strategies.costs import RunSpec, Start, SyncSchedule
from training.strategies.registry import strategy_class
from training.strategies.user_strategy import load_user_strategy, shortened_for_trial
from training.strategies.weights import flatten, weight_hash

STEPS = 1000
"""Of the whole run, of which a test makes the first ones: no strategy may find that too few."""
INTERVAL, DELAY = 4, 2
_DRAWING = threading.Lock()
"""Members are threads, and share the generator."""


class Shapes(nn.Module):
    """A convolution, a matrix, one scalar and a tensor of odd shape."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(3, 2, 3)
        self.odd = nn.Parameter(torch.randn(3, 5, 1, 7) * 0.1)
        self.matrix = nn.Linear(12, width)
        self.scalar = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a prediction for ``x`` of [samples, 3, 8]."""
        hidden = torch.tanh(self.convolution(x)).flatten(1)
        return self.matrix(hidden).mean(1) * self.scalar + (self.odd * x.mean()).sum()


def settings_of(name: str, **more: Any) -> StrategySettings:
    """Return settings with which exchanges are at most :data:`INTERVAL` steps apart."""
    usual = strategy_settings(**{"strategy": name, "verify_interval": 0} | more)
    return shortened_for_trial(usual, INTERVAL)


def overlapping(name: str) -> StrategySettings | None:
    """Return settings with which an exchange overlaps with training; ``None`` for a strategy that has none."""
    costs = strategy_class(name).costs
    run = RunSpec(STEPS, codec=costs.codecs[0]) if costs else RunSpec(STEPS)
    if costs is None or not any(schedule.delay for schedule in costs.sync_schedules(run)):
        return None
    own: dict[str, dict[str, Any]] = {}
    plain: dict[str, Any] = {}
    for option, value in costs.settings(run, SyncSchedule(INTERVAL, DELAY)).items():
        owner, _, field = option.rpartition(".")
        (own.setdefault(owner, {}) if owner else plain)[field] = value
    return settings_of(name, codec=run.codec, owned=own, **plain)


class Member:
    """One member, of the weight ``rank + 1``.

    Args:
        joining: of a newcomer.
        saved: what :meth:`snapshot` gave.
    """

    def __init__(
        self,
        settings: StrategySettings,
        exchange: Exchange,
        joining: JoiningState | None = None,
        saved: dict[str, Any] | None = None,
        make: Callable[[], nn.Module] = Shapes,
        start: Start = "pretrained",
    ) -> None:
        with _DRAWING, torch.random.fork_rng():
            torch.manual_seed(3)
            self.model = make()
        self.exchange = exchange
        self.stretch = strategy_class(settings.strategy).segment_steps(settings)
        if self.stretch:
            exchange.shares_process = True  # type: ignore[misc]  # the order of what comes is that of the speeds
        self._owners: tuple[int, ...] = exchange.members if joining is None else tuple(joining.state["owners"])
        self.warnings: list[str] = []
        self.reports: list[SyncEvent] = []
        self.step = 0
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        self.strategy = strategy_class(settings.strategy)(
            StrategyContext(load_user_strategy(settings), STEPS, 7, self.warnings.append, start)
        )
        if joining is not None:
            self._adopt(joining)
        self.strategy.set_optimizer(self.optimizer)
        self.strategy.attach(self.model, exchange)
        if joining is not None:
            tensors, state = tensors_under("strategy", joining.tensors), joining.state["strategy"]
            if tensors or state:
                self.strategy.load(tensors, state)
        if saved is not None:
            self.step = saved["step"]
            self.model.load_state_dict(saved["model"])
            self.optimizer.load_state_dict(copy.deepcopy(saved["optimizer"]))
            self.strategy.load(saved["tensors"], json.loads(saved["state"]))

    @torch.no_grad()
    def _adopt(self, joining: JoiningState) -> None:
        self.step = joining.state["step"]
        self.model.load_state_dict(tensors_under("model", joining.tensors))
        moments = tensors_under("optimizer", joining.tensors)
        for name, parameter in self.model.named_parameters():
            if name in moments:
                self.optimizer.state[parameter]["momentum_buffer"] = moments[name].clone()

    def snapshot(self) -> dict[str, Any]:
        """Return what a member of the same rank goes on from."""
        return {
            "step": self.step,
            "model": copy.deepcopy(self.model.state_dict()),
            "optimizer": copy.deepcopy(self.optimizer.state_dict()),
            "tensors": {name: tensor.detach().clone() for name, tensor in self.strategy.tensors().items()},
            "state": json.dumps(self.strategy.state()),
        }

    def admit(self) -> None:
        """Hand the newcomers what they begin with."""
        with self.strategy.for_newcomer():
            held = self.optimizer.state
            moments = {n: held[p]["momentum_buffer"] for n, p in self.model.named_parameters() if p in held}
            tensors = prefixed("model", self.model.state_dict()) | prefixed("optimizer", moments)
            tensors |= prefixed("strategy", self.strategy.newcomer_tensors())
            state = {"step": self.step, "strategy": self.strategy.newcomer_state(), "owners": self._owners}
            self.exchange.publish_state(JoiningState(tensors, state))

    def one_step(self) -> bool:
        """Make a step; return whether it ended at a synchronisation point."""
        if self.stretch and self.strategy.synchronised:
            self._meeting = self.step + self.stretch
            self.strategy.begin_segment(self.step, self._meeting, self._owners, lambda step: False, lambda step: None)
        weight = self.exchange.rank + 1
        chance = torch.Generator().manual_seed(self.step * 101 + self.exchange.rank)
        x = torch.randn(2 * weight, 3, 8, generator=chance)
        self.strategy.begin_step(self.step, float(2 * weight))
        self.loss(x[:weight]).backward()
        self.strategy.last_backward()
        self.loss(x[weight:]).backward()
        self.strategy.gradients()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        report = self.strategy.end_step()
        self.step += 1
        if self.stretch and self.strategy.synchronised:
            self.step = self._meeting
        if report is not None:
            self.reports.append(report.model_copy(update={"step": self.step}))
        return self.strategy.meets(report)

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        """Return half the mean loss: a step has two passes."""
        return (self.model(x) - x.square().mean((1, 2))).square().mean() / 2

    def until(self, step: int) -> None:
        """Train until so many steps are made."""
        while self.goes_on(step):
            self.one_step()

    def goes_on(self, step: int) -> bool:
        """Return whether it has fewer steps behind it, or goes at its own pace and the others wait for its next."""
        return self.step < step or bool(self.stretch and not self.strategy.synchronised)

    def until_synchronised(self, step: int) -> None:
        """Train to the first synchronisation point after at least so many steps."""
        while not self.one_step() or self.step < step:
            assert self.step < step + 50, "there is no synchronisation point"

    def weights(self) -> torch.Tensor:
        """Return a copy of what it holds."""
        return flatten(self.model.parameters())

    def hash(self) -> str:
        """Return the hash of what it holds."""
        return weight_hash(self.weights())
