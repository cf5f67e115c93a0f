"""Word and character error counts on text normalised as in the Whisper paper (Radford et al. 2022, appendix C)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import jiwer
from transformers.models.whisper.english_normalizer import EnglishTextNormalizer

from speech.scoring.spelling import american_spellings
from speech.scoring.text_normalisation import characters, normalise, without_formatting

Normalizer = Callable[[str], str]


def normalizer_for(language: str) -> Normalizer:
    """Return Whisper's normaliser for ``en`` (numbers, spelling, contractions), else
    :func:`speech.scoring.text_normalisation.normalise`.
    """
    if language != "en":
        return lambda text: normalise(text, language)
    # untyped in transformers
    english = cast(Normalizer, EnglishTextNormalizer(american_spellings()))  # type: ignore[no-untyped-call]
    # it leaves one of several final dots, which would count as a word
    return lambda text: " ".join(word for word in english(without_formatting(text)).split() if word != ".")


def count_errors(references: Sequence[str], hypotheses: Sequence[str]) -> dict[str, float]:
    """Return ``word_edits``, ``words``, ``char_edits``, ``chars`` over pairs of normalised texts.

    Against an empty reference every word of the hypothesis is an edit. Spaces count as characters, as usual, unless
    they only separate single characters.
    """
    if not references:
        return {"word_edits": 0.0, "words": 0.0, "char_edits": 0.0, "chars": 0.0}
    by_word = jiwer.process_words(list(references), list(hypotheses))
    pairs = [_as_characters(*pair) for pair in zip(references, hypotheses, strict=True)]
    by_char = jiwer.process_characters([pair[0] for pair in pairs], [pair[1] for pair in pairs])
    return {
        "word_edits": float(by_word.substitutions + by_word.deletions + by_word.insertions),
        "words": float(by_word.hits + by_word.substitutions + by_word.deletions),
        "char_edits": float(by_char.substitutions + by_char.deletions + by_char.insertions),
        "chars": float(by_char.hits + by_char.substitutions + by_char.deletions),
    }


def _as_characters(reference: str, hypothesis: str) -> tuple[str, str]:
    """Return both texts, without spaces if every word of both is a single character."""
    words = [*reference.split(), *hypothesis.split()]
    if all(len(word) == 1 or len(characters(word)) == 1 for word in words):
        return reference.replace(" ", ""), hypothesis.replace(" ", "")
    return reference, hypothesis


class ErrorRates:
    """Computes word error rates of pairs of texts, normalised by language."""

    def __init__(self) -> None:
        self._normalizers: dict[str, Normalizer] = {}

    def normalised(self, text: str, language: str) -> str:
        """Return the normalised form of a text."""
        if language not in self._normalizers:
            self._normalizers[language] = normalizer_for(language)
        return self._normalizers[language](text)

    def of(self, reference: str, hypothesis: str, language: str) -> float:
        """Return edits per word of ``reference``; an empty one counts as one word."""
        counted = count_errors([self.normalised(reference, language)], [self.normalised(hypothesis, language)])
        return counted["word_edits"] / max(1.0, counted["words"])
