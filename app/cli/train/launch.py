"""``launch``: any training script on these machines, with torchrun's environment and the mesh as its group."""

from __future__ import annotations

import contextlib
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from app.cli.approval import read_hosts
from app.cli.arguments import (
    OUTPUT,
    AllHosts,
    AllowMissing,
    Detach,
    Json,
    Notified,
    OfflineWheels,
    Output,
    TrustNew,
)
from app.cli.machines.access import prepare_options
from app.cli.runs.attach import STOPPING_SCRIPT, leave, log_texts, tell
from app.cli.terminal import answer, heard_by, somebody
from app.cli.train.local_run import run_to_end
from app.cli.train.torchrun import MEETING, check_nodes, process_count, processes_here, refuse_meeting, restart_count
from app.console import say, show_line, visible
from app.follow import Follower
from app.progress import PlainProgress
from app.report import document, leftovers_text, title_of
from app.run_view.view import EndedRun, RunView
from app.trackers.notify import failed_start_notified
from app.trackers.tracking import start_trackers
from distributed.hosts.file import RUN_HOSTS, Hosts, load_hosts, save_hosts
from profiles.errors import BadInput, ExitCode, MusterError, counted
from profiles.installation import USUAL_HOSTS, program
from profiles.run_settings import RunSettings
from profiles.schema import CUSTOM, ModelSettings, Profile, StrategySettings
from training.hardware.resources import count_gpus
from training.records.event_log import read_events
from training.records.events import ErrorEvent
from training.records.launched_script import LAUNCHED_FILES, LaunchedScript
from training.records.plan import DevicePlan, MemberPlan, RunPlan
from training.records.run_folder import RunFolder, new_run_id
from training.records.run_index import remember
from training.run.processes import BackgroundProcess, end_processes
from training.run.requests.request_book import leave_request
from training.run.stopping import ONE_PRESS, say_beside
from training.strategies.registry import default_strategy

if TYPE_CHECKING:
    from distributed.preparation.prepare import PrepareOptions

Backend = Literal["auto", "muster", "script"]
LOOPBACK = "127.0.0.1"


_SHOWN = 5
"""Number of a folder's entries that are named."""


def launch(
    script: Annotated[
        list[str], typer.Argument(metavar="SCRIPT ARGS", help="The script and its arguments, or -m MODULE ARGS.")
    ],
    hosts: AllHosts = None,
    local: Annotated[
        int, typer.Option(metavar="N", min=0, max=64, help="Start N processes, on this machine only.")
    ] = 0,
    processes_per_machine: Annotated[
        int,
        typer.Option(
            "--nproc-per-machine", metavar="K", min=0, max=64, help="Processes on each machine; default: one per GPU."
        ),
    ] = 0,
    module: Annotated[bool, typer.Option("-m", "--module", help="SCRIPT is a module, as after python -m.")] = False,
    backend: Annotated[
        Backend,
        typer.Option(help="Groups that Muster carries. auto: gloo, unnamed, NCCL between machines; muster: all."),
    ] = "auto",
    folder: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder to copy to other machines; default: the script's.")
    ] = None,
    restarts: Annotated[
        int,
        typer.Option(
            "--max-restarts",
            "--max_restarts",
            metavar="N",
            parser=restart_count,
            help="Start the script again after a failure, on the machines that are there.",
        ),
    ] = 0,
    detach: Detach = False,
    notified: Notified = "",
    allow_missing: AllowMissing = False,
    offline_wheels: OfflineWheels = False,
    trust_new: TrustNew = False,
    output: Output = OUTPUT,
    as_json: Json = False,
    standalone: Annotated[bool, typer.Option("--standalone", hidden=True)] = False,
    processes_per_node: Annotated[
        int, typer.Option("--nproc-per-node", "--nproc_per_node", parser=process_count, hidden=True)
    ] = 0,
    nodes: Annotated[str, typer.Option("--nnodes", hidden=True, callback=check_nodes)] = "",
    meeting: Annotated[list[str] | None, typer.Option(*MEETING, hidden=True, callback=refuse_meeting)] = None,
) -> ExitCode:
    """Start a script on this machine or on several, and show its output."""
    processes_per_machine = processes_per_machine or processes_per_node
    local = processes_here(local, processes_per_machine, hosts, standalone or bool(nodes))
    if restarts and (detach or as_json):
        other = "--detach" if detach else "--json"
        raise BadInput(f"--max-restarts and {other} do not go together", "this command itself starts the script again")
    job = script_of(["-m", *script] if module else script, backend, folder).model_copy(update={"restarts": restarts})
    launcher = ScriptLauncher(processes_per_machine, detach, allow_missing, offline_wheels, trust_new, output, as_json)
    return launcher.begin(job, hosts, local)


