"""ONNX exporter, by PyTorch's own exporter with optimum's file and tensor names, so that optimum's readers open it.

optimum's exporter itself cannot be used: optimum-onnx 0.1.0, the last release, requires transformers below 4.58 and
fails at import with transformers 5 (``get_parameter_dtype`` is gone).
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers.cache_utils import DynamicCache, EncoderDecoderCache

from speech.export.exporters import (
    CheckClip,
    Encoder,
    Exporter,
    MergedWhisper,
    copy_settings,
    features,
    max_text_tokens,
)
from training.tasks.pretrained import only_errors

ENCODER, DECODER, DECODER_WITH_PAST = "encoder_model.onnx", "decoder_model.onnx", "decoder_with_past_model.onnx"
_MAX_INLINE_BYTES = (
    1_500_000_000  # maximum bytes of weights inside an .onnx file, which is limited to 2 GB; else in a separate file
)
_DYNAMIC = torch.export.Dim.DYNAMIC


class _Decoder(nn.Module):
    def __init__(self, whisper: Any) -> None:
        super().__init__()
        self.decoder, self.project = whisper.model.decoder, whisper.proj_out


class _PrefillDecoder(_Decoder):
    """First decoding step, on the prompt: ``logits``, and every layer's self- and cross-attention keys and values."""

    def forward(self, input_ids: torch.Tensor, encoder_hidden_states: torch.Tensor) -> tuple[torch.Tensor, ...]:
        cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
        output = self.decoder(
            input_ids=input_ids, encoder_hidden_states=encoder_hidden_states, past_key_values=cache, use_cache=True
        )
        layers: Any = zip(cache.self_attention_cache.layers, cache.cross_attention_cache.layers)
        present = [tensor for text, sound in layers for tensor in (text.keys, text.values, sound.keys, sound.values)]
        return self.project(output.last_hidden_state), *present


