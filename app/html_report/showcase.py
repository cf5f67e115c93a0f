"""Samples before and after training; the sound is in the page, as MP3, which every browser plays."""

from __future__ import annotations

from app.html_report.sections import text
from app.run_view.tables.showcase import TextPiece, change_of
from app.run_view.tables.showcase import rows as texts_of
from training.tasks.outputs.showcase import Sample, Showcase

_MARKS = {"": "{}", "wrong": "<mark>{}</mark>", "left out": "<del>{}</del>"}
_NOTE = (
    "<mark>Marked</mark> words were not said, <del>struck</del> ones were left out. Texts are as the WER counts them."
)


def showcase(document: Showcase | None) -> str:
    """Return the section of samples before and after training; empty where a run has none."""
    if document is None or not document.samples:
        return ""
    note = f" {_NOTE}" if document.kind == "speech" else ""
    shown = "".join(_sample(document.kind, sample) for sample in document.samples)
    return f'<p>{text(document.rule)}{note}</p><div class="samples">{shown}</div>'


def _sample(kind: str, sample: Sample) -> str:
    figures = change_of(kind, sample).replace("->", "→")
    about = " · ".join(text(field) for field in (sample.id, figures) if field)
    sound = player(sample.sound) if sample.sound else f"<p>{text(sample.soundless)}</p>" if sample.soundless else ""
    texts = "".join(f"<dt>{name}</dt><dd>{_words(pieces)}</dd>" for name, pieces in texts_of(kind, sample))
    heading = f"<h3>{text(sample.why)}</h3>" if sample.why else ""
    return f"<div>{heading}<p>{about}</p>{sound}<dl>{texts}</dl></div>"


def _words(pieces: list[TextPiece]) -> str:
    return " ".join(_MARKS[mark].format(text(words)) for words, mark in pieces)


def player(sound: str) -> str:
    """Return an audio element for an MP3 in base64."""
    return f'<audio controls preload="metadata" src="data:audio/mpeg;base64,{sound}"></audio>'
