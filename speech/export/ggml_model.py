"""Exporter for whisper.cpp's model file (``ggml-model.bin``), as written by its ``convert-h5-to-ggml.py``.

whisper.cpp does not read GGUF for Whisper, and its converter is a script in its repository that no package ships, so
the format is written here. A file consists of, little-endian: magic, eleven sizes, the mel filter bank, the text tokens
as bytes, and every weight with its name, dimensions in reverse order, type and data (``whisper_model_load`` in
whisper.cpp's ``src/whisper.cpp``, release 1.8).
"""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

import numpy as np
import numpy.typing as npt
from transformers.convert_slow_tokenizer import bytes_to_unicode

from profiles.errors import BadInput, RunFailed
from profiles.quantities import span_text
from speech.export.exporters import CheckClip, Exporter, MergedWhisper
from speech.whisper.model import WhisperModelWrapper
from training.run.processes import environment

NAME = "ggml-model.bin"
MAGIC = 0x67676D6C  # "ggml"
_ENGLISH, _MULTILINGUAL = 51864, 51865  # sizes of OpenAI's vocabularies; large-v3 has one more (Cantonese)
_TIMEOUT = 900  # seconds for three recordings
_CHUNK = 1500  # encoder positions of 30 s, the window of whisper.cpp
_QUANTIZATION_VERSION = 2000
_LAYER_NAMES = {
    "self_attn.k_proj": "attn.key",
    "self_attn.q_proj": "attn.query",
    "self_attn.v_proj": "attn.value",
    "self_attn.out_proj": "attn.out",
    "self_attn_layer_norm": "attn_ln",
    "encoder_attn.k_proj": "cross_attn.key",
    "encoder_attn.q_proj": "cross_attn.query",
    "encoder_attn.v_proj": "cross_attn.value",
    "encoder_attn.out_proj": "cross_attn.out",
    "encoder_attn_layer_norm": "cross_attn_ln",
    "fc1": "mlp.0",
    "fc2": "mlp.2",
    "final_layer_norm": "mlp_ln",
}
_OTHER_NAMES = {
    "encoder.layer_norm": "encoder.ln_post",
    "decoder.layer_norm": "decoder.ln",
    "encoder.embed_positions.weight": "encoder.positional_embedding",
    "decoder.embed_positions.weight": "decoder.positional_embedding",
    "decoder.embed_tokens": "decoder.token_embedding",
}

Array = npt.NDArray[Any]


class _GgmlType(NamedTuple):
    """Type numbers of ggml: of the file (``ggml_ftype``) and of a weight matrix (``ggml_type``)."""

    file: int
    matrix: int


_TYPES = {
    "float16": _GgmlType(1, 1),
    "q8_0": _GgmlType(_QUANTIZATION_VERSION + 7, 8),
    "q5_0": _GgmlType(_QUANTIZATION_VERSION + 8, 6),
}
_BLOCK = 32  # weights of a quantised block


def _write(merged: MergedWhisper, folder: Path, quantize: str) -> None:
    """Write the file.

    Raises:
        BadInput: whisper.cpp cannot run a model of this vocabulary, window or shape.
    """
    precision = quantize or "float16"
    _require_readable(merged.wrapper, precision)
    with (folder / NAME).open("wb") as file:
        _write_header(file, merged.wrapper, _TYPES[precision].file)
        for name, weight in _weights(merged.model.state_dict()):
            (kind, data), label = _encode(name, weight, precision), name.encode()
            file.write(struct.pack("<3i", weight.ndim, len(label), kind))
            file.write(struct.pack(f"<{weight.ndim}i", *reversed(weight.shape)) + label + data)


