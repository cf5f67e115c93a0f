"""What a few held-out samples say of a run, in words: shared by ``runs show``, the dashboard and the report."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from app.console import visible
from app.metrics import metric_text
from training.tasks.error_analysis import aligned_texts
from training.tasks.predictions import FOLDER
from training.tasks.showcase import NAME, Sample, Showcase, read_showcase

TextPiece = tuple[str, Literal["", "wrong", "left out"]]
"""Words of a text; ``left out``: they were said and not heard."""
TITLES = {
    "speech": "Held-out clips before and after training",
    "text": "Held-out texts continued before and after training",
    "items": "Held-out samples before and after training",
}
_SHORT = 160
"""Characters of a text in a terminal."""


def showcase_in(run_dir: Path) -> Showcase | None:
    """Return what a run shows of its model; ``None``: nothing."""
    return read_showcase(run_dir / FOLDER / NAME)


def change_of(kind: str, sample: Sample) -> str:
    """``WER 100.0 % -> 0.0 %``, or ``loss 2.3 -> 0.1``; empty where nothing was measured."""
    if sample.last is None:
        return ""
    name = "wer" if kind == "speech" else "loss"
    first_value = "-" if sample.first is None else metric_text(name, sample.first)
    return f"{'WER' if kind == 'speech' else name} {first_value} -> {metric_text(name, sample.last)}"


def pieces(kind: str, sample: Sample, text: str) -> list[TextPiece]:
    """Return what a model wrote; of a clip each word, with what differs from what was said."""
    if kind != "speech":
        return [(text, "")]
    words: list[TextPiece] = []
    for expected, heard in aligned_texts(sample.reference, text):
        if expected == heard:
            words.append((heard, ""))
        else:
            words += [(expected, "left out")] if expected else []
            words += [(heard, "wrong")] if heard else []
    return words or [("(nothing)", "")]


def rows(kind: str, sample: Sample) -> list[tuple[str, list[TextPiece]]]:
    """Return the texts of a sample by what they are."""
    labelled: list[tuple[str, list[TextPiece]]] = (
        [("said", [(sample.reference or "(nothing)", "")])] if kind == "speech" else []
    )
    if kind == "text":
        labelled.append(("prompt", [(sample.prompt, "")]))
    if kind != "items":
        labelled += [("before", pieces(kind, sample, sample.before)), ("after", pieces(kind, sample, sample.after))]
    if sample.reference and kind != "speech":
        labelled.append(("in fact" if kind == "text" else "is", [(sample.reference, "")]))
    return labelled


def plain(text_pieces: list[TextPiece]) -> str:
    """``open *a* (the) door``: what is wrong in stars, what was left out in brackets."""
    marks = {"": "{}", "wrong": "*{}*", "left out": "({})"}
    return " ".join(marks[mark].format(words) for words, mark in text_pieces)


def short(name: str, text: str, limit: int = _SHORT) -> str:
    """Return a text in one line; of a prompt its end, of all others the beginning."""
    line = " ".join(text.split())
    if len(line) <= limit:
        return line
    return "..." + line[3 - limit :] if name == "prompt" else line[: limit - 3] + "..."


def showcase_lines(run_dir: Path) -> list[str]:
    """Return the samples of a run for a terminal; nothing where it has none."""
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
    """Return the same for programs, without the sound."""
    showcase = showcase_in(run_dir)
    if showcase is None:
        return None
    samples = [sample.model_dump(exclude={"sound", "soundless"}) for sample in showcase.samples]
    return {**showcase.model_dump(), "rule": showcase.rule, "samples": samples}