class _CachedDecoder(_Decoder):
    """Step on one further token: ``logits``, and the grown self-attention cache; cross-attention stays constant."""

    def forward(self, input_ids: torch.Tensor, past: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        text, sound = DynamicCache(), DynamicCache()
        for layer in range(len(past) // 4):
            text.update(past[4 * layer], past[4 * layer + 1], layer)
            sound.update(past[4 * layer + 2], past[4 * layer + 3], layer)
        cache = EncoderDecoderCache(text, sound)
        cache.is_updated = dict.fromkeys(range(len(past) // 4), True)
        placeholder = past[0].new_zeros(input_ids.shape[0], 1, self.project.in_features)  # its keys are in the cache
        output = self.decoder(
            input_ids=input_ids, encoder_hidden_states=placeholder, past_key_values=cache, use_cache=True
        )
        layers: Any = text.layers
        grown = [tensor for layer in layers for tensor in (layer.keys, layer.values)]
        return self.project(output.last_hidden_state), *grown


def _names(kind: str, layers: int) -> list[str]:
    suffixes = [(side, tensor) for side in ("decoder", "encoder") for tensor in ("key", "value")]
    return [f"{kind}.{layer}.{side}.{tensor}" for layer in range(layers) for side, tensor in suffixes]


@torch.no_grad()
def _write(merged: MergedWhisper, folder: Path, quantize: str) -> None:
    config, layers = merged.wrapper.config, merged.wrapper.config.decoder_layers
    modules = (Encoder, _PrefillDecoder, _CachedDecoder)
    encoder, prefill, decode_step = (module(merged.model).eval() for module in modules)
    # batch size 2 and text length 3: the exporter would specialise on sizes of 1
    sound = torch.zeros(2, config.num_mel_bins, merged.wrapper.log_mel.frames)
    hidden, ids = encoder(sound), torch.full((2, 3), int(merged.wrapper.tokenizer.eos_token_id))
    past = tuple(prefill(ids, hidden)[1:])
    present, before = _names("present", layers), _names("past_key_values", layers)
    grown = tuple({0: _DYNAMIC, 2: _DYNAMIC} if index % 4 < 2 else {0: _DYNAMIC} for index in range(len(past)))
    files = folder / ENCODER, folder / DECODER, folder / DECODER_WITH_PAST
    _export(encoder, (sound,), files[0], ["input_features"], ["last_hidden_state"], ({0: _DYNAMIC},))
    names = ["input_ids", "encoder_hidden_states"]
    _export(prefill, (ids, hidden), files[1], names, ["logits", *present], ({0: _DYNAMIC, 1: _DYNAMIC}, {0: _DYNAMIC}))
    grown_names = [name for name in present if ".decoder." in name]
    _export(
        decode_step,
        (ids[:, :1], past),
        files[2],
        ["input_ids", *before],
        ["logits", *grown_names],
        ({0: _DYNAMIC}, grown),
    )
    if quantize == "int8":
        for file in files:
            _to_int8(file)
    copy_settings(merged.folder, folder)


def _export(
    module: nn.Module,
    inputs: tuple[Any, ...],
    file: Path,
    names: list[str],
    outputs: list[str],
    shapes: tuple[Any, ...],
) -> None:
    size = sum(weight.numel() * weight.element_size() for weight in module.parameters())
    with only_errors("torch.onnx"), warnings.catch_warnings():  # it logs missing optional packages for vision models
        warnings.simplefilter("ignore")  # of names inside torch that are being renamed
        torch.onnx.export(
            module,
            inputs,
            str(file),
            input_names=names,
            output_names=outputs,
            dynamic_shapes=shapes,
            external_data=size > _MAX_INLINE_BYTES,
            verbose=False,
        )


def _to_int8(file: Path) -> None:
    """Quantise matrices to 8-bit integers, activations stay in float32 (onnxruntime's dynamic quantisation)."""
    from onnxruntime.quantization import QuantType, quantize_dynamic

    small = file.with_suffix(".int8")
    quantize_dynamic(str(file), str(small), op_types_to_quantize=["MatMul", "Gemm"], weight_type=QuantType.QInt8)
    small.replace(file)


class _Runtime:
    """The three graphs as onnxruntime sessions."""

    def __init__(self, folder: Path) -> None:
        import onnxruntime

        def open_session(name: str) -> Any:
            return onnxruntime.InferenceSession(str(folder / name), providers=["CPUExecutionProvider"])

        self.encoder, self.prefill, self.decode_step = (
            open_session(ENCODER),
            open_session(DECODER),
            open_session(DECODER_WITH_PAST),
        )

    def start(self, sound: Any, prompt: Sequence[int]) -> dict[str, Any]:
        hidden = self.encoder.run(None, {"input_features": sound})[0]
        ids = np.array([prompt], dtype=np.int64)
        return _run(self.prefill, {"input_ids": ids, "encoder_hidden_states": hidden})

    def step(self, token: int, previous: Mapping[str, Any]) -> dict[str, Any]:
        past = {
            name.replace("present", "past_key_values"): value for name, value in previous.items() if name != "logits"
        }
        outputs = _run(self.decode_step, {"input_ids": np.array([[token]], dtype=np.int64), **past})
        return {**previous, **outputs}


def _run(session: Any, inputs: Mapping[str, Any]) -> dict[str, Any]:
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, dict(inputs))))


def _transcribe(folder: Path, merged: MergedWhisper, clips: Sequence[CheckClip]) -> list[str]:
    """Transcribe greedily on the CPU, suppressing the same tokens as transformers."""
    runtime, wrapper = _Runtime(folder), merged.wrapper
    suppressed = list(wrapper.generation.suppress_tokens or [])
    begin_suppressed = list(wrapper.generation.begin_suppress_tokens or [])
    texts = []
    for clip in clips:
        outputs = runtime.start(features(wrapper, clip)[None], wrapper.prompt(clip.language))
        generated: list[int] = []
        while len(generated) < max_text_tokens(wrapper):
            scores = outputs["logits"][0, -1].copy()
            scores[suppressed if generated else suppressed + begin_suppressed] = -np.inf
            token = int(scores.argmax())
            if token == wrapper.tokenizer.eos_token_id:
                break
            generated.append(token)
            outputs = runtime.step(token, outputs)
        texts.append(wrapper.tokenizer.decode(generated, skip_special_tokens=True).strip())
    return texts


EXPORTER = Exporter(_write, _transcribe)
