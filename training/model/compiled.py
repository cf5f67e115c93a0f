"""Steps through compiled blocks: ``torch.compile`` of each block of a model by itself.

Alike blocks share their code, so a model takes as long to compile as one of its blocks of each kind. Hooks, adapters,
recomputed activations and exchanges stand between or around blocks, and stay as they are; so does the optimizer, whose
bits must be equal on all members. Evaluations go through the blocks uncompiled: a text that grows has a new length with
every token.
"""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Literal

import torch
from torch import nn

BACKEND: Any = "inductor"
LONG_RUN = 500
"""Steps from which on the start, half a minute, is worth it."""
MOST_RECOMPILES = 8
"""Of one kind of block, for shapes that no code is there for yet."""
_COMPILERS = ("torch._dynamo", "torch._inductor", "torch._functorch", "triton")


def should_compile(setting: Literal["auto", "on", "off"], device: torch.device, task_gains: bool, steps: int) -> bool:
    """Whether to compile the blocks of a run; ``auto``: for a long run on a CUDA device that Triton supports.

    Args:
        task_gains: :attr:`training.tasks.base.Task.gains_from_compiling`.
    """
    if setting != "auto":
        return setting == "on"
    return task_gains and steps >= LONG_RUN and device.type == "cuda" and _has_triton()


def _has_triton() -> bool:
    from torch.utils._triton import has_triton  # looks for a compiler

    return bool(has_triton())


class CompiledBlocks:
    """The blocks of a model, compiled as long as that works.

    Args:
        varies: whether samples differ in length, so that code for one length would be made again and again.
    """

    def __init__(self, model: nn.Module, varies: bool) -> None:
        # Else the steps beyond the limit would be eager without a word
        torch._dynamo.config.fail_on_recompile_limit_hit = True
        torch._dynamo.config.recompile_limit = MOST_RECOMPILES
        warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")  # dynamo's own
        self._blocks: list[Any] = list(blocks_of(model)) or [model]
        # None: dynamic from the second shape on. Module.compile() would leave torch's own containers eager
        compiled = torch.compile(_call_eagerly, backend=BACKEND, dynamic=True if varies else None)
        for block in self._blocks:
            block._compiled_call_impl = partial(_call_block, block, compiled)

    def give_up(self, error: BaseException, warn: Callable[[str], None]) -> bool:
        """Return whether an error comes from the compiler; if so the blocks are eager from now on."""
        if not _is_compiler_error(error):
            return False
        for block in self._blocks:
            block._compiled_call_impl = None
        reason = " ".join(str(error).split())[:200]
        warn(f"the model's blocks cannot be compiled here, so steps go on without: {type(error).__name__}: {reason}")
        return True


def blocks_of(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the blocks of a model: members of the outermost lists of at least two modules of one kind."""
    for child in model.children():
        if isinstance(child, nn.ModuleList) and len(child) > 1 and len({type(block) for block in child}) == 1:
            yield from child
        else:
            yield from blocks_of(child)


def _call_eagerly(block: Any, *inputs: Any, **named: Any) -> Any:
    return block._call_impl(*inputs, **named)  # with the hooks that others have put on it


def _call_block(block: Any, compiled: Callable[..., Any], *inputs: Any, **named: Any) -> Any:
    return (compiled if block.training else _call_eagerly)(block, *inputs, **named)


def _is_compiler_error(error: BaseException) -> bool:
    """Whether an error came through a compiler, or code that it made; what a model does wrong comes again without."""
    frames = (frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__))
    return any(name.startswith(_COMPILERS) for name in frames)
