"""``distributed-train``: start or resume a run, with workers of this machine or on the machines of a hosts file."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from app.cli.approval import approve_profile, approve_user_code, read_hosts
from app.cli.arguments import OUTPUT
from app.cli.runs.attach import fits_here, leave, show_dashboard, show_run, tell
from app.cli.terminal import somebody
from app.cli.train.local_run import StartRun, run_to_end
from app.cli.train.request import TrainRequest, no_profile
from app.console import command_about, say
from app.plan_table import details_text, summary_lines
from app.progress import progress_for
from app.report import title_of
from app.run_view.run_state import reduce_events
from app.trackers.notify import failed_start_notified
from app.trackers.tracking import checked_trackers, start_trackers
from distributed.planning.layouts.divided_plan import fit_locally
from distributed.planning.memory.fitting import fit
from distributed.planning.simulated import Machines
from distributed.preparation.preflight import local_memory_budgets, with_every_gpu_here
from profiles.errors import BadInput, ExitCode
from profiles.files.environment import environment_layer, misspelt_variables
from profiles.files.resolve import load_profile, profile_from_options
from profiles.installation import USUAL_HOSTS
from profiles.run_settings import tracker_names
from profiles.schema import Profile
from profiles.split import DATA_STAY
from training.records.event_log import newest_number
from training.records.plan import RunPlan
from training.records.run_folder import RunFolder
from training.records.run_index import remember
from training.records.runs import find_run
from training.run.local_plan import plan_local_run, trains_objects, with_workers
from training.run.processes import BackgroundProcess
from training.run.resumption import LENGTHS, plan_to_resume
from training.run.run_controller import RunController
from training.tasks.published_models import hub_notes, models_here
from training.workers.data_findings import check_data, check_data_of, usable_for_data, warm_up_remark

if TYPE_CHECKING:
    from distributed.launcher import DistributedLauncher, PlannedRun
    from distributed.preparation.prepare import PrepareOptions

Instead = Callable[["DistributedLauncher", "PlannedRun", "TrainRequest"], ExitCode]


Placed = Callable[[RunPlan], RunPlan]
"""Returns a plan with its members where they are."""


def distributed_train(
    request: TrainRequest, start_run: StartRun = RunController, placed: Placed = lambda plan: plan
) -> ExitCode:
    """Run ``distributed-train``.

    Raises:
        MusterError: nothing was started.
    """
    plan, folder = prepared(request, placed)
    earlier = reduce_events(folder.events())
    progress = progress_for(title_of(plan), earlier, since=-1 if request.resume else None)
    return tell(run_to_end(plan, folder, progress, start_run=start_run), request.as_json)


def prepared(request: TrainRequest, placed: Placed = lambda plan: plan) -> tuple[RunPlan, RunFolder]:
    """Return plan and folder of the run to start or resume; its trackers are started.

    Raises:
        BadInput: it cannot be used.
    """
    with failed_start_notified(request.title):
        plan, folder = _created(request, placed)
    start_trackers(folder.path, tracker_names(plan.profile.run.trackers))
    return plan, folder


def _created(request: TrainRequest, placed: Placed) -> tuple[RunPlan, RunFolder]:
    command = list(request.command)
    if request.resume:
        path, plan = resumable(request)
        plan = placed(plan)
        checked_trackers(plan.profile.run.trackers)
        check_data_of(plan)
        return plan, RunFolder.resume(path, plan, command)
    plan = placed(plan_of(request))
    folder = RunFolder.create(Path(plan.profile.run.output_dir), plan, command)
    remember(folder.path.parent)
    return plan, folder


def start_in_background(request: TrainRequest) -> Path:
    """Start or resume a run of this machine that outlives this process and its terminal; return its folder.

    Raises:
        MusterError: nothing was started.
    """
    _, folder = prepared(request)
    folder.close()
    BackgroundProcess("app.cli.train.local_run", trains=True).start(folder.path)
    return folder.path


def train_in_background(request: TrainRequest) -> ExitCode:
    """Start or resume a run of this machine in the background, and show it unless detached.

    Raises:
        MusterError: nothing was started.
    """
    since = events_before(request)
    return leave_or_show(start_in_background(request), request, since)


def events_before(request: TrainRequest) -> int:
    """Return the number of the last event of the run to resume; -1 if there is none.

    Raises:
        BadInput: no such run.
    """
    if not request.resume:
        return -1
    path = find_run(Path(request.overrides.get("output_dir", "output")), request.resume)
    return newest_number(path / "events.jsonl")


def leave_or_show(path: Path, request: TrainRequest, since: int) -> ExitCode:
    """Detach from a background run, or show it: in the dashboard if requested and the terminal allows.

    Args:
        since: number of the last event before it was started.
    """
    if request.detach:
        return leave(path, request.as_json, since)
    if request.dashboard and fits_here() and not request.as_json:
        return show_dashboard(path)
    return show_run(path, request.as_json, since=since if request.resume else None)


def plan_of(request: TrainRequest) -> RunPlan:
    """Resolve the profile and plan a new local run.

    Raises:
        BadInput: no profile, or one that cannot be used.
    """
    profile = with_every_gpu_here(profile_of(request), say)
    checked_trackers(profile.run.trackers)
    if notes := hub_notes(profile):  # another machine might have it; this one was asked already
        raise BadInput("a run on this computer needs it: nothing was started", _without_hub(profile, notes))
    run = profile.run
    if "workers" in request.overrides and (run.simulate or run.cluster):
        simulation_option = "--simulate" if run.simulate else "--cluster"
        raise BadInput(
            f"{simulation_option} and --local do not go together", f"{simulation_option} has all members in one process"
        )
    machines = Machines.read(Path(run.cluster)) if run.cluster else None
    simulated = run.simulate or (len(machines.names) if machines else 0)
    budgets = local_memory_budgets(profile, 1 if simulated else run.workers)
    fitting = fit(profile, budgets, say) if simulated else fit_locally(profile, budgets, say)
    plan = plan_local_run(fitting, simulated or run.workers, simulated=simulated > 0)
    plan = machines.with_clock(plan) if machines else plan
    check_data_of(plan)
    _say_warm_up(plan)
    return plan


def _without_hub(profile: Profile, notes: Sequence[str]) -> str:
    """Return what to do where the hub cannot be asked: also which model or profile needs no download."""
    is_model = any(profile.model.model_path in note for note in notes)
    models = list(models_here(profile).items())[:1] if is_model else []
    here = [f"--model {name} is on this computer{f' ({about})' if about else ''}" for name, about in models]
    scratch = ["profile whisper-scratch needs no download"] if is_model and profile.model.trait == "speech" else []
    return "; ".join(["connect to the network, check the name, or use a folder", *here, *scratch])


def profile_of(request: TrainRequest, check: Callable[[Profile], None] = lambda profile: None) -> Profile:
    """Return the named profile; a custom job needs none, as its factory sets everything without a default.

    Args:
        check: validates what else the run needs, before a model is fetched.

    Raises:
        BadInput: no profile, or one that cannot be used.
    """
    name_misspelt_variables()
    if request.profile:
        resolved = usable_for_data(request.profile, request.overrides, say, check)
        approve_profile(resolved, trusted=request.trust_code, person=request.person)
        return resolved.profile
    task = request.overrides.get("task", "")
    if request.is_complete:
        profile = profile_from_options(task, request.overrides, environment_layer())
        approve_user_code(profile, "the command line", named=True, person=False)
        return profile
    raise no_profile()


@functools.cache
def name_misspelt_variables() -> None:
    """Warn, once, of environment variables that were meant to set an option."""
    for name, hint in misspelt_variables().items():
        say(f"warning: the variable {name} sets nothing: {hint}")


def resumable(request: TrainRequest) -> tuple[Path, RunPlan]:
    """Return folder and plan of the run to resume; the plan is unchanged but for the workers that hold one model, and
    for how long it trains.

    Raises:
        BadInput: no such run, a completed one, one without a snapshot, or options that would change it.
    """
    changes = request.overrides.keys() - {"output_dir", "workers", "layout", "hosts", *LENGTHS}
    path = find_run(Path(request.overrides.get("output_dir", OUTPUT)), request.resume)
    lengths = {name: request.overrides[name] for name in LENGTHS if name in request.overrides}
    plan, profile = plan_to_resume(path, lengths), RunFolder.open(path).metadata.profile
    if trains_objects(plan):
        message = f"run {plan.run_id} trains objects of a script, which alone can resume it"
        raise BadInput(message, f'call in that script: fit(resume="{path}")')
    if request.profile and request.profile != profile:
        raise BadInput(f"run {plan.run_id} is of profile '{profile}', not '{request.profile}'", "leave the profile out")
    if changes:
        names = ", ".join(sorted(changes))
        raise BadInput(f"--resume continues as planned and takes no other {names}", "leave it out, or start a new run")
    if lengths:
        asked = ", ".join(f"{name} = {value}" for name, value in lengths.items())
        say(f"run {plan.run_id} goes on from its newest snapshot to {asked}, at the learning rates of a run so long")
    if request.overrides.keys() & {"workers", "layout"}:
        workers = int(request.overrides.get("workers", len(plan.processes)))
        plan = with_workers(plan, workers, request.overrides.get("layout", ""))
    approval_step = f"type: {command_about(path, 'distributed-train', '--resume')} --trust-code"
    approve_user_code(
        plan.profile, path / "plan.json", named=request.trust_code, person=request.person, approval_step=approval_step
    )
    return path, plan


def hosts_file_of(request: TrainRequest) -> Path | None:
    """Return the hosts file of a run: the resumed run's, the given one, the profile's, or the default one.

    Returns:
        ``None`` for a run with workers of this machine: asked for with ``--local`` or ``--simulate``, or no hosts file
        is there.

    Raises:
        BadInput: no such run or profile.
    """
    overrides = request.overrides
    if request.resume:
        path = find_run(Path(overrides.get("output_dir", OUTPUT)), request.resume)
        recorded, metadata = path / "hosts.json", RunFolder.open(path).metadata
        if not recorded.is_file() and metadata.run_type == "distributed" and metadata.status != "completed":
            message = f"run {path.name} is of other machines, and {recorded} with their addresses is missing"
            raise BadInput(message, f"copy the hosts file that it was started with to {recorded}")
        if overrides.get("hosts") and not recorded.is_file():
            message = f"run {path.name} is of workers of this machine, where its snapshots are"
            raise BadInput(message, "leave --hosts out; --local N resumes it with another number of workers")
        named = Path(overrides["hosts"]).expanduser() if overrides.get("hosts") else recorded
        return named if recorded.is_file() else None
    if overrides.get("hosts") and (overrides.get("simulate") or overrides.get("cluster")):
        message = "--hosts and a simulation do not go together"
        raise BadInput(message, "leave one of them out: simulated members are one process of this machine")
    if "hosts" in overrides:
        return Path(overrides["hosts"]).expanduser() if overrides["hosts"] else None
    if "workers" in overrides or not request.profile:
        return None
    chosen = load_profile(request.profile, overrides).profile.run
    if chosen.simulate or chosen.cluster:
        return None
    if chosen.hosts:
        return Path(chosen.hosts)
    if USUAL_HOSTS.is_file():
        say(f"on the machines of {USUAL_HOSTS} (--local N trains on this machine)")
        return USUAL_HOSTS
    return None


def train_on_hosts(request: TrainRequest, hosts_file: Path, instead_of_start: Instead | None = None) -> ExitCode:
    """Start or resume a run on the machines of a hosts file, and show it unless detached.

    Args:
        instead: what is done with the plan of a new run, in place of starting it.

    Raises:
        MusterError: nothing was started.
    """
    from app.cli.machines.access import prepare_options
    from distributed.resuming import resume_run

    person, since = not request.no_input and somebody(), events_before(request)
    prepare = prepare_options(person, request.trust_new, request.allow_missing, request.offline_wheels)
    with failed_start_notified(request.title) if instead_of_start is None else contextlib.nullcontext():
        if request.resume:
            path, plan = resumable(request)
            checked_trackers(plan.profile.run.trackers)
            is_named = bool(request.overrides.get("hosts"))
            hosts = read_hosts(hosts_file, named=is_named, person=request.person)
            resume_run(path, plan, prepare, request.command, hosts if is_named else None)
        else:
            launcher, planned = _planned_on_hosts(request, hosts_file, prepare)
            _tell_plan(planned)
            if request.details and instead_of_start is None:
                say(details_text(planned.plan, planned.planning))
            if instead_of_start is not None:
                return instead_of_start(launcher, planned, request)
            path, plan = launcher.start(planned, request.command), planned.plan
    start_trackers(path, tracker_names(plan.profile.run.trackers))
    return leave_or_show(path, request, since)


def _planned_on_hosts(
    request: TrainRequest, hosts_file: Path, prepare: PrepareOptions
) -> tuple[DistributedLauncher, PlannedRun]:
    from distributed.launcher import DistributedLauncher, PlanOptions
    from distributed.planning.documents.document import Planning
    from distributed.preparation.prepare import require_present

    read = partial(read_hosts, hosts_file, named=bool(request.overrides.get("hosts")), person=request.person)
    profile = profile_of(request, lambda profile: require_present(read(), profile.model.task, prepare))
    checked_trackers(profile.run.trackers)
    check_data(profile)
    options = PlanOptions(planning=Planning.read(request.plan_file) if request.plan_file else None)
    hosts = read()
    launcher = DistributedLauncher(hosts, profile, prepare, options, whole_process=True)
    return launcher, launcher.plan()


def _say_warm_up(plan: RunPlan) -> None:
    if remark := warm_up_remark(plan):
        say(f"warning: {remark}")


def _tell_plan(planned: PlannedRun) -> None:
    """Report the planner's choice and its reasons, unless the profile made the choice."""
    if planned.planning is not None:
        for line in summary_lines(planned.planning, planned.plan.profile.name):
            say(line)
    elif planned.plan.profile.data.local_data:
        say(DATA_STAY)
    _say_warm_up(planned.plan)
    if planned.plan.in_clear:
        say("training traffic is NOT encrypted (engine = nccl): anybody on that network can read it")
