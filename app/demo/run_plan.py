"""The plan of a scripted run, made by the real planner from the scripted figures."""

from __future__ import annotations

from collections.abc import Sequence

from app.demo.figures import cluster_of, job_for
from app.demo.job import demo_profile
from app.demo.machines import HUB_PORT, ScriptedMachine, scripted_machine
from distributed.planning.cluster import Cluster
from distributed.planning.document import Candidate, Planning
from distributed.planning.job import Job
from distributed.planning.planner import plan as rank_ways
from distributed.planning.reasons import settings_of
from profiles.schema import Profile
from training.plan import MemberPlan, RunPlan


def demo_planning(machines: Sequence[ScriptedMachine]) -> tuple[Planning, Cluster, Job, Profile]:
    """Rank all ways to do the scripted job on these machines."""
    profile = demo_profile()
    cluster, job = cluster_of(machines), job_for(profile, "fastest")
    return rank_ways(cluster, job, hubs=[cluster.here]), cluster, job, profile


def demo_plan(machines: Sequence[ScriptedMachine], identifier: str) -> tuple[RunPlan, Planning]:
    """Return the best plan of a run of the scripted job, and what it was chosen from."""
    planning, cluster, job, profile = demo_planning(machines)
    assert planning.best is not None
    return run_plan(planning, planning.best, cluster, job, profile, identifier)


def run_plan(
    planning: Planning, chosen: Candidate, cluster: Cluster, job: Job, profile: Profile, identifier: str
) -> tuple[RunPlan, Planning]:
    """Return the plan of a run as a candidate describes it: options, shares, members, hub."""
    settings = settings_of(chosen, cluster, job)
    known = chosen in planning.ranking
    ranking = planning.ranking if known else (chosen, *planning.ranking)
    place = planning.ranking.index(chosen) if known else 0
    own = planning.model_copy(update={"settings": settings, "ranking": ranking, "chosen": place})
    hub = scripted_machine(settings.hub or settings.members[0].name)
    plan = RunPlan(
        run_id=identifier,
        profile=own.overlay(profile),
        members=tuple(
            MemberPlan(
                rank=rank,
                name=member.name,
                device=scripted_machine(member.name).device,
                batch_size=member.batch_size,
            )
            for rank, member in enumerate(settings.members)
        ),
        engine=settings.engine,
        hub_address=f"{hub.address}:{HUB_PORT}",
    )
    return plan, own
