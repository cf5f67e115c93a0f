"""``transcribe`` and ``evaluate``: use what a run has made."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from app.breakdown_words import breakdown_document, breakdown_lines
from app.console import duration_text, say, say_error, show_json, show_line, visible
from app.figures import metric_label, metric_text
from app.progress import PlainProgress
from app.run_state import RunState
from profiles.errors import ExitCode
from training.events import ProgressEvent
from training.runs import find_model
from training.tasks.predictions import write_predictions
from training.tasks.speech_dataset import clips_of_split, is_on_hub, split_to_evaluate

_CUT = " (no end when they were far longer than the longest transcript)"


@dataclass(frozen=True)
class ModelRequest:
    """Which model, where, and how the result is wanted."""

    output: Path
    reference: str
    device: str = "auto"
    language: str = ""
    as_json: bool = False


def transcribe_command(request: ModelRequest, files: Sequence[Path]) -> ExitCode:
    """Write down what is said in ``files``; unreadable ones are named, the others go on.

    Raises:
        BadInput: the model cannot be found or used.
    """
    model = find_model(request.output, request.reference)
    transcripts = []
    if not request.as_json:
        say(f"listening with {model}")  # loading takes seconds, and which run a profile means is worth knowing
    with _only_data_on_stdout():
        from training.tasks.transcription import transcribe  # imports torch

        heard = transcribe(model, files, device=request.device, language=request.language)
    while True:
        with _only_data_on_stdout():
            transcript = next(heard, None)
        if transcript is None:
            break
        transcripts.append(transcript)
        if transcript.error and not request.as_json:
            say_error(f"{transcript.file}: {transcript.error}")
        elif not request.as_json:
            show_line(f"{visible(transcript.file)}: {visible(transcript.text)}")
    code = ExitCode.BAD_INPUT if any(transcript.error for transcript in transcripts) else ExitCode.DONE
    if request.as_json:
        found = [{"file": str(t.file), "text": t.text, "seconds": t.seconds, "error": t.error} for t in transcripts]
        show_json({"model": str(model), "transcripts": found, "exit_code": int(code)})
    return code


def evaluate_command(request: ModelRequest, dataset: str, split: str, out: Path | None = None) -> ExitCode:
    """Measure a model on one split of a data set, or on a lone table.

    Args:
        out: takes what it wrote for every recording, as CSV.

    Raises:
        BadInput: the model, the data set or the split cannot be found or used.
    """
    model = find_model(request.output, request.reference)
    split = split_to_evaluate(dataset, split)
    if not is_on_hub(dataset):
        clips_of_split(dataset, split)  # what is wrong with a table is told before torch is loaded
    with PlainProgress(f"evaluating {model}", RunState()) as progress, _only_data_on_stdout():
        from training.tasks.transcription import evaluate_model  # imports torch

        measured = evaluate_model(
            model,
            dataset,
            split,
            device=request.device,
            language=request.language,
            progress=lambda phase, done, total: progress(ProgressEvent(phase=phase, done=done, total=total)),
        )
    metrics = measured.metrics
    if out is not None:
        write_predictions(out, measured.predictions)
    if request.as_json:
        found = {"model": str(model), "dataset": dataset, "split": split, "metrics": metrics}
        kept = {"predictions": str(out) if out is not None else None}
        show_json({**found, "breakdown": breakdown_document(measured.predictions), **kept, "exit_code": 0})
        return ExitCode.DONE
    counted = {name: metrics[name] for name in ("samples", "hours") if name in metrics}
    for name, value in metrics.items():
        if name not in counted:
            show_line(f"{metric_label(name):5} {metric_text(name, value)}{_CUT if name == 'cut' else ''}")
    length = duration_text(counted["hours"] * 3600) if "hours" in counted else "-"
    part = Path(dataset).name if Path(dataset).expanduser().is_file() else split
    show_line(f"on {counted.get('samples', 0):.0f} recordings of {visible(part)}, {length} of sound")
    for line in breakdown_lines(measured.predictions):
        show_line(line)
    if out is not None:
        say(f"what it wrote for each: {out}")
    return ExitCode.DONE


@contextlib.contextmanager
def _only_data_on_stdout() -> Iterator[None]:
    """Let whatever libraries print go to stderr, and keep their advice to programmers from a person."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    with contextlib.redirect_stdout(sys.stderr):
        yield
