"""A run beside its prediction: what the run folder keeps of the plan, and what is learnt from it at the end."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from distributed.planning.document import Planning, read_planning, write_planning
from distributed.planning.feedback import compare, remember
from distributed.planning.job import Figures, read_figures, write_figures
from profiles.errors import MusterError
from training.run_folder import RunFolder

PLANNING = "planning.json"
"""What a run's plan was chosen from, where there was a choice."""
FIGURES = "figures.json"
"""What was measured for it."""


def keep_planning(folder: Path, planning: Planning, figures: Figures | None) -> None:
    """Write a plan, and the figures it stands on, into a run folder.

    Raises:
        BadInput: they cannot be written.
    """
    write_planning(folder / PLANNING, planning)
    if figures is not None:
        write_figures(folder / FIGURES, figures)


def prediction_metrics(folder: RunFolder) -> dict[str, Any]:
    """Return ``{"prediction": ...}`` for ``metrics.json``, and remember it for the next plan on these machines.

    Nothing where nothing was predicted, or the run was too short to tell.
    """
    with contextlib.suppress(MusterError):  # a damaged document is no reason to lose a run's end
        planning = read_planning(folder.path / PLANNING) if (folder.path / PLANNING).is_file() else None
        if planning is None or planning.best is None or not planning.best.predicted:
            return {}
        comparison = compare(planning.best, folder.events(), planning.job.trainable)
        if comparison is None:
            return {}
        if (folder.path / FIGURES).is_file():
            remember(read_figures(folder.path / FIGURES).cluster, comparison)
        return {"prediction": comparison.document()}
    return {}
