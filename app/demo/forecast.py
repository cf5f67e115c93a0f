"""The Strategy screen of scripted machines: the real planner on scripted figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from app.demo.figures import cluster_of, job_for
from app.demo.job import demo_profile
from app.demo.machines import ScriptedMachine
from app.wizard.forecasting import MOST_ROWS, row_of
from app.wizard.services import JobAnswers
from app.wizard.state import CandidateRow, Status, Strategy
from distributed.planning.cluster import Cluster
from distributed.planning.document import Candidate, Choice, Planning
from distributed.planning.job import Job, Preference
from distributed.planning.planner import plan as rank_ways
from distributed.planning.planner import predict
from distributed.planning.words import sentence
from profiles.schema import Profile


@dataclass(frozen=True)
class Forecast:
    """What a plan is made of."""

    profile: Profile
    cluster: Cluster
    job: Job
    planning: Planning

    def candidate(self, row: CandidateRow | None) -> Candidate | None:
        """Return the candidate of a row, with the row's interval; of none: the chosen one."""
        if row is None:
            return self.planning.best
        choice = self.planning.ranking[row.index].choice
        if row.interval == choice.interval:
            return self.planning.ranking[row.index]
        return predict(self.cluster, self.job, _at(choice, row.interval))


def forecast(machines: Sequence[ScriptedMachine], answers: JobAnswers, preference: Preference) -> Forecast:
    """Rank all ways to train the scripted job on these machines.

    Raises:
        BadInput: an option does not fit.
    """
    profile = demo_profile(dict(answers.options))
    cluster, job = cluster_of(machines), job_for(profile, preference)
    return Forecast(profile, cluster, job, rank_ways(cluster, job, hubs=[cluster.here]))


def strategy_of(found: Forecast) -> Strategy:
    """Return what the screen shows: the best hub of every way, the best first."""
    planning = found.planning
    rows: dict[object, CandidateRow] = {}
    for index, candidate in enumerate(planning.ranking):
        choice = candidate.choice
        key = (choice.strategy, choice.codec, choice.engine, choice.members)
        if key not in rows and len(rows) < MOST_ROWS:
            rows[key] = row_of(candidate, index, recommended=index == planning.chosen)
    reasons = tuple(sentence(reason) for reason in planning.reasons)
    if planning.chosen is None:
        return Strategy(tuple(rows.values()), reasons, status=Status.FAILED, cause="nothing fits", planning=found)
    return Strategy(tuple(rows.values()), reasons, recommended=planning.chosen, status=Status.OK, planning=found)


def with_interval(found: Forecast, index: int, steps: int) -> CandidateRow:
    """Return a row with another H.

    Raises:
        BadInput: there is no such row, or that H cannot be.
    """
    candidate = found.planning.ranking[index]
    moved = predict(found.cluster, found.job, _at(candidate.choice, steps))
    row = row_of(moved, index, recommended=index == found.planning.chosen)
    return replace(row, best_interval=candidate.choice.interval)


def _at(choice: Choice, steps: int) -> Choice:
    """Return a choice with another H; the overlap stays below it."""
    steps = max(1, steps)
    return choice.model_copy(update={"interval": steps, "delay": min(choice.delay, steps - 1)})
