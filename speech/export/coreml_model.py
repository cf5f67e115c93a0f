"""Core ML exporter for whisper.cpp on a Mac: the encoder for the Neural Engine, and the ggml file with the decoder.

whisper.cpp loads the encoder from ``ggml-model-encoder.mlmodelc`` beside ``ggml-model.bin``, with inputs and outputs
named ``logmel_data`` and ``output``, as in its ``convert-whisper-to-coreml.py``. Compiling needs Apple's ``coremlc``
(Xcode); without it the uncompiled package is kept, and the manual gives the command that compiles it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import subprocess
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import nn

from profiles.errors import BadInput
from speech.export import ggml_model
from speech.export.exporters import CheckClip, Encoder, Exporter, MergedWhisper, decode_hidden, features

logging.getLogger("coremltools").setLevel(logging.ERROR)  # off a Mac, its import warns of each library that is Apple's

import coremltools  # noqa: E402

PACKAGE, COMPILED = "ggml-model-encoder.mlpackage", "ggml-model-encoder.mlmodelc"
_TIMEOUT = 600  # seconds for Apple's compiler


@torch.no_grad()
def _write(merged: MergedWhisper, folder: Path, quantize: str) -> None:
    ggml_model.EXPORTER.write(merged, folder, "float16")
    sound = torch.zeros(1, merged.wrapper.config.num_mel_bins, merged.wrapper.log_mel.frames)
    try:
        with _quiet():
            _convert(Encoder(merged.model).eval(), sound).save(str(folder / PACKAGE))
    except (ValueError, RuntimeError, NotImplementedError, TypeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise BadInput(f"coremltools does not convert this model: {reason}", "export to gguf instead") from error
    _compile(folder)


def _convert(encoder: nn.Module, sound: torch.Tensor) -> Any:
    traced = cast(Any, torch.jit).trace(encoder, (sound,), check_trace=False)
    return coremltools.convert(
        traced,
        convert_to="mlprogram",
        inputs=[coremltools.TensorType(name="logmel_data", shape=tuple(sound.shape))],
        outputs=[coremltools.TensorType(name="output")],
        compute_units=coremltools.ComputeUnit.ALL,
    )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence the tracer's warnings and four progress bars."""
    with warnings.catch_warnings(), open(os.devnull, "w") as nowhere, contextlib.redirect_stderr(nowhere):
        warnings.simplefilter("ignore")
        yield


def _compile(folder: Path) -> None:
    """Compile the package with Apple's tool if it is installed."""
    if shutil.which("xcrun") is None:
        return
    command = ["xcrun", "coremlc", "compile", str(folder / PACKAGE), str(folder)]
    process = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT)
    if process.returncode or not (folder / COMPILED).is_dir():
        reason = " ".join(process.stderr.split())[:200] or f"exit code {process.returncode}"
        raise BadInput(f"xcrun coremlc does not compile the encoder: {reason}", "install Xcode and accept its licence")


def _transcribe(folder: Path, merged: MergedWhisper, clips: Sequence[CheckClip]) -> list[str]:
    """Transcribe with the Core ML encoder and the transformers decoder; macOS only."""
    encoder = coremltools.models.MLModel(str(folder / PACKAGE))
    texts = []
    for clip in clips:
        sound = features(merged.wrapper, clip)[None]
        hidden = torch.from_numpy(np.asarray(encoder.predict({"logmel_data": sound})["output"], dtype=np.float32))
        texts.append(decode_hidden(merged.wrapper, merged.model, hidden, clip.language))
    return texts


EXPORTER = Exporter(_write, _transcribe)
