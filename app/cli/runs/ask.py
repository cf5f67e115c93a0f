"""``ask``, ``stop`` and ``fetch``: requests to a run from any terminal, and their outcome."""

from __future__ import annotations

import contextlib
import math
import socket
import time
from pathlib import Path
from typing import Annotated

import typer

from app.cli.approval import approve_hosts
from app.cli.arguments import OUTPUT, AnyRun, Json, LiveRun, Output, RunReference
from app.cli.runs.attach import TAKEN_UP, show_run, stopping
from app.cli.terminal import answer, somebody
from app.console import command_about, command_line, say, show_line, visible
from app.report import leftovers_text
from app.run_view.view import read_view
from distributed.hosts.file import RUN_HOSTS, Machine, as_listed, load_hosts, machine_to_add
from distributed.run.returning import take_up
from profiles.errors import BadInput, ExitCode, MusterError
from profiles.quantities import span_text
from training.records.event_log import follow_events
from training.records.events import RequestEvent, RunEvent, SnapshotEvent
from training.records.run_files import is_live
from training.records.run_folder import RunFolder
from training.records.runs import find_run, list_all_runs
from training.run.outcome import newest_snapshots
from training.run.processes import end_processes
from training.run.requests.request_book import Action, leave_request, withdraw_request

PATIENCE = 300.0
"""Seconds for a request to be accepted: a starting run accepts none. An accepted request may take any time."""
_STOP_PATIENCE = 120.0


def ask(
    run: RunReference,
    action: Annotated[
        Action, typer.Argument(metavar="ACTION", help="pause, resume, snapshot, drop, add, stop or kill.")
    ],
    machine: Annotated[
        str,
        typer.Argument(
            metavar="[MACHINE]", help="For drop and add: a machine of the run; to add also user@host, or localhost."
        ),
    ] = "",
    output: Output = OUTPUT,
    as_json: Json = False,
) -> ExitCode:
    """Leave a request in a run's folder, and report its outcome.

    Raises:
        BadInput: no such run, nobody works on it, or a machine is missing where one is needed.
    """
    path = find_run(output, run)
    if take_up(path):
        say(TAKEN_UP)
    _refuse_ended(path)
    newcomer = newcomer_of(path, machine) if action == "add" and machine else None
    event = answer_to(path, leave_request(path, action, machine, newcomer))
    document = {"action": action, "machine": machine, "outcome": event.outcome, "message": event.message,
                "run_id": RunFolder.open(path).metadata.run_id}  # fmt: skip
    line = f"{f'{action} {machine}'.strip()}: {event.outcome}{f', {event.message}' if event.message else ''}"
    code = ExitCode.DONE if event.outcome == "done" else ExitCode.RUN_FAILED
    return answer(as_json, document, [visible(line)], code)


def _refuse_ended(path: Path) -> None:
    if not is_live(path):
        raise BadInput(f"no process is running {path.name}", f"see {command_about(path, 'runs', 'show')}")


def newcomer_of(path: Path, name: str) -> Machine | None:
    """Return how to reach a machine that is not in the plan of a run, as its hosts file says, or as ``--hosts`` would;
    ``None``: it is, or the run has no other machines.

    Raises:
        BadInput: the name is no address, or a file of the run cannot be read.
    """
    if not (path / RUN_HOSTS).is_file() or RunFolder.open(path).plan().ranks_of(name):
        return None
    listed = (machine for machine in load_hosts(path / RUN_HOSTS).machines if machine.name == name)
    return next(listed, None) or as_listed(machine_to_add(name))


def answer_to(path: Path, identity: str) -> RequestEvent:
    """Wait for the final answer to a request; withdraw it if it is not accepted in time."""
    end = time.monotonic() + PATIENCE
    paused = is_addition = False

    def may_continue() -> bool:
        return is_live(path) and time.monotonic() < end

    for event in follow_events(path / "events.jsonl", may_continue):
        if isinstance(event, RunEvent):
            paused = event.status == "paused"
        elif isinstance(event, RequestEvent) and event.request == identity:
            end = math.inf
            if event.outcome != "accepted":
                return event
            is_addition = event.action == "add"
        if paused and is_addition:
            say(f"the run is paused; the machine joins when it resumes: {command_about(path, 'runs', 'ask')} resume")
            is_addition = False
    withdrawn = withdraw_request(path, identity)
    message = (
        f"the run did not accept the request within {span_text(PATIENCE)}"
        if withdrawn
        else "the run ended without an answer"
    )
    return RequestEvent(request=identity, action="", outcome="refused", message=message)


def fetch(run: AnyRun = "", output: Output = OUTPUT, as_json: Json = False) -> ExitCode:
    """Take up a run that its machines have carried on while this one was away, and wait for its end and its model.

    Raises:
        BadInput: no such run.
    """
    path = find_run(output, run)
    if take_up(path):
        say(TAKEN_UP)
    return show_run(path, as_json)


