"""Whisper's encoder for windows of any length, and a cache of its outputs if it is frozen.

``transformers`` rejects any length but the model's own, though nothing in the encoder depends on it: positions are
absolute, so a shorter window uses the first of them. This forward pass calls the same modules, so adapters, hooks,
activation checkpointing and mixed precision work as usual; at the full length the result is bit-identical.
"""

from __future__ import annotations

import hashlib
import logging
import math
import shutil
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from transformers.modeling_outputs import BaseModelOutput

from profiles.errors import BadInput
from training.tasks.cache import get_or_build

logger = logging.getLogger("muster.data")

_SHARE = 4
"""At most 1 / _SHARE of the free disk space is used: by a run's cached outputs, and by the file of one length."""

_ROWS, _SUMS = "outputs.f16", "sums.u32"

Encode = Callable[[torch.Tensor], torch.Tensor]


def encode_window(whisper: Any, features: torch.Tensor) -> BaseModelOutput:
    """Return the encoder's output [batch, frames / 2, width] for ``features`` [batch, mels, frames].

    No autograd graph is recorded if no weight of the encoder is trained.

    Args:
        whisper: a ``WhisperForConditionalGeneration``.

    Raises:
        ValueError: an odd number of frames, or more than the model has positions for.
    """
    encoder = whisper.model.encoder
    frames, max_frames = features.shape[-1], 2 * encoder.max_source_positions
    if frames % 2 or frames > max_frames:
        raise ValueError(f"a window has an even number of frames up to {max_frames}, not {frames}")
    trained = any(parameter.requires_grad for parameter in encoder.parameters())
    encode = getattr(whisper, "encode", None) or partial(run_layers, encoder)  # of a stage, whose layers lie elsewhere
    with torch.set_grad_enabled(trained and torch.is_grad_enabled()):
        return BaseModelOutput(last_hidden_state=encode(_mask_features(whisper, features, max_frames)))


def _mask_features(whisper: Any, features: torch.Tensor, max_frames: int) -> torch.Tensor:
    """Apply SpecAugment (Park et al. 2019) to ``features`` if the model's configuration enables it.

    Masks are drawn for the full window and cropped to a shorter one, so that a clip is masked with the same probability
    as in a full window.
    """
    if not (whisper.model.training and getattr(whisper.config, "apply_spec_augment", False)):
        return features
    frames = features.shape[-1]
    window = nn.functional.pad(features, (0, max_frames - frames))  # a copy, as it is masked in place
    masked: torch.Tensor = whisper.model._mask_input_features(window)[..., :frames]
    return masked


def run_layers(encoder: Any, features: torch.Tensor) -> torch.Tensor:
    """Return the encoder's output [batch, frames / 2, width] for ``features`` [batch, mels, frames]."""
    hidden = nn.functional.gelu(encoder.conv1(features))
    hidden = nn.functional.gelu(encoder.conv2(hidden)).permute(0, 2, 1)
    hidden = hidden + encoder.embed_positions.weight[: hidden.shape[1]]
    hidden = nn.functional.dropout(hidden, p=encoder.dropout, training=encoder.training)
    for layer in encoder.layers:
        if encoder.training and encoder.layerdrop > 0.0 and torch.rand([]) < encoder.layerdrop:
            continue
        hidden = layer(hidden, None)
    out: torch.Tensor = encoder.layer_norm(hidden)
    return out


def is_constant(encoder: Any) -> bool:
    """Whether a Whisper's encoder is deterministic in training: nothing is trained, dropped or masked."""
    config = encoder.config
    trained = any(parameter.requires_grad for parameter in encoder.parameters())
    drops = (config.dropout, config.attention_dropout, config.activation_dropout, config.encoder_layerdrop)
    return not trained and not any(drops) and not getattr(config, "apply_spec_augment", False)


