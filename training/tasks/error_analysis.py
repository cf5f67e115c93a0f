"""For whom, and on what, a model errs; and whether two models differ in it, or the recordings cannot show it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from profiles.errors import BadInput
from training.lazy import np
from training.tasks.predictions import Prediction

if TYPE_CHECKING:
    import numpy.typing as npt

_SECONDS = (1.0, 2.0, 5.0, 10.0, 20.0, 30.0)
_DECIBELS = (0.0, 5.0, 10.0, 15.0, 20.0, 30.0)
_MOST_KINDS = 8
"""Different noises that are told by name; more of them, if they are numbers, are put into ranges of dB."""
RESAMPLES = 10_000
FEWEST_SPEAKERS = 10
"""From here on speakers are drawn; fewer of them would tell too little of others, so that recordings are."""
_CELLS = 1 << 21
"""Counts that are drawn at once: 16 MiB."""
_WORK = 1 << 30
"""Counts that are drawn in all; with very many recordings there are fewer resamples."""


@dataclass(frozen=True)
class EvaluationSlice:
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


def part_of(name: str, predictions: Sequence[Prediction]) -> EvaluationSlice:
    """Return the sums over some clips."""
    edits, words = sum(one.edits for one in predictions), sum(one.words for one in predictions)
    return EvaluationSlice(name, len(predictions), edits, words, sum(one.cut for one in predictions))


def by_speaker(predictions: Sequence[Prediction]) -> list[EvaluationSlice]:
    """Return a part for each speaker, the worst first; empty where nobody says who speaks."""
    parts = _parts(predictions, lambda one: one.speaker)
    return sorted(parts, key=lambda part: (-(part.wer or 0.0), part.name)) if _tells(parts) else []


def by_language(predictions: Sequence[Prediction]) -> list[EvaluationSlice]:
    """Return a part for each language, the most recordings first; empty where all are in one."""
    parts = _parts(predictions, lambda one: one.language)
    return sorted(parts, key=lambda part: (-part.recordings, part.name)) if len(parts) > 1 else []


def by_length(predictions: Sequence[Prediction]) -> list[EvaluationSlice]:
    """Return a part for each range of lengths, the shortest first."""
    known = [one for one in predictions if one.duration is not None]
    names = _ranges(_SECONDS, "s")
    parts = _parts(known, lambda one: _range(one.duration or 0.0, _SECONDS, names))
    return sorted(parts, key=lambda part: names.index(part.name))


def by_noise(predictions: Sequence[Prediction]) -> list[EvaluationSlice]:
    """Return a part for each kind of noise, or range of speech-to-noise ratios; empty where no noise is told."""
    levels = {one.noise: _number(one.noise) for one in predictions if one.noise}
    if len(levels) > _MOST_KINDS and None not in levels.values():
        names = _ranges(_DECIBELS, "dB")
        parts = _parts(predictions, lambda one: _range(levels.get(one.noise) or 0.0, _DECIBELS, names))
        return sorted(parts, key=lambda part: names.index(part.name))
    parts = _parts(predictions, lambda one: one.noise)
    return sorted(parts, key=lambda part: (levels.get(part.name) or 0.0, part.name)) if _tells(parts) else []


def _tells(parts: Sequence[EvaluationSlice]) -> bool:
    return any(part.name for part in parts)


def _parts(predictions: Iterable[Prediction], name_of: Callable[[Prediction], str]) -> list[EvaluationSlice]:
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
    """Return the words of both normalised texts side by side: :func:`aligned_texts`."""
    return aligned_texts(one.normalised_reference, one.normalised_prediction)


def aligned_texts(reference: str, heard_text: str) -> list[tuple[str, str]]:
    """Return the words of two texts side by side (Levenshtein); empty where one has no counterpart."""
    from jiwer import process_words  # 0.2 s

    found = process_words([reference], [heard_text])
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


@dataclass(frozen=True)
class Difference:
    """WER of a second model against a first one, on the recordings that both have heard. Shares: 0.05 is 5 %."""

    recordings: int
    left_out: int
    """Recordings of only one of the two, or with another reference."""
    units: str
    """What was drawn: ``speakers`` or ``recordings``."""
    drawn: int
    """How many of them there are."""
    first: float
    second: float
    low: float
    """2.5 % of the resampled differences are below this one."""
    high: float
    p: float
    """Two-sided: how often resampling would give the other sign, twice; no less than :func:`_least_p`."""
    improves: float
    """Share of the resamples in which the second model is the better one."""

    @property
    def difference(self) -> float:
        """Second less first; below 0 the second model is better."""
        return self.second - self.first

    @property
    def shown(self) -> bool:
        """Whether the interval leaves out 0, and there are enough draws that differ for it to say so."""
        return (self.low > 0 or self.high < 0) and self.p < 0.05


def difference(first: Sequence[Prediction], second: Sequence[Prediction], seed: int = 0) -> Difference:
    """Return the difference in WER with its 95 % interval.

    Both models are measured on the same draws: units are drawn with replacement, as many as there are, and the WER of
    either model is counted on them (Bisani and Ney 2004, "Bootstrap estimates for confidence intervals in ASR
    performance evaluation", section 4). Where at least :data:`FEWEST_SPEAKERS` speakers are told, speakers are drawn,
    because recordings of one person resemble each other (Liu and Peng 2020, "Statistical testing on ASR performance via
    blockwise bootstrap"); otherwise recordings.

    Raises:
        BadInput: no recording was transcribed by both, or nothing is said in them.
    """
    known = {one.id: one for one in first}
    pairs = [(known[two.id], two) for two in second if two.id in known and known[two.id].reference == two.reference]
    if not pairs or not all(sum(one.words for one in side) for side in zip(*pairs, strict=True)):
        raise BadInput("no recording with words was transcribed by both", "compare evaluations of the same data")
    speakers = {two.speaker for _, two in pairs}
    by_speaker = "" not in speakers and len(speakers) >= FEWEST_SPEAKERS
    counts = _counts(pairs, by_speaker)
    drawn = _resampled(counts, np.random.default_rng(seed), min(RESAMPLES, max(1000, _WORK // len(counts))))
    total = counts.sum(axis=0)
    low, high = np.quantile(drawn, [0.025, 0.975])
    below, above = int((drawn <= 0).sum()), int((drawn >= 0).sum())
    return Difference(
        recordings=len(pairs),
        left_out=len({*known, *(two.id for two in second)}) - len(pairs),
        units="speakers" if by_speaker else "recordings",
        drawn=len(counts),
        first=float(total[0] / total[1]),
        second=float(total[2] / total[3]),
        low=float(low),
        high=float(high),
        p=min(1.0, max(2 * (1 + min(below, above)) / (1 + len(drawn)), _least_p(counts))),
        improves=float((drawn < 0).mean()),
    )


def _counts(pairs: Sequence[tuple[Prediction, Prediction]], by_speaker: bool) -> npt.NDArray[np.float64]:
    """Return edits and words of the first and of the second model, [units, 4]."""
    found: dict[str, npt.NDArray[np.float64]] = {}
    for one, two in pairs:
        row = np.array([one.edits, one.words, two.edits, two.words], dtype=np.float64)
        unit = two.speaker if by_speaker else two.id
        found[unit] = found[unit] + row if unit in found else row
    return np.stack(list(found.values()))


def _least_p(counts: npt.NDArray[np.float64]) -> float:
    """Return the least p that so few units can give: where all m that differ do so to one side, chance alone has them
    do that, to either side, with a probability of 2 (1/2)^m (Yeh 2000, "More accurate tests for the statistical
    significance of result differences": signs exchanged within pairs). The bootstrap draws no other side then, and its
    own p would be that of its number of draws.
    """
    return 2.0 ** (1 - int((counts[:, :2] != counts[:, 2:]).any(axis=1).sum()))


def _resampled(counts: npt.NDArray[np.float64], rng: np.random.Generator, resamples: int) -> npt.NDArray[np.float64]:
    """Return differences in WER, [resamples]; draws in which nothing is said are left out."""
    units, parts = len(counts), []
    even = np.full(units, 1 / units)
    for start in range(0, resamples, step := max(1, _CELLS // units)):
        sums = rng.multinomial(units, even, size=min(step, resamples - start)) @ counts
        sums = sums[(sums[:, 1] > 0) & (sums[:, 3] > 0)]
        parts.append(sums[:, 2] / sums[:, 3] - sums[:, 0] / sums[:, 1])
    return np.concatenate(parts)
