"""Two evaluations of the same recordings, side by side."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from app.breakdown_words import breakdown_lines, difference_document, difference_lines, predictions_in
from app.console import command_line, show_json, show_line, visible
from profiles.errors import BadInput, ExitCode
from training.runs import find_run
from training.tasks.error_analysis import difference
from training.tasks.predictions import FOLDER, NAME, Prediction, read_predictions


def compare_command(output: Path, references: Sequence[str], seed: int, as_json: bool) -> ExitCode:
    """Compare two files or runs; of a lone run, its start with its end.

    Raises:
        BadInput: a file or run is not there or holds no predictions, or they have no recording in common.
    """
    if len(references) == 1:
        path = find_run(output, references[0])
        before, after = predictions_in(path)
        if not before or not after:
            raise BadInput(f"{path.name} has no predictions from before and after training", "evaluate two models")
        names = [f"{path.name} before", f"{path.name} after"]
    else:
        names = list(references)
        before, after = (_predictions(output, reference) for reference in references)
    return show_difference(names, before, after, seed, as_json)


def _predictions(output: Path, reference: str) -> list[Prediction]:
    path = Path(reference).expanduser()
    if path.is_file():
        return read_predictions(path)
    file = find_run(output, reference) / FOLDER / NAME
    if not file.is_file():
        hint = f"{command_line('evaluate', reference, 'DATASET', '--predictions', 'FILE')} writes one"
        raise BadInput(f"{reference}: it has no {NAME}", hint)
    return read_predictions(file)


def show_difference(
    names: Sequence[str],
    before: Sequence[Prediction],
    after: Sequence[Prediction],
    seed: int,
    as_json: bool,
    **more: Any,
) -> ExitCode:
    """Write how two models differ, and for whom."""
    found = difference(before, after, seed)
    if as_json:
        show_json({"models": list(names), **difference_document(found), "seed": seed, **more, "exit_code": 0})
        return ExitCode.DONE
    for letter, name in zip("AB", names, strict=True):
        show_line(f"{letter}     {visible(name)}")
    for line in (*difference_lines(found), *breakdown_lines(after, before)):
        show_line(line)
    return ExitCode.DONE
