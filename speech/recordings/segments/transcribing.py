"""Transcribes pieces of a recording with Whisper, with the start and end of each word.

The times are those of OpenAI's ``find_alignment``: the decoder reads the text once more, and dynamic time warping over
the cross-attention of the alignment heads yields the time of each token. For a model without ``alignment_heads`` all
heads of the upper half of its decoder are used. (``generate(return_token_timestamps=True)`` of transformers leaves out
the row that predicts the first token after a prompt without time stamps, and is one token late there.)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from speech.data.sound_file import Samples
from speech.recordings.segments.transcript import word_spans
from speech.whisper.decoding import Transcriber
from speech.whisper.model import unwrap

_TOKENS_A_SECOND, _EXTRA_TOKENS = 12, 16
"""Token limit by the length of the sound: speech is slower, and a model that repeats itself would not end."""
_FILTER_FRAMES = 7  # width of the median filter, as in Whisper
Matrix = npt.NDArray[np.float32]


@dataclass(frozen=True)
class TimedWord:
    """A word with its start and end, in seconds from the beginning of the recording."""

    text: str
    start: float
    end: float


class TimedTranscriber(Transcriber):
    """Transcribes words with their times. If no language is set, it detects one in the first batch and keeps it."""

    @property
    def seconds(self) -> float:
        """Length of the model's window."""
        return self.wrapper.log_mel.seconds

    @torch.no_grad()
    def transcribe(self, pieces: Sequence[Samples], starts: Sequence[float]) -> list[list[TimedWord]]:
        """Return the words of each piece.

        Args:
            starts: second of the recording at which each piece begins.
        """
        log_mel = self.wrapper.log_mel
        encoded = self.encode(pieces)
        if not self.language:
            languages = self.wrapper.detect_languages(self.model, encoded)
            self.language = Counter(languages).most_common(1)[0][0]
        seconds = [len(piece) / log_mel.rate for piece in pieces]
        token_limit = round(max(seconds) * _TOKENS_A_SECOND) + _EXTRA_TOKENS
        transcriptions = self.wrapper.generate(self.model, encoded, [self.language] * len(pieces), token_limit)
        texts = self.wrapper.tokenise([transcription.text for transcription in transcriptions])
        tokens = [ids[: self.wrapper.text_positions] for ids in texts]
        return [
            list(words_of(self.wrapper.tokenizer, ids[: len(times) - 1], times, start, self.language))
            for ids, times, start in zip(tokens, self._times(encoded, tokens, seconds), starts)
        ]

    def _times(self, encoded: Any, texts: Sequence[Sequence[int]], seconds: Sequence[float]) -> list[list[float]]:
        """Return the start of each token of each text in seconds, and that of the end token: [texts][tokens + 1]."""
        ids, prompt = self.wrapper.decoder_inputs([self.language] * len(texts), texts), self.wrapper.prompt_length
        model = unwrap(self.model)
        model.set_attn_implementation("eager")  # the other implementations do not return attention weights
        layers = model(encoder_outputs=encoded, decoder_input_ids=ids.to(self.device), output_attentions=True)
        heads = torch.stack([layers.cross_attentions[layer][:, head] for layer, head in self._heads()], dim=1)
        model.set_attn_implementation("sdpa")
        frame = self.seconds / self.wrapper.config.max_source_positions
        token_times = []
        for weights, text, length in zip(heads.float().cpu().numpy(), texts, seconds):
            rows = weights[:, : prompt + len(text) - 1, : max(1, round(length / frame))]
            first_frames = warp(attention_matrix(rows)[prompt - 1 :])
            token_times.append([first_frame * frame for first_frame in first_frames])
        return token_times

    def _heads(self) -> list[tuple[int, int]]:
        alignment_heads = getattr(self.wrapper.generation, "alignment_heads", None)
        if alignment_heads:
            return [(int(layer), int(head)) for layer, head in alignment_heads]
        config = self.wrapper.config
        layers = range(config.decoder_layers // 2, config.decoder_layers)
        return [(layer, head) for layer in layers for head in range(config.decoder_attention_heads)]


def attention_matrix(weights: Matrix) -> Matrix:
    """Standardise attention weights over the tokens, median-filter them over the frames, and average the heads.

    Args:
        weights: [heads, tokens, frames].

    Returns:
        [tokens, frames].
    """
    spread = weights.std(axis=1, keepdims=True)
    weights = (weights - weights.mean(axis=1, keepdims=True)) / np.where(spread > 0, spread, 1)
    if weights.shape[-1] > _FILTER_FRAMES // 2:
        padded = np.pad(weights, ((0, 0), (0, 0), (_FILTER_FRAMES // 2, _FILTER_FRAMES // 2)), mode="reflect")
        weights = np.median(np.lib.stride_tricks.sliding_window_view(padded, _FILTER_FRAMES, axis=-1), axis=-1)
    return np.asarray(weights.mean(axis=0), dtype=np.float32)


def warp(matrix: Matrix) -> list[int]:
    """Return the first frame of each row on the path of largest sum from the first corner to the last.

    Dynamic time warping: a step goes to the next row, the next frame, or both. A row's best sums are those of the row
    before, at the same frame or the one before, and then any number of steps along the row: a running maximum.
    """
    sums: list[npt.NDArray[np.float64]] = []
    for row in matrix.astype(np.float64):
        cumulative = np.cumsum(row)
        entered = np.full(len(row), -np.inf)
        if sums:
            entered = sums[-1].copy()
            entered[1:] = np.maximum(entered[1:], sums[-1][:-1])
        else:
            entered[0] = 0.0
        sums.append(cumulative + np.maximum.accumulate(entered - (cumulative - row)))
    frame, first_frames = matrix.shape[1] - 1, []
    for number in range(len(matrix) - 1, 0, -1):
        while frame and sums[number][frame - 1] > max(sums[number - 1][frame], sums[number - 1][frame - 1]):
            frame -= 1
        first_frames.append(frame)
        if frame and sums[number - 1][frame - 1] >= sums[number - 1][frame]:
            frame -= 1
    return [0, *reversed(first_frames)]


def words_of(
    tokenizer: Any, ids: Sequence[int], times: Sequence[float], start: float, language: str = ""
) -> Iterator[TimedWord]:
    """Yield the words of a text, divided at white space; its characters if the language writes no spaces.

    Args:
        ids: tokens of the text, without the end token.
        times: [tokens + 1] seconds at which each token begins, and at which the last one ends.
        start: second of the recording at which the sound begins.
    """
    text, begins, ends = "", list[float](), list[float]()
    for number in range(len(ids)):
        decoded = tokenizer.decode(ids[: number + 1])
        if decoded.endswith("\ufffd"):  # half of a character
            continue
        begins += [times[number]] * (len(decoded) - len(begins))
        ends += [times[number + 1]] * (len(decoded) - len(ends))
        text = decoded
    for start_character, end_character in word_spans(text, language):
        yield TimedWord(
            text[start_character:end_character], start + begins[start_character], start + ends[end_character - 1]
        )
