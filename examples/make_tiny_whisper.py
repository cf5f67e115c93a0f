"""Make the folder of a Whisper to be trained from scratch: shape, audio front end and tokenizer, but no weights.

    python examples/make_tiny_whisper.py --shape tiny --output examples/tiny_whisper
    python examples/make_tiny_whisper.py --shape scratch --output examples/scratch_whisper

``tiny`` learns the spoken commands within minutes on a laptop's CPU: it hears 2 s, and each word of that data set is
one token. ``scratch`` is for recordings of one's own: it hears 30 s, and its tokens are bytes, so it writes any text in
any of Whisper's languages. Both tokenizers are Whisper's kind (byte-level BPE with Whisper's special tokens).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from make_spoken_commands import WORDS
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import (
    GenerationConfig,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperTokenizer,
)
from transformers.models.whisper.tokenization_whisper import LANGUAGES

RATE = 16_000
TRANSFORM = 512


@dataclass(frozen=True)
class Shape:
    """What one folder is made of."""

    words: Sequence[str]
    """Words that are tokens of their own; everything else is written in bytes."""
    languages: Sequence[str]
    window: int
    """Seconds of audio the model hears at once."""
    mels: int
    hop: int
    """Samples between frames. Whisper's are 10 ms apart; longer hops make fewer positions of the encoder."""
    longest_text: int
    """Positions of the decoder: a token each."""
    width: int
    layers: int
    heads: int
    initial_spread: float
    """Standard deviation of the first weights. Whisper's 0.02 suits a width of 384 and more; at a width of 96 attention
    starts flat with it, and hundreds of steps pass before the decoder finds the words in the audio."""


SHAPES = {
    "tiny": Shape(WORDS, ["en"], 2, 40, 400, 32, 96, 2, 4, 0.15),
    "scratch": Shape([], list(LANGUAGES), 30, 80, 320, 1024, 256, 4, 4, 0.06),
}


def special_tokens(shape: Shape) -> list[str]:
    """In Whisper's order: a language is found by its distance from the start token, timestamps follow the last."""
    languages = [f"<|{code}|>" for code in shape.languages]
    tasks = ["<|translate|>", "<|transcribe|>", "<|startoflm|>", "<|startofprev|>", "<|nospeech|>", "<|notimestamps|>"]
    return ["<|startoftranscript|>", *languages, *tasks]


def make_tokenizer(shape: Shape) -> WhisperTokenizer:
    """Byte-level BPE in which every word of the shape, with the space before it, is one token."""
    learner = Tokenizer(models.BPE())
    learner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=1_000, min_frequency=1, initial_alphabet=alphabet, show_progress=False)
    learner.train_from_iterator(shape.words, trainer)
    learned = json.loads(learner.to_str())["model"]
    return WhisperTokenizer(
        vocab=learned["vocab"],
        merges=[tuple(pair) for pair in learned["merges"]],
        add_prefix_space=True,
        extra_special_tokens=special_tokens(shape),
        pad_token="<|endoftext|>",
        model_max_length=shape.longest_text,
        language="english",
        task="transcribe",
    )


def make_config(shape: Shape, tokenizer: WhisperTokenizer) -> WhisperConfig:
    """The model: 0.4 M parameters for ``tiny``, 8 M for ``scratch``."""
    end = tokenizer.eos_token_id
    return WhisperConfig(
        vocab_size=len(tokenizer),
        num_mel_bins=shape.mels,
        max_source_positions=shape.window * RATE // shape.hop // 2,
        max_target_positions=shape.longest_text,
        d_model=shape.width,
        encoder_layers=shape.layers,
        decoder_layers=shape.layers,
        encoder_attention_heads=shape.heads,
        decoder_attention_heads=shape.heads,
        encoder_ffn_dim=4 * shape.width,
        decoder_ffn_dim=4 * shape.width,
        dropout=0.0,
        init_std=shape.initial_spread,
        bos_token_id=end,
        eos_token_id=end,
        pad_token_id=end,
        decoder_start_token_id=tokenizer.convert_tokens_to_ids("<|startoftranscript|>"),
        begin_suppress_tokens=None,
        architectures=["WhisperForConditionalGeneration"],
    )


def make_generation_config(shape: Shape, tokenizer: WhisperTokenizer) -> GenerationConfig:
    """Greedy transcription without timestamps; where there is one language, in it."""
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
        language=shape.languages[0] if len(shape.languages) == 1 else None,
        task="transcribe",
        lang_to_id={f"<|{code}|>": number(f"<|{code}|>") for code in shape.languages},
        task_to_id={name: number(f"<|{name}|>") for name in ("transcribe", "translate")},
        return_timestamps=False,
        max_length=shape.longest_text,
    )


def main() -> None:
    """Write the folder."""
    parser = argparse.ArgumentParser(description="Make the folder of a Whisper without weights.")
    parser.add_argument("--shape", choices=SHAPES, default="tiny")
    parser.add_argument("--output", type=Path, required=True, help="folder to write to")
    arguments = parser.parse_args()
    shape, output = SHAPES[arguments.shape], arguments.output
    tokenizer = make_tokenizer(shape)
    features = WhisperFeatureExtractor(
        feature_size=shape.mels, sampling_rate=RATE, hop_length=shape.hop, n_fft=TRANSFORM, chunk_length=shape.window
    )
    make_config(shape, tokenizer).save_pretrained(output)
    make_generation_config(shape, tokenizer).save_pretrained(output)
    features.save_pretrained(output)
    tokenizer.save_pretrained(output)


if __name__ == "__main__":
    main()