class EncoderCache:
    """Disk cache of a frozen encoder's outputs for the clips of a feature store, shared by all epochs and workers.

    Without randomness before or in the encoder, its output depends only on the clip, the weights and the window. An
    entry is named by the hash of weights and features, the window's length and the precision; its file is sparse. A row
    is valid only with its checksum, so rows damaged by a crash, the disk or concurrent writers are computed again; if
    nothing can be stored, training continues without the cache.

    Newly computed outputs are rounded to float16 too, so a step has the same input on a hit and on a miss.

    Args:
        root: cache folder.
        encoder: a Whisper's, in its final state.
        features: key of the feature store.
        clips: number of clips.
    """

    def __init__(self, root: Path, encoder: Any, features: str, clips: int) -> None:
        self._root = root / "encoded"
        self._width = int(encoder.config.d_model)
        self._clips = clips
        self._weights = _hash_of(encoder, features)
        self._stores: dict[str, _Outputs | None] = {}
        self._min_free = 0

    def __call__(self, features: torch.Tensor, clips: Sequence[int], encode: Encode) -> torch.Tensor:
        """Return the outputs [batch, frames / 2, width] for ``features`` [batch, mels, frames] of ``clips``.

        Args:
            encode: computes the outputs of missing clips.
        """
        store = self._store_for(features.shape[2] // 2, _precision_on(features.device))
        if store is None:
            return encode(features)
        outputs = {clip: store.read(clip) for clip in clips}
        missing = [row for row, clip in enumerate(clips) if outputs[clip] is None]
        if missing:
            computed = encode(features[missing]).to("cpu", torch.float16).numpy()
            outputs.update(zip((clips[row] for row in missing), computed))
            store.write([clips[row] for row in missing], computed)
        rows = [row for clip in clips if (row := outputs[clip]) is not None]
        outputs_of_batch = torch.from_numpy(np.stack(rows))
        return outputs_of_batch.to(features.device, torch.float32)

    def _store_for(self, positions: int, precision: str) -> _Outputs | None:
        """Return the store for outputs of this length; ``None`` if it would be too large, or cannot be created."""
        name = f"{positions}-{precision}"
        if name not in self._stores:
            try:
                self._stores[name] = self._open(f"{self._weights}-{name}", (self._clips, positions, self._width))
            except (OSError, BadInput) as error:
                logger.warning("outputs of the frozen encoder are not cached but computed again each epoch: %s", error)
                self._stores[name] = None
        return self._stores[name]

    def _open(self, key: str, shape: tuple[int, int, int]) -> _Outputs | None:
        self._root.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(self._root).free
        self._min_free = self._min_free or free - free // _SHARE
        if not (self._root / key).is_dir() and 2 * math.prod(shape) > free // _SHARE:
            return None
        entry = get_or_build(self._root, key, partial(_make_empty, shape), is_sound=partial(_is_whole, shape))
        return _Outputs(entry, shape, self._min_free)


class _Outputs:
    """Stored outputs of one length: a row per clip, and its checksum (0 if not yet stored).

    Args:
        min_free: bytes of the disk that remain free.
    """

    def __init__(self, entry: Path, shape: tuple[int, int, int], min_free: int) -> None:
        self._paths = entry / _ROWS, entry / _SUMS
        self._min_free = min_free
        self._rows = np.memmap(self._paths[0], np.float16, "r", shape=shape)
        self._sums = np.memmap(self._paths[1], np.uint32, "r", shape=shape[:1])
        self._is_full = False

    def read(self, clip: int) -> npt.NDArray[np.float16] | None:
        if not self._sums[clip]:
            return None
        row = np.array(self._rows[clip])  # a snapshot, as another worker may be writing it
        return row if self._sums[clip] == _sum_of(row) else None

    def write(self, clips: Sequence[int], outputs: npt.NDArray[np.float16]) -> None:
        """Store computed outputs; nothing more is stored once the disk is full."""
        try:
            self._is_full = self._is_full or shutil.disk_usage(self._paths[0].parent).free < self._min_free
            if not self._is_full:
                _write_rows(self._paths[0], clips, [output.tobytes() for output in outputs])
                _write_rows(self._paths[1], clips, [_sum_of(output).tobytes() for output in outputs])
        except OSError:
            self._is_full = True


def _write_rows(path: Path, rows: Sequence[int], values: Sequence[bytes]) -> None:
    """Write values of equal size to their rows; not through the mapping, where a full disk would kill the process."""
    with path.open("r+b") as file:
        for row, value in zip(rows, values, strict=True):
            file.seek(row * len(value))
            file.write(value)


def _sum_of(row: npt.NDArray[np.float16]) -> np.uint32:
    checksum: np.uint32 = np.uint32(zlib.crc32(row.tobytes()) or 1)
    return checksum


def _files(shape: tuple[int, int, int]) -> tuple[tuple[str, int], ...]:
    """Return names and sizes of an entry's files."""
    return (_ROWS, 2 * math.prod(shape)), (_SUMS, 4 * shape[0])


def _make_empty(shape: tuple[int, int, int], folder: Path) -> None:
    """Create sparse files, which take space only where they are written."""
    for name, size in _files(shape):
        with (folder / name).open("wb") as file:
            file.truncate(size)


def _is_whole(shape: tuple[int, int, int], entry: Path) -> bool:
    try:
        return all((entry / name).stat().st_size == size for name, size in _files(shape))
    except OSError:
        return False


def _precision_on(device: torch.device) -> str:
    used = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else torch.float32
    return str(used).removeprefix("torch.")


def _hash_of(encoder: Any, features: str) -> str:
    layout = f"{features} {encoder.config.encoder_attention_heads} {encoder.config.activation_function}"
    digest = hashlib.blake2b(layout.encode(), digest_size=16)
    for name, weight in encoder.state_dict().items():
        digest.update(f"{name} {tuple(weight.shape)}".encode())
        digest.update(weight.detach().to("cpu", torch.float32).contiguous().numpy().tobytes())
    return digest.hexdigest()
