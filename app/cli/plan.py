"""``plan PROFILE``: which way of training is best on the machines that were measured."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from app.cli.arguments import TrustCode
from profiles.errors import ExitCode

if TYPE_CHECKING:
    from distributed.planning.cluster import Cluster
    from distributed.planning.document import Planning, Reason
    from distributed.run.planning import PlanOptions
    from profiles.schema import Profile


def plan(
    profile: Annotated[str, typer.Argument(metavar="PROFILE", help="Profile of config.ini or a saved one.")],
    hosts: Annotated[
        Path | None,
        typer.Option("--hosts", metavar="FILE", help="The machines; empty: the profile's, or this one alone."),
    ] = None,
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
    settings: Annotated[
        list[str], typer.Option("--set", metavar="KEY=VALUE", help="Any option of the profile; may be repeated.")
    ] = [],  # noqa: B006 - typer copies it
    explain: Annotated[bool, typer.Option("--explain", help="Show the ranking and all reasons.")] = False,
    allow_missing: Annotated[
        bool, typer.Option("--allow-missing", help="Plan with the reachable machines only.")
    ] = False,
    trust_new: Annotated[bool, typer.Option("--trust-new", help="Accept the host keys of new machines.")] = False,
    trust_code: TrustCode = False,
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE", help="Write the plan to this file.")] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON document on stdout, and nothing else.")
    ] = False,
) -> ExitCode:
    """Predict every way to train a profile on these machines, and show the best one and why."""
    from app.cli.approval import somebody, stand_behind_profile
    from app.cli.option_flags import merged_overrides
    from app.console import say
    from distributed.run.planning import PlanOptions
    from training.tasks.published_models import usable_profile

    found = usable_profile(profile, merged_overrides(settings, {}, {}), tell=say)
    chosen = found.profile
    plan_options = PlanOptions(preference, lost_quality / 100)
    if figures is not None:
        planning = _from_figures(figures, chosen, hosts, plan_options)
    else:
        stand_behind_profile(found, trusted=trust_code, person=somebody(as_json))
        planning = _from_machines(chosen, hosts, plan_options, allow_missing, trust_new, somebody(as_json))
    if out is not None:
        planning.write(out)
    _tell(planning, explain, as_json, out)
    return ExitCode.NOT_READY if planning.chosen is None else ExitCode.DONE


def _from_figures(figures: Path, profile: Profile, hosts: Path | None, plan_options: PlanOptions) -> Planning:
    from app.console import say
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
    from app.cli.approval import USUAL_HOSTS
    from app.cli.distributed import MachineRequest
    from app.cli.measure import machines_of
    from distributed.planning.fitting import fit
    from distributed.preparation.members import rooms_of
    from distributed.preparation.prepare import prepare
    from distributed.run.planning import propose
    from training.tasks.early_look import check_data

    check_data(profile)
    request = MachineRequest(hosts or USUAL_HOSTS, allow_missing=allow_missing, trust_new=trust_new)
    prepare_options = request.prepare_options()
    machines = prepare(machines_of(hosts, profile, person), profile.model.task, prepare_options)
    try:
        profile = fit(profile, rooms_of(profile, machines), prepare_options.tell)
        return propose(machines, profile, plan_options, prepare_options.tell)[0]
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


def _tell(planning: Planning, explain: bool, as_json: bool, out: Path | None) -> None:
    from app.console import say, show_json, show_line
    from app.plan_table import explanation_lines, summary_lines, table_lines
    from distributed.planning.reasons import sentence

    if as_json:
        sentences = [sentence(reason) for reason in planning.reasons]
        code = int(ExitCode.NOT_READY if planning.chosen is None else ExitCode.DONE)
        show_json(planning.model_dump(mode="json") | {"sentences": sentences, "exit_code": code})
        return
    lines = [*table_lines(planning), "", *explanation_lines(planning)] if explain else summary_lines(planning)
    for line in lines:
        show_line(line)
    if out is not None:
        say(f"written to {out}")
