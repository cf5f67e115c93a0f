"""A model on held-out recordings, for the report: error rates by group, confusions, and the ten worst with their sound.

The sound is in the page, as MP3, which every browser plays; it is cut and bounded, so that the page can be mailed.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from pathlib import Path

from app.html_report.sections import table, text
from app.html_report.showcase import player
from app.run_view.metrics import metric_text
from profiles.errors import BadInput
from speech.data.speech_clips import FileSource
from speech.data.speech_dataset import read_speech
from speech.report.figures import GROUPINGS, changed_lines, predictions_in
from speech.scoring.error_analysis import EvaluationSlice, aligned, confusions, worst_clips
from training.records.plan import RunPlan
from training.tasks.outputs.predictions import Prediction

WORST = 10
LONGEST = 30.0
"""Seconds of one recording in the page."""
MOST_SOUND = 300_000
"""Bytes of sound in this section, so that a page stays below 2 MB."""
_SHOWN_PARTS = 60


def recordings(run_dir: Path, plan: RunPlan | None) -> str:
    """Return the section of the error analysis; empty where no predictions were kept."""
    before, after = predictions_in(run_dir)
    if not after:
        return ""
    shown = [f"<p>{text(line)}</p>" for line in changed_lines(before, after)]
    for grouping, divide in GROUPINGS.items():
        groups, earlier = divide(after), {group.name: group for group in divide(before)}
        if len(groups) > 1:
            shown.append(f"<h3>By {grouping}</h3>{_groups_table(grouping, groups[:_SHOWN_PARTS], earlier)}")
            left = len(groups) - _SHOWN_PARTS
            shown.append(f"<p>{left} more, none of them worse.</p>" if left > 0 else "")
    if confused := confusions(after, 20):
        rows = [
            (confusion.reference or "(nothing)", confusion.hypothesis or "(nothing)", confusion.count)
            for confusion in confused
        ]
        shown.append(f"<h3>Words heard as others</h3>{table(('said', 'heard', 'times'), rows, numbers=(2,))}")
    return "".join(shown) + _worst(plan, before, after)


def _groups_table(grouping: str, groups: Sequence[EvaluationSlice], before: Mapping[str, EvaluationSlice]) -> str:
    rows = []
    for group in groups:
        group_before = before.get(group.name)
        error_rates = (metric_text("wer", group_before.wer) if group_before else "-", metric_text("wer", group.wer))
        rows.append((group.name or "not told", *error_rates, group.edits, group.words, group.recordings))
    header = (grouping, "WER before", "WER after", "edits", "words", "recordings")
    return table(header, rows, numbers=range(1, 6))


def _worst(plan: RunPlan | None, before: Sequence[Prediction], after: Sequence[Prediction]) -> str:
    chosen = worst_clips(after, WORST)
    if not chosen:
        return "<h3>The worst</h3><p>No recording has an error.</p>"
    earlier = {prediction.id: prediction for prediction in before}
    sounds = players(chosen, plan)
    rows = "".join(
        f"<tr><td>{text(prediction.id)}<br>{text(prediction.speaker)}</td><td>{sound}</td><td>{text(prediction.reference)}</td>"
        f"<td>{marked(earlier[prediction.id]) if prediction.id in earlier else '-'}</td>"
        f"<td>{marked(prediction, earlier.get(prediction.id))}</td></tr>"
        for prediction, sound in zip(chosen, sounds, strict=True)
    )
    number = f" {len(chosen)}" if len(chosen) > 1 else ""
    head = "".join(f"<th>{name}</th>" for name in ("recording", "sound", "said", "heard before", "heard after"))
    note = (
        "Texts are normalised as for the WER. <mark>Marked</mark> words were not said, <del>struck</del> ones "
        "were left out, <ins>underlined</ins> ones were wrong before and are right now."
    )
    return (
        f'<h3>The worst{number}</h3><p>{note}</p><div class="wide"><table class="heard"><thead><tr>{head}</tr>'
        f"</thead><tbody>{rows}</tbody></table></div>"
    )


def marked(prediction: Prediction, before: Prediction | None = None) -> str:
    """Return the predicted words; errors, and corrections of errors in ``before``, are marked."""
    earlier = [(expected, heard) for expected, heard in aligned(before) if expected] if before is not None else []
    wrong_before = {position for position, (expected, heard) in enumerate(earlier) if expected != heard}
    words, position = [], 0
    for expected, heard in aligned(prediction):
        if expected == heard:
            words.append(f"<ins>{text(heard)}</ins>" if position in wrong_before else text(heard))
        else:
            words += [f"<del>{text(expected)}</del>"] if expected else []
            words += [f"<mark>{text(heard)}</mark>"] if heard else []
        position += bool(expected)
    return " ".join(words)


def players(chosen: Sequence[Prediction], plan: RunPlan | None, max_bytes: int = MOST_SOUND) -> list[str]:
    """Return an audio element for each recording, at most ``max_bytes`` in all, or why there is none."""
    remaining, elements = max_bytes, []
    files = local_files(chosen, plan.profile.data.dataset_path if plan is not None else "")
    for prediction in chosen:
        sound = _sound(files.get(prediction.id))
        if isinstance(sound, str):
            elements.append(text(sound))
        elif (remaining := remaining - len(sound) * 4 // 3) < 0:
            elements.append("too much sound for this page")
        else:
            elements.append(player(base64.b64encode(sound).decode()))
    return elements


def local_files(chosen: Sequence[Prediction], dataset: str) -> dict[str, Path]:
    """Return the local files of recordings; those that another machine evaluated are looked up in the data set."""
    files = {
        prediction.id: Path(prediction.audio)
        for prediction in chosen
        if prediction.audio and Path(prediction.audio).is_file()
    }
    if len(files) == len(chosen) or not dataset or not Path(dataset).expanduser().exists():
        return files

    chosen_ids = {prediction.id for prediction in chosen}
    try:
        clips = [clip for split in read_speech(dataset).values() for clip in split if clip.id in chosen_ids]
    except BadInput:  # the data set has changed
        return files
    return {clip.id: clip.audio.path for clip in clips if isinstance(clip.audio, FileSource)} | files


def _sound(path: Path | None) -> bytes | str:
    """Return the beginning of a recording as MP3, or the reason why it is not in the page."""
    if path is None or not path.is_file():
        return "the recording is not on this machine"
    from speech.data.audio import as_mp3  # imports soundfile
    from speech.data.sound_file import AudioError

    try:
        return as_mp3(path, LONGEST)
    except AudioError as error:
        return str(error)
