"""Small random models and sounds for the tests of this folder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import nn
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerFast,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
)
from transformers.convert_slow_tokenizer import bytes_to_unicode
from transformers.models.whisper.tokenization_whisper import WhisperTokenizer

from profiles.files.resolve import profile_from_options
from profiles.schema import Profile
from speech.whisper.task import WhisperTask
from training.tasks.base import Batch, Task
from training.tasks.custom import CustomJob, CustomTask

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


def custom_task(*parts: Any, **more: Any) -> CustomTask:
    """The task of a job that its factory makes of these parts."""
    task = CustomTask(profile_from_options("own", {"task": "custom"}), lambda: CustomJob(*parts, **more))
    task.prepare(silent)
    return task


def byte_tokenizer(template: str = "") -> PreTrainedTokenizerFast:
    """Bytes, a beginning and an end."""
    vocabulary = {symbol: index for index, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    inner = Tokenizer(models.BPE(vocab={**vocabulary, "<|end|>": 256, "<bos>": 257}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|end|>", bos_token="<bos>")
    made.chat_template = template or None
    return made


def learn(task: Task, model: nn.Module, batches: Sequence[Batch], rate: float) -> list[float]:
    """Take an optimizer step on each batch; return the losses."""
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=rate)
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        loss = task.loss(model, batch)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


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


def silent(phase: str, done: int, total: int | None) -> None:
    """A progress display that shows nothing."""


ProfileMaker = Callable[..., Profile]
Prepared = Callable[..., WhisperTask]
