"""CTranslate2, through its own converter for transformers; faster-whisper reads the folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import ctranslate2
import numpy as np
from ctranslate2.converters import TransformersConverter

from profiles.errors import BadInput
from training.export.exporters import CheckClip, Exporter, MergedWhisper, features


def _write(plain: MergedWhisper, folder: Path, quantize: str) -> None:
    """Convert; ``tokenizer.json`` and ``preprocessor_config.json`` go along, faster-whisper wants them."""
    texts = [name for name in ("tokenizer.json", "preprocessor_config.json") if (plain.folder / name).is_file()]
    converter = TransformersConverter(str(plain.folder), copy_files=texts)
    try:
        converter.convert(str(folder), quantization=quantize or None, force=True)  # the folder is there, and empty
    except (ValueError, RuntimeError, NotImplementedError) as error:
        reason = " ".join(str(error).split())[:200]
        raise BadInput(f"CTranslate2 does not convert this model: {reason}", "export to hf or onnx instead") from error


def _listen(folder: Path, plain: MergedWhisper, clips: Sequence[CheckClip]) -> list[str]:
    """Greedy texts on the CPU, without time stamps."""
    model = ctranslate2.models.Whisper(str(folder), device="cpu", inter_threads=1)
    batch = np.stack([features(plain.wrapper, clip) for clip in clips])
    prompts = [plain.wrapper.prompt(clip.language) for clip in clips]
    positions = plain.wrapper.max_positions  # CTranslate2 lets a text have half of max_length
    found = model.generate(ctranslate2.StorageView.from_array(batch), prompts, beam_size=1, max_length=positions)
    decode = plain.wrapper.tokenizer.decode
    return [decode(one.sequences_ids[0], skip_special_tokens=True).strip() for one in found]


EXPORTER = Exporter(_write, _listen)
