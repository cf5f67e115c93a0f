"""What a Whisper writes for a clip, how sure it is of it, and how windows follow one another in a long recording.

A recording longer than the model's window is heard by the algorithm of Radford et al. 2022, "Robust Speech Recognition
via Large-Scale Weak Supervision", section 4.5: each window begins where the last one's words ended, by the times that
the model writes; a text that repeats itself or that the model holds unlikely is drawn again at a higher temperature;
silence is passed over (:func:`is_silence`). Greedy instead of the paper's beam, and a window does not see the text of
the one before.
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

from profiles.schema import ModelSettings
from training.device import evaluating, select_device
from training.tasks.sound_file import Samples
from training.tasks.whisper.model import TICK, WhisperModelWrapper

_NO_SPEECH = ("<|nospeech|>", "<|nocaptions|>")
"""Names of the token, in newer and older tokenizers."""
TEMPERATURES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
MOST_COMPRESSED = 2.4
"""Length of a text against that of its zlib form, above which it repeats itself."""
LEAST_LIKELY = -1.0
"""Mean log probability of a text's tokens."""
SILENT = 0.6
"""Probability of the token for no speech, above which an unlikely text is silence, and any text without a voice."""
_SHORTEST_MOVE = 1.0
"""Seconds that a window moves at least: a time of 0 must not hold it where it is."""


class Transcriber:
    """A finished model on a device.

    Args:
        folder: of the model, or its name on the hub.
        language: name or code; empty: as the model was saved; ``auto``: it finds out.

    Raises:
        BadInput: it cannot be used, or does not know the language.
    """

    def __init__(self, folder: str | Path, device: str = "auto", language: str = "") -> None:
        self.wrapper = WhisperModelWrapper(ModelSettings(model_path=str(folder), language=language))
        self.language = self.wrapper.default_language
        """Code; empty where the model is to find out."""
        self.device = select_device(device)

    @cached_property
    def model(self) -> nn.Module:
        return self.wrapper.build().eval().to(self.device)

    @torch.no_grad()
    def encode(self, pieces: Sequence[Samples]) -> Any:
        """The encoder's output for sounds at the model's rate, each at most its window."""
        log_mel = self.wrapper.log_mel
        features = np.stack([log_mel.fill(*log_mel(piece)) for piece in pieces])
        return self.wrapper.hear(self.model, torch.from_numpy(features).to(self.device))


@dataclass(frozen=True)
class DecodingResult:
    """A transcript with the measures of Radford et al. 2022, section 4.5."""

    text: str
    confidence: float
    """Mean natural logarithm of the probabilities of its tokens, the end token included."""
    no_speech: float
    """Probability that nobody speaks; 0 where a model has no token for it."""
    cut: bool
    """It had not ended when it reached its bound."""
    reference_confidence: float | None = None
    """Mean logarithm of the probabilities of the text that was given for the clip; ``None`` if none was."""


def compression_ratio(text: str) -> float:
    """Return the bytes of ``text`` over those after zlib, high where it repeats itself; 0 for an empty one."""
    data = text.encode()
    return len(data) / len(zlib.compress(data)) if data else 0.0


