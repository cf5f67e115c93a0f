"""Code that ``torch.compile`` leaves alone.

A compiled model that is distributed calls its group in the middle: torch would trace what is written in Python there,
links and locks included, and fails. ``torch.compiler.disable`` says the same for one function, but loads the whole
compiler, which takes seconds, whether or not anything is compiled.
"""

from __future__ import annotations

from types import FunctionType
from typing import Any, TypeVar

import torch

Kind = TypeVar("Kind", bound=type)


def untraced(kind: Kind) -> Kind:
    """Have the methods of a class, and what they call, run as they are. Before torch 2.7, nothing."""
    frames: Any = torch._C._dynamo.eval_frame
    if hasattr(frames, "set_code_exec_strategy"):
        skip = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.SKIP)
        for method in vars(kind).values():
            if isinstance(method, FunctionType):
                frames.set_code_exec_strategy(method.__code__, skip)
    return kind
