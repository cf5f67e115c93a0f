"""``distributed-train``: start or resume a run."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from app.cli.approval import USUAL_HOSTS, somebody, stand_behind_code, stand_behind_profile
from app.cli.local_run import StartRun, run_to_end
from app.console import command_about, command_line, say, say_error, show_json, show_line
from app.progress import progress_for
from app.report import Ended, completed_lines, document, failure_hint, stopped_line
from app.run_state import reduce_events
from app.trackers.tracking import checked_trackers, start_trackers
from distributed.planning.fitting import fit
from distributed.preparation.members import room_here
from profiles.counts import counted
from profiles.errors import BadInput, ExitCode
from profiles.resolve import load_profile, profile_from_options
from profiles.schema import Profile, tracker_names
from training.local_plan import plan_local_run
from training.local_run import LocalRun
from training.plan import RunPlan
from training.run_folder import RunFolder
from training.runs import find_run, plan_to_resume
from training.tasks.early_look import check_data
from training.tasks.published_models import usable_profile


@dataclass(frozen=True)
class TrainRequest:
    """What was asked for on the command line."""

    profile: str = ""
    overrides: dict[str, str] = field(default_factory=dict)
    """Options and references by name, as text."""
    resume: str = ""
    dry_run: bool = False
    as_json: bool = False
    command: tuple[str, ...] = ()
    """The command line, for the run's metadata."""
    trust_code: bool = False
    """Whether the code that a file names may run."""
    no_input: bool = False

    @property
    def person(self) -> bool:
        """Whether somebody can be asked."""
        return not self.no_input and somebody(self.as_json)


def distributed_train(request: TrainRequest, start_run: StartRun = LocalRun) -> ExitCode:
    """Carry out ``distributed-train``.

    Raises:
        MusterError: nothing was started.
    """
    plan, folder = prepared(request)
    earlier = reduce_events(folder.events())
    ended = run_to_end(plan, folder, progress_for(title_of(plan), earlier), start_run=start_run)
    tell(ended, request.as_json)
    return ended.exit_code


def prepared(request: TrainRequest) -> tuple[RunPlan, RunFolder]:
    """Hold the folder of the run that is to begin, or to go on, with its trackers beside it.

    Raises:
        BadInput: it cannot be used.
    """
    plan, folder = _resumed(request) if request.resume else _new(request)
    start_trackers(folder.path, tracker_names(plan.profile.run.trackers))
    return plan, folder


def plan_of(request: TrainRequest) -> RunPlan:
    """Resolve the profile and plan a new local run.

    Raises:
        BadInput: no profile, or one that cannot be used.
    """
    profile = profile_of(request)
    checked_trackers(profile.run.trackers)
    check_data(profile)
    workers = profile.run.workers
    return plan_local_run(fit(profile, room_here(profile, workers), say), workers)


def profile_of(request: TrainRequest) -> Profile:
    """Return the profile that is named; a custom job needs none, its factory says all that has no default.

    Raises:
        BadInput: no profile, or one that cannot be used.
    """
    if request.profile:
        found = usable_profile(request.profile, request.overrides, tell=say)
        stand_behind_profile(found, trusted=request.trust_code, person=request.person)
        return found.profile
    if request.overrides.get("task") == "custom" and request.overrides.get("model_path"):
        profile = profile_from_options("custom", request.overrides)
        stand_behind_code(profile, "the command line", named=True, person=False)
        return profile
    raise BadInput("no profile given", f"{command_line('profiles', 'list')} lists them")


def title_of(plan: RunPlan) -> str:
    """Return what runs, in one line."""
    workers = counted(plan.world_size, "worker")
    return f"{plan.profile.name} · {plan.run_id} · {workers} · {plan.profile.strategy.strategy} over {plan.engine}"


def _new(request: TrainRequest) -> tuple[RunPlan, RunFolder]:
    plan = plan_of(request)
    output = Path(plan.profile.run.output_dir)
    return plan, RunFolder.create(output, plan, list(request.command))


def _resumed(request: TrainRequest) -> tuple[RunPlan, RunFolder]:
    """Hold the run to resume."""
    path, plan = resumable(request)
    checked_trackers(plan.profile.run.trackers)
    check_data(plan.profile)
    return plan, RunFolder.resume(path, plan, list(request.command))


def resumable(request: TrainRequest) -> tuple[Path, RunPlan]:
    """Return folder and plan of the run to resume; it goes on exactly as it was planned.

    Raises:
        BadInput: no such run, a completed one, one without a snapshot, or options that would change it.
    """
    changes = {name: value for name, value in request.overrides.items() if name != "output_dir"}
    path = find_run(Path(request.overrides.get("output_dir", "output")), request.resume)
    plan, profile = plan_to_resume(path), RunFolder.open(path).metadata.profile
    if request.profile and request.profile != profile:
        raise BadInput(f"run {plan.run_id} is of profile '{profile}', not '{request.profile}'", "leave the profile out")
    if changes:
        names = ", ".join(changes)
        raise BadInput(f"--resume continues as planned and takes no other {names}", "leave it out, or start a new run")
    again = f"type: {command_about(path, 'distributed-train', '--resume')} --trust-code"
    stand_behind_code(plan.profile, path / "plan.json", named=request.trust_code, person=request.person, how=again)
    return path, plan


def hosts_file_of(request: TrainRequest) -> Path | None:
    """Return the hosts file of a run: of the run to resume, as asked for, of the profile, or the usual one.

    Returns:
        ``None`` for a run with workers of this machine: asked for with ``--local``, or no hosts file is there.

    Raises:
        BadInput: no such run or profile.
    """
    overrides = request.overrides
    if request.resume:
        path = find_run(Path(overrides.get("output_dir", "output")), request.resume)
        return path / "hosts.json" if (path / "hosts.json").is_file() else None
    if "hosts" in overrides:
        return Path(overrides["hosts"]).expanduser() if overrides["hosts"] else None
    if "workers" in overrides or not request.profile:
        return None
    chosen = load_profile(request.profile, overrides).profile.run.hosts
    if chosen:
        return Path(chosen)
    if USUAL_HOSTS.is_file():
        say(f"on the machines of {USUAL_HOSTS} (--local N trains on this machine)")
        return USUAL_HOSTS
    return None


def tell(ended: Ended, as_json: bool) -> None:
    """Write how a run ended: the document on stdout, or lines for a person."""
    if as_json:
        show_json(document(ended))
    elif ended.status == "completed":
        for line in completed_lines(ended):
            show_line(line)
    if ended.status == "cancelled":
        say(stopped_line(ended))
    elif ended.status == "failed" and not as_json:
        say_error(ended.message, failure_hint(ended))
