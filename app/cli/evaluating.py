"""``evaluate``: how well a model hears, for whom, and whether better than another one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.breakdown_words import breakdown_document, breakdown_lines
from app.cli.comparing import show_difference
from app.cli.models import ModelRequest, only_data_on_stdout
from app.console import duration_text, say, show_json, show_line, visible
from app.figures import metric_label, metric_text
from app.progress import PlainProgress
from app.run_state import RunState
from profiles.counts import counted
from profiles.errors import ExitCode
from training.events import ProgressEvent
from training.run_files import try_to_write
from training.runs import find_model
from training.tasks.predictions import write_predictions
from training.tasks.speech_dataset import clips_of_split, is_on_hub, split_to_evaluate

if TYPE_CHECKING:
    from training.tasks.whisper.evaluation import Measured

_CUT = " (cut off: far longer than the longest transcript)"


@dataclass(frozen=True)
class Recordings:
    """What a model is measured on, and what becomes of it."""

    dataset: str
    split: str
    out: Path | None = None
    """Takes what the model wrote for every recording, as CSV."""
    against: str = ""
    """Another model, measured on the same."""
    seed: int = 0

    @property
    def part(self) -> str:
        """What is measured on, for a person."""
        return Path(self.dataset).name if Path(self.dataset).expanduser().is_file() else self.split


def evaluate_command(request: ModelRequest, dataset: str, split: str, **more: Any) -> ExitCode:
    """Measure a model on one split of a data set, or on a lone table; of two models, how they differ.

    Raises:
        BadInput: a model, the data set or the split cannot be found or used.
    """
    wanted = Recordings(dataset, split_to_evaluate(dataset, split), **more)
    model = find_model(request.output, request.reference)
    other = find_model(request.output, wanted.against) if wanted.against else None
    if not is_on_hub(dataset):
        clips_of_split(dataset, wanted.split)  # what is wrong with a table is told before torch is loaded
    if wanted.out is not None:
        try_to_write(wanted.out.parent, "--predictions")
    measured = _measured(model, request, wanted)
    if wanted.out is not None:
        write_predictions(wanted.out, measured.predictions, 0o644)
    if other is not None:
        first = _measured(other, request, wanted)
        names, figures = [str(other), str(model)], [first.metrics, measured.metrics]
        return show_difference(
            names, first.predictions, measured.predictions, wanted.seed, request.as_json, metrics=figures
        )
    _show(request, model, wanted, measured)
    return ExitCode.DONE


def _measured(model: Path, request: ModelRequest, wanted: Recordings) -> Measured:
    with PlainProgress(f"evaluating {model}", RunState()) as progress, only_data_on_stdout():
        from training.tasks.whisper.evaluation import evaluate_model  # imports torch

        return evaluate_model(
            model,
            wanted.dataset,
            wanted.split,
            device=request.device,
            language=request.language,
            prompt=request.prompt,
            timestamps=request.timestamps,
            progress=lambda phase, done, total: progress(ProgressEvent(phase=phase, done=done, total=total)),
        )


def _show(request: ModelRequest, model: Path, wanted: Recordings, measured: Measured) -> None:
    metrics = measured.metrics
    if request.as_json:
        found = {"model": str(model), "dataset": wanted.dataset, "split": wanted.split, "metrics": metrics}
        kept = {"predictions": str(wanted.out) if wanted.out is not None else None}
        show_json({**found, "breakdown": breakdown_document(measured.predictions), **kept, "exit_code": 0})
        return
    for name, value in metrics.items():
        if name not in ("samples", "hours"):
            show_line(f"{metric_label(name):5} {metric_text(name, value)}{_CUT if name == 'cut' else ''}")
    length = duration_text(metrics["hours"] * 3600)
    show_line(f"on {counted(round(metrics['samples']), 'recording')} of {visible(wanted.part)}, {length} of sound")
    for line in breakdown_lines(measured.predictions):
        show_line(line)
    if wanted.out is not None:
        say(f"text of each clip: {wanted.out}")