@dataclass(frozen=True)
class ScriptLauncher:
    """How a script is started, as typed."""

    processes_per_machine: int
    detach: bool
    allow_missing: bool
    offline_wheels: bool
    trust_new: bool
    output: Path
    as_json: bool

    def begin(self, job: LaunchedScript, hosts: Path | None, local: int) -> ExitCode:
        """Start a script on machines, or in ``local`` processes here, and again as often as it may be.

        Raises:
            BadInput: the machines, or a combination of options, cannot be used.
        """
        if job.restarts and (self.detach or self.as_json):
            other = "--detach" if self.detach else "--json"
            problem = f"--max-restarts and {other} do not go together"
            raise BadInput(problem, "this command itself starts the script again")
        file = hosts or (USUAL_HOSTS if not local and USUAL_HOSTS.is_file() else None)
        if file is None:
            return restarted(job, lambda job, attempt: self.here(job, local or gpus(), attempt))
        if hosts is None:
            say(f"on the machines of {file} (--local N runs it on this machine)")
        listed = read_hosts(file, named=hosts is not None, person=somebody(self.as_json))
        announce_files(Path(job.folder))
        return restarted(job, lambda job, attempt: self.there(job, listed, attempt))

    def there(self, job: LaunchedScript, hosts: Hosts, attempt: int) -> tuple[ExitCode, Path]:
        """Run a script on machines; a restart goes without those that are away."""
        goes_without = self.allow_missing or attempt > 1
        prepare = prepare_options(somebody(self.as_json), self.trust_new, goes_without, self.offline_wheels)
        with failed_start_notified(job.title):
            prepared_hosts, devices = devices_of(hosts, prepare, self.processes_per_machine)
            plan = plan_of(job, devices, self.output, attempt)
            run_folder = RunFolder.create(self.output, plan, sys.argv, run_type="distributed")
            remember(self.output)
            save_hosts(prepared_hosts, run_folder.path / RUN_HOSTS)
        code = run_in_background("distributed.supervisor", run_folder, self.as_json, shown=not self.detach)
        return code, run_folder.path

    def here(self, job: LaunchedScript, processes: int, attempt: int) -> tuple[ExitCode, Path]:
        """Run a script in so many processes of this machine, to its end unless it is detached."""
        devices = [DevicePlan(addresses=(LOOPBACK,))] * processes
        plan = plan_of(job.model_copy(update={"folder": ""}), devices, self.output, attempt)
        run_folder = RunFolder.create(self.output, plan, sys.argv)
        remember(self.output)
        if self.detach:
            return run_in_background("app.cli.train.local_run", run_folder, self.as_json), run_folder.path
        start_trackers(run_folder.path)
        with shown_logs(run_folder.path, self.as_json):
            ended = run_to_end(plan, run_folder, PlainProgress(title_of(plan)))
        return tell_end(ended, {"this machine": end_processes(plan.run_id)}, self.as_json), run_folder.path


