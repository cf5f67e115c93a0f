"""Whether a model trains in stages as it does whole: the same losses and gradients, bit for bit, in one process.

A stage does the arithmetic of the whole model on the same numbers, so any difference is a mistake: a model whose blocks
hand each other more than a hidden state, a module that is needed on two stages. Such a model is refused.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from training.layouts.stage import Departing, StageModel
from training.tasks.base import Batch


def run_in_one_process(stages: Sequence[StageModel], batch: Batch, seed: int | None = None) -> torch.Tensor:
    """Compute forward and backward of one micro-batch through all stages; return the scalar loss.

    Gradients are added to those of the stages' parameters.
    """
    requires_grad: tuple[bool, ...] = ()
    departed: tuple[torch.Tensor, ...] = ()
    crossings: list[tuple[list[torch.Tensor], tuple[torch.Tensor, ...]]] = []
    for stage in stages:
        flags = zip(departed, requires_grad, strict=True)
        arrived = [tensor.detach().requires_grad_(is_required) for tensor, is_required in flags]
        result = stage.forward(batch, arrived, seed)
        departed = result.tensors if isinstance(result, Departing) else (result,)
        crossings.append((arrived, departed))
        requires_grad = stage.departing_require_grad(requires_grad)
    loss = departed[0].detach()
    gradients: list[torch.Tensor | None] = [torch.ones_like(loss)]
    for arrived, departed in reversed(crossings):
        _backward(departed, gradients)
        gradients = [tensor.grad for tensor in arrived]
    return loss


def _backward(departed: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None]) -> None:
    sent = zip(departed, gradients, strict=True)
    pairs = [(tensor, gradient) for tensor, gradient in sent if gradient is not None and tensor.requires_grad]
    if pairs:
        torch.autograd.backward([tensor for tensor, _ in pairs], [gradient for _, gradient in pairs])


def gradients_of(stages: Sequence[StageModel]) -> dict[str, torch.Tensor]:
    """Return the gradients of all stages by name; those of shared weights are summed in the order of the stages."""
    gradients: dict[str, torch.Tensor] = {}
    for stage in stages:
        for name, parameter in stage.module.named_parameters():
            if parameter.grad is not None:
                gradients[name] = gradients[name] + parameter.grad if name in gradients else parameter.grad
    return gradients
