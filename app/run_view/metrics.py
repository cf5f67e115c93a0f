"""The evaluations of a split; labels and texts of metrics, and of work that is counted."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from profiles.quantities import bytes_text, duration_text, error_rate_text, loss_text
from training.records.events import EvaluationEvent, ProgressEvent

RATES = ("wer", "cer", "accuracy", "cut")
"""Metrics that are shares, shown as per cent."""


_PACE_AFTER = 3.0
"""Seconds of a phase from which on its pace counts."""
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
    return error_rate_text(value) if name in RATES else loss_text(value)


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


def phase_text(phase: str, done: int, total: int | None) -> str:
    """``features 3/10``, ``features 3`` where the total is unknown, or ``sending to anna 3.2 MB/85.4 MB``."""
    return f"{phase_label(phase)} {amount_text(phase, done, total)}".rstrip()


def phase_label(phase: str) -> str:
    """Return a phase in words: ``sending to anna`` for ``bytes to anna``."""
    return f"sending {words}" if (words := phase.removeprefix("bytes ")).startswith("to ") else words


def amount_text(phase: str, done: int, total: int | None) -> str:
    """Return the progress of a phase: ``3/10``, or ``3.2 MB/85.4 MB``; empty where it waits or counts nothing."""
    if phase.startswith("waiting ") or not (done or total):
        return ""
    shown = bytes_text if phase.startswith("bytes ") else str
    return f"{shown(done)}/{shown(total)}" if total else shown(done)


def phase_progress_text(begun: ProgressEvent, newest: ProgressEvent, now: float) -> str:
    """Return a phase with its time: ``features 3/10, 0:40 left``, ``loading the program on anna, 0:12 so far``; for
    arguments see :func:`phase_time_text`."""
    text, time = phase_text(newest.phase, newest.done, newest.total), phase_time_text(begun, newest, now)
    return ", ".join(filter(None, (text, time)))


def phase_time_text(begun: ProgressEvent, newest: ProgressEvent, now: float) -> str:
    """Return the time that a phase still takes at its pace, or, where it has counted nothing yet, takes already:
    ``0:40 left``, ``0:12 so far``; empty: too short to tell.

    Args:
        begun: its first report.
        now: Unix time.
    """
    counts = bool(amount_text(newest.phase, newest.done, newest.total))
    if counts and (newest.done > begun.done or newest.done == newest.total):
        return phase_left_text(begun, newest)
    since = max(0.0, now - begun.time)
    return f"{duration_text(since)} so far" if since >= _PACE_AFTER else ""


def phase_left_text(begun: ProgressEvent, newest: ProgressEvent) -> str:
    """Return how long a phase still takes at the pace since its first report: ``1:23 left``; empty: not known yet."""
    done, seconds = newest.done - begun.done, newest.time - begun.time
    if not newest.total or done <= 0 or seconds < _PACE_AFTER or newest.done >= newest.total:
        return ""
    return f"{duration_text(seconds / done * (newest.total - newest.done))} left"
