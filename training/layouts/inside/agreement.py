"""Whether the devices that hold shards compute what one device would: the same parts of the model in each pass, without
state that depends on the samples that a device has seen.

A unit's gradients are summed by their place in one vector: where a device has used other weights than the others, as
experts that samples choose, gradients of different weights would be added.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from profiles.errors import BadInput, RunFailed

_REPLICATE = "set layout = replicate"


def refuse_gradient_hooks(model: nn.Module, layout: str) -> None:
    """Raise BadInput for hooks on gradients, which would not be called: other parameters take the place of weights."""
    for name, weight in model.named_parameters():
        if weight._backward_hooks or getattr(weight, "_post_accumulate_grad_hooks", None):
            raise BadInput(
                f"layout = {layout}: {name} has a hook on its gradient, of which devices have a part", _REPLICATE
            )


class ForwardRecord:
    """What this device has computed in training since the last call of :meth:`checksum`.

    Args:
        model: of which ``units`` were sharded already.
    """

    def __init__(self, model: nn.Module, units: Sequence[nn.Module]) -> None:
        self._passes: list[tuple[list[int], set[str]]] = []
        """The units in the order of their calls, and the modules with weights, of each pass."""
        self._given: dict[int, list[int]] = {}
        for number, unit in enumerate(units):
            unit.register_forward_pre_hook(partial(self._enter, number), with_kwargs=True)
            unit.register_forward_hook(partial(self._leave, number), with_kwargs=True)
        for name, module in model.named_modules():
            if module._parameters:
                module.register_forward_pre_hook(partial(self._note, name))
        self._saved = model.state_dict(keep_vars=True).keys()
        self._owners = [
            (f"{name}.{leaf}".lstrip("."), module, leaf)
            for name, module in model.named_modules()
            for leaf in module._buffers
        ]
        self._buffers = self._buffer_states()

    def begin_pass(self) -> None:
        """Note that what is computed from here on is another pass."""
        if torch.is_grad_enabled():
            self._passes.append(([], set()))

    def checksum(self) -> int:
        """Return a checksum of what has computed, the same on devices that have computed the same.

        Raises:
            BadInput: a buffer has changed, which depends on the samples of this device.
        """
        checksum = zlib.crc32(repr([(units, sorted(modules)) for units, modules in self._passes]).encode())
        self._passes.clear()
        self._refuse_changed_buffers()
        return checksum

    def _enter(self, number: int, _: nn.Module, args: Any, kwargs: Any) -> None:
        if torch.is_grad_enabled() and self._passes:
            self._passes[-1][0].append(number)
        self._given[number] = [id(leaf) for leaf in tree_leaves((args, kwargs))]

    def _leave(self, number: int, _: nn.Module, args: Any, kwargs: Any, output: object) -> None:
        before, now = self._given.pop(number, None), [id(leaf) for leaf in tree_leaves((args, kwargs))]
        if before is not None and before != now:
            message = "layout = shard: a block changes a list or a dict that it is given, and would change a copy"
            raise BadInput(message, f"let it return what it computes, or {_REPLICATE}")

    def _note(self, name: str, *_: object) -> None:
        if torch.is_grad_enabled() and self._passes:
            self._passes[-1][1].add(name)

    def _buffer_states(self) -> list[tuple[int, int] | None]:
        buffers = ((name, module._buffers[leaf]) for name, module, leaf in self._owners)
        # one that is not saved may be made anew, as tables of positions are
        return [None if buffer is None else (id(buffer) * (name in self._saved), buffer._version)
                for name, buffer in buffers]  # fmt: skip

    def _refuse_changed_buffers(self) -> None:
        before, self._buffers = self._buffers, self._buffer_states()
        for (name, *_), old, new in zip(self._owners, before, self._buffers):
            if old != new:
                message = f"layout = shard: the buffer {name} changes in training, and a device sees some samples only"
                raise BadInput(message, _REPLICATE)


def different_passes() -> RunFailed:
    """Return the error for devices that have computed different parts of the model."""
    cause = "layers that are dropped at random, or experts that samples choose"
    message = f"the devices have computed different parts of the model, as {cause}"
    return RunFailed(message, "set layerdrop to 0 in the model's config.json, or layout = pipeline")
