"""Code that ``torch.compile`` does not trace.

A compiled model that is distributed calls its group in the middle: torch would trace the Python code there, links and
locks included, and fail. ``torch.compiler.disable`` does the same for one function, but loads the whole compiler, which
takes seconds, whether or not anything is compiled.
"""

from __future__ import annotations

from types import FunctionType
from typing import Any, TypeVar

import torch

Kind = TypeVar("Kind", bound=type)


def untraced(kind: Kind) -> Kind:
    """Exclude the methods of a class, and what they call, from tracing. No effect before torch 2.7."""
    frames: Any = torch._C._dynamo.eval_frame
    if hasattr(frames, "set_code_exec_strategy"):
        skip = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.SKIP)
        for method in vars(kind).values():
            if isinstance(method, FunctionType):
                frames.set_code_exec_strategy(method.__code__, skip)
    return kind
