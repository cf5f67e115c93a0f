"""whisper.cpp's own file (``ggml-model.bin``), as its ``convert-h5-to-ggml.py`` writes it.

whisper.cpp reads no GGUF, and its converter is a script of its repository that no package brings, so the format is
written here. A file is, little-endian: magic, eleven sizes, the mel filter bank, the text tokens as bytes, and every
weight with its name, dimensions in reverse order, type and data (``whisper_model_load`` in whisper.cpp's
``src/whisper.cpp``, release 1.8).
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
from training.export.exporters import CheckClip, Exporter, MergedWhisper
from training.processes import environment
from training.tasks.whisper.model import WhisperModelWrapper

NAME = "ggml-model.bin"
MAGIC = 0x67676D6C  # "ggml"
_ENGLISH, _MULTILINGUAL = 51864, 51865  # entries of OpenAI's vocabularies; one more with large-v3's Cantonese
_PATIENCE = 900  # seconds for three recordings
_CHUNK = 1500  # encoder positions of 30 s: whisper.cpp goes through a recording in steps of 30 s
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


class _Kind(NamedTuple):
    """Types in the numbering of ggml: of the file (``ggml_ftype``) and of a weight matrix (``ggml_type``)."""

    file: int
    matrix: int


_KINDS = {
    "float16": _Kind(1, 1),
    "q8_0": _Kind(_QUANTIZATION_VERSION + 7, 8),
    "q5_0": _Kind(_QUANTIZATION_VERSION + 8, 6),
}
_BLOCK = 32  # weights of a quantised block


def _write(plain: MergedWhisper, folder: Path, quantize: str) -> None:
    """Write the file.

    Raises:
        BadInput: whisper.cpp would not run this model: another vocabulary, window or shape.
    """
    precision = quantize or "float16"
    _require_readable(plain.wrapper, precision)
    with (folder / NAME).open("wb") as file:
        _write_header(file, plain.wrapper, _KINDS[precision].file)
        for name, weight in _weights(plain.model.state_dict()):
            (kind, data), label = _encoded(name, weight, precision), name.encode()
            file.write(struct.pack("<3i", weight.ndim, len(label), kind))
            file.write(struct.pack(f"<{weight.ndim}i", *reversed(weight.shape)) + label + data)


def _require_readable(wrapper: WhisperModelWrapper, precision: str) -> None:
    """whisper.cpp takes from a file the sizes only: tokens, window and activation are its own."""
    config, start = wrapper.config, _text_tokens(wrapper)
    ids = wrapper.tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|startoftranscript|>"])
    odd = ""
    if config.vocab_size < _ENGLISH or ids != [start, start + 1]:
        odd = "its vocabulary is not that of OpenAI's Whisper"
    elif config.max_source_positions != _CHUNK:
        odd = f"it hears {wrapper.log_mel.seconds:g} s, and whisper.cpp goes through a recording in steps of 30 s"
    elif {config.encoder_ffn_dim, config.decoder_ffn_dim} != {4 * config.d_model}:
        odd = "its feed-forward layers are not four times as wide as the model"
    elif config.activation_function != "gelu":
        odd = f"its activation is {config.activation_function}, not gelu"
    elif precision in _BLOCKS and config.d_model % _BLOCK:
        odd = f"its width of {config.d_model} cannot be cut into blocks of 32 for {precision}"
    if odd:
        message = f"whisper.cpp cannot run model {wrapper.path}: {odd}"
        raise BadInput(message, "export to ctranslate2, onnx or hf instead")


def _text_tokens(wrapper: WhisperModelWrapper) -> int:
    """Tokens before the end token: 50256 of English-only models, 50257 of the others."""
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
    """The text tokens in their order; whisper.cpp names the special ones after them by itself."""
    symbol_of: dict[int, str] = cast(Any, bytes_to_unicode)()  # untyped
    byte_of = {symbol: byte for byte, symbol in symbol_of.items()}
    symbols = {number: token for token, number in wrapper.tokenizer.get_vocab().items()}
    for number in range(_text_tokens(wrapper)):
        token = symbols.get(number, "")
        known = all(symbol in byte_of for symbol in token)
        yield bytes(byte_of[symbol] for symbol in token) if known else token.encode()


def _weights(state: Mapping[str, Any]) -> Iterator[tuple[str, Array]]:
    for name, tensor in state.items():
        if name == "proj_out.weight":  # the same as the token embedding
            continue
        weight = tensor.detach().float().numpy()
        new = _renamed(name.removeprefix("model."))
        yield new, weight.reshape(-1, 1) if new in ("encoder.conv1.bias", "encoder.conv2.bias") else weight


def _renamed(name: str) -> str:
    side, part, *rest = name.split(".")
    if part == "layers":
        layer, inner, leaf = rest[0], ".".join(rest[1:-1]), rest[-1]
        return f"{side}.blocks.{layer}.{_LAYER_NAMES[inner]}.{leaf}"
    owner, _, leaf = name.rpartition(".")
    return _OTHER_NAMES.get(name) or f"{_OTHER_NAMES.get(owner, owner)}.{leaf}"


def _encoded(name: str, weight: Array, precision: str) -> tuple[int, bytes]:
    """Matrices in the precision chosen, convolutions in float16 (whisper.cpp stops at float32), the rest in float32."""
    plain = weight.ndim < 2 or name.endswith((".positional_embedding", "conv1.bias", "conv2.bias"))
    if plain:
        return 0, weight.astype("<f4").tobytes()
    if weight.ndim == 2 and precision in _BLOCKS:
        return _KINDS[precision].matrix, _BLOCKS[precision](weight)
    return 1, weight.astype("<f2").tobytes()


def _listen(folder: Path, plain: MergedWhisper, clips: Sequence[CheckClip]) -> list[str]:
    """Texts by whisper.cpp, in a process of its own: where it does not like a file, it ends its process.

    Raises:
        RunFailed: it ended so, or took too long.
    """
    sound = np.zeros((len(clips), plain.wrapper.log_mel.n_samples), dtype=np.float32)
    for row, clip in zip(sound, clips):
        row[: len(clip.samples)] = clip.samples
    languages = ",".join(clip.language or "en" for clip in clips)
    command = [sys.executable, "-m", "training.export.ggml_listen", str((folder / NAME).resolve()), languages]
    try:
        own, data = environment(0), sound.tobytes()
        done = subprocess.run(command, input=data, capture_output=True, timeout=_PATIENCE, env=own)
    except subprocess.TimeoutExpired as error:
        raise RunFailed(f"whisper.cpp did not end within {_PATIENCE} s", "check later with --no-check") from error
    if done.returncode:
        raise RunFailed(
            f"whisper.cpp cannot run the exported model: exit code {done.returncode}", "export to ctranslate2"
        )
    texts: list[str] = json.loads(done.stdout)
    return texts


def q8_0(weight: Array) -> bytes:
    """Return ``weight`` [rows, columns, a multiple of 32] as ``block_q8_0`` of ``ggml-common.h``: float16
    scale, then 32 whole numbers of 8 bits, as by ggml's reference (``quantize_row_q8_0_ref`` in ``ggml-quants.c``).

    The scale is the largest magnitude of the block divided by 127.
    """
    blocks = weight.astype(np.float32).reshape(-1, _BLOCK)
    scale = np.abs(blocks).max(axis=1, keepdims=True) / np.float32(127)
    numbers = _away_from_zero(blocks * _inverse(scale)).astype(np.int8)
    return _joined(scale, numbers.view(np.uint8))


def q5_0(weight: Array) -> bytes:
    """Return ``weight`` as ``block_q5_0``: float16 scale, the fifth bits of 32 numbers, then their lower four bits in
    pairs, as by ``quantize_row_q5_0_ref``.

    The scale is the weight of largest magnitude, with its sign, divided by -16; ``n`` stands for ``scale * (n - 16)``.
    """
    blocks = weight.astype(np.float32).reshape(-1, _BLOCK)
    largest = np.take_along_axis(blocks, np.abs(blocks).argmax(axis=1, keepdims=True), axis=1)
    scale = largest / np.float32(-16)
    numbers = np.minimum(31, (blocks * _inverse(scale) + np.float32(16.5)).astype(np.int8)).astype(np.uint8)
    fifth = np.packbits(numbers >> 4, axis=1, bitorder="little")
    low, high = numbers[:, : _BLOCK // 2] & 0x0F, numbers[:, _BLOCK // 2 :] & 0x0F
    return _joined(scale, np.concatenate([fifth, low | (high << 4)], axis=1))


def _inverse(scale: Array) -> Array:
    inverse: Array = np.divide(1, scale, out=np.zeros_like(scale), where=scale != 0)
    return inverse


def _away_from_zero(values: Array) -> Array:
    """Round as C's ``roundf``: halves away from zero."""
    rounded: Array = np.trunc(values + np.copysign(np.float32(0.5), values))
    return rounded


def _joined(scale: Array, rest: Array) -> bytes:
    return np.concatenate([scale.astype("<f2").view(np.uint8), rest], axis=1).tobytes()


_BLOCKS = {"q8_0": q8_0, "q5_0": q5_0}
EXPORTER = Exporter(_write, _listen)
