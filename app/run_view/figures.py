"""Figures of a run, and of an evaluation of its model, as texts and JSON documents; every display shares them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from app.console import visible
from app.run_view.member_state import MIN_STEPS, MemberState
from app.run_view.metrics import metric_label, metric_text, metrics_of
from app.run_view.run_series import RUN, evaluation_series, of_member, of_run, series_names
from app.run_view.run_state import RunState, SplitResults
from app.run_view.showcase import showcase_lines
from app.run_view.timeline import chronological
from profiles.errors import BadInput, counted
from training.records.events import Event, TimingEvent
from training.tasks.outputs.predictions import BEFORE, FOLDER, NAME, Prediction, read_predictions
from training.tasks.scoring.error_analysis import (
    EvaluationSlice,
    WerDifference,
    by_language,
    by_length,
    by_noise,
    by_speaker,
    confusions,
    slice_of,
    wer_difference,
)

DATA_BRAKE = 0.1
"""Share of waiting for samples in a step from which on the data is the bottleneck."""
MORE_DATA = "set data_workers higher, or put the data on a faster disk"
"""Advice against it."""


def data_text(state: RunState, whole_run: bool = False) -> str:
    """Return the largest share of a step that a machine waits for samples, as text; empty where it is small.

    Args:
        whole_run: over all steps of a run that has ended; else over the members' windows.
    """
    if whole_run:
        done = {rank: member.total for rank, member in state.members.items() if member.total.steps >= MIN_STEPS}
        shares = {rank: total.data / total.seconds for rank, total in done.items() if total.seconds > 0}
    else:
        shares = {rank: member.data_share for rank, member in state.members.items() if member.active}
    rank = max(shares, key=lambda r: shares[r], default=-1)
    if shares.get(rank, 0.0) < DATA_BRAKE:
        return ""
    on_machine = f" on {state.members[rank].label}" if len(state.members) > 1 else ""
    return f"{shares[rank]:.0%} of each step {'waited' if whole_run else 'waits'} for data{on_machine}".replace(
        "%", " %", 1
    )


def evaluation_headline(results: SplitResults, split: str) -> str:
    """Return ``WER on validation: 98.1 % -> 12.3 % (step 400)``: the main metric of a split, first and last.

    The share of texts that reached ``eval_max_new_tokens`` is added, except before the first step: with many of them
    the WER says little.
    """
    text = evaluation_text(results, split)
    return f"{text} (step {results.last.step})" if results.last.figures else text


def evaluation_text(results: SplitResults, split: str = "") -> str:
    """Return the same without the step, and without the split where none is given: ``WER 98.1 % -> 12.3 %``."""
    last_metrics = metrics_of(results.last)
    if not last_metrics:
        return f"{f'{split}: ' if split else ''}evaluated at step {results.last.step}"
    name = next(iter(last_metrics))
    label = f"{metric_label(name)} on {split}:" if split else metric_label(name)
    cut = (
        f", {metric_text('cut', last_metrics['cut'])} of the texts unfinished"
        if "cut" in last_metrics and results.last.step
        else ""
    )
    return f"{label} {change(results, name)}{cut}"


def change(results: SplitResults, name: str, arrow: str = " -> ") -> str:
    """Return ``98.1 % -> 12.3 %``: a metric of the first and last evaluation; one value after a single one."""
    now = metric_text(name, results.last.figures.get(name))
    return now if results.first is results.last else f"{metric_text(name, results.first.figures.get(name))}{arrow}{now}"


def evaluated_series(state: RunState) -> dict[str, str]:
    """Return the metrics of all series of evaluations, by the names of the series."""
    return {
        evaluation_series(split, metric): metric
        for split, results in state.evaluations.items()
        for metric in {**results.first.figures, **results.last.figures}
    }


def start_line(events: Iterable[Event]) -> str:
    """Return the durations of the newest start's phases in the order of their ends; empty where none was measured.

    A phase of several machines lasts as long as on the slowest one. Phases overlap, so they do not add up.
    """
    newest = {(event.part, event.member): event for event in events if isinstance(event, TimingEvent)}
    seconds: dict[str, float] = {}
    for (phase, _), event in sorted(newest.items(), key=lambda item: item[1].time):
        seconds[phase] = max(event.seconds, seconds.get(phase, 0.0))
    return ", ".join(f"{phase} {value:.1f} s" for phase, value in seconds.items())


_OF_STATE = (
    "status", "step", "total_steps", "samples_per_second", "snapshot_step", "weights_differ", "joules",
    "message", "resume_step", "started", "updated",
)  # fmt: skip
_OF_MEMBER = (
    "rank", "name", "device", "status", "step", "loss", "learning_rate", "samples_per_second", "message", "epoch",
    "snapshot_step", "memory_peak", "device_memory_peak", "joules", "meters", "throttled",
)  # fmt: skip
_OF_MACHINE = ("cpu_percent", "celsius", "watts", "battery_percent", "on_mains")
_OF_SYNC = {"round", "step", "bytes_sent", "bytes_received", "seconds", "wait", "weight_hash", "time"}


def state_document(state: RunState) -> dict[str, object]:
    """Return the state as a JSON document, for ``--json``."""
    left = state.time_left(state.updated or 0.0)
    return {
        **{name: getattr(state, name) for name in _OF_STATE},
        "seconds_left": left.seconds if left else None,
        "members": [_member_document(member) for member in state.members.values()],
        "evaluations": evaluations_document(state),
        "series": series_document(state),
        "happenings": [entry._asdict() for entry in chronological(state.timeline)],
        "warnings": [{"member": w.member, "message": w.text, "time": w.time} for w in state.warnings],
        "errors": [{"member": e.member, "message": e.text, "hint": e.hint} for e in state.errors],
    }


def series_document(state: RunState) -> dict[str, Mapping[str, object]]:
    """Return the final figures of every series: of the run, and the newest of each member."""
    document: dict[str, Mapping[str, object]] = {}
    for name in series_names(state.curves):
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
    """Return first, best and last evaluation of every split as a JSON document."""
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
        "ways": [route.model_dump() for route in member.routes.values()],
    }


# ------------------------------------------------------------------------------------------------------ error analysis


SHOWN_SPEAKERS = 24
SHOWN_CONFUSIONS = 5

GROUPINGS: Mapping[str, Callable[[Sequence[Prediction]], list[EvaluationSlice]]] = {
    "speaker": by_speaker,
    "language": by_language,
    "length": by_length,
    "noise": by_noise,
}


def predictions_in(run_dir: Path) -> tuple[list[Prediction], list[Prediction]]:
    """Return the predictions before the first step and of the newest evaluation; empty lists where there are none."""
    predictions = []
    for name in (BEFORE, NAME):
        try:
            predictions.append(read_predictions(run_dir / FOLDER / name))
        except BadInput:  # none was written, or it was changed
            predictions.append([])
    return predictions[0], predictions[1]


def breakdown_lines(predictions: Sequence[Prediction], before: Sequence[Prediction] = ()) -> list[str]:
    """Return error rates by speaker, language, length and noise in columns, and the most frequent confusions."""
    lines = []
    for grouping, divide in GROUPINGS.items():
        groups = divide(predictions)
        if len(groups) > 1:
            earlier = {group.name: group for group in divide(before)}
            lines += [
                f"WER by {grouping}",
                *_rows(groups, earlier, SHOWN_SPEAKERS if grouping == "speaker" else len(groups)),
            ]
    if wrong := confusions(predictions, SHOWN_CONFUSIONS):
        pairs = ", ".join(
            f"{_word(confusion.reference)} as {_word(confusion.hypothesis)} ({confusion.count}x)" for confusion in wrong
        )
        lines.append(f"heard    {pairs}")
    return lines


def _rows(groups: Sequence[EvaluationSlice], before: Mapping[str, EvaluationSlice], limit: int) -> list[str]:
    """Return ``ada  73.8 % -> 4.9 % of 61 words``: before, where it is known, and after."""
    rows, shown, omitted = [], groups[:limit], groups[limit:]
    width = min(40, max(len(_name(group)) for group in shown))
    for group in shown:
        wer_before = f"{metric_text('wer', before[group.name].wer)} -> " if group.name in before else ""
        heard = f"{counted(group.words, 'word')} in {counted(group.recordings, 'recording')}"
        rows.append(f"  {_name(group):{width}}  {wer_before}{metric_text('wer', group.wer)} of {heard}")
    if omitted:
        best, worst = omitted[-1].wer, omitted[0].wer
        rows.append(f"  {len(omitted)} more from {metric_text('wer', best)} to {metric_text('wer', worst)}")
    return rows


def _name(group: EvaluationSlice) -> str:
    return visible(group.name)[:40] or "not told"


def _word(word: str) -> str:
    return visible(repr(word)) if word else "nothing"


def breakdown_document(predictions: Sequence[Prediction]) -> dict[str, Any]:
    """Return the error analysis as a JSON document."""
    breakdown = {
        grouping: [_document(group) for group in divide(predictions)] for grouping, divide in GROUPINGS.items()
    }
    wrong = [
        {"said": confusion.reference, "heard": confusion.hypothesis, "times": confusion.count}
        for confusion in confusions(predictions, 50)
    ]
    return {"overall": _document(slice_of("", predictions)), **breakdown, "confusions": wrong}


def _document(group: EvaluationSlice) -> dict[str, Any]:
    figures = {"recordings": group.recordings, "words": group.words, "edits": group.edits, "cut": group.cut}
    return {"name": group.name, "wer": group.wer, **figures}


def difference_lines(difference: WerDifference) -> list[str]:
    """Return the difference in WER between two models, with its confidence interval, as text."""
    first_wer, second_wer = metric_text("wer", difference.first), metric_text("wer", difference.second)
    interval = f"95 % interval {difference.low * 100:+.1f} to {difference.high * 100:+.1f} points"
    p = (
        f"{difference.p:.2f}"
        if difference.p >= 0.1
        else f"{difference.p:.3f}"
        if difference.p >= 0.001
        else "under 0.001"
    )
    method = f"{difference.drawn} {difference.units} resampled, p {p}"
    if difference.shown:
        better = "fewer" if difference.difference < 0 else "more"
        conclusion = f"{abs(difference.difference) * 100:.1f} points {better}"
    elif difference.low > 0 or difference.high < 0:
        better = "fewer" if difference.difference < 0 else "more"
        few = f"{counted(difference.recordings, 'recording')} are too few to be sure"
        conclusion = f"{abs(difference.difference) * 100:.1f} points {better}, but {few}"
    else:
        conclusion = f"no difference that {counted(difference.recordings, 'recording')} can show"
    lines = [f"WER   {first_wer} -> {second_wer}: {conclusion} ({interval}; {method})"]
    if difference.left_out:
        lines.append(
            f"      left out: {counted(difference.left_out, 'recording')} that only one of the two transcribed"
        )
    return lines


def difference_document(difference: WerDifference) -> dict[str, Any]:
    """Return the difference as a JSON document."""
    return {**vars(difference), "difference": difference.difference, "shown": difference.shown}


def run_lines(run_dir: Path) -> list[str]:
    """Return how a run changed the errors, with their breakdown and its held-out samples."""
    before, after = predictions_in(run_dir)
    return [*changed_lines(before, after), *breakdown_lines(after, before), *showcase_lines(run_dir)]


def changed_lines(before: Sequence[Prediction], after: Sequence[Prediction]) -> list[str]:
    """Return the difference between two evaluations of a model; empty where one of them was not kept."""
    try:
        return difference_lines(wer_difference(before, after)) if before and after else []
    except BadInput:  # no recording is in both
        return []
