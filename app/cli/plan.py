"""``plan PROFILE``: which way of training is best on the machines that were measured."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from app.cli.arguments import AllowMissing, HostsOfProfile, Json, ProfileName, Setting, TrustCode, TrustNew
from app.cli.measure import machines_of
from app.cli.terminal import answer, somebody
from app.console import say
from profiles.errors import ExitCode

if TYPE_CHECKING:
    from distributed.planning.cluster import Cluster
    from distributed.planning.document import Planning, Reason
    from distributed.run.planning import PlanOptions
    from profiles.schema import Profile


def plan(
    profile: ProfileName,
    hosts: HostsOfProfile = None,
    figures: Annotated[
        Path | None,
        typer.Option("--figures", metavar="FILE", help="Use these figures of 'measure --out', and no machine."),
    ] = None,
    preference: Annotated[
        Literal["fastest", "closest-to-exact", "least-traffic"], typer.Option("--preference", help="What matters most.")
    ] = "fastest",
    lost_quality: Annotated[
        float,
        typer.Option("--lost-quality", metavar="PERCENT", min=0, max=100, help="Accepted rise of the final loss."),
    ] = 2.0,
    settings: Setting = [],  # noqa: B006 - typer copies it
    explain: Annotated[bool, typer.Option("--explain", help="Show the ranking and all reasons.")] = False,
    allow_missing: AllowMissing = False,
    trust_new: TrustNew = False,
    trust_code: TrustCode = False,
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE", help="Write the plan to this file.")] = None,
    as_json: Json = False,
) -> ExitCode:
    """Predict every way to train a profile on these machines, and show the best one and why."""
    from app.cli.approval import stand_behind_profile
    from app.cli.train_command import merged_overrides
    from app.plan_table import explanation_lines, summary_lines, table_lines
    from distributed.planning.reasons import sentence
    from distributed.run.planning import PlanOptions
    from training.tasks.published_models import usable_profile

    found = usable_profile(profile, merged_overrides(settings), tell=say)
    plan_options = PlanOptions(preference, lost_quality / 100)
    if figures is not None:
        planning = _from_figures(figures, found.profile, hosts, plan_options)
    else:
        stand_behind_profile(found, trusted=trust_code, person=somebody(as_json))
        planning = _from_machines(found.profile, hosts, plan_options, allow_missing, trust_new, somebody(as_json))
    if out is not None:
        planning.write(out)
    document = planning.model_dump(mode="json") | {"sentences": [sentence(one) for one in planning.reasons]}
    table = [*table_lines(planning), "", *explanation_lines(planning)] if explain else summary_lines(planning)
    code = answer(as_json, document, table, ExitCode.NOT_READY if planning.chosen is None else ExitCode.DONE)
    if out is not None and not as_json:
        say(f"written to {out}")
    return code


def _from_figures(figures: Path, profile: Profile, hosts: Path | None, plan_options: PlanOptions) -> Planning:
    from distributed.planning.fitting import Room, fit
    from distributed.planning.job import Figures, job_of
    from distributed.planning.planner import plan as make_plan
    from distributed.planning.planner import signed

    found = Figures.read(figures)
    members = [machine for machine in found.cluster.machines if machine.trains]
    profile = fit(profile, [Room(each.name, each.memory_total, each.device) for each in members], say)
    job = job_of(profile, found.workload, plan_options.preference, plan_options.max_loss_increase)
    cluster, missing = _part(found.cluster, hosts) if hosts is not None else (found.cluster, ())
    planning = signed(make_plan(cluster, job), cluster, profile)
    return planning.model_copy(update={"reasons": (*planning.reasons, *missing)})


def _from_machines(
    profile: Profile, hosts: Path | None, plan_options: PlanOptions, allow_missing: bool, trust_new: bool, person: bool
) -> Planning:
    """Ask the machines, and measure what is not known well enough, as a run would before it starts."""
    from app.cli.distributed import prepare_options
    from distributed.planning.fitting import fit
    from distributed.preparation.members import rooms_of
    from distributed.preparation.prepare import prepare
    from distributed.run.planning import propose
    from training.tasks.early_look import check_data

    check_data(profile)
    options = prepare_options(somebody(), trust_new, allow_missing)
    machines = prepare(machines_of(hosts, profile, person), profile.model.task, options)
    try:
        profile = fit(profile, rooms_of(profile, machines), options.tell)
        return propose(machines, profile, plan_options, options.tell)[0]
    finally:
        for link, _ in machines:
            link.close()


def _part(cluster: Cluster, hosts_file: Path) -> tuple[Cluster, tuple[Reason, ...]]:
    """Return the part of the cluster that a hosts file names, and a reason for each machine that was not measured."""
    from distributed.hosts.file import load_hosts
    from distributed.planning.document import Reason

    wanted = [machine.name.casefold() for machine in load_hosts(hosts_file).machines]
    known = {machine.name: machine.name.casefold().partition(":")[0] for machine in cluster.machines}
    names = tuple(name for name, bare in known.items() if name.casefold() in wanted or bare in wanted)
    measured = {name.casefold() for name in names} | {known[name] for name in names}
    missing = tuple(Reason(code="not-measured", subject=name) for name in sorted(set(wanted) - measured))
    return cluster.only(names), missing
