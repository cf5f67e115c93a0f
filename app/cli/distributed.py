"""Runs on several machines: start, attach, logs, stop."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from app.cli.access import accept_new, is_the_right_one, let_in
from app.cli.approval import read_hosts, somebody, stand_behind
from app.cli.dashboard import ascii_lines, dashboard_command, fits_here, goes_on
from app.cli.train import TrainRequest, profile_of, resumable, tell, title_of
from app.console import command_about, say, show_json, show_line, visible
from app.follow import Follower
from app.plan_table import summary_lines
from app.progress import progress_for
from app.report import Ended
from app.run_state import RunState, reduce_events
from app.trackers.tracking import checked_trackers, start_trackers
from distributed.cleaning.clean import leftovers
from distributed.hosts.file import RUN_HOSTS
from distributed.launcher import DistributedLauncher, resume_run
from distributed.planning.document import Planning
from distributed.preparation.preflight import NotReady
from distributed.preparation.prepare import PrepareOptions
from distributed.run.planning import Planned, PlanOptions
from distributed.run.requests import Action, leave_request
from distributed.run.run_machines import all_hosts
from distributed.ssh.connection import Trust
from distributed.ssh.host_keys import HostKeyInfo
from profiles.counts import counted
from profiles.errors import BadInput, ExitCode, MusterError
from training.event_log import follow_lines
from training.run_files import is_live
from training.run_folder import RunFolder
from training.runs import find_run
from training.tasks.early_look import check_data

_STOP_PATIENCE = 120.0
_STOPPING, _KILLING = "stopping after the step under way, with a snapshot", "ending at once, without a snapshot"
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True)
class MachineRequest:
    """What was asked for on the command line about machines."""

    hosts_file: Path
    plan_file: Path | None = None
    detach: bool = False
    allow_missing: bool = False
    no_input: bool = False
    offline_wheels: bool = False
    trust_new: bool = False
    dashboard: bool = False

    def prepare_options(self) -> PrepareOptions:
        """Return how machines are made ready: with the person's help where there is one."""
        person = not self.no_input and sys.stdin.isatty() and sys.stderr.isatty()
        return PrepareOptions(
            tell=lambda line: say(visible(line)),
            trust=trust(self.trust_new, person),
            let_in=let_in if person else None,
            allow_missing=self.allow_missing,
            offline_wheels=self.offline_wheels,
        )


def train_on_hosts(request: TrainRequest, machines: MachineRequest) -> ExitCode:
    """Start or resume a run on the machines of a hosts file, and show it unless it is to be left alone.

    Raises:
        MusterError: nothing was started.
    """
    if request.resume:
        if request.dry_run:
            raise BadInput("--dry-run and --resume do not go together", "use --dry-run with the profile instead")
        path = _resume(request, machines)
    else:
        profile = profile_of(request)
        trackers = checked_trackers(profile.run.trackers)
        check_data(profile)
        plan_options = PlanOptions(planning=Planning.read(machines.plan_file) if machines.plan_file else None)
        named = bool(request.overrides.get("hosts"))
        hosts = read_hosts(machines.hosts_file, named=named, person=request.person)
        launcher = DistributedLauncher(hosts, profile, machines.prepare_options(), plan_options, whole_process=True)
        planned = launcher.plan()
        _tell_plan(planned)
        if request.dry_run:
            launcher.dismiss()
            return _tell_dry_run(planned, request.as_json)
        path = launcher.start(planned, request.command)
        start_trackers(path, trackers)
    return leave_or_show(path, machines.detach, machines.dashboard, request.as_json)


def leave_or_show(path: Path, detach: bool, dashboard: bool, as_json: bool) -> ExitCode:
    """Leave a run that goes on by itself alone, or show it: in the dashboard where one was asked for and fits."""
    if detach:
        return _detached(path, as_json)
    if dashboard and fits_here() and not as_json:
        return dashboard_command(path, False)
    return show_run(path, as_json)


def _tell_plan(planned: Planned) -> None:
    """Say what was chosen and why; nothing where the profile had chosen."""
    if planned.planning is not None:
        for line in summary_lines(planned.planning):
            say(line)
        for name in planned.planning.settings.left_out if planned.planning.settings else ():
            say(f"{visible(name)} is left out: it would cost more than it adds")
    if planned.in_clear:
        say("training traffic is NOT encrypted (engine = torch): anybody on that network can read it")