def _require_readable(wrapper: WhisperModelWrapper, precision: str) -> None:
    """Raise ``BadInput`` if the model departs from what whisper.cpp hard-codes: tokens, window and activation."""
    config, start = wrapper.config, _text_tokens(wrapper)
    ids = wrapper.tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|startoftranscript|>"])
    problem = ""
    if config.vocab_size < _ENGLISH or ids != [start, start + 1]:
        problem = "its vocabulary is not that of OpenAI's Whisper"
    elif config.max_source_positions != _CHUNK:
        problem = (
            f"it hears {span_text(wrapper.log_mel.seconds)}, and whisper.cpp goes through a recording in steps of 30 s"
        )
    elif {config.encoder_ffn_dim, config.decoder_ffn_dim} != {4 * config.d_model}:
        problem = "its feed-forward layers are not four times as wide as the model"
    elif config.activation_function != "gelu":
        problem = f"its activation is {config.activation_function}, not gelu"
    elif precision in _BLOCKS and config.d_model % _BLOCK:
        problem = f"its width of {config.d_model} cannot be cut into blocks of 32 for {precision}"
    if problem:
        message = f"whisper.cpp cannot run model {wrapper.path}: {problem}"
        raise BadInput(message, "export to ctranslate2, onnx or hf instead")


def _text_tokens(wrapper: WhisperModelWrapper) -> int:
    """Number of tokens before the end token: 50256 in English-only models, 50257 in the others."""
    return 50257 if wrapper.config.vocab_size >= _MULTILINGUAL else 50256


def _write_header(file: BinaryIO, wrapper: WhisperModelWrapper, file_type: int) -> None:
    config = wrapper.config
    encoder = (config.max_source_positions, config.d_model, config.encoder_attention_heads, config.encoder_layers)
    decoder = (config.max_target_positions, config.d_model, config.decoder_attention_heads, config.decoder_layers)
    file.write(struct.pack("<I11i", MAGIC, config.vocab_size, *encoder, *decoder, config.num_mel_bins, file_type))
    filters = np.ascontiguousarray(wrapper.log_mel.filters.T, dtype="<f4")  # [mels, bins]
    file.write(struct.pack("<2i", *filters.shape) + filters.tobytes())
    tokens = list(_token_bytes(wrapper))
    file.write(struct.pack("<i", len(tokens)))
    for token in tokens:
        file.write(struct.pack("<I", len(token)) + token)


def _token_bytes(wrapper: WhisperModelWrapper) -> Iterator[bytes]:
    """Yield the text tokens in order; whisper.cpp adds the special ones after them itself."""
    symbol_of: dict[int, str] = cast(Any, bytes_to_unicode)()  # untyped
    byte_of = {symbol: byte for byte, symbol in symbol_of.items()}
    symbols = {number: token for token, number in wrapper.tokenizer.get_vocab().items()}
    for number in range(_text_tokens(wrapper)):
        token = symbols.get(number, "")
        is_byte_level = all(symbol in byte_of for symbol in token)
        yield bytes(byte_of[symbol] for symbol in token) if is_byte_level else token.encode()


def _weights(state: Mapping[str, Any]) -> Iterator[tuple[str, Array]]:
    for name, tensor in state.items():
        if name == "proj_out.weight":  # the same as the token embedding
            continue
        weight = tensor.detach().float().numpy()
        new = _ggml_name(name.removeprefix("model."))
        yield new, weight.reshape(-1, 1) if new in ("encoder.conv1.bias", "encoder.conv2.bias") else weight


def _ggml_name(name: str) -> str:
    side, component, *path = name.split(".")
    if component == "layers":
        layer, inner, leaf = path[0], ".".join(path[1:-1]), path[-1]
        return f"{side}.blocks.{layer}.{_LAYER_NAMES[inner]}.{leaf}"
    module, _, leaf = name.rpartition(".")
    return _OTHER_NAMES.get(name) or f"{_OTHER_NAMES.get(module, module)}.{leaf}"


def _encode(name: str, weight: Array, precision: str) -> tuple[int, bytes]:
    """Encode matrices in the chosen precision, convolutions in float16 (whisper.cpp rejects float32)."""
    is_float32 = weight.ndim < 2 or name.endswith((".positional_embedding", "conv1.bias", "conv2.bias"))
    if is_float32:
        return 0, weight.astype("<f4").tobytes()
    if weight.ndim == 2 and precision in _BLOCKS:
        return _TYPES[precision].matrix, _BLOCKS[precision](weight)
    return 1, weight.astype("<f2").tobytes()


