"""Decode clips and windows of long recordings with Whisper, with confidences.

A recording longer than the model's window is decoded by the algorithm of Radford et al. 2022, "Robust Speech
Recognition via Large-Scale Weak Supervision", section 4.5: each window begins where the previous one's words ended,
according to the generated timestamps; a text that is repetitive or unlikely is decoded again at a higher temperature;
silence is skipped (:func:`is_silence`). Unlike in the paper, decoding is greedy instead of by beam search, and not
conditioned on the previous window's text.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import LogitsProcessor

from profiles.optimisation import TrainingSettings
from profiles.schema import ModelSettings, Profile
from speech.data.sound_file import Samples
from speech.whisper.model import TIMESTAMP_STEP, WhisperModelWrapper
from training.hardware.device import evaluating, select_device
from training.inference.in_use import model_for

_MARGIN = 8  # minimum tokens beyond the longest transcript; else half of its length
_NO_SPEECH = ("<|nospeech|>", "<|nocaptions|>")
"""Names of the no-speech token, in newer and older tokenizers."""
TEMPERATURES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
MAX_COMPRESSION = 2.4
"""Compression ratio of a text above which it counts as repetitive."""
MIN_CONFIDENCE = -1.0
"""Mean log probability of a text's tokens below which it is unlikely."""
NO_SPEECH_THRESHOLD = 0.6
"""No-speech probability above which a text is taken for silence if it is unlikely, or if no voice is detected."""
_MIN_MOVE = 1.0
"""Minimum seconds by which a window advances, so that a timestamp of 0 cannot stall it."""


class Transcriber:
    """A trained model on a device.

    Args:
        folder: the model's folder or hub name.
        language: name or code; empty: the model's default; ``auto``: detected.
        workers: of this machine, which hold the model together.

    Raises:
        BadInput: the model cannot be used, or does not support the language.
    """

    def __init__(self, folder: str | Path, device: str = "auto", language: str = "", workers: int = 1) -> None:
        model = ModelSettings(model_path=str(folder), language=language)
        training = TrainingSettings(device=device, mixed_precision="off")
        self._profile, self._workers = Profile(name="transcribe", model=model, training=training), workers
        self.wrapper = WhisperModelWrapper(model)
        self.language = self.wrapper.default_language
        """Language code; empty if it is to be detected."""
        self._kind = device

    @cached_property
    def model(self) -> nn.Module:
        if self._workers == 1:
            return self.wrapper.build().eval().to(select_device(self._kind))
        return model_for(self, self._profile, self._workers)

    @property
    def device(self) -> torch.device:
        """That of the model, or of its last stage."""
        return next(self.model.parameters()).device

    @torch.no_grad()
    def encode(self, pieces: Sequence[Samples]) -> Any:
        """Return the encoder's output for pieces of audio at the model's rate, each at most one window long."""
        log_mel = self.wrapper.log_mel
        features = np.stack([log_mel.fill(*log_mel(piece)) for piece in pieces])
        return self.wrapper.encode_audio(self.model, torch.from_numpy(features).to(self.device))


@dataclass(frozen=True)
class DecodingResult:
    """A transcript with the measures of Radford et al. 2022, section 4.5."""

    text: str
    confidence: float
    """Mean log probability (natural) of its tokens, including the end token."""
    no_speech: float
    """Probability of no speech; 0 if the model has no token for it."""
    cut: bool
    """Whether generation stopped at the length limit."""
    reference_confidence: float | None = None
    """Mean log probability of the clip's reference text; ``None`` without one."""


def compression_ratio(text: str) -> float:
    """Return the ratio of ``text``'s size to its zlib-compressed size, high for repetitive text; 0 if empty."""
    data = text.encode()
    return len(data) / len(zlib.compress(data)) if data else 0.0