def _tell_dry_run(planned: Planned, as_json: bool) -> ExitCode:
    """Show what would run, and on which machines; nothing was started."""
    plan = planned.plan
    if as_json:
        show_json({"plan": plan.model_dump(mode="json"), "plan_hash": plan.hash(), "exit_code": 0})
        return ExitCode.DONE
    for member in plan.members:
        show_line(f"{visible(member.name)}: {counted(member.batch_size, 'sample')} a step on {member.device}")
    show_line(f"{plan.profile.strategy.strategy} over {plan.engine}, plan {plan.hash()}; nothing was started")
    return ExitCode.DONE


def _resume(request: TrainRequest, machines: MachineRequest) -> Path:
    """Continue a distributed run on the machines that hold its snapshots."""
    path, plan = resumable(request)
    trackers = checked_trackers(plan.profile.run.trackers)
    read_hosts(machines.hosts_file, named=False, person=request.person)
    resume_run(path, plan, machines.prepare_options(), request.command)
    start_trackers(path, trackers)
    return path


def is_distributed(path: Path) -> bool:
    """Whether a run folder is of a run on several machines."""
    return (path / RUN_HOSTS).is_file()


def _detached(path: Path, as_json: bool) -> ExitCode:
    run_id = RunFolder.open(path).metadata.run_id
    if as_json:
        show_json({"run_id": run_id, "run_dir": str(path), "status": "starting", "exit_code": 0})
    else:
        show_line(run_id)
        say(f"runs in the background; watch it with: {command_about(path, 'attach')}")
    return ExitCode.DONE


def trust(new: bool, person: bool | None = None) -> Trust | None:
    """Return what decides about machines never met before: accept all, ask the person, or refuse without one."""
    lock = threading.Lock()

    def ask(key: HostKeyInfo) -> bool:
        with lock:
            return is_the_right_one(key)

    if new:
        return accept_new
    there = sys.stdin.isatty() and sys.stderr.isatty() if person is None else person
    return ask if there else None


# --------------------------------------------------------------------------------------------------------------- attach


def attach_command(output: Path, reference: str, as_json: bool, ascii_only: bool = False) -> ExitCode:
    """Show a run from its beginning until it ends.

    Raises:
        BadInput: no such run.
    """
    return show_run(find_run(output, reference), as_json, ascii_only)


def show_run(path: Path, as_json: bool, ascii_only: bool = False) -> ExitCode:
    """Show a run until it ends or the person goes; the exit code is the run's."""
    follower = Follower(path)
    write = ascii_lines() if ascii_only else None
    progress = progress_for(title_of(follower.plan), write=write)
    events = follower.events()
    with _goodbye_signals() as asked:
        while True:
            with progress:
                for event in events:
                    if event is not None:
                        progress(event)
                    if asked:
                        break
                else:
                    break
            number = asked.pop()
            asked.clear()
            if _leave(path, number):
                return ExitCode.DONE
            progress = progress_for(title_of(follower.plan), progress.state, write)
    return _tell_end(follower, progress.state, as_json)


def _tell_end(follower: Follower, state: RunState, as_json: bool) -> ExitCode:
    ended: Ended = follower.ended(state)
    tell(ended, as_json)
    return ended.exit_code


def _leave(path: Path, number: int) -> bool:
    """Ask what Ctrl-C means; return whether to stop watching. Without a person to ask: watch no more, run on."""
    choice = _ask() if number == signal.SIGINT and sys.stdin.isatty() else "d"
    if choice in ("s", "k"):
        leave_request(path, "stop" if choice == "s" else "kill")
        say(_STOPPING if choice == "s" else _KILLING)
        return False
    say(goes_on(path))
    return True


def _ask() -> str:
    say("\n[d]etach: the run goes on (default), [s]top with a snapshot, or [k]ill? ")
    with contextlib.suppress(OSError, InterruptedError):
        return sys.stdin.readline().strip().lower()[:1]
    return "d"


@contextlib.contextmanager
def _goodbye_signals() -> Iterator[list[int]]:
    asked: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        asked.append(number)

    before = {number: signal.signal(number, note) for number in _SIGNALS}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# ----------------------------------------------------------------------------------------------------------------- logs