def restarted(job: LaunchedScript, start: Callable[[LaunchedScript, int], tuple[ExitCode, Path]]) -> ExitCode:
    """Run a script, and again in a new run with a new group when it has failed, as often as it may be.

    Args:
        start: runs a script to its end, for the attempt of this number, from 1; returns its run folder, too.
    """
    for attempt in range(1, job.restarts + 2):
        code, path = start(job, attempt)
        if code is not ExitCode.RUN_FAILED or attempt > job.restarts:
            break
        say(f"restart {attempt} of {job.restarts}: a new group begins, from checkpoints that the script has written")
        job = with_written_files(job, path)
    return code


def with_written_files(job: LaunchedScript, run_dir: Path) -> LaunchedScript:
    """Return the script in a folder that also has the files that its rank 0 wrote in an earlier run; where it runs in
    this folder, they are in it already."""
    from distributed.preparation.code_sync import launched_files

    written = run_dir / LAUNCHED_FILES
    if not job.folder or not written.is_dir():
        return job
    source, merged = Path(job.folder), run_dir / "restart"
    for file in launched_files(source):
        target = merged / file.relative_to(source)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(file, target)
    shutil.copytree(written, merged, dirs_exist_ok=True)
    script = job.script if job.module else str(merged / Path(job.script).relative_to(source))
    return job.model_copy(update={"folder": str(merged), "script": script})


def gpus() -> int:
    """Return the default number of processes of this machine: one per GPU."""
    return max(1, count_gpus())


def announce_files(folder: Path) -> None:
    """Say which files of the script's folder are sent to other machines, and which are not.

    Raises:
        BadInput: too much lies there.
    """
    from distributed.preparation.code_sync import launched_files, left_out

    say(f"sending to the machines: {counted(len(launched_files(folder)), 'file')} of {visible(folder)}")
    if skipped := left_out(folder):
        more_note = f" and {len(skipped) - _SHOWN} more" if len(skipped) > _SHOWN else ""
        say(f"left out, no files: {visible(', '.join(skipped[:_SHOWN]))}{more_note}")


def run_in_background(entry: str, run_folder: RunFolder, as_json: bool, shown: bool = False) -> ExitCode:
    """Start the background process of a run, module ``entry``; follow it to its end if ``shown``."""
    run_folder.close()
    with failed_start_notified(run_folder.metadata.profile):
        BackgroundProcess(entry, trains=True).start(run_folder.path)
    start_trackers(run_folder.path)
    return follow(run_folder.path, as_json) if shown else leave(run_folder.path, as_json)


def script_of(words: list[str], backend: Backend, folder: Path | None) -> LaunchedScript:
    """Return the script that is launched.

    Raises:
        BadInput: there is no such file, or it is not in ``folder``.
    """
    module = words[0] == "-m"
    if words == ["-m"]:
        raise BadInput("-m names no module", f"for example: {program('launch', '-- -m package.train --its args')}")
    target, *arguments = words[module:]
    path = Path(target).expanduser().resolve()
    if not module and not path.is_file():
        raise BadInput(f"{target}: no such script", f"for example: {program('launch', '-- train.py --its args')}")
    top = (folder or (Path.cwd() if module else path.parent)).expanduser().resolve()
    if not module and not path.is_relative_to(top):
        raise BadInput(f"{target} is not in {folder}", "name the folder that it is in with --folder")
    return LaunchedScript(
        script=target if module else str(path), module=module, arguments=tuple(arguments), backend=backend,
        folder=str(top),
    )  # fmt: skip


def devices_of(hosts: Hosts, options: PrepareOptions, processes_per_machine: int) -> tuple[Hosts, list[DevicePlan]]:
    """Prepare machines; return those that are ready, and a device for each rank, which all are the script's to choose.

    Raises:
        NotReady: some machine cannot take part.
    """
    from distributed.preparation.members import addresses_of
    from distributed.preparation.prepare import prepare, updated_hosts

    ready = prepare(hosts, "", options)
    addresses, devices = addresses_of(ready), []
    for link, facts in ready:
        gpus = facts.gpus if "+cpu" not in facts.torch else 0
        ranks = processes_per_machine or len(link.machine.devices) or max(1, gpus)
        device = DevicePlan(
            machine=link.name,
            interface=link.machine.interface,
            addresses=(addresses[link.name],),
            coordinator_address=link.machine.coordinator_at,
            through_ssh=not facts.dials_here,
        )
        devices += [device] * ranks
        link.close()
    return updated_hosts(hosts, [link for link, _ in ready]).only([device.machine for device in devices]), devices


