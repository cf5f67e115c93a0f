"""The data of a report, read once from the run folder. What is missing is ``None``, never guessed."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.run_view.member_state import MemberTotals
from app.run_view.plan_vs_actual import PlanPrediction, PlanVsActual, compare_with_plan, comparison_in, plan_prediction
from app.run_view.run_series import RUN
from app.run_view.run_state import RunState, state_of
from app.run_view.showcase import showcase_in
from distributed.planning.documents.document import Planning
from distributed.planning.feedback import PredictionComparison, compare, planning_in
from profiles.errors import BadInput
from training.records.plan import RunMetadata, RunPlan
from training.records.run_folder import RunFolder
from training.records.runs import RunSummary, finished_model, size_of, summarise
from training.tasks.outputs.showcase import Showcase


@dataclass(frozen=True)
class Evidence:
    """The data of one run."""

    path: Path
    metadata: RunMetadata
    summary: RunSummary
    state: RunState
    plan: RunPlan | None
    planning: Planning | None
    """The plan with its predictions; ``None``: the run was started without one, or it cannot be read."""
    comparison: PredictionComparison | None
    """Predicted and measured steps: as written at the end of the run, or computed from the events so far."""
    metrics: Mapping[str, Any]
    model: Path | None
    model_bytes: int
    showcase: Showcase | None

    @property
    def work(self) -> Mapping[int, MemberTotals]:
        """Totals over all starts of every member that took a step."""
        done = {rank: member.total for rank, member in self.state.members.items()}
        return {rank: work for rank, work in done.items() if work.steps}

    @property
    def prediction(self) -> PlanPrediction | None:
        """What the plan predicted; ``None``: nothing."""
        return plan_prediction(self.planning)

    @property
    def plan_vs_actual(self) -> PlanVsActual | None:
        """The run compared with that; ``None``: it is not completed."""
        return compare_with_plan(self.state, self.prediction, self.comparison)

    def name(self, rank: int) -> str:
        """Return the name of a member: its own, the planned one, or its rank."""
        return self.state.name(rank, {host.get("rank", RUN): host.get("name", "") for host in self.metadata.hosts})


def read_evidence(path: Path) -> Evidence:
    """Read a run folder.

    Raises:
        BadInput: there is no run, or its metadata is damaged.
    """
    folder = RunFolder.open(path)
    plan = None
    with contextlib.suppress(BadInput):
        plan = folder.plan()
    planning = planning_in(path)
    metrics = folder.metadata.metrics
    with contextlib.suppress(OSError, ValueError, RecursionError):
        written = json.loads((path / "metrics.json").read_bytes())
        metrics = written if isinstance(written, dict) and written else metrics
    best = planning.best if planning else None
    model = finished_model(path)
    return Evidence(
        path=path,
        metadata=folder.metadata,
        summary=summarise(path),
        state=state_of(folder),
        plan=plan,
        planning=planning,
        comparison=comparison_in(metrics) or (compare(best, folder.events()) if best else None),
        metrics=metrics,
        model=model,
        model_bytes=size_of(model) if model else 0,
        showcase=showcase_in(path),
    )
