"""An evaluation in words: for whom and on what a model errs, in lines for a terminal and in a document for programs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.console import visible
from app.figures import metric_text
from profiles.counts import counted
from profiles.errors import BadInput
from training.tasks.error_analysis import Part, by_language, by_length, by_noise, by_speaker, confusions, part_of
from training.tasks.predictions import BEFORE, FOLDER, NAME, Prediction, read_predictions

if TYPE_CHECKING:
    from training.tasks.error_analysis import Difference

SHOWN_SPEAKERS = 24
SHOWN_CONFUSIONS = 5

WAYS: Mapping[str, Callable[[Sequence[Prediction]], list[Part]]] = {
    "speaker": by_speaker,
    "language": by_language,
    "length": by_length,
    "noise": by_noise,
}


def predictions_in(run_dir: Path) -> tuple[list[Prediction], list[Prediction]]:
    """Return what the model of a run wrote before the first step and in its newest evaluation; empty: not there."""
    found = []
    for name in (BEFORE, NAME):
        try:
            found.append(read_predictions(run_dir / FOLDER / name))
        except BadInput:  # none was written, or somebody has changed it
            found.append([])
    return found[0], found[1]


def breakdown_lines(
    predictions: Sequence[Prediction], before: Sequence[Prediction] = (), most: int = SHOWN_SPEAKERS
) -> list[str]:
    """Return error rates by speaker, language, length and noise in columns, and the most frequent confusions."""
    lines = []
    for way, divide in WAYS.items():
        parts = divide(predictions)
        if len(parts) > 1:
            earlier = {part.name: part for part in divide(before)}
            lines += [f"WER by {way}", *_rows(parts, earlier, most if way == "speaker" else len(parts))]
    if wrong := confusions(predictions, SHOWN_CONFUSIONS):
        said = ", ".join(f"{_word(one.said)} as {_word(one.heard)} ({one.times}x)" for one in wrong)
        lines.append(f"heard    {said}")
    return lines


def _rows(parts: Sequence[Part], before: Mapping[str, Part], most: int) -> list[str]:
    shown = parts[:most]
    width = min(40, max(len(_name(part)) for part in shown))
    rows = [f"  {_name(part):{width}}  {course(part, before.get(part.name))}" for part in shown]
    rest = parts[most:]
    if rest:
        best, worst = rest[-1].wer, rest[0].wer
        rows.append(f"  {len(rest)} more from {metric_text('wer', best)} to {metric_text('wer', worst)}")
    return rows


def course(part: Part, before: Part | None) -> str:
    """``73.8 % -> 4.9 % of 61 words``: before, where it is known, and after."""
    first = f"{metric_text('wer', before.wer)} -> " if before is not None else ""
    heard = f"{counted(part.words, 'word')} in {counted(part.recordings, 'recording')}"
    return f"{first}{metric_text('wer', part.wer)} of {heard}"


def _name(part: Part) -> str:
    return visible(part.name)[:40] or "not told"


def _word(word: str) -> str:
    return visible(repr(word)) if word else "nothing"


def breakdown_document(predictions: Sequence[Prediction]) -> dict[str, Any]:
    """Return the same for programs."""
    ways = {way: [_document(part) for part in divide(predictions)] for way, divide in WAYS.items()}
    wrong = [{"said": one.said, "heard": one.heard, "times": one.times} for one in confusions(predictions, 50)]
    return {"overall": _document(part_of("", predictions)), **ways, "confusions": wrong}


def _document(part: Part) -> dict[str, Any]:
    figures = {"recordings": part.recordings, "words": part.words, "edits": part.edits, "cut": part.cut}
    return {"name": part.name, "wer": part.wer, **figures}


def difference_lines(found: Difference) -> list[str]:
    """Return what two models differ by, in words."""
    first, second = metric_text("wer", found.first), metric_text("wer", found.second)
    interval = f"95 % interval {found.low * 100:+.1f} to {found.high * 100:+.1f} points"
    how = f"{found.drawn} {found.units} resampled, p {_p_text(found.p)}"
    if found.shown:
        better = "fewer" if found.difference < 0 else "more"
        verdict = f"{abs(found.difference) * 100:.1f} points {better}"
    else:
        verdict = f"no difference that {counted(found.recordings, 'recording')} can show"
    lines = [f"WER   {first} -> {second}: {verdict} ({interval}; {how})"]
    if found.left_out:
        lines.append(f"      left out: {counted(found.left_out, 'recording')} that only one of them transcribed")
    return lines


def _p_text(p: float) -> str:
    return f"{p:.2f}" if p >= 0.1 else f"{p:.3f}" if p >= 0.001 else "under 0.001"


def difference_document(found: Difference) -> dict[str, Any]:
    """Return the same for programs."""
    return {**vars(found), "difference": found.difference, "shown": found.shown}


def run_lines(run_dir: Path) -> list[str]:
    """Return what a run has changed for whom: before the first step and in its newest evaluation."""
    from training.tasks.error_analysis import difference

    before, after = predictions_in(run_dir)
    try:
        changed = difference_lines(difference(before, after)) if before and after else []
    except BadInput:  # no recording is in both
        changed = []
    return [*changed, *breakdown_lines(after, before)]
