"""An exponential moving average of the trained weights, to evaluate and to save: the option ``ema``.

After every step ``average = decay * average + (1 - decay) * weights``, and after the first one the weights themselves,
as ``torch.optim.swa_utils.AveragedModel`` with ``get_ema_multi_avg_fn(decay)``; buffers are the model's. The average is
linear in the weights, so the mean over members that differ is the average of their mean.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn

from profiles.errors import RunFailed
from training.exchange.base import Exchange
from training.strategies.base import Strategy
from training.strategies.weights import flatten, mean_of_all, sync_weights, unflatten_into


class WeightAverage:
    """The average of the weights that a device holds.

    Args:
        decay: of one step, below 1; 0: there is no average.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self._decay = decay
        self._weights = {name: p for name, p in model.named_parameters() if p.requires_grad} if decay else {}
        self._averages: dict[str, torch.Tensor] = {}

    @torch.no_grad()
    def update(self) -> None:
        """Take the weights after a step into the average."""
        if not self._averages:
            self._averages = {name: self._wide(p).clone() for name, p in self._weights.items()}
        elif self._weights:
            weights = [self._wide(p) for p in self._weights.values()]
            torch._foreach_lerp_(list(self._averages.values()), weights, 1 - self._decay)

    @staticmethod
    def _wide(weights: torch.Tensor) -> torch.Tensor:
        """Return weights with 32 bits or more: in fewer bits a small share of a step would be rounded away."""
        return weights.detach() if weights.dtype in (torch.float32, torch.float64) else weights.detach().float()

    @contextmanager
    def in_use(self, strategy: Strategy, exchange: Exchange, name: str, wanted: bool = True) -> Iterator[None]:
        """Hold the average of all members in the model, and restore its weights afterwards.

        A collective: all members enter it together.

        Args:
            name: of the exchange.
            wanted: whether the average is wanted at all.
        """
        if not self._averages or not wanted:
            yield
            return
        parameters = list(self._weights.values())
        averages = self._of_all(strategy, exchange, name)
        kept = [parameter.detach().clone() for parameter in parameters]
        self._copy(parameters, averages)
        try:
            yield
        finally:
            self._copy(parameters, kept)

    def _of_all(self, strategy: Strategy, exchange: Exchange, name: str) -> list[torch.Tensor]:
        averages = list(self._averages.values())
        if exchange.engine == "solo" or len(exchange.members) == 1:
            return averages
        if strategy.equal == "always":  # but for rounding, where members compute on different devices
            sync_weights(averages, exchange, name)
            return averages
        means = [torch.empty_like(average) for average in averages]
        unflatten_into(means, mean_of_all(flatten(averages, torch.device("cpu")), exchange, name).mean)
        return means

    @staticmethod
    @torch.no_grad()
    def _copy(targets: list[nn.Parameter], values: list[torch.Tensor]) -> None:
        for target, value in zip(targets, values, strict=True):
            target.copy_(value)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the averages by name of their weight, for a snapshot or a newcomer."""
        return dict(self._averages)

    def load(self, averages: Mapping[str, torch.Tensor]) -> None:
        """Restore from :meth:`tensors`; weights that it does not hold begin with the next step.

        Raises:
            RunFailed: they are of another model.
        """
        if not self._weights or not averages:
            return
        for name, weights in self._weights.items():
            if name not in averages or averages[name].shape != weights.shape:
                raise RunFailed(f"the snapshot has no average of {name}", "resume with the same model")
        self._averages = {name: averages[name].to(p.device, copy=True) for name, p in self._weights.items()}
