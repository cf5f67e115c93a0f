"""Held-out samples before and after training, as text: shared by ``runs show``, the dashboard and the report."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Literal

from app.console import visible
from app.run_view.metrics import metric_text
from training.tasks.outputs.alignment import aligned_texts
from training.tasks.outputs.predictions import FOLDER
from training.tasks.outputs.showcase import NAME, Sample, Showcase, read_showcase

TextPiece = tuple[str, Literal["", "wrong", "left out"]]
"""Words of a text and their mark; ``left out``: they are in the reference only."""
TITLES = {
    "speech": "Held-out clips before and after training",
    "text": "Held-out texts continued before and after training",
    "items": "Held-out samples before and after training",
}
UNTRAINED = "(untrained)"
"""Stands for the output before training, where training began from nothing."""
_SHORT = 160
"""Characters of a text in a terminal."""


def showcase_in(run_dir: Path) -> Showcase | None:
    """Return the samples of a run; ``None``: it has none."""
    return read_showcase(run_dir / FOLDER / NAME)


def change_of(kind: str, sample: Sample) -> str:
    """Return ``WER 100.0 % -> 0.0 %``, or ``loss 2.3 -> 0.1``; empty where it was not measured."""
    if sample.last is None:
        return ""
    name = "wer" if kind == "speech" else "loss"
    first_value = "-" if sample.first is None else metric_text(name, sample.first)
    return f"{'WER' if kind == 'speech' else name} {first_value} -> {metric_text(name, sample.last)}"


def pieces(kind: str, sample: Sample, text: str) -> list[TextPiece]:
    """Return a model's output in pieces; that of a speech model word by word, aligned with the reference."""
    if kind != "speech" or text == UNTRAINED:
        return [(text, "")]
    if not sample.id:  # nobody wrote what was said
        return [(text or "(nothing)", "")]
    words: list[TextPiece] = []
    for expected, heard in aligned_texts(sample.reference, text, _folded):
        if _folded(expected) == _folded(heard):
            words.append((heard, ""))
        else:
            words += [(expected, "left out")] if expected else []
            words += [(heard, "wrong")] if heard else []
    return words or [("(nothing)", "")]


def _folded(word: str) -> str:
    """Return a word without capitals and the punctuation around it, which are no errors of a transcript."""
    return re.sub(r"^\W+|\W+$", "", word.casefold()) or word


def rows(kind: str, sample: Sample) -> list[tuple[str, list[TextPiece]]]:
    """Return the labelled texts of a sample: reference, prompt, before, after."""
    labelled: list[tuple[str, list[TextPiece]]] = (
        [("said", [(sample.reference or "(nothing)", "")])] if kind == "speech" and sample.id else []
    )
    if kind == "text":
        labelled.append(("prompt", [(sample.prompt, "")]))
    if kind != "items":
        labelled += [("before", pieces(kind, sample, sample.before)), ("after", pieces(kind, sample, sample.after))]
    if sample.reference and kind != "speech":
        labelled.append(("in fact" if kind == "text" else "is", [(sample.reference, "")]))
    return labelled


def plain(text_pieces: list[TextPiece]) -> str:
    """Return ``open *a* (the) door``: wrong words in stars, words left out in brackets."""
    marks = {"": "{}", "wrong": "*{}*", "left out": "({})"}
    return " ".join(marks[mark].format(words) for words, mark in text_pieces)


def short(name: str, text: str, limit: int = _SHORT) -> str:
    """Return a text in one line, cut at the end, or for a prompt at the beginning."""
    line = " ".join(text.split())
    if len(line) <= limit:
        return line
    return "..." + line[3 - limit :] if name == "prompt" else line[: limit - 3] + "..."


def showcase_lines(run_dir: Path) -> list[str]:
    """Return the samples of a run as lines for a terminal; empty where it has none."""
    showcase = showcase_in(run_dir)
    if showcase is None:
        return []
    legend = "; *wrong*, (left out)" if showcase.kind == "speech" else ""
    lines = [f"{TITLES[showcase.kind]}, step {showcase.step}{legend}"]
    for sample in showcase.samples:
        lines.append(
            "  " + ", ".join(field for field in (sample.why, sample.id, change_of(showcase.kind, sample)) if field)
        )
        lines += [f"    {name:7} {short(name, plain(text))}" for name, text in rows(showcase.kind, sample)]
    return [visible(line) for line in lines]


def showcase_document(run_dir: Path) -> dict[str, Any] | None:
    """Return the samples as a JSON document, without the sound; ``None``: there are none."""
    showcase = showcase_in(run_dir)
    if showcase is None:
        return None
    samples = [sample.model_dump(exclude={"sound", "soundless"}) for sample in showcase.samples]
    return {**showcase.model_dump(), "rule": showcase.rule, "samples": samples}
