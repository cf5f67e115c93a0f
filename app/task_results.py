"""Seam between what shows results and a task that has more to say of them than metrics.

A plug-in names its :class:`TaskResults` in the entry points ``muster.results``, by the name of the task.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from profiles.errors import BadInput, ExitCode
from profiles.installation import load_plugin, plugins
from training.records.plan import RunPlan

if TYPE_CHECKING:
    from textual.screen import Screen

    from training.tasks.outputs.showcase import Sample


@dataclass(frozen=True, kw_only=True)
class EvaluationRequest:
    """Options of the command ``evaluate``."""

    model: Path
    against: Path | None
    dataset: str
    split: str
    predictions: Path | None
    seed: int
    language: str
    prompt: str
    timestamps: bool | None
    mixed_precision: str
    device: str
    workers: int
    as_json: bool


class TaskResults:
    """Results of a task's models; this base is for a task that has nothing to add to its metrics."""

    usage: Sequence[str] = ()
    """The command that uses a model, and what follows the model in it."""

    def commands(self, run_dir: Path, plan: RunPlan | None) -> list[str]:
        """Return the commands to use the model of a run; with its plan, those that need its data, too."""
        return []

    def dialog(
        self,
        commands: Sequence[str],
        model: Path | None,
        base: str,
        samples: Sequence[Sample],
        report: Callable[[], None],
    ) -> Screen[Any] | None:
        """Return the dialog after a run; ``None``: the one that all runs have.

        Args:
            commands: shown below its actions.
            model: of the run; ``None``: it has none.
            base: what it was trained from: a folder or a name; empty: it was trained from nothing.
            samples: held-out ones of the run, before and after training.
            report: writes and opens the report.
        """
        return None

    def lines(self, run_dir: Path) -> Sequence[str]:
        """Return what a run changed, as lines for a terminal."""
        return ()

    def document(self, run_dir: Path) -> dict[str, Any] | None:
        """Return the analysis of a run's newest evaluation as a JSON document."""
        return None

    def report_sections(self, run_dir: Path, plan: RunPlan | None) -> Iterable[tuple[str, str]]:
        """Return titles and HTML of sections of the report; a section whose HTML is empty is left out."""
        return ()

    def evaluate(self, request: EvaluationRequest) -> ExitCode:
        """Evaluate a model on a data set, and show how it does.

        Raises:
            BadInput: the model or the data cannot be used.
        """
        raise BadInput(f"{request.model}: no installed task evaluates such a model", "name a model of this program")

    def compare(self, references: Sequence[str], seed: int, output: Path, as_json: bool) -> ExitCode:
        """Compare predictions of two runs or files, or of one run before and after training, and show the difference.

        Raises:
            BadInput: one of them has no predictions.
        """
        raise BadInput("no installed task compares models", "compare strategies: --strategies")


def results_of(task: str) -> TaskResults:
    """Return the results of a task; the base for a task without any of its own.

    Raises:
        BadInput: the package that has them is broken.
    """
    classes: list[type[TaskResults]] = [load_plugin(point) for point in plugins("muster.results") if point.name == task]
    return next(iter(classes), TaskResults)()