def plan_of(job: LaunchedScript, devices: Sequence[DevicePlan], output: Path, attempt: int = 1) -> RunPlan:
    """Return the plan, with a rank for each device, numbered from the first machine to the last.

    Args:
        attempt: 1, and one more with every restart of the script.
    """
    machines = [device.machine for device in devices]
    members = []
    for rank, device in enumerate(devices):
        name, is_only_rank = device.machine or "rank", machines.count(device.machine) == 1 < len(set(machines))
        name = name if is_only_rank else f"{name}-{machines[:rank].count(device.machine)}"
        members.append(MemberPlan(rank=rank, name=name, batch_size=1, devices=(device,)))
    name = job.script.rpartition(".")[2] if job.module else Path(job.script).stem
    model = ModelSettings(task=CUSTOM, model_path=f"{job.script}:__main__")
    strategy, run = StrategySettings(strategy=default_strategy()), RunSettings(output_dir=str(output))
    profile = Profile(name=name, model_name=job.title, model=model, strategy=strategy, run=run)
    ranks = tuple(members)
    return RunPlan(run_id=new_run_id(), profile=profile, members=ranks, engine="mesh", launch=job, attempt=attempt)


@contextlib.contextmanager
def shown_logs(path: Path, as_json: bool) -> Iterator[None]:
    """Copy the output of all ranks to stdout inside the context, each line with its rank."""
    if as_json:
        yield
        return
    over = threading.Event()

    def show() -> None:
        for line in log_texts(RunView(path), lambda: not over.is_set(), notices=False):
            show_line(line)

    reader = threading.Thread(target=show, daemon=True)
    reader.start()
    try:
        yield
    finally:
        over.set()
        reader.join()


def follow(path: Path, as_json: bool) -> ExitCode:
    """Show a run of several machines until it ends; Ctrl-C stops it, a second one kills it."""
    from distributed.cleaning.clean import leftovers

    follower, hosts, press_times = Follower(path), load_hosts(path / RUN_HOSTS), [0.0]

    def stop(number: int, frame: object) -> None:
        if time.monotonic() - press_times[-1] > ONE_PRESS:
            leave_request(path, "stop" if len(press_times) == 1 else "kill")
            press_times.append(time.monotonic())
            say_beside(say, STOPPING_SCRIPT if len(press_times) == 2 else "ending at once")

    with heard_by(stop), shown_logs(path, as_json), PlainProgress(title_of(follower.plan)) as progress:
        for event in follower.events():
            if event is not None:
                progress(event)
    ended = follower.ended(progress.state)
    leftover_results = {} if ended.outcome.status == "completed" else leftovers(hosts, follower.plan.run_id)
    leftovers_by_machine = {
        name: [one.message] if isinstance(one, MusterError) else one for name, one in leftover_results.items()
    }
    return tell_end(ended, leftovers_by_machine, as_json)


def tell_end(ended: EndedRun, leftovers_by_machine: Mapping[str, list[str]], as_json: bool) -> ExitCode:
    """Report how a run ended (a failure with the traceback of the first rank that failed) and what is left where."""
    if as_json:
        return answer(True, {**document(ended), "left": leftovers_by_machine}, (), ended.outcome.exit_code)
    if ended.outcome.status == "failed" and ended.path.exists():
        errors = (event for event in read_events(ended.path / "events.jsonl") if isinstance(event, ErrorEvent))
        for line in next((error.traceback for error in errors), "").splitlines():
            say(visible(line))
    tell(ended, False)
    for name, processes in leftovers_by_machine.items():
        if processes or ended.outcome.status != "completed":
            say(visible(f"{name}: {leftovers_text(processes)}"))
    return ended.outcome.exit_code
