"""How figures of a run are put in words: shared by the display, the report and the lists."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from app.history import in_order
from app.member_state import MemberState
from app.run_series import RUN, evaluated, names, of_member, of_run
from app.run_state import RunState, SplitResults
from training.events import EvaluationEvent, Event, TimingEvent

RATES = ("wer", "cer", "accuracy", "cut")
"""Metrics that are shares of one and read best as per cent."""


def metric_text(name: str, value: float | None) -> str:
    """``3.2 %`` for an error rate, four digits for anything else, ``-`` for nothing."""
    if value is None or value != value:
        return "-"
    return f"{value * 100:.1f} %" if name in RATES else four_digits(value)


def four_digits(value: float) -> str:
    """``2.000`` and ``0.08712``: as many digits for every loss, so that a column of them does not jump."""
    return f"{value:#.4g}".rstrip(".")


def metric_label(name: str) -> str:
    """``WER`` for ``wer``; other names as they are."""
    return {"wer": "WER", "cer": "CER", "cut": "cut texts"}.get(name, name)


def metrics_of(result: EvaluationEvent) -> dict[str, float]:
    """Metrics of an evaluation, error rates first, the loss last."""
    every = result.figures
    first = [name for name in RATES if name in every]
    rest = sorted(name for name in every if name not in RATES and name != "loss")
    last = ["loss"] if "loss" in every else []
    return {name: every[name] for name in (*first, *rest, *last)}


def headline(results: SplitResults, split: str) -> str:
    """``WER on validation: 98.1 % -> 12.3 % (step 400)``: the most telling metric of a split, first and last.

    Texts that had not ended at their bound (``eval_max_new_tokens``) are told: with many of them the WER says little.
    Before the first step a model from scratch ends none.
    """
    told = course(results, split)
    return f"{told} (step {results.last.step})" if results.last.figures else told


def course(results: SplitResults, split: str = "") -> str:
    """Return the headline without the step, and without the split where none is given: ``WER 98.1 % -> 12.3 %``."""
    last = metrics_of(results.last)
    if not last:
        return f"{f'{split}: ' if split else ''}evaluated at step {results.last.step}"
    name = next(iter(last))
    label = f"{metric_label(name)} on {split}:" if split else metric_label(name)
    cut = f", {metric_text('cut', last['cut'])} of the texts cut" if "cut" in last and results.last.step else ""
    return f"{label} {change(results, name)}{cut}"


def change(results: SplitResults, name: str, arrow: str = " -> ") -> str:
    """``98.1 % -> 12.3 %``: a metric of the first and of the last evaluation; one value where there was only one."""
    now = metric_text(name, results.last.figures.get(name))
    return now if results.first is results.last else f"{metric_text(name, results.first.figures.get(name))}{arrow}{now}"


def evaluated_series(state: RunState) -> dict[str, str]:
    """Return the metric of every series that evaluations gave, by the name of the series."""
    return {
        evaluated(split, metric): metric
        for split, results in state.evaluations.items()
        for metric in {**results.first.figures, **results.last.figures}
    }


def start_line(events: Iterable[Event]) -> str:
    """Return the parts of the newest start in the order in which they ended; empty where nothing was measured.

    A part that several machines have is as long as the slowest of them took. Parts overlap, so they do not add up.
    """
    newest = {(event.part, event.member): event for event in events if isinstance(event, TimingEvent)}
    seconds: dict[str, float] = {}
    for (part, _), event in sorted(newest.items(), key=lambda item: item[1].time):
        seconds[part] = max(event.seconds, seconds.get(part, 0.0))
    return ", ".join(f"{part} {value:.1f} s" for part, value in seconds.items())


_OF_STATE = (
    "status", "step", "total_steps", "samples_per_second", "seconds_left", "snapshot_step", "weights_differ", "joules",
    "message", "resume_step", "started", "updated",
)  # fmt: skip
_OF_MEMBER = (
    "rank", "name", "device", "status", "step", "loss", "learning_rate", "samples_per_second", "message", "epoch",
    "snapshot_step", "memory_peak", "device_memory_peak", "joules", "meters", "throttled",
)  # fmt: skip
_OF_MACHINE = ("cpu_percent", "celsius", "watts", "battery_percent", "on_mains")
_OF_SYNC = {"round", "step", "bytes_sent", "bytes_received", "seconds", "wait", "weight_hash", "time"}


def state_document(state: RunState) -> dict[str, object]:
    """Return the state as JSON-able data, for ``--json``."""
    return {
        **{name: getattr(state, name) for name in _OF_STATE},
        "members": [_member_document(member) for member in state.members.values()],
        "evaluations": evaluations_document(state),
        "series": series_document(state),
        "happenings": [one._asdict() for one in in_order(state.chronicles)],
        "warnings": [{"member": w.member, "message": w.text, "time": w.time} for w in state.warnings],
        "errors": [{"member": e.member, "message": e.text, "hint": e.hint} for e in state.errors],
    }


def series_document(state: RunState) -> dict[str, Mapping[str, object]]:
    """Return the final figures of everything that the dashboard draws: of the run, and the newest of each member."""
    document: dict[str, Mapping[str, object]] = {}
    for name in names(state.curves):
        points = of_run(state.curves, name).points()
        newest = {rank: of_member(state.curves, rank, name).newest for rank in state.curves}
        document[name] = {
            "newest": points[-1].mean if points else None,
            "lowest": min((point.low for point in points), default=None),
            "highest": max((point.high for point in points), default=None),
            "step": points[-1].step if points else None,
            "members": {str(rank): value for rank, value in newest.items() if value is not None and rank != RUN},
        }
    return document


def evaluations_document(state: RunState) -> dict[str, dict[str, Mapping[str, object]]]:
    """Return first, best and last evaluation of every split."""
    return {
        split: {
            which: {"step": result.step, "samples": result.samples, **metrics_of(result)}
            for which, result in (("first", results.first), ("best", results.best), ("last", results.last))
        }
        for split, results in state.evaluations.items()
    }


def _member_document(member: MemberState) -> dict[str, object]:
    compute, wait, transfer = member.shares
    sync = member.last_sync
    return {
        **{name: getattr(member, name) for name in _OF_MEMBER},
        **{name: getattr(member.machine, name, None) for name in _OF_MACHINE},
        "compute_share": compute,
        "wait_share": wait,
        "transfer_share": transfer,
        "bytes_sent": member.work.bytes_sent,
        "bytes_received": member.work.bytes_received,
        "synchronisations": member.work.syncs,
        "weight_hash": sync.weight_hash if sync else "",
        "last_synchronisation": {**sync.model_dump(include=_OF_SYNC), "members": len(sync.members)} if sync else None,
        "hottest_celsius": member.hottest,
    }
