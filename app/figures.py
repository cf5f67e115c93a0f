"""How figures of a run are put in words: shared by the display, the report and the lists."""

from __future__ import annotations

from collections.abc import Mapping

from app.history import in_order
from app.run_curves import RUN, evaluated, names, of_member, of_run
from app.run_state import RunState, SplitResults
from training.events import EvaluationEvent, SyncEvent

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
    now = metric_text(name, last[name])
    label = f"{metric_label(name)} on {split}:" if split else metric_label(name)
    cut = f", {metric_text('cut', last['cut'])} of the texts cut" if "cut" in last and results.last.step else ""
    if results.first is not results.last:
        now = f"{metric_text(name, metrics_of(results.first).get(name))} -> {now}"
    return f"{label} {now}{cut}"


def evaluated_series(state: RunState) -> dict[str, str]:
    """Return the metric of every series that evaluations gave, by the name of the series."""
    return {
        evaluated(split, metric): metric
        for split, results in state.evaluations.items()
        for metric in {**results.first.figures, **results.last.figures}
    }


def state_document(state: RunState) -> dict[str, object]:
    """Return the state as JSON-able data, for ``--json``."""
    return {
        "status": state.status,
        "step": state.step,
        "total_steps": state.total_steps,
        "samples_per_second": state.samples_per_second,
        "seconds_left": state.seconds_left,
        "snapshot_step": state.snapshot_step,
        "weights_differ": state.weights_differ,
        "joules": state.joules,
        "message": state.message,
        "resume_step": state.resume_step,
        "started": state.started,
        "updated": state.updated,
        "members": [_member_document(state, rank) for rank in state.members],
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


def _member_document(state: RunState, rank: int) -> dict[str, object]:
    member = state.members[rank]
    compute, wait, transfer = member.shares
    return {
        "rank": rank,
        "name": member.name,
        "device": member.device,
        "status": member.status,
        "step": member.step,
        "loss": member.loss,
        "learning_rate": member.learning_rate,
        "samples_per_second": member.samples_per_second,
        "compute_share": compute,
        "wait_share": wait,
        "transfer_share": transfer,
        "bytes_sent": member.work.bytes_sent,
        "bytes_received": member.work.bytes_received,
        "synchronisations": member.work.syncs,
        "weight_hash": member.last_sync.weight_hash if member.last_sync else "",
        "message": member.message,
        "epoch": member.epoch,
        "snapshot_step": member.snapshot_step,
        "cpu_percent": member.cpu_percent,
        "last_synchronisation": _sync_document(member.last_sync) if member.last_sync else None,
        "memory_peak": member.memory_peak,
        "device_memory_peak": member.device_memory_peak,
        "celsius": member.celsius,
        "hottest_celsius": member.hottest,
        "watts": member.watts,
        "joules": member.joules,
        "meters": member.meters,
        "throttled": member.throttled,
        "battery_percent": member.battery_percent,
        "on_mains": member.on_mains,
    }


def _sync_document(sync: SyncEvent) -> dict[str, object]:
    names = {"round", "step", "bytes_sent", "bytes_received", "seconds", "wait", "weight_hash", "time"}
    return {**sync.model_dump(include=names), "members": len(sync.members)}
