"""How a module of the user's own is called with a batch, and which number of its output is the loss."""

from __future__ import annotations

import inspect
import numbers
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from profiles.errors import RunFailed

TARGETS = ("target", "targets", "label", "labels")


def split_target(data: Any) -> tuple[Any, Any]:
    """Split a batch into the model's inputs and the target.

    Raises:
        RunFailed: the batch has no target.
    """
    if isinstance(data, Mapping):
        name = next((name for name in TARGETS if name in data), None)
        if name is None:
            raise RunFailed(f"a batch has {', '.join(data)}, but no target", f"name it {' or '.join(TARGETS)}")
        return {key: value for key, value in data.items() if key != name}, data[name]
    fields: tuple[str, ...] = getattr(data, "_fields", ())
    if isinstance(data, tuple) and (named := next((name for name in TARGETS if name in fields), None)):
        return tuple(value for name, value in zip(fields, data) if name != named), getattr(data, named)
    if isinstance(data, (tuple, list)) and len(data) > 1:
        return tuple(data[:-1]), data[-1]
    if not isinstance(data, torch.Tensor):
        name = next((name for name in (*TARGETS, "y") if hasattr(data, name)), None)
        if name is not None:
            return data, getattr(data, name)
    raise RunFailed("a loss function was given, but samples have no target", "return (input, target) samples")


def loss_of(output: Any, source: str = "the model's forward gave") -> torch.Tensor:
    """Return the loss in a model's output: the output itself, ``output.loss``, ``output["loss"]`` or ``output[0]``.

    Args:
        source: what has returned it, for the message.

    Raises:
        RunFailed: there is no scalar loss.
    """
    if isinstance(output, Mapping) and "loss" in output:
        output = output["loss"]
    elif getattr(output, "loss", None) is not None:
        output = output.loss
    elif isinstance(output, (tuple, list)) and output:
        output = output[0]
    return scalar_loss(output, source)


def scalar_loss(value: Any, source: str) -> torch.Tensor:
    """Return the loss as a tensor without dimensions.

    Raises:
        RunFailed: it is not one real number, or no tensor, from which nothing could be learned.
    """
    hint = "return the mean loss of the batch, or give a loss function"
    if isinstance(value, torch.Tensor):
        if value.numel() == 1 and not value.is_complex():
            return value.reshape(())
        kind = "a complex number" if value.numel() == 1 else f"a tensor of shape {tuple(value.shape)}"
        raise RunFailed(f"{source} {kind} as loss, not one number", hint)
    if isinstance(value, numbers.Number):
        hint = "return it as it was computed, without item() or float()"
    raise RunFailed(f"{source} {type(value).__name__} as loss, not a tensor of one number", hint)


def call_step(step: Callable[[nn.Module, Any], Any], model: nn.Module, batch: Any) -> Any:
    """Return what a ``train_step`` of the user's returns.

    Raises:
        RunFailed: it makes the gradients itself, which the run would make once more; or an evaluation, which has none,
            asks it for some.
    """
    if not torch.is_grad_enabled():
        try:
            return step(model, batch)
        except RuntimeError as error:
            if "grad" not in str(error):
                raise
            hint = "leave backward() to the run, and put other gradients under torch.enable_grad()"
            raise RunFailed(f"train_step needs gradients, and an evaluation makes none: {error}", hint) from error
    begins = not _has_gradients(model)
    returned = step(model, batch)
    if begins and _has_gradients(model):
        raise RunFailed("train_step calls backward(), as the run does with the loss", "only return the loss")
    return returned


def _has_gradients(model: nn.Module) -> bool:
    return any(parameter.grad is not None for parameter in model.parameters())


def metric_values(returned: Any) -> dict[str, float]:
    """Return the means that the user's ``metrics`` gave.

    Raises:
        RunFailed: they are no numbers with names.
    """
    hint = 'return numbers by name: {"accuracy": 0.9}'
    if not isinstance(returned, Mapping):
        raise RunFailed(f"metrics gave {type(returned).__name__}, not a mapping", hint)
    values = {}
    for name, value in returned.items():
        try:
            values[str(name)] = float(value)
        except (TypeError, ValueError, RuntimeError):
            kind = f"shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else f"type {type(value).__name__}"
            raise RunFailed(f"metrics gave {name} of {kind}, not one number", hint) from None
    return values


def call_model(model: nn.Module, inputs: Any) -> Any:
    """Call a model with a batch unpacked or as a whole, whichever its forward accepts."""
    if isinstance(inputs, Mapping):
        if _accepts(model, **inputs):
            return model(**inputs)
        if (named := _named_inputs(model, inputs)) and _accepts(model, **named):
            return model(**named)
        return model(inputs) if _accepts(model, inputs) else model(**inputs)
    if isinstance(inputs, (tuple, list)):
        signature = _signature(model)
        takes_batch = signature is not None and next(iter(signature.parameters), "") == "batch"
        is_unpacked = len(inputs) == 1 or (_accepts(model, *inputs) and not takes_batch)
        return model(*inputs) if is_unpacked or not _accepts(model, inputs) else model(inputs)
    return model(inputs)


def _named_inputs(model: nn.Module, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of a batch that a model's forward names: a data set may have more columns."""
    signature = _signature(model)
    return {name: inputs[name] for name in (signature.parameters if signature else ()) if name in inputs}


def _accepts(model: nn.Module, /, *positional: Any, **named: Any) -> bool:
    """Whether a model's forward accepts these arguments; true if its signature is unknown."""
    signature = _signature(model)
    try:
        return signature is None or bool(signature.bind(*positional, **named))
    except TypeError:
        return False


def _signature(model: nn.Module) -> inspect.Signature | None:
    try:
        return inspect.signature(model.forward)
    except (TypeError, ValueError):
        return None
