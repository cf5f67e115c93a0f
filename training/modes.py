"""Training and evaluation mode of a model whose author keeps parts of it in evaluation mode."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


def start_training(model: nn.Module) -> None:
    """Put a freshly built model into training mode, but what its author has put into evaluation mode.

    A batch norm whose statistics are to stay, or a frozen part without dropout, is left as it is. A model that is in
    evaluation mode as a whole was not put there part by part: ``from_pretrained`` returns it so. That holds as well for
    such a model inside of another one, if it has weights to train.
    """
    kept = _kept(model) if model.training else []
    model.train()
    for module in kept:
        module.training = False


def _kept(model: nn.Module) -> list[nn.Module]:
    as_loaded = {
        inner
        for module in model.modules()
        if not module.training and hasattr(module, "from_pretrained") and _trains(module)
        for inner in module.modules()
    }
    return [module for module in model.modules() if not module.training and module not in as_loaded]


def _trains(module: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters())


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode, and afterwards every module back into the mode that it had."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