def stop(
    run: LiveRun = "",
    kill: Annotated[bool, typer.Option("--kill", help="End at once, without a snapshot.")] = False,
    output: Output = OUTPUT,
    as_json: Json = False,
) -> ExitCode:
    """Stop a run and show, for each machine, that nothing of it is left running.

    Raises:
        BadInput: no such run, or one on this machine that has ended; no run was named, and not exactly one is live.
        NotReady: machines that could not be asked.
    """
    from distributed.cleaning.clean import leftovers

    moments = {"asked": time.time()}
    try:
        path = find_run(output, run) if run else find_live_run(output)
    except BadInput:
        from app.cli.runs.carried import show_carried  # loads SSH, which a run of this computer does not need

        reason = f"stopped by the user of {socket.gethostname()}"
        if kill or (code := show_carried(run, as_json, reason)) is None:
            raise
        return code
    action: Action = "kill" if kill else "stop"
    distributed = (path / RUN_HOSTS).is_file()
    if not distributed:
        _refuse_ended(path)
    elif take_up(path):
        say(TAKEN_UP)
    if is_live(path):
        leave_request(path, action)
        say(stopping(path, action) if run else f"{path.name}: {stopping(path, action)}")

    def ended() -> None:
        _wait_until_gone(path)
        moments["ended"] = time.time()

    leftovers_by_machine: dict[str, list[str] | MusterError]
    if distributed:
        hosts = load_hosts(path / RUN_HOSTS)
        approve_hosts(hosts, path / RUN_HOSTS, named=False, person=somebody(as_json))
        snapshots: list[SnapshotEvent] = []
        leftovers_by_machine = leftovers(
            hosts, RunFolder.open(path).metadata.run_id, ended, on_snapshot=snapshots.append
        )
        note_unheard(path, snapshots)
    else:
        ended()
        leftovers_by_machine = {"this machine": end_processes(RunFolder.open(path).metadata.run_id)}
    moments["proved"] = time.time()
    return _tell_leftovers(path, leftovers_by_machine, moments, as_json)


def find_live_run(output_dir: Path) -> Path:
    """Return the folder of the run that is going on, wherever it was started.

    Raises:
        BadInput: none is, or several are.
    """
    live = [run.path for run in list_all_runs(output_dir) if run.live]
    if len(live) == 1:
        return live[0]
    if live:
        raise BadInput(f"{len(live)} runs are going on", f"name one: {', '.join(path.name for path in live)}")
    raise BadInput("no run is going on", f"see how they ended: {command_line('runs', 'list')}")


def note_unheard(path: Path, snapshots: list[SnapshotEvent]) -> None:
    """Record the snapshots that machines wrote on their own after the run's supervisor was gone."""
    newest_by_member = newest_snapshots(RunFolder.open(path).events())
    missing = [e for e in snapshots if e.member is not None and e.step > newest_by_member.get(e.member, (-1, ()))[0]]
    if missing and not is_live(path):
        with contextlib.suppress(MusterError), RunFolder.take_over(path) as folder:
            for event in sorted(missing, key=lambda event: event.step):
                folder.append(event)


def _wait_until_gone(path: Path) -> None:
    """Wait while the run reports anything: a step or a snapshot may take long."""
    size, end = -1, time.monotonic() + _STOP_PATIENCE
    while is_live(path):
        grown = 0
        with contextlib.suppress(OSError):
            grown = (path / "events.jsonl").stat().st_size
        if grown != size:
            size, end = grown, time.monotonic() + _STOP_PATIENCE
        if time.monotonic() > end:
            hint = f"end it with: {command_about(path, 'runs', 'stop', '--kill')}"
            raise BadInput(f"the run goes on, but has reported nothing for {span_text(_STOP_PATIENCE)}", hint)
        time.sleep(0.05)


def _tell_leftovers(
    path: Path, leftovers_by_machine: dict[str, list[str] | MusterError], moments: dict[str, float], as_json: bool
) -> ExitCode:
    from distributed.preparation.preflight import NotReady

    problems = {name: left for name, left in leftovers_by_machine.items() if isinstance(left, MusterError)}
    processes_by_machine = {
        name: left for name, left in leftovers_by_machine.items() if not isinstance(left, MusterError)
    }
    view, status = read_view(path), RunFolder.open(path).metadata.status
    state = view.state
    code = ExitCode.RUN_FAILED if any(processes_by_machine.values()) else ExitCode.DONE
    if as_json:
        unknown = {name: problem.message for name, problem in problems.items()}
        outcome = {
            "kept_step": state.resume_step,
            "kept": state.saved_progress,
            "left": processes_by_machine,
            "unknown": unknown,
        }
        document = {"run_dir": str(path), "status": status, **outcome, **moments}
        return answer(True, document, (), ExitCode.NOT_READY if problems else code)
    stopped = "stopped" if view.launched else f"stopped; {state.saved_progress}"
    show_line("the run is completed" if status == "completed" else stopped)
    if status != "completed" and view.resume_command:
        say(f"resume with: {view.resume_command}")
    for name, processes in processes_by_machine.items():
        show_line(visible(f"{name}: {leftovers_text(processes)}"))
    if problems:
        raise NotReady(list(problems.values()))
    return code
