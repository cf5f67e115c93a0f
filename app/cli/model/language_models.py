"""``evaluate`` for language models: loss and perplexity on the texts, or responses, of a data set."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.cli.terminal import answer, reporting
from app.console import visible
from app.run_view.metrics import metric_text
from profiles.errors import BadInput, ExitCode, counted

if TYPE_CHECKING:
    from training.inference.text_evaluation import TextResult


def refuse_of_speech(options: Sequence[str]) -> None:
    """Refuse options that only apply to speech models.

    Raises:
        BadInput: there are some.
    """
    if options:
        raise BadInput(f"{', '.join(options)}: the model is a language model, which hears nothing", "leave it out")


def evaluate_texts(models: Sequence[Path], dataset: str, split: str, as_json: bool, **options: Any) -> ExitCode:
    """Evaluate language models on one split of a data set, or on a single file.

    ``options``: further ones of :func:`training.inference.text_evaluation.evaluate_text`.

    Raises:
        BadInput: a model, the data set or the split cannot be used.
    """
    results = [_measured(model, dataset, split, **options) for model in models]
    documents = [
        {"model": str(model), "dataset": dataset, **asdict(result)}
        for model, result in zip(models, results, strict=True)
    ]
    document = {**documents[0], **({"against": documents[1]} if len(documents) > 1 else {})}
    dataset_part = Path(dataset).name if Path(dataset).expanduser().is_file() else results[0].split
    lines = [
        line for model, result in zip(models, results, strict=True) for line in _lines(model, result, dataset_part)
    ]
    return answer(as_json, document, lines)


def _measured(model: Path, dataset: str, split: str, **options: Any) -> TextResult:
    with reporting(f"evaluating {model}") as progress:
        from training.inference.text_evaluation import evaluate_text  # imports torch

        return evaluate_text(model, dataset, split, progress=progress, **options)


def _lines(model: Path, result: TextResult, dataset_part: str) -> Iterator[str]:
    figures = (f"{name} {metric_text(name, result.metrics[name])}" for name in ("loss", "perplexity"))
    yield f"{visible(model)}: {', '.join(figures)}"
    amount = f"{counted(round(result.metrics['samples']), 'sample')} of {visible(dataset_part)}"
    tokens = f"{round(result.metrics['tokens']):,} predicted tokens"
    yield f"on {amount}, {tokens}, at most {result.block_size} at once, computed in {result.precision}"
