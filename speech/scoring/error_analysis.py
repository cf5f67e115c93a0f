"""Word error rates by speaker, language, length and noise; confusions; and significance of a difference in WER."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from profiles.errors import BadInput
from profiles.quantities import setting_text
from training.lazy import np
from training.tasks.outputs.alignment import aligned_texts
from training.tasks.outputs.predictions import Prediction

if TYPE_CHECKING:
    import numpy.typing as npt

_SECONDS = (1.0, 2.0, 5.0, 10.0, 20.0, 30.0)
_DECIBELS = (0.0, 5.0, 10.0, 15.0, 20.0, 30.0)
_MAX_KINDS = 8
"""Maximum number of noise kinds listed by name; more numeric ones are grouped into ranges of dB."""
RESAMPLES = 10_000
MIN_SPEAKERS = 10
"""Minimum number of speakers for resampling speakers; with fewer, recordings are resampled."""
_COUNTS_AT_ONCE = 1 << 21
"""Counts drawn at once: 16 MiB."""
_MAX_COUNTS = 1 << 30
"""Total counts drawn; with very many recordings there are fewer resamples."""


@dataclass(frozen=True)
class EvaluationSlice:
    """Error counts over a subset of an evaluation's clips."""

    name: str
    recordings: int
    edits: int
    words: int
    cut: int
    """Texts whose generation stopped at the length limit."""

    @property
    def wer(self) -> float | None:
        """Edits per word; ``None`` if the references have no words."""
        return self.edits / self.words if self.words else None


def slice_of(name: str, predictions: Sequence[Prediction]) -> EvaluationSlice:
    """Return the sums over a subset of clips."""
    edits, words = (
        sum(prediction.edits for prediction in predictions),
        sum(prediction.words for prediction in predictions),
    )
    return EvaluationSlice(name, len(predictions), edits, words, sum(prediction.cut for prediction in predictions))


def by_speaker(predictions: Sequence[Prediction]) -> list[EvaluationSlice]:
    """Return a slice per speaker, worst first; empty if no speakers are given."""
    slices = _slices(predictions, lambda prediction: prediction.speaker)
    return sorted(slices, key=lambda entry: (-(entry.wer or 0.0), entry.name)) if _has_names(slices) else []


def by_language(predictions: Sequence[Prediction]) -> list[EvaluationSlice]:
    """Return a slice per language, most recordings first; empty if there is only one."""
    slices = _slices(predictions, lambda prediction: prediction.language)
    return sorted(slices, key=lambda entry: (-entry.recordings, entry.name)) if len(slices) > 1 else []


def by_length(predictions: Sequence[Prediction]) -> list[EvaluationSlice]:
    """Return a slice per range of durations, shortest first."""
    timed = [prediction for prediction in predictions if prediction.duration is not None]
    names = _ranges(_SECONDS, "s")
    slices = _slices(timed, lambda prediction: _range(prediction.duration or 0.0, _SECONDS, names))
    return sorted(slices, key=lambda entry: names.index(entry.name))


def by_noise(predictions: Sequence[Prediction]) -> list[EvaluationSlice]:
    """Return a slice per kind of noise, or range of speech-to-noise ratios; empty if no noise is given."""
    levels = {prediction.noise: _number(prediction.noise) for prediction in predictions if prediction.noise}
    if len(levels) > _MAX_KINDS and None not in levels.values():
        names = _ranges(_DECIBELS, "dB")
        slices = _slices(predictions, lambda prediction: _range(levels.get(prediction.noise) or 0.0, _DECIBELS, names))
        return sorted(slices, key=lambda entry: names.index(entry.name))
    slices = _slices(predictions, lambda prediction: prediction.noise)
    return sorted(slices, key=lambda entry: (levels.get(entry.name) or 0.0, entry.name)) if _has_names(slices) else []


def _has_names(slices: Sequence[EvaluationSlice]) -> bool:
    return any(entry.name for entry in slices)


def _slices(predictions: Iterable[Prediction], name_of: Callable[[Prediction], str]) -> list[EvaluationSlice]:
    members_by_name: dict[str, list[Prediction]] = {}
    for prediction in predictions:
        members_by_name.setdefault(name_of(prediction), []).append(prediction)
    return [slice_of(name, members) for name, members in members_by_name.items()]


def _ranges(edges: Sequence[float], unit: str) -> list[str]:
    inner = [f"{setting_text(low)} to {setting_text(high)} {unit}" for low, high in pairwise(edges)]
    return [f"under {setting_text(edges[0])} {unit}", *inner, f"{setting_text(edges[-1])} {unit} and more"]


def _range(value: float, edges: Sequence[float], names: Sequence[str]) -> str:
    return names[sum(value >= edge for edge in edges)]


def _number(text: str) -> float | None:
    try:
        value = float(text.lower().removesuffix("db"))
    except ValueError:
        return None
    return value if abs(value) < 1e6 else None


def worst_clips(predictions: Sequence[Prediction], limit: int = 10) -> list[Prediction]:
    """Return the clips with the highest error rate: by edits per word, then by edits."""
    wrong = [prediction for prediction in predictions if prediction.edits]
    return sorted(
        wrong, key=lambda prediction: (-prediction.edits / max(1, prediction.words), -prediction.edits, prediction.id)
    )[:limit]


@dataclass(frozen=True)
class Confusion:
    """A word recognised as another one."""

    reference: str
    """Reference word; empty for an insertion."""
    hypothesis: str
    """Hypothesis word; empty for a deletion."""
    count: int