@torch.no_grad()
def transcribe_clips(
    wrapper: WhisperModelWrapper,
    model: nn.Module,
    features: torch.Tensor,
    languages: Sequence[str],
    max_new_tokens: int,
    references: Sequence[str] = (),
) -> list[DecodingResult]:
    """Transcribe clips greedily.

    Args:
        features: [batch, mels, frames], on the model's device.
        languages: code of each clip; empty ones are detected.
        references: optional text of each clip, whose probability is computed too.
    """
    with evaluating(model):
        encoded = wrapper.encode_audio(model, features)
        if wrapper.is_multilingual and not all(languages):
            detected = wrapper.detect_languages(model, encoded)
            languages = [language or code for language, code in zip(languages, detected, strict=True)]
        transcripts = wrapper.generate(model, encoded, languages, max_new_tokens)
        confidences, no_speech = text_probabilities(
            wrapper, model, encoded, languages, [transcript.text for transcript in transcripts]
        )
        results = [
            DecodingResult(transcript.text, confidences[i], no_speech[i], transcript.cut)
            for i, transcript in enumerate(transcripts)
        ]
        if not references:
            return results
        reference_confidences, _ = text_probabilities(wrapper, model, encoded, languages, references)
    return [
        dataclasses.replace(result, reference_confidence=value)
        for result, value in zip(results, reference_confidences, strict=True)
    ]


def text_probabilities(
    wrapper: WhisperModelWrapper, model: nn.Module, encoded: Any, languages: Sequence[str], texts: Sequence[str]
) -> tuple[list[float], list[float]]:
    """Return each text's mean log probability, and its clip's no-speech probability."""
    tokens = [ids[: wrapper.text_positions + 1] for ids in wrapper.tokenise(texts)]
    device = next(model.parameters()).device
    inputs = wrapper.decoder_inputs(languages, tokens).to(device)
    logits = model(encoder_outputs=encoded, decoder_input_ids=inputs, use_cache=False).logits.float()
    start, confidences = wrapper.prompt_length - 1, list[float]()
    for index, ids in enumerate(tokens):
        scores = logits[index, start : start + len(ids)].log_softmax(dim=-1)
        confidences.append(float(scores.gather(1, torch.tensor(ids, device=device)[:, None]).mean()))
    return confidences, _no_speech(wrapper, logits[:, 0])


def is_silence(no_speech: float, confidence: float, voice: Callable[[], bool]) -> bool:
    """Return whether a text was generated for audio without speech.

    The thresholds are those of section 4.5. They keep confident texts, but models are confident of "you" for plain
    silence, so a voice activity detector decides if the no-speech probability is high.

    Args:
        no_speech: probability of the no-speech token.
        confidence: mean log probability of the text's tokens.
        voice: returns whether a voice is detected; only called if it decides.
    """
    return no_speech > NO_SPEECH_THRESHOLD and (confidence < MIN_CONFIDENCE or not voice())


@dataclass(frozen=True)
class TimedText:
    """A transcript segment with start and end time."""

    start: float
    end: float
    """In seconds from the beginning of the recording."""
    text: str


TimedTokens = tuple[float, float, list[int]]
"""Start, end and tokens of a segment."""


def split_at_timestamps(tokens: Sequence[int], first_timestamp: int, seconds: float) -> tuple[list[TimedTokens], float]:
    """Split the generated tokens of a window into segments at their timestamps.

    Args:
        tokens: text and timestamp tokens, without the end token.
        first_timestamp: token of the time 0.
        seconds: length of the audio in the window.

    Returns:
        start, end and tokens of every complete segment, in seconds of the window; and how far to advance the window.
        Text after the last pair of timestamps is incomplete, and decoded again by the next window.
    """

    def time_of(token: int) -> float:
        return min(max(0.0, (token - first_timestamp) * TIMESTAMP_STEP), seconds)

    is_time = [token >= first_timestamp for token in tokens]
    ends = [i + 1 for i in range(len(tokens) - 1) if is_time[i] and is_time[i + 1]]
    closed = is_time[-2:] == [False, True]  # the last segment is complete
    if not ends:
        times = [time_of(token) for token in tokens if token >= first_timestamp]
        begin = times[0] if is_time[:1] == [True] else 0.0
        end = times[-1] if times and times[-1] > begin else seconds
        return [(begin, end, list(tokens))], seconds
    if closed:
        ends.append(len(tokens))
    segments, start = list[TimedTokens](), 0
    for end in ends:
        segment = list(tokens[start:end])
        begin = time_of(segment[0]) if segment[0] >= first_timestamp else (segments[-1][1] if segments else 0.0)
        segments.append((begin, max(begin, time_of(segment[-1])), segment))
        start = end
    move = seconds if closed else segments[-1][1]
    return segments, move if move >= min(_MIN_MOVE, seconds) else seconds


