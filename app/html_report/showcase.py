"""The part of a report to be shown to friends: a few held-out samples before and after training, clips to be heard."""

from __future__ import annotations

from app.html_report.recordings import player
from app.html_report.sections import text
from app.showcase import Piece, change_of, rows
from training.tasks.showcase import Sample, Showcase

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
    texts = "".join(f"<dt>{name}</dt><dd>{_words(said)}</dd>" for name, said in rows(kind, one))
    heading = f"<h3>{text(one.why)}</h3>" if one.why else ""
    return f"<div>{heading}<p>{about}</p>{sound}<dl>{texts}</dl></div>"


def _words(found: list[Piece]) -> str:
    return " ".join(_MARKS[mark].format(text(words)) for words, mark in found)
