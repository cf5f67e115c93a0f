"""CTranslate2 exporter, through its own converter for transformers; faster-whisper reads the folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import ctranslate2
import numpy as np
from ctranslate2.converters import TransformersConverter

from profiles.errors import BadInput
from speech.export.exporters import CheckClip, Exporter, MergedWhisper, features


def _write(merged: MergedWhisper, folder: Path, quantize: str) -> None:
    """Convert the model, and copy ``tokenizer.json`` and ``preprocessor_config.json``, which faster-whisper needs."""
    texts = [name for name in ("tokenizer.json", "preprocessor_config.json") if (merged.folder / name).is_file()]
    converter = TransformersConverter(str(merged.folder), copy_files=texts)
    try:
        converter.convert(str(folder), quantization=quantize or None, force=True)  # the folder exists, and is empty
    except (ValueError, RuntimeError, NotImplementedError) as error:
        reason = " ".join(str(error).split())[:200]
        raise BadInput(f"CTranslate2 does not convert this model: {reason}", "export to hf or onnx instead") from error


def _transcribe(folder: Path, merged: MergedWhisper, clips: Sequence[CheckClip]) -> list[str]:
    """Transcribe greedily on the CPU, without timestamps."""
    model = ctranslate2.models.Whisper(str(folder), device="cpu", inter_threads=1)
    batch = np.stack([features(merged.wrapper, clip) for clip in clips])
    prompts = [merged.wrapper.prompt(clip.language) for clip in clips]
    positions = merged.wrapper.max_positions  # CTranslate2 limits a text to half of max_length
    results = model.generate(ctranslate2.StorageView.from_array(batch), prompts, beam_size=1, max_length=positions)
    decode = merged.wrapper.tokenizer.decode
    return [decode(result.sequences_ids[0], skip_special_tokens=True).strip() for result in results]


EXPORTER = Exporter(_write, _transcribe)
