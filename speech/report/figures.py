"""Error analysis of an evaluation as texts and JSON documents: by group, confusions, differences of two models."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from app.console import visible
from app.run_view.metrics import is_usable, metric_text
from profiles.errors import BadInput, counted
from speech.scoring.error_analysis import (
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
from training.tasks.outputs.predictions import BEFORE, FOLDER, NAME, Prediction, read_predictions

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
        if len(groups) > 1 and any(group.wer is not None and is_usable("wer", group.wer) for group in groups):
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
    first_wer = metric_text("wer", difference.first, exact=True)  # points need both, however high
    second_wer = metric_text("wer", difference.second, exact=True)
    interval = f"95 % interval {_interval(difference)}"
    p = (
        f"{difference.p:.2f}"
        if difference.p >= 0.1
        else f"{difference.p:.3f}"
        if difference.p >= 0.001
        else "under 0.001"
    )
    method = f"{difference.drawn} {difference.units} resampled, p {p}"
    points = f"{abs(difference.difference) * 100:.1f} points {'fewer' if difference.difference < 0 else 'more'}"
    if difference.shown:
        conclusion = points
    else:
        recordings = counted(difference.recordings, "recording")
        if not difference.difference:
            conclusion = f"no difference in {recordings}"
        elif difference.low > 0 or difference.high < 0:
            conclusion = f"{points}, but {recordings} are too few to be sure"
        else:
            conclusion = f"{points}, which may be chance in {recordings}"
        method = method if difference.units != "recordings" else f"p {p}"  # their number is in the conclusion
    sentence = f"{conclusion} ({interval}; {method})"
    if difference.recordings == 1:
        sentence = "1 recording is too few to compare"
    elif not (difference.low or difference.high):
        sentence = f"as many words wrong in each of {difference.recordings} recordings"
    lines = [f"WER   {first_wer} -> {second_wer}: {sentence}"]
    if difference.left_out:
        lines.append(
            f"      left out: {counted(difference.left_out, 'recording')} that only one of the two transcribed"
        )
    return lines


def _interval(difference: WerDifference) -> str:
    """Return ``42.5 to 50.0 fewer``, or ``3.0 more to 60.0 fewer`` where it includes 0; fewer than none wrong cannot
    be."""
    low, high = (max(end, -difference.first) * 100 for end in (difference.low, difference.high))
    if low < 0 < high:
        return f"{high:.1f} more to {-low:.1f} fewer"
    ends = sorted((abs(low), abs(high)))
    return f"{ends[0]:.1f} to {ends[1]:.1f} {'fewer' if low < 0 else 'more'}"


def difference_document(difference: WerDifference) -> dict[str, Any]:
    """Return the difference as a JSON document."""
    return {**vars(difference), "difference": difference.difference, "shown": difference.shown}


def changed_lines(before: Sequence[Prediction], after: Sequence[Prediction]) -> list[str]:
    """Return the difference between two evaluations of a model; empty where one of them was not kept."""
    try:
        return difference_lines(wer_difference(before, after)) if before and after else []
    except BadInput:  # no recording is in both
        return []