def _transcribe(folder: Path, merged: MergedWhisper, clips: Sequence[CheckClip]) -> list[str]:
    """Transcribe with whisper.cpp in a separate process, as it aborts its process on a file that it rejects.

    Raises:
        RunFailed: the process failed or timed out.
    """
    sound = np.zeros((len(clips), merged.wrapper.log_mel.n_samples), dtype=np.float32)
    for row, clip in zip(sound, clips):
        row[: len(clip.samples)] = clip.samples
    languages = ",".join(clip.language or "en" for clip in clips)
    command = [sys.executable, "-m", "speech.export.ggml_transcribe", str((folder / NAME).resolve()), languages]
    try:
        variables, data = environment(0), sound.tobytes()
        process = subprocess.run(command, input=data, capture_output=True, timeout=_TIMEOUT, env=variables)
    except subprocess.TimeoutExpired as error:
        raise RunFailed(
            f"whisper.cpp did not end within {span_text(_TIMEOUT)}", "check later with --no-check"
        ) from error
    if process.returncode:
        raise RunFailed(
            f"whisper.cpp cannot run the exported model: exit code {process.returncode}", "export to ctranslate2"
        )
    texts: list[str] = json.loads(process.stdout)
    return texts


def q8_0(weight: Array) -> bytes:
    """Quantise ``weight`` [rows, columns (a multiple of 32)] to ``block_q8_0`` of ``ggml-common.h``.

    A block is a float16 scale, then 32 signed 8-bit integers, as in ggml's reference (``quantize_row_q8_0_ref`` in
    ``ggml-quants.c``).

    The scale is the largest magnitude of the block divided by 127.
    """
    blocks = weight.astype(np.float32).reshape(-1, _BLOCK)
    scale = np.abs(blocks).max(axis=1, keepdims=True) / np.float32(127)
    numbers = _away_from_zero(blocks * _inverse(scale)).astype(np.int8)
    return _pack(scale, numbers.view(np.uint8))


def q5_0(weight: Array) -> bytes:
    """Quantise ``weight`` to ``block_q5_0``, as ``quantize_row_q5_0_ref`` does.

    A block is a float16 scale, the fifth bits of 32 numbers, then their lower four bits in pairs.

    The scale is the weight of largest magnitude, with its sign, divided by -16; ``n`` encodes ``scale * (n - 16)``.
    """
    blocks = weight.astype(np.float32).reshape(-1, _BLOCK)
    largest = np.take_along_axis(blocks, np.abs(blocks).argmax(axis=1, keepdims=True), axis=1)
    scale = largest / np.float32(-16)
    numbers = np.minimum(31, (blocks * _inverse(scale) + np.float32(16.5)).astype(np.int8)).astype(np.uint8)
    fifth = np.packbits(numbers >> 4, axis=1, bitorder="little")
    low, high = numbers[:, : _BLOCK // 2] & 0x0F, numbers[:, _BLOCK // 2 :] & 0x0F
    return _pack(scale, np.concatenate([fifth, low | (high << 4)], axis=1))


def _inverse(scale: Array) -> Array:
    inverse: Array = np.divide(1, scale, out=np.zeros_like(scale), where=scale != 0)
    return inverse


def _away_from_zero(values: Array) -> Array:
    """Round like C's ``roundf``: halves away from zero."""
    rounded: Array = np.trunc(values + np.copysign(np.float32(0.5), values))
    return rounded


def _pack(scale: Array, numbers: Array) -> bytes:
    return np.concatenate([scale.astype("<f2").view(np.uint8), numbers], axis=1).tobytes()


_BLOCKS = {"q8_0": q8_0, "q5_0": q5_0}
EXPORTER = Exporter(_write, _transcribe)
