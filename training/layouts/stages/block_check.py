"""Whether the blocks of a module of one's own can be divided, as far as a forward without numbers shows it.

A published model is compared with its stages instead (:mod:`training.layouts.stages.probe`): its blocks may need data.
"""

from __future__ import annotations

from collections import defaultdict
from contextlib import suppress
from functools import partial
from typing import Any

import torch
import torch.fx.experimental._config
from torch import nn

from training.layouts.stages.anatomy import MODEL_ERRORS, Anatomy, Run, examine, meta_copy, not_to_be_cut
from training.layouts.stages.origins import Origins
from training.layouts.stages.stand_ins import hidden_state

_CONFIG: Any = torch.fx.experimental._config  # what it has is made when it is imported


def examine_own(model: nn.Module, run: Run) -> Anatomy:
    """Return the anatomy of a module of one's own; see :func:`~training.layouts.stages.anatomy.examine`.

    Args:
        run: computes a forward of a copy on the meta device.

    Raises:
        BadInput: it cannot be cut.
    """
    anatomy = examine(meta_copy(model).train(), run)
    _BlockCheck(meta_copy(model).train(), anatomy).record(run)
    return anatomy


class _BlockCheck:
    """One forward with the blocks, in which each gives the shape that it takes, reads weights of its own alone, and
    leaves nothing but its output to others."""

    def __init__(self, model: nn.Module, anatomy: Anatomy) -> None:
        self._model, self._anatomy, self._running = model, anatomy, ""
        self._origins = Origins(self._check, self._read, assumes_numbers=True)
        self._weights: dict[int, list[str]] = defaultdict(list)
        for name, weight in model.named_parameters(remove_duplicate=False):
            self._weights[id(weight)].append(name)

    def record(self, run: Run) -> None:
        for name in self._anatomy.blocks:
            block = self._model.get_submodule(name)
            block.register_forward_pre_hook(partial(self._enter, name), with_kwargs=True)
            block.register_forward_hook(self._leave, with_kwargs=True)
        # experts choose by numbers; what these decide otherwise, such as a length, is not followed further
        all_chosen = _CONFIG.patch(meta_nonzero_assume_all_nonzero=True)
        with suppress(*MODEL_ERRORS), torch.no_grad(), all_chosen, self._origins:
            run(self._model)

    @property
    def _inside(self) -> frozenset[int]:
        """The origins of what the block that computes has computed so far."""
        return frozenset({self._anatomy.blocks.index(self._running)} if self._running else ())

    def _enter(self, name: str, _: nn.Module, args: Any, kwargs: Any) -> None:
        self._running = name
        self._origins.set(hidden_state(args, kwargs), self._inside)

    def _leave(self, _: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        name, self._running = self._running, ""
        self._origins.set(output, frozenset())
        taken = hidden_state(args, kwargs).shape
        given = getattr(output[0] if isinstance(output, tuple) else output, "shape", taken)
        if given != taken:  # other stages have its input in place of its output
            reason = f"{name} gives {list(given)} for {list(taken)}, and all blocks are to be of one shape"
            raise not_to_be_cut(self._model, reason)

    def _check(self, origins: frozenset[int]) -> None:
        for block in origins - self._inside:  # as a loss that is kept in an attribute, or a state for the next block
            name, reader = self._anatomy.blocks[block], self._running or "the model"
            reason = f"{reader} reads more of {name} than its output, and that alone crosses"
            raise not_to_be_cut(self._model, reason)

    def _read(self, weight: nn.Parameter) -> frozenset[int]:
        names = self._weights[id(weight)]
        is_own = any(name.startswith(f"{self._running}.") or name in self._anatomy.everywhere for name in names)
        if self._running and names and not is_own:
            raise not_to_be_cut(self._model, f"{names[0]} is read by {self._running}, which does not have it")
        return self._inside
