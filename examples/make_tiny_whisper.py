"""Make ``examples/tiny_whisper``: a Whisper small enough to be trained from scratch in minutes on a laptop's CPU.

    python examples/make_tiny_whisper.py --output examples/tiny_whisper

The folder holds the shape, the audio front end and a tokenizer of its own, but no weights. The tokenizer is
Whisper's kind (byte-level BPE with Whisper's special tokens), so it can write any text; each word of the
spoken-commands data set is one token.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from make_spoken_commands import WORDS
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import (
    GenerationConfig,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperTokenizer,
)

SPECIAL_TOKENS = [
    "<|startoftranscript|>",
    "<|en|>",
    "<|translate|>",
    "<|transcribe|>",
    "<|startoflm|>",
    "<|startofprev|>",
    "<|nospeech|>",
    "<|notimestamps|>",
]
"""In Whisper's order: a language is found by its distance from the start token, timestamps follow the last."""

WINDOW = 2
"""Seconds of audio the model sees at once."""

MELS = 40
RATE = 16_000
HOP = 400
"""Samples between frames: 25 ms instead of Whisper's 10, so that a clip is 40 positions of the encoder, not 100."""

TRANSFORM = 512
LONGEST_TEXT = 32
INITIAL_SPREAD = 0.15
"""Standard deviation of the first weights. Whisper's 0.02 suits a width of 384 and more; at a width of 96 attention
starts flat with it, and hundreds of steps pass before the decoder finds the words in the audio."""


def make_tokenizer() -> WhisperTokenizer:
    """Byte-level BPE in which every word of the data set, with the space before it, is one token."""
    learner = Tokenizer(models.BPE())
    learner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=1_000, min_frequency=1, initial_alphabet=alphabet, show_progress=False)
    learner.train_from_iterator(WORDS, trainer)
    learned = json.loads(learner.to_str())["model"]
    return WhisperTokenizer(
        vocab=learned["vocab"],
        merges=[tuple(pair) for pair in learned["merges"]],
        add_prefix_space=True,
        extra_special_tokens=SPECIAL_TOKENS,
        pad_token="<|endoftext|>",
        model_max_length=LONGEST_TEXT,
        language="english",
        task="transcribe",
    )


def make_config(tokenizer: WhisperTokenizer) -> WhisperConfig:
    """The shape: 0.4 M parameters."""
    end = tokenizer.eos_token_id
    return WhisperConfig(
        vocab_size=len(tokenizer),
        num_mel_bins=MELS,
        max_source_positions=WINDOW * RATE // HOP // 2,
        max_target_positions=LONGEST_TEXT,
        d_model=96,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=384,
        decoder_ffn_dim=384,
        dropout=0.0,
        init_std=INITIAL_SPREAD,
        bos_token_id=end,
        eos_token_id=end,
        pad_token_id=end,
        decoder_start_token_id=tokenizer.convert_tokens_to_ids("<|startoftranscript|>"),
        begin_suppress_tokens=None,
        architectures=["WhisperForConditionalGeneration"],
    )


def make_generation_config(tokenizer: WhisperTokenizer) -> GenerationConfig:
    """Greedy English transcription without timestamps."""
    number = tokenizer.convert_tokens_to_ids
    end = tokenizer.eos_token_id
    return GenerationConfig(
        bos_token_id=end,
        eos_token_id=end,
        pad_token_id=end,
        decoder_start_token_id=number("<|startoftranscript|>"),
        no_timestamps_token_id=number("<|notimestamps|>"),
        prev_sot_token_id=number("<|startofprev|>"),
        is_multilingual=True,
        language="en",
        task="transcribe",
        lang_to_id={"<|en|>": number("<|en|>")},
        task_to_id={name: number(f"<|{name}|>") for name in ("transcribe", "translate")},
        return_timestamps=False,
        max_length=LONGEST_TEXT,
    )


def main() -> None:
    """Write the folder."""
    parser = argparse.ArgumentParser(description="Make the tiny Whisper's folder.")
    parser.add_argument("--output", type=Path, required=True, help="folder to write to")
    output: Path = parser.parse_args().output
    tokenizer = make_tokenizer()
    features = WhisperFeatureExtractor(
        feature_size=MELS, sampling_rate=RATE, hop_length=HOP, n_fft=TRANSFORM, chunk_length=WINDOW
    )
    make_config(tokenizer).save_pretrained(output)
    make_generation_config(tokenizer).save_pretrained(output)
    features.save_pretrained(output)
    tokenizer.save_pretrained(output)


if __name__ == "__main__":
    main()
