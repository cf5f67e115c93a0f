"""ONNX, by PyTorch's own exporter, with the file and tensor names that optimum gives: its readers open the folder.

optimum's exporter itself cannot be used: optimum-onnx 0.1.0, the last release, wants transformers below 4.58 and fails
at import with transformers 5 (``get_parameter_dtype`` is gone).
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers.cache_utils import DynamicCache, EncoderDecoderCache

from training.export.exporters import CheckClip, Encoder, Exporter, MergedWhisper, copy_texts, features, longest_text

ENCODER, FIRST, LATER = "encoder_model.onnx", "decoder_model.onnx", "decoder_with_past_model.onnx"
_LARGEST = 1_500_000_000  # bytes of weights inside an .onnx file, which cannot exceed 2 GB; else beside it
_ANY = torch.export.Dim.DYNAMIC


class _Decoder(nn.Module):
    def __init__(self, whisper: Any) -> None:
        super().__init__()
        self.decoder, self.project = whisper.model.decoder, whisper.proj_out


class _First(_Decoder):
    """The prompt's step: ``logits``, and keys and values of every layer, those of the sound among them."""

    def forward(self, input_ids: torch.Tensor, encoder_hidden_states: torch.Tensor) -> tuple[torch.Tensor, ...]:
        cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
        found = self.decoder(
            input_ids=input_ids, encoder_hidden_states=encoder_hidden_states, past_key_values=cache, use_cache=True
        )
        layers: Any = zip(cache.self_attention_cache.layers, cache.cross_attention_cache.layers)
        present = [part for text, sound in layers for part in (text.keys, text.values, sound.keys, sound.values)]
        return self.project(found.last_hidden_state), *present


class _Later(_Decoder):
    """One token's step: ``logits``, and the longer keys and values of the text; those of the sound stay."""

    def forward(self, input_ids: torch.Tensor, past: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        text, sound = DynamicCache(), DynamicCache()
        for layer in range(len(past) // 4):
            text.update(past[4 * layer], past[4 * layer + 1], layer)
            sound.update(past[4 * layer + 2], past[4 * layer + 3], layer)
        cache = EncoderDecoderCache(text, sound)
        cache.is_updated = dict.fromkeys(range(len(past) // 4), True)
        unread = past[0].new_zeros(input_ids.shape[0], 1, self.project.in_features)  # its keys are in the cache
        found = self.decoder(input_ids=input_ids, encoder_hidden_states=unread, past_key_values=cache, use_cache=True)
        layers: Any = text.layers
        longer = [part for layer in layers for part in (layer.keys, layer.values)]
        return self.project(found.last_hidden_state), *longer


def _names(kind: str, layers: int) -> list[str]:
    parts = [(side, part) for side in ("decoder", "encoder") for part in ("key", "value")]
    return [f"{kind}.{layer}.{side}.{part}" for layer in range(layers) for side, part in parts]


@torch.no_grad()
def _write(plain: MergedWhisper, folder: Path, quantize: str) -> None:
    config, layers = plain.wrapper.config, plain.wrapper.config.decoder_layers
    encoder, first, later = (part(plain.model).eval() for part in (Encoder, _First, _Later))
    # two of a batch and three of a text: sizes that the exporter does not take for constants
    sound = torch.zeros(2, config.num_mel_bins, plain.wrapper.log_mel.frames)
    hidden, ids = encoder(sound), torch.full((2, 3), int(plain.wrapper.tokenizer.eos_token_id))
    past = tuple(first(ids, hidden)[1:])
    present, before = _names("present", layers), _names("past_key_values", layers)
    grown = tuple({0: _ANY, 2: _ANY} if index % 4 < 2 else {0: _ANY} for index in range(len(past)))
    files = folder / ENCODER, folder / FIRST, folder / LATER
    _export(encoder, (sound,), files[0], ["input_features"], ["last_hidden_state"], ({0: _ANY},))
    names = ["input_ids", "encoder_hidden_states"]
    _export(first, (ids, hidden), files[1], names, ["logits", *present], ({0: _ANY, 1: _ANY}, {0: _ANY}))
    told = [name for name in present if ".decoder." in name]
    _export(later, (ids[:, :1], past), files[2], ["input_ids", *before], ["logits", *told], ({0: _ANY}, grown))
    if quantize == "int8":
        for file in files:
            _to_int8(file)
    copy_texts(plain.folder, folder)


def _export(
    module: nn.Module,
    inputs: tuple[Any, ...],
    file: Path,
    names: list[str],
    outputs: list[str],
    shapes: tuple[Any, ...],
) -> None:
    logger = logging.getLogger("torch.onnx")
    level, size = logger.level, sum(weight.numel() * weight.element_size() for weight in module.parameters())
    logger.setLevel(logging.ERROR)  # it tells of packages for pictures
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of names inside torch that are being renamed
            torch.onnx.export(
                module,
                inputs,
                str(file),
                input_names=names,
                output_names=outputs,
                dynamic_shapes=shapes,
                external_data=size > _LARGEST,
                verbose=False,
            )
    finally:
        logger.setLevel(level)


def _to_int8(file: Path) -> None:
    """Matrices in whole numbers of 8 bits, activations in float32 (onnxruntime's dynamic quantisation)."""
    from onnxruntime.quantization import QuantType, quantize_dynamic

    small = file.with_suffix(".int8")
    quantize_dynamic(str(file), str(small), op_types_to_quantize=["MatMul", "Gemm"], weight_type=QuantType.QInt8)
    small.replace(file)


class _Runtime:
    """The three graphs in onnxruntime."""

    def __init__(self, folder: Path) -> None:
        import onnxruntime

        def opened(name: str) -> Any:
            return onnxruntime.InferenceSession(str(folder / name), providers=["CPUExecutionProvider"])

        self.encoder, self.first, self.later = opened(ENCODER), opened(FIRST), opened(LATER)

    def start(self, sound: Any, prompt: Sequence[int]) -> dict[str, Any]:
        hidden = self.encoder.run(None, {"input_features": sound})[0]
        ids = np.array([prompt], dtype=np.int64)
        return _named(self.first, {"input_ids": ids, "encoder_hidden_states": hidden})

    def go_on(self, token: int, last: Mapping[str, Any]) -> dict[str, Any]:
        past = {name.replace("present", "past_key_values"): value for name, value in last.items() if name != "logits"}
        found = _named(self.later, {"input_ids": np.array([[token]], dtype=np.int64), **past})
        return {**last, **found}


def _named(session: Any, inputs: Mapping[str, Any]) -> dict[str, Any]:
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, dict(inputs))))


def _listen(folder: Path, plain: MergedWhisper, clips: Sequence[CheckClip]) -> list[str]:
    """Greedy texts on the CPU; the same tokens are forbidden as in transformers."""
    runtime, wrapper = _Runtime(folder), plain.wrapper
    never = list(wrapper.generation.suppress_tokens or [])
    not_first = list(wrapper.generation.begin_suppress_tokens or [])
    texts = []
    for clip in clips:
        last = runtime.start(features(wrapper, clip)[None], wrapper.prompt(clip.language))
        said: list[int] = []
        while len(said) < longest_text(wrapper):
            scores = last["logits"][0, -1].copy()
            scores[never if said else never + not_first] = -np.inf
            token = int(scores.argmax())
            if token == wrapper.tokenizer.eos_token_id:
                break
            said.append(token)
            last = runtime.go_on(token, last)
        texts.append(wrapper.tokenizer.decode(said, skip_special_tokens=True).strip())
    return texts


EXPORTER = Exporter(_write, _listen)
