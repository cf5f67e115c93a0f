"""For whom, and on what, a model errs: error rates of parts of an evaluation, and what it takes for what."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from training.tasks.predictions import Prediction

_SECONDS = (1.0, 2.0, 5.0, 10.0, 20.0, 30.0)
_DECIBELS = (0.0, 5.0, 10.0, 15.0, 20.0, 30.0)
_MOST_KINDS = 8
"""Different noises that are told by name; more of them, if they are numbers, are put into ranges of dB."""


@dataclass(frozen=True)
class Part:
    """Some of the clips of an evaluation."""

    name: str
    recordings: int
    edits: int
    words: int
    cut: int
    """Texts that had not ended at their bound."""

    @property
    def wer(self) -> float | None:
        """Edits a word; ``None`` where nothing is said."""
        return self.edits / self.words if self.words else None


def part_of(name: str, predictions: Sequence[Prediction]) -> Part:
    """Return the sums over some clips."""
    edits, words = sum(one.edits for one in predictions), sum(one.words for one in predictions)
    return Part(name, len(predictions), edits, words, sum(one.cut for one in predictions))


def by_speaker(predictions: Sequence[Prediction]) -> list[Part]:
    """Return a part for each speaker, the worst first; empty where nobody says who speaks."""
    parts = _parts(predictions, lambda one: one.speaker)
    return sorted(parts, key=lambda part: (-(part.wer or 0.0), part.name)) if _tells(parts) else []


def by_language(predictions: Sequence[Prediction]) -> list[Part]:
    """Return a part for each language, the most recordings first; empty where all are in one."""
    parts = _parts(predictions, lambda one: one.language)
    return sorted(parts, key=lambda part: (-part.recordings, part.name)) if len(parts) > 1 else []


def by_length(predictions: Sequence[Prediction]) -> list[Part]:
    """Return a part for each range of lengths, the shortest first."""
    known = [one for one in predictions if one.duration is not None]
    names = _ranges(_SECONDS, "s")
    parts = _parts(known, lambda one: _range(one.duration or 0.0, _SECONDS, names))
    return sorted(parts, key=lambda part: names.index(part.name))


def by_noise(predictions: Sequence[Prediction]) -> list[Part]:
    """Return a part for each kind of noise, or range of speech-to-noise ratios; empty where no noise is told."""
    levels = {one.noise: _number(one.noise) for one in predictions if one.noise}
    if len(levels) > _MOST_KINDS and None not in levels.values():
        names = _ranges(_DECIBELS, "dB")
        parts = _parts(predictions, lambda one: _range(levels.get(one.noise) or 0.0, _DECIBELS, names))
        return sorted(parts, key=lambda part: names.index(part.name))
    parts = _parts(predictions, lambda one: one.noise)
    return sorted(parts, key=lambda part: (levels.get(part.name) or 0.0, part.name)) if _tells(parts) else []


def _tells(parts: Sequence[Part]) -> bool:
    return any(part.name for part in parts)


def _parts(predictions: Iterable[Prediction], name_of: Callable[[Prediction], str]) -> list[Part]:
    found: dict[str, list[Prediction]] = {}
    for one in predictions:
        found.setdefault(name_of(one), []).append(one)
    return [part_of(name, members) for name, members in found.items()]


def _ranges(edges: Sequence[float], unit: str) -> list[str]:
    inner = [f"{low:g} to {high:g} {unit}" for low, high in pairwise(edges)]
    return [f"under {edges[0]:g} {unit}", *inner, f"{edges[-1]:g} {unit} and more"]


def _range(value: float, edges: Sequence[float], names: Sequence[str]) -> str:
    return names[sum(value >= edge for edge in edges)]


def _number(text: str) -> float | None:
    try:
        value = float(text.lower().removesuffix("db"))
    except ValueError:
        return None
    return value if abs(value) < 1e6 else None


def worst(predictions: Sequence[Prediction], most: int = 10) -> list[Prediction]:
    """Return the clips with an error that the model hears worst: by edits a word, then by edits."""
    wrong = [one for one in predictions if one.edits]
    return sorted(wrong, key=lambda one: (-one.edits / max(1, one.words), -one.edits, one.id))[:most]


@dataclass(frozen=True)
class Confusion:
    """A word that was taken for another."""

    said: str
    """Empty: a word that nobody said was written."""
    heard: str
    """Empty: a word was left out."""
    times: int


def confusions(predictions: Sequence[Prediction], most: int = 10) -> list[Confusion]:
    """Return the most frequent substitutions, deletions and insertions, in the alignment of fewest edits."""
    found: Counter[tuple[str, str]] = Counter()
    for one in predictions:
        if one.edits:
            found.update(pair for pair in aligned(one) if pair[0] != pair[1])
    ranked = sorted(found.items(), key=lambda entry: (-entry[1], entry[0]))[:most]
    return [Confusion(said, heard, times) for (said, heard), times in ranked]


def aligned(one: Prediction) -> list[tuple[str, str]]:
    """Return the words of both normalised texts side by side (Levenshtein); empty where one has no counterpart."""
    from jiwer import process_words  # 0.2 s

    found = process_words([one.normalised_reference], [one.normalised_prediction])
    said, heard = found.references[0], found.hypotheses[0]
    pairs = list[tuple[str, str]]()
    for chunk in found.alignments[0]:
        left = said[chunk.ref_start_idx : chunk.ref_end_idx]
        right = heard[chunk.hyp_start_idx : chunk.hyp_end_idx]
        if chunk.type in ("equal", "substitute"):
            pairs += zip(left, right, strict=True)
        else:
            pairs += [(word, "") for word in left] + [("", word) for word in right]
    return pairs
