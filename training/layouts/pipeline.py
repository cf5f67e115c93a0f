"""A member whose model lies on several devices, a stage on each: one step, its norm, and an evaluation."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import nn

from profiles.errors import BadInput
from training.hardware.device import Precision, move, total_norm
from training.layouts.carrier import Carrier, sum_among
from training.layouts.messages import Tensors
from training.layouts.relay import StageRelay, StageTimes
from training.layouts.stages.stage import Departing, StageModel
from training.layouts.stages.stand_ins import UnexpectedArrival
from training.strategies.weights import trainable
from training.tasks.base import Batch


class Pipeline:
    """One stage's part in the steps of its member. All stages call the same methods with the same batches.

    The gradients of the stages together are those of the whole model in one process: losses are means, so each
    micro-batch counts by its weight, and a weight that several stages hold gets the sum of their gradients.

    Args:
        wire: element type of floating-point numbers on the way between stages; ``None``: their own.
        extra: see :func:`training.layouts.orders.micro_batches_under_way`.

    Raises:
        BadInput: the precision is fp16: an overflow would have to be seen on all stages.
    """

    def __init__(
        self,
        stage: StageModel,
        carrier: Carrier,
        precision: Precision,
        wire: torch.dtype | None = None,
        extra: int = 0,
    ) -> None:
        if precision.loss_scale is not None:
            raise BadInput("fp16 needs one loss scale for all stages", "set mixed_precision = bf16 or off")
        self._stage, self._carrier, self._precision = stage, carrier, precision
        self.stage_seconds: tuple[float, ...] = ()
        """For which each stage computed in the last step."""
        self._relay = StageRelay(carrier, wire, extra, precision.device)

    @property
    def times(self) -> StageTimes:
        """Of the last step or evaluation."""
        return self._relay.times

    def passes(
        self,
        micro_batches: Sequence[Batch],
        weights: Sequence[float],
        total: float,
        seeds: Sequence[int] | None = None,
    ) -> list[torch.Tensor]:
        """Add the gradients of some micro-batches of a step to ``grad`` of the stage's parameters.

        Args:
            weights: what the loss of each micro-batch is a mean over, see :meth:`training.tasks.base.Task.weight`.
            total: weight of the whole step; a step may take several calls.
            seeds: of each micro-batch's dropout; ``None``: it draws from the process's generators.

        Returns:
            The share of the step's loss that each micro-batch contributes, the same scalars on all stages.

        Raises:
            ExchangeError: a device is lost.
            RunFailed: a device sent something else than what belongs there, or the loss depends on no trained weight.
        """

        def forward(index: int, arrived: Tensors) -> Tensors | torch.Tensor:
            output = self._forward(micro_batches[index], arrived, seeds[index] if seeds else None)
            return output * (weights[index] / total if total else 0.0) if isinstance(output, torch.Tensor) else output

        if not micro_batches:
            return []
        tied = self._tied_parameters()
        earlier = [parameter.grad for parameter, _ in tied]
        for parameter, _ in tied:
            parameter.grad = None
        losses = self._relay.train(len(micro_batches), forward)
        for (parameter, holders), gradient in zip(tied, earlier):
            parameter.grad = self._sum_over_holders(parameter, holders, gradient)
        return self._told_by_all(losses, len(micro_batches))

    def _told_by_all(self, losses: Sequence[torch.Tensor], count: int) -> list[torch.Tensor]:
        """Return the last stage's losses on all stages, and learn for which time each stage computed."""
        seconds = torch.zeros(self._carrier.stages, dtype=torch.float64)
        seconds[self._carrier.stage] = self.times.forward + self.times.backward
        shares = [loss.cpu().double() for loss in losses] or [*torch.zeros(count, dtype=torch.float64)]
        sums = self._sum_over_stages([*shares, *seconds], count + len(seconds))
        self.stage_seconds = tuple(sums[count:].tolist())
        return [*sums[:count]]

    def trained_weights(self) -> int:
        """Return the number of the member's trained weights: one that several stages hold counts once."""
        count = sum(parameter.numel() for parameter in self._counted_parameters())
        return int(self._sum_over_stages([torch.tensor(count, dtype=torch.float64)], 1))

    @property
    def ties_trained_weights(self) -> bool:
        """Whether another stage holds a trained weight of this one too."""
        return bool(self._tied_parameters())

    @property
    def tied_weights(self) -> dict[str, nn.Parameter]:
        """The trained weights of this stage that other stages hold too, by name."""
        named, tied = self._stage.module.named_parameters(), {id(weight) for weight, _ in self._tied_parameters()}
        return {name: weight for name, weight in named if id(weight) in tied}

    def norm(self) -> float:
        """Return the norm of the member's whole gradient: a weight that several stages hold counts once.

        Raises:
            ExchangeError: a device is lost.
        """
        gradients = [parameter.grad for parameter in self._counted_parameters() if parameter.grad is not None]
        square = float(total_norm(gradients)) ** 2
        return math.sqrt(float(self._sum_over_stages([torch.tensor(square, dtype=torch.float64)], 1)))

    def evaluate(self, batches: Sequence[Batch], weights: Sequence[float]) -> dict[str, float]:
        """Return ``loss_sum`` and ``weight`` of some batches, as the last stage counts them, on all stages.

        The caller puts the module into evaluation mode.

        Raises:
            ExchangeError: a device is lost.
            RunFailed: a device sent something else than what belongs there.
        """
        losses = self.results(batches)
        means = self._sum_over_stages(losses, len(batches)).tolist()
        return {"loss_sum": math.fsum(map(math.prod, zip(means, weights))), "weight": math.fsum(weights)}

    def results(self, batches: Sequence[Batch]) -> list[torch.Tensor]:
        """Return what the last stage computes for some batches; empty on the others."""
        return self._relay.evaluate(
            len(batches), lambda index, arrived: self._forward(batches[index], arrived, seed=None)
        )

    def _forward(self, batch: Batch, arrived: Tensors, seed: int | None) -> Tensors | torch.Tensor:
        try:
            with self._precision.autocast():
                output = self._stage.forward(move(batch, self._precision.device), arrived, seed)
        except UnexpectedArrival as error:
            sent, expected = (", ".join(map(str, shapes)) or "nothing" for shapes in (error.arrived, error.expected))
            neighbour = self._carrier.stage - 1
            raise self._carrier.refused(neighbour, f"tensors of shape {sent}", expected) from error
        return output.tensors if isinstance(output, Departing) else output

    def _counted_parameters(self) -> list[nn.Parameter]:
        """Return the trained parameters but those that an earlier stage holds too."""
        elsewhere = {
            id(parameter) for parameter, holders in self._tied_parameters() if self._carrier.stage != min(holders)
        }
        return [parameter for parameter in trainable(self._stage.module) if id(parameter) not in elsewhere]

    def _tied_parameters(self) -> list[tuple[nn.Parameter, tuple[int, ...]]]:
        """Return the trained parameters that other stages hold too, and the holders, in the same order on all."""
        parameters = dict(self._stage.module.named_parameters())
        shared = ((parameters[name], holders) for name, holders in sorted(self._stage.shared.items()))
        return [(parameter, holders) for parameter, holders in shared if parameter.requires_grad]

    def _sum_over_holders(
        self, parameter: nn.Parameter, holders: tuple[int, ...], earlier: torch.Tensor | None
    ) -> torch.Tensor:
        """Return the sum of the holders' gradients, and what the parameter had from earlier micro-batches."""
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        total = sum_among(self._carrier, holders, gradient)
        return total if earlier is None else earlier.add_(total)

    def _sum_over_stages(self, scalars: Sequence[torch.Tensor], count: int) -> torch.Tensor:
        """Return the sums of ``count`` scalars over all stages; a stage may have none."""
        if not count:
            return torch.zeros(0)
        values = torch.stack([scalar.cpu() for scalar in scalars]) if scalars else torch.zeros(count)
        return sum_among(self._carrier, range(self._carrier.stages), values.double())