@torch.no_grad()
def hear(
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
        languages: code of each clip; an empty one: the model decides.
        references: a text for each clip, to learn how probable it is too.
    """
    with evaluating(model):
        sound = wrapper.hear(model, features)
        if wrapper.is_multilingual and not all(languages):
            detected = wrapper.detect_languages(model, sound)
            languages = [language or code for language, code in zip(languages, detected, strict=True)]
        transcripts = wrapper.generate(model, sound, languages, max_new_tokens)
        confidences, no_speech = probabilities(
            wrapper, model, sound, languages, [transcript.text for transcript in transcripts]
        )
        results = [
            DecodingResult(transcript.text, confidences[i], no_speech[i], transcript.cut)
            for i, transcript in enumerate(transcripts)
        ]
        if not references:
            return results
        reference_confidences, _ = probabilities(wrapper, model, sound, languages, references)
    return [
        dataclasses.replace(result, reference_confidence=value)
        for result, value in zip(results, reference_confidences, strict=True)
    ]


def probabilities(
    wrapper: WhisperModelWrapper, model: nn.Module, sound: Any, languages: Sequence[str], texts: Sequence[str]
) -> tuple[list[float], list[float]]:
    """Return each text's mean log-probability, and the probability of silence after the start token."""
    tokens = [ids[: wrapper.room + 1] for ids in wrapper.encode(texts)]
    device = next(model.parameters()).device
    inputs = wrapper.decoder_inputs(languages, tokens).to(device)
    logits = model(encoder_outputs=sound, decoder_input_ids=inputs, use_cache=False).logits.float()
    start, sure = wrapper.prompt_length - 1, list[float]()
    for index, ids in enumerate(tokens):
        scores = logits[index, start : start + len(ids)].log_softmax(dim=-1)
        sure.append(float(scores.gather(1, torch.tensor(ids, device=device)[:, None]).mean()))
    return sure, _no_speech(wrapper, logits[:, 0])


def is_silence(no_speech: float, confidence: float, voice: Callable[[], bool]) -> bool:
    """Return whether a text was written for sound in which nobody speaks.

    The thresholds are those of section 4.5. They keep what a model is sure of, and models are sure of "you" for plain
    silence. So a detector of voices has the last word where the model itself takes the sound for silence.

    Args:
        no_speech: probability of the token for no speech.
        confidence: mean log probability of the text's tokens.
        voice: whether somebody speaks; only asked where it decides.
    """
    return no_speech > SILENT and (confidence < LEAST_LIKELY or not voice())


@dataclass(frozen=True)
class TimedText:
    """Something that was said, between two times."""

    start: float
    end: float
    """Seconds from the beginning of the recording."""
    text: str


Timed = tuple[float, float, list[int]]
"""Start, end and tokens of a segment."""


def divided(tokens: Sequence[int], first_time: int, seconds: float) -> tuple[list[Timed], float]:
    """Divide what was written on a window at its times.

    Args:
        tokens: text and times, without the end token.
        first_time: token of the time 0.
        seconds: how much of the window holds sound.

    Returns:
        start, end and tokens of every segment that is whole, in seconds of the window; and how far to move it. What
        was begun after the last pair of times is not whole: it is heard again by the next window.
    """

    def time_of(token: int) -> float:
        return min(max(0.0, (token - first_time) * TICK), seconds)

    is_time = [token >= first_time for token in tokens]
    ends = [i + 1 for i in range(len(tokens) - 1) if is_time[i] and is_time[i + 1]]
    closed = is_time[-2:] == [False, True]  # the last words end, and nothing was begun after them
    if not ends:
        times = [time_of(token) for token in tokens if token >= first_time]
        begin = times[0] if is_time[:1] == [True] else 0.0
        end = times[-1] if times and times[-1] > begin else seconds
        return [(begin, end, list(tokens))], seconds
    if closed:
        ends.append(len(tokens))
    segments, start = list[Timed](), 0
    for end in ends:
        segment = list(tokens[start:end])
        begin = time_of(segment[0]) if segment[0] >= first_time else (segments[-1][1] if segments else 0.0)
        segments.append((begin, max(begin, time_of(segment[-1])), segment))
        start = end
    move = seconds if closed else segments[-1][1]
    return segments, move if move >= min(_SHORTEST_MOVE, seconds) else seconds


class _Likelihood(LogitsProcessor):
    """Counts how likely the model held the tokens it wrote; no step's scores are kept beyond the next one."""

    def __init__(self, end: int) -> None:
        self._end = end
        self._scores: torch.Tensor | None = None
        self._sums = torch.zeros(0)
        self._counts = torch.zeros(0)
        self._going = torch.zeros(0)

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        if self._scores is not None:
            self._add(input_ids[:, -1])
        else:
            self._sums, self._counts = scores.new_zeros(len(scores)), scores.new_zeros(len(scores))
            self._going = scores.new_ones(len(scores))
        self._scores = torch.log_softmax(scores.float(), dim=-1)
        return scores

    def _add(self, written: torch.Tensor) -> None:
        assert self._scores is not None
        likely = self._scores.gather(1, written[:, None])[:, 0].clamp(min=-100.0)
        self._sums = self._sums + likely * self._going
        self._counts = self._counts + self._going
        self._going = self._going * (written != self._end)

    def means(self, last_tokens: torch.Tensor) -> list[float]:
        """Return the mean log probability of each text; ``last`` are the tokens [batch] that were written last."""
        if self._scores is not None:
            self._add(last_tokens)
        return [float(value) for value in self._sums / self._counts.clamp(min=1.0)]


def write_with_times(
    wrapper: WhisperModelWrapper,
    model: nn.Module,
    heard: Any,
    languages: Sequence[str],
    bound: int,
    voices: Sequence[Callable[[], bool]],
) -> list[list[int]]:
    """Return text and times, without the end token, of each window of a batch; nothing for silence.

    Args:
        voices: of each window, whether somebody speaks in it.
    """
    silent, end = silence(wrapper, model, heard), int(wrapper.tokenizer.eos_token_id)
    result: list[list[int]] = [[] for _ in languages]
    pending = list(range(len(languages)))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        for temperature in TEMPERATURES:
            remaining = type(heard)(last_hidden_state=heard.last_hidden_state[pending])
            likelihood = _Likelihood(end)
            options = {"temperature": temperature, "logits_processor": [likelihood]}
            ids = wrapper.write(model, remaining, [languages[window] for window in pending], bound, True, **options)
            failed = []
            for window, row, likely in zip(pending, ids.tolist(), likelihood.means(ids[:, -1]), strict=True):
                result[window] = list(row[: row.index(end)] if end in row else row)
                if is_silence(silent[window], likely, voices[window]):
                    result[window] = []
                elif likely < LEAST_LIKELY or compression_ratio(wrapper.text(result[window])) > MOST_COMPRESSED:
                    failed.append(window)
            pending = failed
            if not pending:
                break
    return result


def silence(wrapper: WhisperModelWrapper, model: nn.Module, heard: Any) -> list[float]:
    """Return how likely nobody speaks in each window; 0 where the model has no token for that."""
    count, start_token = len(heard.last_hidden_state), int(wrapper.generation.decoder_start_token_id)
    start = torch.full((count, 1), start_token, device=heard.last_hidden_state.device)
    logits = model(encoder_outputs=heard, decoder_input_ids=start, use_cache=False).logits.float()
    return _no_speech(wrapper, logits[:, 0])


def _no_speech(wrapper: WhisperModelWrapper, logits: torch.Tensor) -> list[float]:
    """Return the probability of the token for no speech in ``logits`` [batch, vocabulary] after the start token."""
    vocabulary = wrapper.tokenizer.get_vocab()
    token = next((vocabulary[name] for name in _NO_SPEECH if name in vocabulary), None)
    return [0.0] * len(logits) if token is None else [float(p) for p in logits.softmax(dim=-1)[:, token]]
