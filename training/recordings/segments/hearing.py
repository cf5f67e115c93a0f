"""What a Whisper hears in pieces of a recording, word by word with times.

The times are those of OpenAI's ``find_alignment``: the decoder reads the text once more, and dynamic time warping over
the cross-attention of the heads that follow the sound says when it was at which token. A model that does not name such
heads gives those of the upper half of its decoder. (``generate(return_token_timestamps=True)`` of transformers leaves
out the row that predicts the first token after a prompt without time stamps, and is one token late there.)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from training.recordings.segments.transcript import word_places
from training.tasks.sound_file import Samples
from training.tasks.whisper.listening import Transcriber
from training.tasks.whisper.model import unwrap

_TOKENS_A_SECOND, _TOKENS_MORE = 12, 16
"""Bound of a text by the length of its sound: nobody speaks faster, and a model that repeats itself would not end."""
_FILTER = 7  # frames of the median filter, as in Whisper
Matrix = npt.NDArray[np.float32]


@dataclass(frozen=True)
class HeardWord:
    """A word as the model writes it, and its seconds from the beginning of the recording."""

    text: str
    start: float
    end: float


class Hearer(Transcriber):
    """A model that hears words with their times; one that is to find out the language keeps the first that it hears."""

    @property
    def seconds(self) -> float:
        """Length of the model's window."""
        return self.wrapper.log_mel.seconds

    @torch.no_grad()
    def hear(self, pieces: Sequence[Samples], starts: Sequence[float]) -> list[list[HeardWord]]:
        """Return the words of each piece, which begins at so many seconds of its recording."""
        log_mel = self.wrapper.log_mel
        encoded = self.encode(pieces)
        if not self.language:
            found = self.wrapper.detect_languages(self.model, encoded)
            self.language = Counter(found).most_common(1)[0][0]
        seconds = [len(piece) / log_mel.rate for piece in pieces]
        bound = round(max(seconds) * _TOKENS_A_SECOND) + _TOKENS_MORE
        said = self.wrapper.generate(self.model, encoded, [self.language] * len(pieces), bound)
        texts = self.wrapper.encode([one.text for one in said])
        tokens = [ids[: self.wrapper.room] for ids in texts]
        return [
            list(words_of(self.wrapper.tokenizer, ids[: len(times) - 1], times, start, self.language))
            for ids, times, start in zip(tokens, self._times(encoded, tokens, seconds), starts)
        ]

    def _times(self, encoded: Any, texts: Sequence[Sequence[int]], seconds: Sequence[float]) -> list[list[float]]:
        """Return the seconds at which each token begins, and the end token as the end of the last, for each text."""
        ids, prompt = self.wrapper.decoder_inputs([self.language] * len(texts), texts), self.wrapper.prompt_length
        model = unwrap(self.model)
        model.set_attn_implementation("eager")  # the others do not give their weights
        layers = model(encoder_outputs=encoded, decoder_input_ids=ids.to(self.device), output_attentions=True)
        heads = torch.stack([layers.cross_attentions[layer][:, head] for layer, head in self._heads()], dim=1)
        model.set_attn_implementation("sdpa")
        frame = self.seconds / self.wrapper.config.max_source_positions
        found = []
        for weights, text, length in zip(heads.float().cpu().numpy(), texts, seconds):
            rows = weights[:, : prompt + len(text) - 1, : max(1, round(length / frame))]
            begins = warp(sharpened(rows)[prompt - 1 :])
            found.append([begin * frame for begin in begins])
        return found

    def _heads(self) -> list[tuple[int, int]]:
        named = getattr(self.wrapper.generation, "alignment_heads", None)
        if named:
            return [(int(layer), int(head)) for layer, head in named]
        config = self.wrapper.config
        layers = range(config.decoder_layers // 2, config.decoder_layers)
        return [(layer, head) for layer in layers for head in range(config.decoder_attention_heads)]


def sharpened(weights: Matrix) -> Matrix:
    """Return one matrix [tokens, frames] of weights [heads, tokens, frames]: what stands out in each frame."""
    spread = weights.std(axis=1, keepdims=True)
    weights = (weights - weights.mean(axis=1, keepdims=True)) / np.where(spread > 0, spread, 1)
    if weights.shape[-1] > _FILTER // 2:
        sides = np.pad(weights, ((0, 0), (0, 0), (_FILTER // 2, _FILTER // 2)), mode="reflect")
        weights = np.median(np.lib.stride_tricks.sliding_window_view(sides, _FILTER, axis=-1), axis=-1)
    return np.asarray(weights.mean(axis=0), dtype=np.float32)


def warp(matrix: Matrix) -> list[int]:
    """Return the first frame of each row on the path of largest sum from the first corner to the last.

    Dynamic time warping: a step goes to the next row, the next frame, or both. A row's best sums are those of the row
    before, at the same frame or the one before, and then any number of steps along the row: a running maximum.
    """
    sums: list[npt.NDArray[np.float64]] = []
    for row in matrix.astype(np.float64):
        along = np.cumsum(row)
        entered = np.full(len(row), -np.inf)
        if sums:
            entered = sums[-1].copy()
            entered[1:] = np.maximum(entered[1:], sums[-1][:-1])
        else:
            entered[0] = 0.0
        sums.append(along + np.maximum.accumulate(entered - (along - row)))
    frame, begins = matrix.shape[1] - 1, []
    for number in range(len(matrix) - 1, 0, -1):
        while frame and sums[number][frame - 1] > max(sums[number - 1][frame], sums[number - 1][frame - 1]):
            frame -= 1
        begins.append(frame)
        if frame and sums[number - 1][frame - 1] >= sums[number - 1][frame]:
            frame -= 1
    return [0, *reversed(begins)]


def words_of(
    tokenizer: Any, ids: Sequence[int], times: Sequence[float], start: float, language: str = ""
) -> Iterator[HeardWord]:
    """Yield the words of a text: what white space divides, or its characters where a language writes none.

    Args:
        ids: its tokens, without the one that ends it.
        times: [tokens + 1] seconds at which each begins, and at which the last one ends.
        start: seconds at which the sound begins.
    """
    text, begins, ends = "", list[float](), list[float]()
    for number in range(len(ids)):
        whole = tokenizer.decode(ids[: number + 1])
        if whole.endswith("\ufffd"):  # half of a character
            continue
        begins += [times[number]] * (len(whole) - len(begins))
        ends += [times[number + 1]] * (len(whole) - len(ends))
        text = whole
    for first, end in word_places(text, language):
        yield HeardWord(text[first:end], start + begins[first], start + ends[end - 1])
