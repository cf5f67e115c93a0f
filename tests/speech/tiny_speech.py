"""A small random Whisper, and sounds for it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import soundfile
from transformers import (
    GenerationConfig,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
)
from transformers.convert_slow_tokenizer import bytes_to_unicode
from transformers.models.whisper.tokenization_whisper import WhisperTokenizer

from speech.whisper.task import WhisperTask

RATE = 16000
WINDOW = 1.0
WORDS = ("one", "two", "three", "four")


def tone(word: int, seconds: float = 0.6, rate: int = RATE) -> np.ndarray:
    """A "spoken" word: a chord of its own."""
    time = np.arange(int(seconds * rate)) / rate
    pitch = 300.0 * (word + 1)
    return (0.2 * np.sin(2 * np.pi * pitch * time) + 0.1 * np.sin(4 * np.pi * pitch * time)).astype(np.float32)


def tiny_tokenizer(languages: tuple[str, ...] = ()) -> WhisperTokenizer:
    """Bytes, and Whisper's special tokens."""
    vocabulary = {symbol: index for index, symbol in enumerate(bytes_to_unicode().values())}
    names = ["<|endoftext|>", "<|startoftranscript|>"]
    names += [f"<|{code}|>" for code in languages] + (["<|translate|>", "<|transcribe|>"] if languages else [])
    names += ["<|notimestamps|>"]
    vocabulary.update({name: len(vocabulary) + index for index, name in enumerate(names)})
    tokenizer = WhisperTokenizer(vocab=vocabulary, merges=[])
    tokenizer.add_special_tokens({"extra_special_tokens": names[1:]})
    return tokenizer


def tiny_whisper(
    folder: Path, languages: tuple[str, ...] = (), positions: int = 24, layers: int = 1, width: int = 16
) -> Path:
    """Save a random Whisper that hears one second, with one layer in the encoder and ``layers`` in the decoder."""
    tokenizer = tiny_tokenizer(languages)
    start, end = tokenizer.convert_tokens_to_ids(["<|startoftranscript|>", "<|endoftext|>"])
    ids = {"decoder_start_token_id": start, "eos_token_id": end, "pad_token_id": end, "bos_token_id": end}
    config = WhisperConfig(
        vocab_size=len(tokenizer),
        num_mel_bins=16,
        d_model=width,
        encoder_layers=1,
        decoder_layers=layers,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=32,
        decoder_ffn_dim=32,
        max_source_positions=50,
        max_target_positions=positions,
        begin_suppress_tokens=None,
        **ids,
    )
    model = WhisperForConditionalGeneration(config)
    model.generation_config = GenerationConfig(**ids)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    WhisperFeatureExtractor(feature_size=16, chunk_length=1).save_pretrained(folder)
    return folder


def write_clips(folder: Path, count: int, extension: str = "wav") -> list[tuple[str, str, str]]:
    """Write ``count`` sounds; return (id, path, text) of each."""
    (folder / "audio").mkdir(parents=True, exist_ok=True)
    rows = []
    for index in range(count):
        path = folder / "audio" / f"clip{index}.{extension}"
        soundfile.write(path, tone(index % len(WORDS)), RATE)
        rows.append((f"clip{index}", f"audio/{path.name}", WORDS[index % len(WORDS)]))
    return rows


def write_csv(path: Path, rows: list[tuple[str, ...]], header: str = "id,audio_path,text") -> Path:
    path.write_text("\n".join([header, *(",".join(row) for row in rows)]) + "\n", encoding="utf-8")
    return path


def write_splits(folder: Path) -> Path:
    """Make a data set of eight clips to train on and two to evaluate on; return its folder."""
    rows = write_clips(folder, 10)
    write_csv(folder / "train.csv", rows[:8])
    write_csv(folder / "validation.csv", rows[8:])
    return folder


Prepared = Callable[..., WhisperTask]
