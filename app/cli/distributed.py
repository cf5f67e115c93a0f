"""``distributed-train`` on the machines of a hosts file."""

from __future__ import annotations

from pathlib import Path

from app.cli.access import let_in, trust
from app.cli.approval import read_hosts
from app.cli.terminal import answer, somebody
from app.cli.train import TrainRequest, leave_or_show, profile_of, resumable
from app.console import say, visible
from app.plan_table import summary_lines
from app.trackers.tracking import checked_trackers, start_trackers
from distributed.launcher import DistributedLauncher, resume_run
from distributed.planning.document import Planning
from distributed.preparation.prepare import PrepareOptions
from distributed.run.planning import Planned, PlanOptions
from profiles.counts import counted
from profiles.errors import BadInput, ExitCode
from training.plan import RunPlan
from training.tasks.early_look import check_data


def train_on_hosts(request: TrainRequest, hosts_file: Path) -> ExitCode:
    """Start or resume a run on the machines of a hosts file, and show it unless it is to be left alone.

    Raises:
        MusterError: nothing was started.
    """
    person = not request.no_input and somebody()
    prepare = prepare_options(person, request.trust_new, request.allow_missing, request.offline_wheels)
    if request.resume:
        if request.dry_run:
            raise BadInput("--dry-run and --resume do not go together", "use --dry-run with the profile instead")
        path, plan = resumable(request)
        trackers = checked_trackers(plan.profile.run.trackers)
        read_hosts(hosts_file, named=False, person=request.person)
        resume_run(path, plan, prepare, request.command)
    else:
        profile = profile_of(request)
        trackers = checked_trackers(profile.run.trackers)
        check_data(profile)
        plan_options = PlanOptions(planning=Planning.read(request.plan_file) if request.plan_file else None)
        named = bool(request.overrides.get("hosts"))
        hosts = read_hosts(hosts_file, named=named, person=request.person)
        launcher = DistributedLauncher(hosts, profile, prepare, plan_options, whole_process=True)
        planned = launcher.plan()
        _tell_plan(planned)
        if request.dry_run:
            launcher.dismiss()
            return _tell_dry_run(planned.plan, request.as_json)
        path = launcher.start(planned, request.command)
    start_trackers(path, trackers)
    return leave_or_show(path, request)


def prepare_options(
    person: bool, trust_new: bool = False, allow_missing: bool = False, offline_wheels: bool = False
) -> PrepareOptions:
    """Return how machines are made ready: with the person's help where there is one."""
    return PrepareOptions(
        tell=lambda line: say(visible(line)),
        trust=trust(trust_new, person),
        let_in=let_in if person else None,
        allow_missing=allow_missing,
        offline_wheels=offline_wheels,
    )


def _tell_plan(planned: Planned) -> None:
    """Say what was chosen and why; nothing where the profile had chosen."""
    if planned.planning is not None:
        for line in summary_lines(planned.planning):
            say(line)
        for name in planned.planning.settings.left_out if planned.planning.settings else ():
            say(f"{visible(name)} is left out: it would cost more than it adds")
    if planned.in_clear:
        say("training traffic is NOT encrypted (engine = torch): anybody on that network can read it")


def _tell_dry_run(plan: RunPlan, as_json: bool) -> ExitCode:
    """Show what would run, and on which machines; nothing was started."""
    lines = [f"{visible(one.name)}: {counted(one.batch_size, 'sample')} a step on {one.device}" for one in plan.members]
    lines.append(f"{plan.profile.strategy.strategy} over {plan.engine}, plan {plan.hash()}; nothing was started")
    return answer(as_json, {"plan": plan.model_dump(mode="json"), "plan_hash": plan.hash()}, lines)
