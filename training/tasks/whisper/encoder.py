"""Whisper's encoder for windows of any length, and what it hears of each clip where it is frozen.

``transformers`` refuses every other length than the model's own, though nothing in the encoder depends on it: its
positions are absolute, so a shorter window has the first of them. This forward pass goes through the same modules, so
adapters, hooks, recomputed activations and mixed precision hold in it; at the full length it gives the same bits.
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
"""One part in so many of the free disk may be taken: by all that a run keeps, and by the whole file of one length."""

_ROWS, _SUMS = "outputs.f16", "sums.u32"

Encode = Callable[[torch.Tensor], torch.Tensor]


def encode(whisper: Any, features: torch.Tensor) -> BaseModelOutput:
    """Return the encoder's output [batch, frames / 2, width] for ``features`` [batch, mels, frames].

    Nothing is kept for backward where no weight of the encoder is trained.

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
    with torch.set_grad_enabled(trained and torch.is_grad_enabled()):
        return BaseModelOutput(last_hidden_state=_through(encoder, _masked(whisper, features, max_frames)))


def _masked(whisper: Any, features: torch.Tensor, max_frames: int) -> torch.Tensor:
    """Blank parts of ``features`` where the model's configuration asks for SpecAugment (Park et al. 2019).

    The masks are drawn for the full window, and what falls beyond a cut one is lost: a clip is masked as often as in a
    full window, and a mask may be longer than the cut one.
    """
    if not (whisper.model.training and getattr(whisper.config, "apply_spec_augment", False)):
        return features
    frames = features.shape[-1]
    window = nn.functional.pad(features, (0, max_frames - frames))  # always a copy: it is masked in place
    masked: torch.Tensor = whisper.model._mask_input_features(window)[..., :frames]
    return masked


def _through(encoder: Any, features: torch.Tensor) -> torch.Tensor:
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
    """Whether the encoder of a Whisper gives one output for one input in training: nothing is trained or dropped."""
    config = encoder.config
    trained = any(parameter.requires_grad for parameter in encoder.parameters())
    drops = (config.dropout, config.attention_dropout, config.activation_dropout, config.encoder_layerdrop)
    return not trained and not any(drops) and not getattr(config, "apply_spec_augment", False)


class EncoderCache:
    """Outputs of one frozen encoder for the clips of one feature store: in 16 bits, for all epochs and workers.

    Where nothing random stands before or in the encoder, its output for a clip is a function of the clip, the weights
    and the window. An entry is named by the hash of weights and features, the window's length and the precision; of its
    file only what was computed takes space. A row counts only with its checksum, so what a crash, a disk or two workers
    at once made of it is computed again; and where nothing can be kept, the training goes on without.

    They are rounded to float16 when they are computed too, so a step has the same input whether it finds them or not.

    Args:
        root: cache folder.
        encoder: a Whisper's, as it will stay.
        features: what the features are a function of.
        clips: how many there are.
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
            encode: computes the outputs of those that are not there.
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
        heard = torch.from_numpy(np.stack(rows))
        return heard.to(features.device, torch.float32)

    def _store_for(self, positions: int, precision: str) -> _Outputs | None:
        """Return where outputs of this length are; ``None`` where they would take too much of the disk, or cannot be
        kept."""
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
    """Outputs of one length: a row a clip, and its checksum, 0 where nothing is yet.

    Args:
        least: bytes of the disk that stay free.
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
        row = np.array(self._rows[clip])  # as it is now: another worker may write it
        return row if self._sums[clip] == _sum_of(row) else None

    def write(self, clips: Sequence[int], outputs: npt.NDArray[np.float16]) -> None:
        """Keep what was computed; where the disk is full, nothing more is kept."""
        try:
            self._is_full = self._is_full or shutil.disk_usage(self._paths[0].parent).free < self._min_free
            if not self._is_full:
                _put(self._paths[0], clips, [output.tobytes() for output in outputs])
                _put(self._paths[1], clips, [_sum_of(output).tobytes() for output in outputs])
        except OSError:
            self._is_full = True


def _put(path: Path, rows: Sequence[int], values: Sequence[bytes]) -> None:
    """Write values of one length at their places; not through the mapping: a full disk would end the process there."""
    with path.open("r+b") as file:
        for row, value in zip(rows, values, strict=True):
            file.seek(row * len(value))
            file.write(value)


def _sum_of(row: npt.NDArray[np.float16]) -> np.uint32:
    checksum: np.uint32 = np.uint32(zlib.crc32(row.tobytes()) or 1)
    return checksum


def _files(shape: tuple[int, int, int]) -> tuple[tuple[str, int], ...]:
    """Names and bytes of the files of an entry."""
    return (_ROWS, 2 * math.prod(shape)), (_SUMS, 4 * shape[0])


def _make_empty(shape: tuple[int, int, int], folder: Path) -> None:
    """Write files of holes: they take space where something is written."""
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