def logs_command(output: Path, reference: str, follow: bool) -> ExitCode:
    """Write the logs of a run's processes to stdout, each line with its machine.

    Raises:
        BadInput: no such run.
    """
    path = find_run(output, reference)
    readers: dict[Path, Iterator[bytes]] = {}

    def goes_on() -> bool:
        return follow and is_live(path)

    with contextlib.suppress(KeyboardInterrupt):
        while True:
            last_round = not goes_on()
            for log in sorted((path / "logs").glob("*.log")):
                readers.setdefault(log, follow_lines(log, goes_on))
                _show_new(log.stem, readers[log], last_round)
            if last_round:
                return ExitCode.DONE
            time.sleep(0.2)
    return ExitCode.DONE


def _show_new(machine: str, lines: Iterator[bytes], to_the_end: bool) -> None:
    for line in lines:
        if line:
            show_line(f"{machine}: {visible(line.decode(errors='replace').rstrip())}")
        elif not to_the_end:
            return


# ----------------------------------------------------------------------------------------------------------------- stop


def stop_command(output: Path, reference: str, kill: bool, as_json: bool) -> ExitCode:
    """Stop a run and show, machine by machine, that nothing of it is left.

    Raises:
        BadInput: no such run, or one on this machine that has ended.
        NotReady: machines that could not be asked.
    """
    moments = {"asked": time.time()}
    path = find_run(output, reference)
    distributed = is_distributed(path)
    if not distributed and not is_live(path):
        raise BadInput(f"no process is running {path.name}", f"see {command_about(path, 'runs', 'show')}")
    action: Action = "kill" if kill else "stop"
    if is_live(path):
        leave_request(path, action)
        say(_KILLING if kill else _STOPPING)

    def ended() -> None:
        _wait_until_gone(path)
        moments["ended"] = time.time()

    found: dict[str, list[str] | MusterError]
    if distributed:
        hosts = all_hosts(path)
        stand_behind(hosts, path / RUN_HOSTS, named=False, person=somebody(as_json))
        found = leftovers(hosts, RunFolder.open(path).metadata.run_id, ended)
    else:
        ended()
        found = {"this machine": []}  # its workers end with the process that has just gone
    moments["proved"] = time.time()
    return _tell_leftovers(path, found, moments, as_json)


def _wait_until_gone(path: Path) -> None:
    """Wait as long as the run says anything: a step and a snapshot take the time that they take."""
    size, end = -1, time.monotonic() + _STOP_PATIENCE
    while is_live(path):
        if (grown := _size(path / "events.jsonl")) != size:
            size, end = grown, time.monotonic() + _STOP_PATIENCE
        if time.monotonic() > end:
            hint = f"end it with: {command_about(path, 'stop', '--kill')}"
            raise BadInput(f"the run goes on, but has reported nothing for {_STOP_PATIENCE:.0f} s", hint)
        time.sleep(0.05)


def _size(path: Path) -> int:
    with contextlib.suppress(OSError):
        return path.stat().st_size
    return 0


def _tell_leftovers(
    path: Path, found: dict[str, list[str] | MusterError], moments: dict[str, float], as_json: bool
) -> ExitCode:
    problems = [answer for answer in found.values() if isinstance(answer, MusterError)]
    left = {name: answer for name, answer in found.items() if not isinstance(answer, MusterError)}
    run = RunFolder.open(path)
    state = reduce_events(run.events())
    code = ExitCode.RUN_FAILED if any(left.values()) else ExitCode.DONE
    if as_json:
        unknown = {name: answer.message for name, answer in found.items() if isinstance(answer, MusterError)}
        code = ExitCode.NOT_READY if problems else code
        kept = {"kept_step": state.resume_step, "kept": state.kept, "left": left, "unknown": unknown}
        show_json({"run_dir": str(path), "status": run.metadata.status, **kept, **moments, "exit_code": int(code)})
        return code
    show_line("the run is completed" if run.metadata.status == "completed" else f"stopped; {state.kept}")
    for name, processes in left.items():
        show_line(f"{name}: {'nothing is left' if not processes else '; '.join(map(visible, processes))}")
    if problems:
        raise NotReady(problems)
    return code
