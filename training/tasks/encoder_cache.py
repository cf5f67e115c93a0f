"""What a frozen encoder hears of each clip, computed once: on the disk in 16 bits, for all epochs and workers.

Where nothing random stands before or in the encoder, its output for a clip is a function of the clip, the weights and
the window. An entry is named by the hash of weights, features and precision; in it is one file a window length, of
which only what was computed takes space.
"""

from __future__ import annotations

import hashlib
import math
import os
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from training.tasks.cache import get_or_build

_SHARE = 4
"""The whole cache of a window length takes at most one part in so many of the free disk."""

Encode = Callable[[torch.Tensor], torch.Tensor]


def is_constant(encoder: Any) -> bool:
    """Whether the encoder of a Whisper gives one output for one input in training: nothing is trained or dropped."""
    config = encoder.config
    trained = any(parameter.requires_grad for parameter in encoder.parameters())
    drops = (config.dropout, config.attention_dropout, config.activation_dropout, config.encoder_layerdrop)
    return not trained and not any(drops) and not getattr(config, "apply_spec_augment", False)


class EncoderCache:
    """Outputs of one encoder for the clips of one feature store.

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
        rows = [found for clip in clips if (found := outputs[clip]) is not None]
        heard = torch.from_numpy(np.stack(rows))
        return heard.to(features.device, torch.float32)

    def _store_for(self, positions: int, precision: str) -> _Outputs | None:
        """Return where outputs of this length are; ``None`` where they would take too much of the disk."""
        name = f"{positions}-{precision}"
        if name not in self._stores:
            shape, key = (self._clips, positions, self._width), f"{self._weights}-{name}"
            self._root.mkdir(parents=True, exist_ok=True)
            most = shutil.disk_usage(self._root).free // _SHARE
            fits = (self._root / key).is_dir() or 2 * math.prod(shape) <= most
            make = partial(_make_empty, shape)
            self._stores[name] = _Outputs(get_or_build(self._root, key, make), shape) if fits else None
        return self._stores[name]


class _Outputs:
    """Outputs of one length: a row a clip, and a byte a clip that says whether its row is there."""

    def __init__(self, entry: Path, shape: tuple[int, int, int]) -> None:
        self._paths = entry / "outputs.f16", entry / "there"
        self._bytes = 2 * shape[1] * shape[2]
        self._rows = np.memmap(self._paths[0], np.float16, "r", shape=shape)
        self._there = np.memmap(self._paths[1], np.uint8, "r", shape=shape[:1])
        self._is_full = False

    def read(self, clip: int) -> npt.NDArray[np.float16] | None:
        return self._rows[clip] if self._there[clip] else None

    def write(self, clips: Sequence[int], outputs: npt.NDArray[np.float16]) -> None:
        """Keep what was computed; where the disk is full, nothing more is kept."""
        if self._is_full:
            return
        try:  # not through the mapping: a full disk would end the process there
            with self._paths[0].open("r+b") as file:
                for clip, output in zip(clips, outputs):
                    file.seek(clip * self._bytes)
                    file.write(output.tobytes())
                file.flush()
                os.fsync(file.fileno())  # a row is told to be there when it is
            with self._paths[1].open("r+b") as file:
                for clip in clips:
                    file.seek(clip)
                    file.write(b"\1")
        except OSError:
            self._is_full = True


def _make_empty(shape: tuple[int, int, int], folder: Path) -> None:
    """Write files of holes: they take space where something is written."""
    for name, size in (("outputs.f16", 2 * math.prod(shape)), ("there", shape[0])):
        with (folder / name).open("wb") as file:
            file.truncate(size)


def _precision_on(device: torch.device) -> str:
    used = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else torch.float32
    return str(used).removeprefix("torch.")


def _hash_of(encoder: Any, features: str) -> str:
    digest = hashlib.blake2b(features.encode(), digest_size=16)
    for name, weight in encoder.state_dict().items():
        digest.update(f"{name} {tuple(weight.shape)}".encode())
        digest.update(weight.detach().to("cpu", torch.float32).contiguous().numpy().tobytes())
    return digest.hexdigest()
