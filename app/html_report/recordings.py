"""What a model makes of data that it was not trained on: a few samples before and after training, to be shown to
friends; for whom it errs, what it takes for what, and the worst ten recordings to hear.

The sound is in the page, as MP3, which every browser plays; it is cut and bounded, so that the page can be mailed.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from pathlib import Path

from app.figures import WAYS, changed_lines
from app.html_report.evidence import Evidence
from app.html_report.sections import table, text
from app.metrics import metric_text
from app.showcase import TextPiece, change_of
from app.showcase import rows as texts_of
from profiles.errors import BadInput
from training.plan import RunPlan
from training.tasks.error_analysis import EvaluationSlice, aligned, confusions, worst
from training.tasks.predictions import Prediction
from training.tasks.showcase import Sample, Showcase
from training.tasks.speech_clips import FileSource
from training.tasks.speech_dataset import read_speech

WORST = 10
LONGEST = 30.0
"""Seconds of one recording in the page."""
MOST_SOUND = 300_000
"""Bytes of sound in this part, so that a page stays below 2 MB."""
_SHOWN_PARTS = 60
_MARKS = {"": "{}", "wrong": "<mark>{}</mark>", "left out": "<del>{}</del>"}
_NOTE = (
    "<mark>Marked</mark> words were not said, <del>struck</del> ones were left out. Texts are as the WER counts them."
)


def showcase(found: Showcase | None) -> str:
    """Return the section; empty where a run shows nothing."""
    if found is None or not found.samples:
        return ""
    note = f" {_NOTE}" if found.kind == "speech" else ""
    shown = "".join(_sample(found.kind, one) for one in found.samples)
    return f'<p>{text(found.rule)}{note}</p><div class="samples">{shown}</div>'


def _sample(kind: str, one: Sample) -> str:
    figures = change_of(kind, one).replace("->", "→")
    about = " · ".join(text(part) for part in (one.id, figures) if part)
    sound = player(one.sound) if one.sound else f"<p>{text(one.soundless)}</p>" if one.soundless else ""
    texts = "".join(f"<dt>{name}</dt><dd>{_words(said)}</dd>" for name, said in texts_of(kind, one))
    heading = f"<h3>{text(one.why)}</h3>" if one.why else ""
    return f"<div>{heading}<p>{about}</p>{sound}<dl>{texts}</dl></div>"


def _words(found: list[TextPiece]) -> str:
    return " ".join(_MARKS[mark].format(text(words)) for words, mark in found)


def recordings(evidence: Evidence) -> str:
    """Return the section; empty where nothing was kept of what a model wrote."""
    before, after = evidence.predictions
    if not after:
        return ""
    shown = [f"<p>{text(line)}</p>" for line in changed_lines(before, after)]
    for way, divide in WAYS.items():
        parts, earlier = divide(after), {part.name: part for part in divide(before)}
        if len(parts) > 1:
            shown.append(f"<h3>By {way}</h3>{_parts(way, parts[:_SHOWN_PARTS], earlier)}")
            left = len(parts) - _SHOWN_PARTS
            shown.append(f"<p>{left} more, none of them worse.</p>" if left > 0 else "")
    if found := confusions(after, 20):
        rows = [(one.said or "(nothing)", one.heard or "(nothing)", one.times) for one in found]
        shown.append(f"<h3>Words heard as others</h3>{table(('said', 'heard', 'times'), rows, numbers=(2,))}")
    return "".join(shown) + _worst(evidence, before, after)


def _parts(way: str, parts: Sequence[EvaluationSlice], before: Mapping[str, EvaluationSlice]) -> str:
    rows = []
    for part in parts:
        first = before.get(part.name)
        course = (metric_text("wer", first.wer) if first else "-", metric_text("wer", part.wer))
        rows.append((part.name or "not told", *course, part.edits, part.words, part.recordings))
    header = (way, "WER before", "WER after", "edits", "words", "recordings")
    return table(header, rows, numbers=range(1, 6))


def _worst(evidence: Evidence, before: Sequence[Prediction], after: Sequence[Prediction]) -> str:
    chosen = worst(after, WORST)
    if not chosen:
        return "<h3>The worst</h3><p>No recording has an error.</p>"
    earlier = {one.id: one for one in before}
    sounds = players(chosen, evidence.plan)
    rows = "".join(
        f"<tr><td>{text(one.id)}<br>{text(one.speaker)}</td><td>{sound}</td><td>{text(one.reference)}</td>"
        f"<td>{marked(earlier[one.id]) if one.id in earlier else '-'}</td>"
        f"<td>{marked(one, earlier.get(one.id))}</td></tr>"
        for one, sound in zip(chosen, sounds, strict=True)
    )
    head = "".join(f"<th>{name}</th>" for name in ("recording", "sound", "said", "heard before", "heard after"))
    note = (
        "Texts are normalised as for the WER. <mark>Marked</mark> words were not said, <del>struck</del> ones "
        "were left out, <ins>underlined</ins> ones were wrong before and are right now."
    )
    return (
        f'<h3>The worst {len(chosen)}</h3><p>{note}</p><div class="wide"><table class="heard"><thead><tr>{head}</tr>'
        f"</thead><tbody>{rows}</tbody></table></div>"
    )


def marked(one: Prediction, before: Prediction | None = None) -> str:
    """Return the heard words with what differs from the said ones, and with what ``before`` had wrong, marked."""
    earlier = [(said, heard) for said, heard in aligned(before) if said] if before is not None else []
    wrong_before = {place for place, (said, heard) in enumerate(earlier) if said != heard}
    words, place = [], 0
    for said, heard in aligned(one):
        if said == heard:
            words.append(f"<ins>{text(heard)}</ins>" if place in wrong_before else text(heard))
        else:
            words += [f"<del>{text(said)}</del>"] if said else []
            words += [f"<mark>{text(heard)}</mark>"] if heard else []
        place += bool(said)
    return " ".join(words)


def players(chosen: Sequence[Prediction], plan: RunPlan | None, most: int = MOST_SOUND) -> list[str]:
    """Return an audio element for each recording, ``most`` bytes in all, or why there is none."""
    room, elements = most, []
    files = _files(chosen, plan)
    for one in chosen:
        sound = _sound(files.get(one.id))
        if isinstance(sound, str):
            elements.append(text(sound))
        elif (room := room - len(sound) * 4 // 3) < 0:
            elements.append("too much sound for this page")
        else:
            elements.append(player(base64.b64encode(sound).decode()))
    return elements


def player(sound: str) -> str:
    """Return an audio element for an MP3 in base64."""
    return f'<audio controls preload="metadata" src="data:audio/mpeg;base64,{sound}"></audio>'


def _files(chosen: Sequence[Prediction], plan: RunPlan | None) -> dict[str, Path]:
    """Return where the recordings are here: those of another machine are looked for in this one's data set."""
    found = {one.id: Path(one.audio) for one in chosen if one.audio and Path(one.audio).is_file()}
    dataset = plan.profile.data.dataset_path if plan is not None else ""
    if len(found) == len(chosen) or not dataset or not Path(dataset).expanduser().exists():
        return found

    wanted = {one.id for one in chosen}
    try:
        clips = [clip for split in read_speech(dataset).values() for clip in split if clip.id in wanted]
    except BadInput:  # the data set is no longer what it was
        return found
    return {clip.id: clip.audio.path for clip in clips if isinstance(clip.audio, FileSource)} | found


def _sound(path: Path | None) -> bytes | str:
    """Return the beginning of a recording as MP3, or why it is not in the page."""
    if path is None or not path.is_file():
        return "the recording is not on this machine"
    from training.tasks.audio import as_mp3  # imports soundfile
    from training.tasks.sound_file import AudioError

    try:
        return as_mp3(path, LONGEST)
    except AudioError as error:
        return str(error)
