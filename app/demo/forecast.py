"""The Strategy screen of scripted machines: the real planner on scripted figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from app.demo.figures import cluster_of, job_for
from app.demo.job import demo_profile
from app.demo.machines import ScriptedMachine
from app.wizard.forecasting import ranked, row_of
from app.wizard.forecasting import with_interval as at_interval
from app.wizard.services import JobAnswers
from app.wizard.state import CandidateRow, Strategy
from distributed.planning.cluster import Cluster
from distributed.planning.document import Candidate, Planning
from distributed.planning.job import Job, Preference
from distributed.planning.planner import plan as rank_ways
from distributed.planning.planner import predict
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
        return predict(self.cluster, self.job, at_interval(choice, row.interval))


def forecast(machines: Sequence[ScriptedMachine], answers: JobAnswers, preference: Preference) -> Forecast:
    """Rank all ways to train the scripted job on these machines.

    Raises:
        BadInput: an option does not fit.
    """
    profile = demo_profile(dict(answers.options))
    cluster, job = cluster_of(machines), job_for(profile, preference)
    return Forecast(profile, cluster, job, rank_ways(cluster, job, hubs=[cluster.here]))


def strategy_of(found: Forecast) -> Strategy:
    """Return what the screen shows."""
    return ranked(found.planning, found)


def with_interval(found: Forecast, index: int, steps: int) -> CandidateRow:
    """Return a row with another H.

    Raises:
        BadInput: there is no such row, or that H cannot be.
    """
    choice = at_interval(found.planning.ranking[index].choice, steps)
    return row_of(found.planning, index, predict(found.cluster, found.job, choice))
