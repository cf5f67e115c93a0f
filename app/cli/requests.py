"""``ask RUN ACTION [MACHINE]``: what a live run is to do, and what became of it."""

from __future__ import annotations

import math
import time
from pathlib import Path

from app.console import command_about, say, show_json, show_line, visible
from distributed.hosts.file import RUN_HOSTS, typed_machine
from distributed.hosts.schema import Machine
from distributed.run.requests import Action, leave_request, withdraw_request
from distributed.run.run_machines import all_hosts
from profiles.errors import BadInput, ExitCode
from training.event_log import follow_lines
from training.events import RequestEvent, RunEvent, from_line
from training.run_files import is_live
from training.run_folder import RunFolder
from training.runs import find_run

PATIENCE = 300.0
"""Seconds until a request is taken: a run that is starting takes none. What is taken has the time that it needs."""


def ask_command(output: Path, reference: str, action: Action, machine: str, as_json: bool) -> ExitCode:
    """Leave a request in a run's folder, and tell its outcome.

    Raises:
        BadInput: no such run, nobody works on it, or a machine is missing where one is needed.
    """
    path = find_run(output, reference)
    if not is_live(path):
        raise BadInput(f"no process is running {path.name}", f"see {command_about(path, 'runs', 'show')}")
    identity = leave_request(path, action, machine, _newcomer(path, action, machine))
    answer = _answer(path, identity)
    code = ExitCode.DONE if answer.outcome == "done" else ExitCode.RUN_FAILED
    if as_json:
        show_json({"action": action, "machine": machine, "outcome": answer.outcome, "message": answer.message,
                   "run_id": RunFolder.open(path).metadata.run_id, "exit_code": int(code)})  # fmt: skip
    else:
        what = f"{action} {machine}".strip()
        show_line(visible(f"{what}: {answer.outcome}{f', {answer.message}' if answer.message else ''}"))
    return code


def _newcomer(path: Path, action: Action, machine: str) -> Machine | None:
    """Return the entry of a machine that the run has never had; ``None`` for one of its own."""
    if action != "add" or not machine or not (path / RUN_HOSTS).is_file():
        return None
    if any(one.name == machine for one in all_hosts(path).machines):
        return None
    return typed_machine(machine)


def _answer(path: Path, identity: str) -> RequestEvent:
    """Wait for the last word on a request; take back what nobody has taken in time."""
    end = time.monotonic() + PATIENCE

    paused = waits = False

    def goes_on() -> bool:
        return is_live(path) and time.monotonic() < end

    for line in follow_lines(path / "events.jsonl", goes_on):
        event = _told(line)
        if isinstance(event, RunEvent):
            paused = event.status == "paused"
        elif event is not None and event.request == identity:
            end = math.inf
            if event.outcome != "accepted":
                return event
            waits = event.action == "add"
        if paused and waits:
            say(f"the run is paused; the machine joins when it resumes: {command_about(path, 'ask')} resume")
            waits = False
    back = withdraw_request(path, identity)
    message = f"the run accepted no request within {PATIENCE:.0f} s" if back else "the run ended without an answer"
    return RequestEvent(request=identity, action="", outcome="refused", message=message)


def _told(line: bytes) -> RequestEvent | RunEvent | None:
    if b'"request"' not in line and b'"run"' not in line:
        return None
    try:
        event = from_line(line)
    except ValueError:
        return None
    return event if isinstance(event, RequestEvent | RunEvent) else None
