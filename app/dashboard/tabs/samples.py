"""Held-out samples before and after training, for the dashboard."""

from __future__ import annotations

from textual.content import Content

from app.run_view.tables.showcase import TITLES, TextPiece, change_of, rows, short
from app.shell.dialogs import Dialog
from app.shell.text import literal
from training.tasks.outputs.showcase import Sample, Showcase

_LEGEND = "Words that were not said stand in asterisks, left out ones in brackets."  # seen without colours, too
_MARKED = {"wrong": "*{}*", "left out": "({})"}
_STYLES = {"": "", "wrong": "bold $text-error", "left out": "$text-muted"}


class SamplesDialog(Dialog):
    """All samples of a run; the report plays those with sound."""

    def __init__(self, showcase: Showcase) -> None:
        legend = f" {_LEGEND}" * (showcase.kind == "speech")
        lines = [literal(showcase.rule + legend, "$text-muted")]
        for sample in showcase.samples:
            lines += [Content(""), _heading(showcase.kind, sample)]
            lines += sample_texts(showcase.kind, sample)
        if any(sample.sound for sample in showcase.samples):
            lines += [Content(""), literal("The report (o) plays them.", "$text-muted")]
        super().__init__(TITLES[showcase.kind], *lines)


def sample_texts(kind: str, sample: Sample) -> list[Content]:
    """Return the lines of a sample: reference or prompt, and the outputs before and after training."""
    return [_line(name, text) for name, text in rows(kind, sample)]


def marked_texts(kind: str, sample: Sample) -> list[Content]:
    """Return the same, with what marked words mean where some are."""
    marked = kind == "speech" and any(mark for _, text in rows(kind, sample) for _, mark in text)
    return [*sample_texts(kind, sample), *([Content(""), literal(_LEGEND, "$text-muted")] if marked else [])]


def sample_lines(showcase: Showcase, width: int, max_samples: int) -> list[Content]:
    """Return the first samples in short: reference, and the outputs before and after training."""
    lines = []
    for sample in showcase.samples[:max_samples]:
        texts = [(name, text) for name, text in rows(showcase.kind, sample) if name in ("said", "before", "after")]
        lines += [_line(name, text) for name, text in texts] or [_heading(showcase.kind, sample)]
    return [line.truncate(max(1, width), ellipsis=True) for line in lines]


def _heading(kind: str, sample: Sample) -> Content:
    words = (sample.why, sample.id, change_of(kind, sample))
    return literal(", ".join(word for word in words if word), "bold")


def _line(name: str, text: list[TextPiece]) -> Content:
    marked = [(_MARKED.get(mark, "{}").format(words), _STYLES[mark]) for words, mark in text]
    words = [literal(short(name, words, 400), style) for words, style in marked]
    return Content.assemble((f"{name:8}", "$text-muted"), Content(" ").join(words))
