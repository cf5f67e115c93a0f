"""``ask RUN ACTION [MACHINE]``: what a live run is to do, and what became of it."""

from __future__ import annotations

import time
from pathlib import Path

from app.console import command_about, show_json, show_line, visible
from app.follow import follow_lines
from distributed.hosts.file import RUN_HOSTS, typed_machine
from distributed.hosts.schema import Machine
from distributed.run.newcomers import all_hosts
from distributed.run.requests import Action, leave_request
from distributed.runs import find_run
from profiles.errors import BadInput, ExitCode
from training.events import RequestEvent, from_line
from training.run_files import is_live
from training.run_folder import RunFolder

PATIENCE = 300.0
"""Seconds for an answer; a machine that is taken in gets code and data first."""


def ask_command(output: Path, reference: str, action: Action, machine: str, as_json: bool) -> ExitCode:
    """Leave a request in a run's folder, and tell its outcome.

    Raises:
        BadInput: no such run, nobody works on it, or a machine is missing where one is needed.
    """
    path = find_run(output, reference)
    if not is_live(path):
        raise BadInput(f"nobody works on {path.name} any more", f"see {command_about(path, 'runs', 'show')}")
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
    """Wait for the last word on a request."""
    end = time.monotonic() + PATIENCE
    for line in follow_lines(path / "events.jsonl", lambda: is_live(path) and time.monotonic() < end):
        event = _request(line)
        if event is not None and event.request == identity and event.outcome != "accepted":
            return event
    return RequestEvent(request=identity, action="", outcome="refused", message="the run gave no answer")


def _request(line: bytes) -> RequestEvent | None:
    if b'"request"' not in line:
        return None
    try:
        event = from_line(line)
    except ValueError:
        return None
    return event if isinstance(event, RequestEvent) else None
