"""What a Whisper writes for a clip, and how sure it is of it."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from training.modes import evaluating
from training.tasks.whisper_model import WhisperModelWrapper
from training.tasks.word_errors import Normalizer, count_errors, normalizer_for

_NO_SPEECH = ("<|nospeech|>", "<|nocaptions|>")
"""Names of the token, in newer and older tokenizers."""


@dataclass(frozen=True)
class Heard:
    """A transcript with the measures of Radford et al. 2022, section 4.5."""

    text: str
    confidence: float
    """Mean natural logarithm of the probabilities of its tokens, the end token included."""
    no_speech: float
    """Probability that nobody speaks; 0 where a model has no token for it."""
    cut: bool
    """It had not ended when it reached its bound."""
    given: float | None = None
    """Mean logarithm of the probabilities of the text that was given for the clip; ``None`` if none was."""

    @property
    def compression(self) -> float:
        """Length of the text over its length after zlib: high where it repeats itself."""
        return compression_ratio(self.text)


def compression_ratio(text: str) -> float:
    """Return the bytes of ``text`` over those after zlib; 0 for an empty one."""
    data = text.encode()
    return len(data) / len(zlib.compress(data)) if data else 0.0


@torch.no_grad()
def hear(
    wrapper: WhisperModelWrapper,
    model: nn.Module,
    features: torch.Tensor,
    languages: Sequence[str],
    max_new_tokens: int,
    given: Sequence[str] = (),
) -> list[Heard]:
    """Transcribe clips greedily.

    Args:
        features: [batch, mels, frames], on the model's device.
        languages: code of each clip; an empty one: the model decides.
        given: a text for each clip, to learn how probable it is too.
    """
    with evaluating(model):
        sound = wrapper.hear(model, features)
        if wrapper.is_multilingual and not all(languages):
            found = wrapper.detect_languages(model, sound)
            languages = [given or code for given, code in zip(languages, found, strict=True)]
        said = wrapper.generate(model, sound, languages, max_new_tokens)
        sure, silent = _probabilities(wrapper, model, sound, languages, [one.text for one in said])
        heard = [Heard(one.text, sure[i], silent[i], one.cut) for i, one in enumerate(said)]
        if not given:
            return heard
        known, _ = _probabilities(wrapper, model, sound, languages, given)
    return [dataclasses.replace(one, given=value) for one, value in zip(heard, known, strict=True)]


def _probabilities(
    wrapper: WhisperModelWrapper, model: nn.Module, sound: Any, languages: Sequence[str], texts: Sequence[str]
) -> tuple[list[float], list[float]]:
    """Return each text's mean log-probability, and the probability of silence after the start token."""
    limit = wrapper.room + 1
    tokens = [ids[:limit] for ids in wrapper.encode(texts)]
    rows = [[*wrapper.prompt(code), *ids] for code, ids in zip(languages, tokens, strict=True)]
    device = next(model.parameters()).device
    inputs = torch.full((len(rows), max(map(len, rows)) - 1), int(wrapper.tokenizer.eos_token_id), device=device)
    for index, row in enumerate(rows):
        inputs[index, : len(row) - 1] = torch.tensor(row[:-1])
    logits = model(encoder_outputs=sound, decoder_input_ids=inputs, use_cache=False).logits.float()
    start, sure = wrapper.prompt_length - 1, list[float]()
    for index, ids in enumerate(tokens):
        scores = logits[index, start : start + len(ids)].log_softmax(dim=-1)
        sure.append(float(scores.gather(1, torch.tensor(ids, device=device)[:, None]).mean()))
    vocabulary = wrapper.tokenizer.get_vocab()
    silence = next((vocabulary[name] for name in _NO_SPEECH if name in vocabulary), None)
    silent = [0.0] * len(rows) if silence is None else logits[:, 0].softmax(dim=-1)[:, silence].tolist()
    return sure, silent


class ErrorRates:
    """Word error rates of pairs of texts, normalised as in an evaluation."""

    def __init__(self, wrapper: WhisperModelWrapper) -> None:
        self._spelling = getattr(wrapper.tokenizer, "english_spelling_normalizer", None)
        self._normalizers: dict[str, Normalizer] = {}

    def normalised(self, text: str, language: str) -> str:
        """Return what is left of a text that counts."""
        if language not in self._normalizers:
            self._normalizers[language] = normalizer_for(language, self._spelling)
        return self._normalizers[language](text)

    def of(self, reference: str, hypothesis: str, language: str) -> float:
        """Return edits a word of ``reference``; against an empty one every word is an edit of one word."""
        counted = count_errors([self.normalised(reference, language)], [self.normalised(hypothesis, language)])
        return counted["word_edits"] / max(1.0, counted["words"])
