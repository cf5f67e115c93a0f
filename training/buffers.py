"""A model's persistent buffers (running statistics of batch norm), made equal over the members."""

from __future__ import annotations

import hashlib
import json

import torch
from torch import nn

from training.exchange.base import Exchange
from training.exchange.codecs import codec_by_name
from training.exchange.documents import documents
from training.strategies.flat import flatten, unflatten_into

_PIECE = 1 << 20
"""Bytes in one gathered payload."""


def persistent_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the buffers that belong to a model's state, by name."""
    saved = model.state_dict(keep_vars=True).keys()
    return {name: buffer for name, buffer in model.named_buffers() if name in saved}


def synchronise_buffers(model: nn.Module, exchange: Exchange, name: str) -> None:
    """Average the floating-point buffers in which members differ; one that all hold alike keeps its bits."""
    buffers = {n: b for n, b in persistent_buffers(model).items() if b.is_floating_point()}
    if exchange.engine == "solo" or not buffers:
        return
    mine = {n: hashlib.blake2b(_bytes(b), digest_size=8).hexdigest() for n, b in buffers.items()}
    said = exchange.gather(f"buffers/{name}/hashes", json.dumps(mine).encode())
    hashes = documents(said).values()
    different = [n for n in buffers if len({str(theirs.get(n)) for theirs in hashes}) > 1]
    wide = [buffers[n] for n in different if buffers[n].dtype == torch.float64]
    narrow = [buffers[n] for n in different if buffers[n].dtype != torch.float64]
    if narrow:
        result = exchange.mean(f"buffers/{name}", flatten(narrow), 1.0, codec_by_name("fp32"))
        if result.weight:  # else nobody's are finite, and each keeps its own
            unflatten_into(narrow, result.mean)
    for number, buffer in enumerate(wide):
        _average_wide(buffer, exchange, f"buffers/{name}/{number}")


@torch.no_grad()
def _average_wide(buffer: torch.Tensor, exchange: Exchange, name: str) -> None:
    """Average a buffer of 64 bits, for which the exchange's own mean of 32 bits is too coarse."""
    raw, flat = _bytes(buffer), torch.empty(buffer.numel(), dtype=buffer.dtype)
    for start in range(0, len(raw), _PIECE):
        said = exchange.gather(f"{name}/{start}", raw[start : start + _PIECE])
        whole = [said[rank] for rank in sorted(said) if len(said[rank]) == len(raw[start : start + _PIECE])]
        parts = [torch.frombuffer(bytearray(piece), dtype=buffer.dtype) for piece in whole]
        own = torch.frombuffer(bytearray(raw[start : start + _PIECE]), dtype=buffer.dtype)
        finite = [part for part in parts if bool(part.isfinite().all())]
        first = start // buffer.element_size()
        flat[first : first + own.numel()] = torch.stack(finite).mean(0) if finite else own
    buffer.copy_(flat.view_as(buffer))


def _bytes(buffer: torch.Tensor) -> bytes:
    flat = buffer.detach().to("cpu").contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
