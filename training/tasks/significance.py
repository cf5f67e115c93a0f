"""Whether two models differ in WER, or the recordings cannot show it: a paired bootstrap."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from profiles.errors import BadInput
from training.tasks.predictions import Prediction

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

RESAMPLES = 10_000
FEWEST_SPEAKERS = 10
"""From here on speakers are drawn; fewer of them would tell too little of others, so that recordings are."""
_CELLS = 1 << 21
"""Counts that are drawn at once: 16 MiB."""
_WORK = 1 << 30
"""Counts that are drawn in all; with very many recordings there are fewer resamples."""


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
    """Two-sided: how often resampling would give the other sign, twice."""
    improves: float
    """Share of the resamples in which the second model is the better one."""

    @property
    def difference(self) -> float:
        """Second less first; below 0 the second model is better."""
        return self.second - self.first

    @property
    def shown(self) -> bool:
        """Whether the interval leaves out 0."""
        return self.low > 0 or self.high < 0


def difference(
    first: Sequence[Prediction], second: Sequence[Prediction], seed: int = 0, resamples: int = RESAMPLES
) -> Difference:
    """Return the difference in WER with its 95 % interval.

    Both models are measured on the same draws: units are drawn with replacement, as many as there are, and the WER of
    either model is counted on them (Bisani and Ney 2004, "Bootstrap estimates for confidence intervals in ASR
    performance evaluation", section 4). Where at least :data:`FEWEST_SPEAKERS` speakers are told, speakers are drawn,
    because recordings of one person resemble each other (Liu and Peng 2020, "Statistical testing on ASR performance via
    blockwise bootstrap"); otherwise recordings.

    Raises:
        BadInput: no recording was transcribed by both, or nothing is said in them.
    """
    import numpy as np

    known = {one.id: one for one in first}
    pairs = [(known[two.id], two) for two in second if two.id in known and known[two.id].reference == two.reference]
    if not pairs or not all(sum(one.words for one in side) for side in zip(*pairs, strict=True)):
        raise BadInput("no recording with words was transcribed by both", "compare evaluations of the same data")
    speakers = {two.speaker for _, two in pairs}
    by_speaker = "" not in speakers and len(speakers) >= FEWEST_SPEAKERS
    counts = _counts(pairs, by_speaker)
    drawn = _resampled(counts, np.random.default_rng(seed), min(resamples, max(1000, _WORK // len(counts))))
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
        p=min(1.0, 2 * (1 + min(below, above)) / (1 + len(drawn))),
        improves=float((drawn < 0).mean()),
    )


def _counts(pairs: Sequence[tuple[Prediction, Prediction]], by_speaker: bool) -> npt.NDArray[np.float64]:
    """Return edits and words of the first and of the second model, [units, 4]."""
    import numpy as np

    found: dict[str, npt.NDArray[np.float64]] = {}
    for one, two in pairs:
        row = np.array([one.edits, one.words, two.edits, two.words], dtype=np.float64)
        unit = two.speaker if by_speaker else two.id
        found[unit] = found[unit] + row if unit in found else row
    return np.stack(list(found.values()))


def _resampled(counts: npt.NDArray[np.float64], rng: np.random.Generator, resamples: int) -> npt.NDArray[np.float64]:
    """Return differences in WER, [resamples]; draws in which nothing is said are left out."""
    import numpy as np

    units, parts = len(counts), []
    even = np.full(units, 1 / units)
    for start in range(0, resamples, step := max(1, _CELLS // units)):
        sums = rng.multinomial(units, even, size=min(step, resamples - start)) @ counts
        sums = sums[(sums[:, 1] > 0) & (sums[:, 3] > 0)]
        parts.append(sums[:, 2] / sums[:, 3] - sums[:, 0] / sums[:, 1])
    return np.concatenate(parts)
