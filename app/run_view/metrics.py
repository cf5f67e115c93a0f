"""Labels and texts of metrics."""

from __future__ import annotations

from training.records.events import EvaluationEvent

RATES = ("wer", "cer", "accuracy", "cut")
"""Metrics that are shares, shown as per cent."""


NOT_YET = "not yet"
"""Stands for an error rate above 100 %: the model, not trained enough, writes more wrong words than were said."""


def is_usable(name: str, value: float) -> bool:
    """Whether a metric tells how good a model is: false for an error rate above 100 %."""
    return name not in ("wer", "cer") or value <= 1


def metric_text(name: str, value: float | None, exact: bool = False) -> str:
    """Return ``3.2 %`` for a share, four digits for anything else, ``-`` for ``None`` and NaN.

    Args:
        exact: return an error rate above 100 % as it is, rather than :data:`NOT_YET`.
    """
    if value is None or value != value:
        return "-"
    if not exact and not is_usable(name, value):
        return NOT_YET
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


def unfinished_text(share: float) -> str:
    """Return what it means that a model was stopped in a share of its texts."""
    return f"{metric_text('cut', share)} of the texts are unfinished: the model went on and on, and was stopped"


def metrics_of(result: EvaluationEvent) -> dict[str, float]:
    """Return the metrics of an evaluation, error rates first, the loss last."""
    figures = result.figures
    rates = [name for name in RATES if name in figures]
    others = sorted(name for name in figures if name not in RATES and name != "loss")
    loss = ["loss"] if "loss" in figures else []
    return {name: figures[name] for name in (*rates, *others, *loss)}
