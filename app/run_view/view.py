"""A run at one moment, with what its plan promised: what dashboard, report, ``runs show`` and end texts render."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from app.console import command_about, is_of_tour
from app.run_view.plan_vs_actual import PlanPrediction, PlanVsActual, compare_with_plan, comparison_in, plan_prediction
from app.run_view.run_state import RunState, at_its_end, state_of
from app.run_view.tables.showcase import showcase_in
from distributed.planning.documents.document import Candidate, Planning
from distributed.planning.feedback import PredictionComparison, compare, planning_in
from distributed.planning.run_time import RunTime, promised_time, took_text
from profiles.errors import BadInput
from profiles.quantities import throughput_text
from training.records.plan import RunMetadata, RunPlan
from training.records.run_folder import RunFolder
from training.records.runs import finished_model
from training.run.local_plan import trains_objects
from training.run.outcome import RunOutcome
from training.tasks.outputs.showcase import Showcase


@dataclass(frozen=True)
class RunView:
    """A run at one moment."""

    path: Path
    state: RunState = field(default_factory=RunState)
    now: float = 0.0
    """Current Unix time by the clock of the events."""
    plan: RunPlan | None = None
    metadata: RunMetadata | None = None
    planning: Planning | None = None
    """The plan with its predictions; ``None``: the run was started without one, or it cannot be read."""
    live: bool = True
    """Whether a process works on the run."""
    replayed: bool = False
    """Whether it is played again: nothing can be done about it."""
    metrics: Mapping[str, Any] = field(default_factory=dict)
    """Figures that were written at the end of the run."""
    comparison: PredictionComparison | None = None
    """Predicted and measured steps; ``None``: the run was too short, or has not ended."""
    showcase: Showcase | None = None
    """Held-out samples of the run; ``None``: there are none yet."""

    @property
    def expected(self) -> int:
        """Number of members: the planned ones, and those that came later."""
        hosts = self.metadata.hosts if self.metadata else ()
        return max(self.plan.world_size if self.plan else len(hosts), len(self.state.members))

    @property
    def model(self) -> Path | None:
        """Folder of the model that the run has left; ``None``: there is none."""
        return finished_model(self.path)

    @property
    def launched(self) -> bool:
        """Whether its members run a user's script, which reports no steps and no loss."""
        return self.plan is not None and self.plan.is_script

    @property
    def planned(self) -> Candidate | None:
        """The candidate plan that this run follows; ``None`` where it has no prediction."""
        best = self.planning.best if self.planning else None
        return best if best is not None and best.predicted else None

    @property
    def time(self) -> RunTime | None:
        """The time that the plan promised, and that of the best single machine; ``None``: nothing was predicted."""
        return promised_time(self.planning)

    @property
    def prediction(self) -> PlanPrediction | None:
        """What the plan predicted; ``None``: nothing."""
        return plan_prediction(self.planning)

    @property
    def plan_vs_actual(self) -> PlanVsActual | None:
        """The run compared with that; ``None``: it is not completed."""
        return compare_with_plan(self.state, self.prediction, self.comparison)

    @property
    def seconds(self) -> float:
        """How long the run took, or has taken so far: the time in its attempts."""
        written = None if self.live else self.metrics.get("seconds")
        return float(written) if isinstance(written, (int, float)) and written > 0 else self.state.seconds(self.now)

    @property
    def took(self) -> str:
        """How long the run took beside its promise, and why it did not meet it."""
        return str(self.plan_vs_actual or took_text(self.seconds, self.time))

    @property
    def whole_rate(self) -> str:
        """Samples per second over the whole run; empty where they were not measured."""
        rate = self.metrics.get("samples_per_second")
        return throughput_text(rate) if isinstance(rate, (int, float)) and rate else ""

    @property
    def resume_command(self) -> str:
        """The command that continues the run from its snapshots, or what to call in its script; empty: it cannot be
        resumed.

        In the tour's nothing trained: it is recorded.
        """
        plan = self.plan
        if plan is None or plan.is_script or is_of_tour(plan.profile.name):
            return ""
        if self.state.resume_step is None:
            return ""
        if trains_objects(plan):
            return f'fit(resume="{self.path}")'
        command = command_about(self.path, "distributed-train", "--resume")
        return f"{command} --allow-missing" if self.state.lost and len(plan.machines) > 1 else command

    def hint_for(self, message: str) -> str:
        """Return the hint of the run's newest error with this message; empty: none."""
        return next((error.hint for error in reversed(self.state.errors) if error.text == message and error.hint), "")

    def name(self, rank: int) -> str:
        """Return the name of a member: its own, the planned one, or its rank."""
        members = self.plan.members if self.plan else ()
        planned = {rank: member.name for rank, member in enumerate(members)}
        hosts = self.metadata.hosts if self.metadata else ()
        return self.state.name(rank, {host.get("rank", -1): host.get("name", "") for host in hosts} | planned)


@dataclass(frozen=True, kw_only=True)
class EndedRun(RunView):
    """A run whose newest attempt has ended."""

    plan: RunPlan
    outcome: RunOutcome

    @classmethod
    def of(cls, outcome: RunOutcome, plan: RunPlan, state: RunState) -> EndedRun:
        """Return the run of a plan and an outcome; ``state``: after its last event."""
        return cls(
            path=outcome.run_dir,
            state=at_its_end(state, outcome.status, outcome.message),
            plan=plan,
            planning=planning_in(outcome.run_dir),
            live=False,
            metrics=outcome.metrics,
            comparison=comparison_in(outcome.metrics),
            outcome=outcome,
        )

    @property
    def resume_command(self) -> str:
        return super().resume_command if self.outcome.resumable else ""


def read_view(path: Path) -> RunView:
    """Read a run folder.

    Raises:
        BadInput: there is no run, or its metadata is damaged.
    """
    folder, plan, planning = RunFolder.open(path), None, planning_in(path)
    with contextlib.suppress(BadInput):
        plan = folder.plan()
    metrics = folder.metadata.metrics
    best = planning.best if planning else None
    return RunView(
        path=path,
        state=state_of(folder),
        now=time.time(),
        plan=plan,
        metadata=folder.metadata,
        planning=planning,
        live=folder.live,
        metrics=metrics,
        comparison=comparison_in(metrics) or (compare(best, folder.events()) if best else None),
        showcase=showcase_in(path),
    )
