"""A few held-out samples before and after training, as the dashboard shows them."""

from __future__ import annotations

from textual.content import Content

from app.shell.dialogs import Dialog
from app.shell.text import literal
from app.showcase import TITLES, TextPiece, change_of, rows, short
from training.tasks.showcase import Sample, Showcase

_STYLES = {"": "", "wrong": "bold $text-error", "left out": "$text-muted"}


class SamplesDialog(Dialog):
    """All samples of a run; those that are clips can be heard in the report."""

    def __init__(self, found: Showcase) -> None:
        how = " Words that were not said are red, left out ones in brackets." * (found.kind == "speech")
        lines = [literal(found.rule + how, "$text-muted")]
        for one in found.samples:
            lines += [Content(""), _heading(found.kind, one)]
            lines += sample_texts(found.kind, one)
        if any(one.sound for one in found.samples):
            lines += [Content(""), literal("The report (o) plays them.", "$text-muted")]
        super().__init__(TITLES[found.kind], *lines)


def sample_texts(kind: str, one: Sample) -> list[Content]:
    """Return what was said, what the model made of it before, and after."""
    return [_line(name, text) for name, text in rows(kind, one)]


def sample_lines(found: Showcase, width: int, most: int) -> list[Content]:
    """Return the first samples in short: what was said, and what was made of it before and after."""
    lines = []
    for one in found.samples[:most]:
        texts = [(name, text) for name, text in rows(found.kind, one) if name in ("said", "before", "after")]
        lines += [_line(name, text) for name, text in texts] or [_heading(found.kind, one)]
    return [line.truncate(max(1, width), ellipsis=True) for line in lines]


def _heading(kind: str, one: Sample) -> Content:
    words = (one.why, one.id, change_of(kind, one))
    return literal(", ".join(word for word in words if word), "bold")


def _line(name: str, text: list[TextPiece]) -> Content:
    marked = [(f"({words})" if mark == "left out" else words, _STYLES[mark]) for words, mark in text]
    words = [literal(short(name, words, 400), style) for words, style in marked]
    return Content.assemble((f"{name:8}", "$text-muted"), Content(" ").join(words))
