"""The evaluations of a split; labels and texts of metrics."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from training.records.events import EvaluationEvent

RATES = ("wer", "cer", "accuracy", "cut")
"""Metrics that are shares, shown as per cent."""


TOO_HIGH = "over 100 %"
"""Stands for an error rate above 100 %: the model, not trained enough, writes more wrong words than were said."""


def is_usable(name: str, value: float) -> bool:
    """Whether a metric tells how good a model is: false for an error rate above 100 %."""
    return name not in ("wer", "cer") or value <= 1


def metric_text(name: str, value: float | None, exact: bool = False) -> str:
    """Return ``3.2 %`` for a share, four digits for anything else, ``-`` for ``None`` and NaN.

    Args:
        exact: return an error rate above 100 % as it is, rather than :data:`TOO_HIGH`.
    """
    if value is None or value != value:
        return "-"
    if not exact and not is_usable(name, value):
        return TOO_HIGH
    return f"{value * 100:.1f} %" if name in RATES else four_digits(value)


def four_digits(value: float) -> str:
    """Return ``2.000`` or ``0.08712``: four significant digits, so that a changing loss keeps its width."""
    return f"{value:#.4g}".rstrip(".")


def simulated_text(hours: float) -> str:
    """Return ``3.20 simulated hours``, or seconds below one hour."""
    return f"{hours:.2f} simulated hours" if hours >= 1 else f"{hours * 3600:.1f} simulated seconds"


def metric_label(name: str) -> str:
    """Return ``WER`` for ``wer``; other names are unchanged."""
    return {"wer": "WER", "cer": "CER", "cut": "unfinished texts"}.get(name, name)


def unfinished_text(shares: Mapping[str, float]) -> str:
    """Return what it means that a model was stopped in a share of its texts, by split; its name may be empty."""
    of_splits = ", ".join(f"{split}: {metric_text('cut', share)}".removeprefix(": ") for split, share in shares.items())
    return f"{of_splits} of the texts are unfinished: the model went on and on, and was stopped"


def metrics_of(result: EvaluationEvent) -> dict[str, float]:
    """Return the metrics of an evaluation, error rates first, the loss last."""
    figures = result.figures
    rates = [name for name in RATES if name in figures]
    others = sorted(name for name in figures if name not in RATES and name != "loss")
    loss = ["loss"] if "loss" in figures else []
    return {name: figures[name] for name in (*rates, *others, *loss)}


def result_text(result: EvaluationEvent, limit: int | None = None) -> str:
    """Return ``validation: WER 12.3 %, loss 0.5``, with at most ``limit`` metrics."""
    shown = (f"{metric_label(name)} {metric_text(name, value)}" for name, value in metrics_of(result).items())
    return f"{result.split}: {', '.join(list(shown)[:limit])}"


@dataclass(frozen=True)
class SplitResults:
    """First, last and best evaluation of one split; the best has the lowest WER, or loss where there is no WER."""

    first: EvaluationEvent
    last: EvaluationEvent
    best: EvaluationEvent
    count: int = 0
    """Evaluations after the first step."""

    def seconds_left(self, total_steps: int) -> float:
        """Return the seconds of the evaluations that are still to come: at the end, and at the interval so far."""
        if self.last.step >= total_steps:
            return 0.0
        interval = self.last.step / self.count if self.count else math.inf
        return (1 + max(0, int((total_steps - 1) / interval) - self.count)) * self.last.seconds


def with_result(previous: SplitResults | None, result: EvaluationEvent) -> SplitResults:
    """Return the results of a split with one more, whatever the order in which they arrive."""
    results = (result,) if previous is None else (previous.first, previous.last, previous.best, result)
    ordered = sorted(results, key=_order)
    count = (previous.count if previous else 0) + (result.step > 0)
    return SplitResults(first=ordered[0], last=ordered[-1], best=min(ordered, key=_badness), count=count)


def _order(result: EvaluationEvent) -> tuple[object, ...]:
    """Return the sort key among the evaluations of a split, independent of the order of arrival."""
    figures_text = repr(sorted(result.figures.items()))
    member = -1 if result.member is None else result.member
    return (result.step, result.time, result.samples, result.seconds, figures_text, member)


def _badness(result: EvaluationEvent) -> tuple[object, ...]:
    value = result.metrics.get("wer", result.loss)
    return (value if value is not None and math.isfinite(value) else math.inf, _order(result))
