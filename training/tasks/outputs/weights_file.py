"""The weights of any module as one safetensors file.

As safetensors' own functions for models, but for weights that are parts of one block of memory, as cuDNN lays those of
an LSTM or a GRU: these it refuses (https://github.com/safetensors/safetensors/issues/657), and a run would end with an
error after its last step.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn


def write_weights(model: nn.Module, path: Path) -> None:
    """Write a model's state. A tensor with several names is written under the first of them; the metadata have the
    others.

    Raises:
        OSError, SafetensorError: it cannot be written.
    """
    names: dict[object, str] = {}
    kept: dict[str, torch.Tensor] = {}
    aliases: dict[str, str] = {}
    for name, tensor in sorted(model.state_dict().items()):
        first = names.setdefault(_memory(tensor) if tensor.numel() else name, name)
        if first != name:
            aliases[name] = first
        else:
            is_whole = tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes
            kept[name] = tensor if is_whole else tensor.clone(memory_format=torch.contiguous_format)
    save_file(kept, str(path), metadata=aliases or None)


def read_weights(model: nn.Module, path: Path) -> None:
    """Load such a file, or one of safetensors, into a model.

    Raises:
        RuntimeError: names or shapes do not fit.
    """
    values, state = load_file(str(path)), model.state_dict()
    missing, unexpected = model.load_state_dict(values, strict=False)
    loaded = {_memory(state[name]) for name in state.keys() & values.keys()}
    absent = [name for name in missing if _memory(state[name]) not in loaded]
    if absent or unexpected:
        lists = {"missing": absent, "unknown": unexpected}
        raise RuntimeError("; ".join(f"{kind}: {', '.join(names)}" for kind, names in lists.items() if names))


def _memory(tensor: torch.Tensor) -> object:
    return tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()