class _Likelihood(LogitsProcessor):
    """Accumulates the log probabilities of generated tokens, keeping only one step's scores at a time."""

    def __init__(self, end: int) -> None:
        self._end = end
        self._scores: torch.Tensor | None = None
        self._sums = torch.zeros(0)
        self._counts = torch.zeros(0)
        self._unfinished = torch.zeros(0)

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        if self._scores is not None:
            self._add(input_ids[:, -1])
        else:
            self._sums, self._counts = scores.new_zeros(len(scores)), scores.new_zeros(len(scores))
            self._unfinished = scores.new_ones(len(scores))
        self._scores = torch.log_softmax(scores.float(), dim=-1)
        return scores

    def _add(self, written: torch.Tensor) -> None:
        assert self._scores is not None
        likely = self._scores.gather(1, written[:, None])[:, 0].clamp(min=-100.0)
        self._sums = self._sums + likely * self._unfinished
        self._counts = self._counts + self._unfinished
        self._unfinished = self._unfinished * (written != self._end)

    def means(self, last_tokens: torch.Tensor) -> list[float]:
        """Return the mean log probability of each text; ``last_tokens`` [batch] are those generated last."""
        if self._scores is not None:
            self._add(last_tokens)
        return [float(value) for value in self._sums / self._counts.clamp(min=1.0)]


def generate_with_timestamps(
    wrapper: WhisperModelWrapper,
    model: nn.Module,
    encoded: Any,
    languages: Sequence[str],
    bound: int,
    voices: Sequence[Callable[[], bool]],
) -> list[list[int]]:
    """Return text and timestamp tokens, without the end token, of each window of a batch; empty for silence.

    Args:
        voices: for each window, a function that returns whether a voice is detected in it.
    """
    silent, end = no_speech_probabilities(wrapper, model, encoded), int(wrapper.tokenizer.eos_token_id)
    result: list[list[int]] = [[] for _ in languages]
    pending = list(range(len(languages)))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        for temperature in TEMPERATURES:
            remaining = type(encoded)(last_hidden_state=encoded.last_hidden_state[pending])
            likelihood = _Likelihood(end)
            options = {"temperature": temperature, "logits_processor": [likelihood]}
            ids = wrapper.generate_tokens(
                model, remaining, [languages[window] for window in pending], bound, True, **options
            )
            failed = []
            for window, row, likely in zip(pending, ids.tolist(), likelihood.means(ids[:, -1]), strict=True):
                result[window] = list(row[: row.index(end)] if end in row else row)
                if is_silence(silent[window], likely, voices[window]):
                    result[window] = []
                elif likely < MIN_CONFIDENCE or compression_ratio(wrapper.text(result[window])) > MAX_COMPRESSION:
                    failed.append(window)
            pending = failed
            if not pending:
                break
    return result


def no_speech_probabilities(wrapper: WhisperModelWrapper, model: nn.Module, encoded: Any) -> list[float]:
    """Return the no-speech probability of each window; 0 if the model has no token for it."""
    count, start_token = len(encoded.last_hidden_state), int(wrapper.generation.decoder_start_token_id)
    start = torch.full((count, 1), start_token, device=encoded.last_hidden_state.device)
    logits = model(encoder_outputs=encoded, decoder_input_ids=start, use_cache=False).logits.float()
    return _no_speech(wrapper, logits[:, 0])


def _no_speech(wrapper: WhisperModelWrapper, logits: torch.Tensor) -> list[float]:
    """Return the probability of the no-speech token in ``logits`` [batch, vocabulary] after the start token."""
    vocabulary = wrapper.tokenizer.get_vocab()
    token = next((vocabulary[name] for name in _NO_SPEECH if name in vocabulary), None)
    return [0.0] * len(logits) if token is None else [float(p) for p in logits.softmax(dim=-1)[:, token]]


def generation_bound(longest: int, cap: int, positions: int) -> int:
    """Return the maximum number of tokens of a generated text in an evaluation.

    Args:
        longest: tokens of the longest transcript of the whole split, so that the limit is the same for every batch.
        cap: the configured limit (``eval_max_new_tokens``); 0: none.
        positions: the decoder's positions that remain for a text.
    """
    return min(longest + max(_MARGIN, longest // 2), cap or positions, positions)