def confusions(predictions: Sequence[Prediction], limit: int = 10) -> list[Confusion]:
    """Return the most frequent substitutions, deletions and insertions, in the alignment of fewest edits."""
    counts: Counter[tuple[str, str]] = Counter()
    for prediction in predictions:
        if prediction.edits:
            counts.update(pair for pair in aligned(prediction) if pair[0] != pair[1])
    ranked = sorted(counts.items(), key=lambda entry: (-entry[1], entry[0]))[:limit]
    return [Confusion(reference, hypothesis, count) for (reference, hypothesis), count in ranked]


def aligned(prediction: Prediction) -> list[tuple[str, str]]:
    """Return the aligned words of both normalised texts, see :func:`aligned_texts`."""
    return aligned_texts(prediction.normalised_reference, prediction.normalised_prediction)


@dataclass(frozen=True)
class WerDifference:
    """WER of a second model against a first one, on the recordings that both transcribed. Shares: 0.05 is 5 %."""

    recordings: int
    left_out: int
    """Recordings of only one model, or with different references."""
    units: str
    """Resampled units: ``speakers`` or ``recordings``."""
    drawn: int
    """Number of units."""
    first: float
    second: float
    low: float
    """2.5 % quantile of the resampled differences."""
    high: float
    p: float
    """Two-sided: twice the share of resamples with the opposite sign; no less than :func:`_min_p`."""
    improves: float
    """Share of the resamples in which the second model is better."""

    @property
    def difference(self) -> float:
        """Second minus first; below 0 the second model is better."""
        return self.second - self.first

    @property
    def shown(self) -> bool:
        """Whether the interval excludes 0 and p is below 0.05."""
        return (self.low > 0 or self.high < 0) and self.p < 0.05


def wer_difference(first: Sequence[Prediction], second: Sequence[Prediction], seed: int = 0) -> WerDifference:
    """Return the difference in WER with its 95 % interval.

    Paired bootstrap: units are drawn with replacement, and the WER of both models is computed on the same draws (Bisani
    and Ney 2004, "Bootstrap estimates for confidence intervals in ASR performance evaluation", section 4). With at
    least :data:`MIN_SPEAKERS` speakers the units are speakers, because recordings of one speaker are correlated (Liu
    and Peng 2020, "Statistical testing on ASR performance via blockwise bootstrap"); otherwise recordings.

    Raises:
        BadInput: no recording was transcribed by both, or their references have no words.
    """
    first_by_id = {prediction.id: prediction for prediction in first}
    pairs = [
        (first_by_id[two.id], two)
        for two in second
        if two.id in first_by_id and first_by_id[two.id].reference == two.reference
    ]
    if not pairs or not all(sum(prediction.words for prediction in side) for side in zip(*pairs, strict=True)):
        raise BadInput("no recording with words was transcribed by both", "compare evaluations of the same data")
    speakers = {two.speaker for _, two in pairs}
    by_speaker = "" not in speakers and len(speakers) >= MIN_SPEAKERS
    counts = _counts(pairs, by_speaker)
    drawn = _resample_differences(
        counts, np.random.default_rng(seed), min(RESAMPLES, max(1000, _MAX_COUNTS // len(counts)))
    )
    total = counts.sum(axis=0)
    low, high = np.quantile(drawn, [0.025, 0.975])
    below, above = int((drawn <= 0).sum()), int((drawn >= 0).sum())
    return WerDifference(
        recordings=len(pairs),
        left_out=len({*first_by_id, *(two.id for two in second)}) - len(pairs),
        units="speakers" if by_speaker else "recordings",
        drawn=len(counts),
        first=float(total[0] / total[1]),
        second=float(total[2] / total[3]),
        low=float(low),
        high=float(high),
        p=min(1.0, max(2 * (1 + min(below, above)) / (1 + len(drawn)), _min_p(counts))),
        improves=float((drawn < 0).mean()),
    )


def _counts(pairs: Sequence[tuple[Prediction, Prediction]], by_speaker: bool) -> npt.NDArray[np.float64]:
    """Return edits and words of the first and of the second model by unit, [units, 4]."""
    counts_by_unit: dict[str, npt.NDArray[np.float64]] = {}
    for first, second in pairs:
        row = np.array([first.edits, first.words, second.edits, second.words], dtype=np.float64)
        unit = second.speaker if by_speaker else second.id
        counts_by_unit[unit] = counts_by_unit[unit] + row if unit in counts_by_unit else row
    return np.stack(list(counts_by_unit.values()))


def _min_p(counts: npt.NDArray[np.float64]) -> float:
    """Return the smallest p-value that this number of units can support.

    If all m units that differ do so in one direction, the probability of that by chance, in either direction, is
    2 (1/2)^m (Yeh 2000, "More accurate tests for the statistical significance of result differences": signs exchanged
    within pairs). The bootstrap then never draws the other sign, so its own p would only reflect the number of draws.
    """
    return 2.0 ** (1 - int((counts[:, :2] != counts[:, 2:]).any(axis=1).sum()))


def _resample_differences(
    counts: npt.NDArray[np.float64], rng: np.random.Generator, resamples: int
) -> npt.NDArray[np.float64]:
    """Return differences in WER, [resamples]; draws without reference words are dropped."""
    units, differences = len(counts), []
    even = np.full(units, 1 / units)
    for start in range(0, resamples, step := max(1, _COUNTS_AT_ONCE // units)):
        sums = rng.multinomial(units, even, size=min(step, resamples - start)) @ counts
        sums = sums[(sums[:, 1] > 0) & (sums[:, 3] > 0)]
        differences.append(sums[:, 2] / sums[:, 3] - sums[:, 0] / sums[:, 1])
    return np.concatenate(differences)
