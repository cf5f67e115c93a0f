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


def change_of(kind: str, one: Sample) -> str:
    """``WER 100.0 % -> 0.0 %``, or ``loss 2.3 -> 0.1``; empty where nothing was measured."""
    if one.last is None:
        return ""
    name = "wer" if kind == "speech" else "loss"
    first = "-" if one.first is None else metric_text(name, one.first)
    return f"{'WER' if kind == 'speech' else name} {first} -> {metric_text(name, one.last)}"


def pieces(kind: str, one: Sample, text: str) -> list[TextPiece]:
    """Return what a model wrote; of a clip each word, with what differs from what was said."""
    if kind != "speech":
        return [(text, "")]
    found: list[TextPiece] = []
    for said, heard in aligned_texts(one.reference, text):
        if said == heard:
            found.append((heard, ""))
        else:
            found += [(said, "left out")] if said else []
            found += [(heard, "wrong")] if heard else []
    return found or [("(nothing)", "")]


def rows(kind: str, one: Sample) -> list[tuple[str, list[TextPiece]]]:
    """Return the texts of a sample by what they are."""
    found: list[tuple[str, list[TextPiece]]] = (
        [("said", [(one.reference or "(nothing)", "")])] if kind == "speech" else []
    )
    if kind == "text":
        found.append(("prompt", [(one.prompt, "")]))
    if kind != "items":
        found += [("before", pieces(kind, one, one.before)), ("after", pieces(kind, one, one.after))]
    if one.reference and kind != "speech":
        found.append(("in fact" if kind == "text" else "is", [(one.reference, "")]))
    return found


def plain(found: list[TextPiece]) -> str:
    """``open *a* (the) door``: what is wrong in stars, what was left out in brackets."""
    marks = {"": "{}", "wrong": "*{}*", "left out": "({})"}
    return " ".join(marks[mark].format(words) for words, mark in found)


def short(name: str, text: str, most: int = _SHORT) -> str:
    """Return a text in one line; of a prompt its end, of all others the beginning."""
    line = " ".join(text.split())
    if len(line) <= most:
        return line
    return "..." + line[3 - most :] if name == "prompt" else line[: most - 3] + "..."


def showcase_lines(run_dir: Path) -> list[str]:
    """Return the samples of a run for a terminal; nothing where it has none."""
    found = showcase_in(run_dir)
    if found is None:
        return []
    how = "; *wrong*, (left out)" if found.kind == "speech" else ""
    lines = [f"{TITLES[found.kind]}, step {found.step}{how}"]
    for one in found.samples:
        lines.append("  " + ", ".join(part for part in (one.why, one.id, change_of(found.kind, one)) if part))
        lines += [f"    {name:7} {short(name, plain(text))}" for name, text in rows(found.kind, one)]
    return [visible(line) for line in lines]


def showcase_document(run_dir: Path) -> dict[str, Any] | None:
    """Return the same for programs, without the sound."""
    found = showcase_in(run_dir)
    if found is None:
        return None
    samples = [one.model_dump(exclude={"sound", "soundless"}) for one in found.samples]
    return {**found.model_dump(), "rule": found.rule, "samples": samples}
