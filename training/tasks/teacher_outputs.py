"""What a teacher says of each token of the transcripts, computed once and kept in a memory-mapped file.

Of every token the likeliest :data:`TOP` are kept and the mass of all others together: with Whisper's 51,865 tokens that
is 258 bytes instead of 104 kB. What is lost by it is only how the others share their mass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

TOP = 64
"""Tokens that are kept by name."""
_FILE = "outputs.bin"
_LEAST = -100.0
"""Logarithm of what counts as no probability."""


class Soft(NamedTuple):
    """A teacher's probabilities at some temperature, as logarithms."""

    top: torch.Tensor
    """[tokens, k]: of the likeliest, fp16"""
    indices: torch.Tensor
    """[tokens, k]: which these are, int64"""
    rest: torch.Tensor
    """[tokens]: of all others together, fp16"""


def soften(logits: torch.Tensor, temperature: float, most: int = TOP) -> Soft:
    """Return what is kept of ``logits`` [tokens, vocabulary] at a temperature."""
    scaled = torch.log_softmax(logits.float() / temperature, dim=-1)
    top, indices = scaled.topk(min(most, scaled.shape[-1]), dim=-1)
    rest = scaled.scatter(-1, indices, -torch.inf).logsumexp(-1)
    return Soft(top.clamp(min=_LEAST).half(), indices, rest.clamp(min=_LEAST).half())


def divergence(soft: Soft, logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """Return KL(teacher || student) of each token [tokens] at a temperature, never negative.

    The tokens that the teacher does not name count as one. With all of them named it is the divergence itself, else at
    most that (the log sum inequality).

    Args:
        logits: the student's [tokens, vocabulary].
    """
    scaled = torch.log_softmax(logits.float() / temperature, dim=-1)
    named = scaled.gather(-1, soft.indices)
    target = torch.cat([soft.top, soft.rest[:, None]], dim=-1).float().log_softmax(-1)  # a sum of 1, but for rounding
    if named.shape[-1] == scaled.shape[-1]:
        return (target[:, :-1].exp() * (target[:, :-1] - named)).sum(-1)
    others = scaled.scatter(-1, soft.indices, -torch.inf).logsumexp(-1, keepdim=True)
    return (target.exp() * (target - torch.cat([named, others], dim=-1))).sum(-1)


class TeacherOutputs:
    """A teacher's :class:`Soft` of every token of many clips.

    Args:
        folder: what :func:`write_outputs` has filled.
        tokens: of each clip, in the same order.
        vocabulary: tokens that there are.
    """

    def __init__(self, folder: Path, tokens: Sequence[int], vocabulary: int) -> None:
        self._ends = np.concatenate([[0], np.cumsum(tokens)]).astype(np.int64)
        shape = (int(self._ends[-1]),)
        self._data: Any = np.memmap(folder / _FILE, _row(vocabulary), "r", shape=shape)

    def of(self, clips: Sequence[int]) -> Soft:
        """Return what is kept of the tokens of some clips, one after another."""
        rows = np.concatenate([self._data[self._ends[clip] : self._ends[clip + 1]] for clip in clips])
        top, rest = (torch.from_numpy(np.ascontiguousarray(rows[name])) for name in ("top", "rest"))
        return Soft(top, torch.from_numpy(rows["indices"].astype(np.int64)), rest)


def write_outputs(folder: Path, parts: Iterator[Soft], vocabulary: int, report: Callable[[int], None]) -> None:
    """Write what a teacher says of some clips after another; ``report`` takes how many parts are written."""
    report(0)
    with (folder / _FILE).open("wb") as file:
        for number, soft in enumerate(parts):
            rows = np.empty(len(soft.rest), _row(vocabulary))
            for name, values in zip(("top", "indices", "rest"), soft, strict=True):
                rows[name] = values.cpu().numpy()
            file.write(rows.tobytes())
            report(number + 1)


def _row(vocabulary: int) -> np.dtype[Any]:
    """Type of what is kept of one token."""
    most, index = min(TOP, vocabulary), np.uint16 if vocabulary <= 1 << 16 else np.uint32
    return np.dtype([("top", np.float16, (most,)), ("indices", index, (most,)), ("rest", np.float16)])


def freeze(model: nn.Module) -> nn.Module:
    """Return a model that only answers."""
    return model.requires_grad_(False).eval()
