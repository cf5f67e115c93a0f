"""Process entry of the coordinator::

    python -m training.exchange.group.coordinator_main --config coordinator.json

It prints ``{"port": N, "relay": M}`` when it listens and then one event a line; SIGTERM ends it. When stdin closes,
the supervisor is gone: it then serves until the last member has left, so that training ends in good order.
A line ``{"ban": RANK}`` on stdin drops a member for good, ``{"admit": RANK}`` lets it in again; ``{"ended": RANK}``
says that a member's process has ended, and ``{"command": "stop"}`` also that the supervisor is gone.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from pydantic import ValidationError

from profiles.bootstrap import end_process
from profiles.errors import BadInput, ExitCode, MusterError
from training.exchange.group.coordinator_server import Coordinator
from training.exchange.group.coordinator_state import CoordinatorConfig
from training.records.bounded_fields import first_problem
from training.records.event_log import EventSink
from training.records.events import MemberEvent, WarningEvent, WaysEvent

_RETURN, _POLL_SECONDS = 10.0, 0.1
"""Seconds within which members whose connections broke return, and between two checks for members."""
_MAX_FILES = 8192
"""Includes connections in their handshake, at some 100 kB each: the cost of unauthenticated peers is bounded."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a coordinator until SIGTERM comes, or it is no longer needed; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m training.exchange.group.coordinator_main", description=__doc__)
    parser.add_argument("--config", type=Path, required=True, metavar="FILE.json")
    parser.add_argument("--wait", action="store_true", help="read the file after a line on stdin")
    options = parser.parse_args(arguments)
    path: Path = options.config
    if options.wait and not _line_on_stdin():
        return int(ExitCode.DONE)
    try:
        _serve(path)
    except MusterError as error:
        failure = {"port": 0, "error": error.message, "hint": error.hint, "option": error.option}
        print(json.dumps(failure), flush=True)
        print(f"coordinator: {error}", file=sys.stderr)
        return int(error.exit_code)
    return int(ExitCode.DONE)


def _serve(path: Path) -> None:
    _allow_connections()
    end = threading.Event()
    write = EventSink(sys.stdout)
    buffered: list[MemberEvent | WarningEvent | WaysEvent] = []
    is_listening, lock = threading.Event(), threading.Lock()

    def log(event: MemberEvent | WarningEvent | WaysEvent) -> None:
        with lock:
            if not is_listening.is_set():  # members of a restarted coordinator connect at once
                buffered.append(event)
                return
            write(event)

    coordinator = Coordinator(_read_config(path), log)
    port = coordinator.start()
    _watch_for(end, coordinator)
    with lock:
        print(json.dumps({"port": port, "relay": coordinator.group.relay}), flush=True)
        for event in buffered:
            write(event)
        is_listening.set()
    end.wait()
    coordinator.stop()


def _line_on_stdin() -> bool:
    """Wait for a line, and take nothing that follows it; return whether one came."""
    while byte := os.read(0, 1):
        if byte == b"\n":
            return True
    return False


def _allow_connections() -> None:
    """Raise the limit of open files above the usual 256 or 1024, so that idle peers cannot exhaust it."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = _MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, _MAX_FILES)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


def _read_config(path: Path) -> CoordinatorConfig:
    try:
        return CoordinatorConfig.model_validate_json(path.read_bytes())
    except OSError as error:
        raise BadInput(f"{path}: {error.strerror}", "name the coordinator's configuration file") from error
    except ValidationError as error:
        raise BadInput(f"{path}: {first_problem(error)}", "write the configuration again") from error


def _watch_for(end: threading.Event, coordinator: Coordinator) -> None:
    """Obey commands on stdin; set ``end`` on a termination signal, or when stdin has closed and no member is left."""
    signal.signal(signal.SIGTERM, lambda *_: end.set())
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an engine sends it to all processes; the run's own one acts on it

    def watch() -> None:
        # os.read, not sys.stdin: a daemon thread inside a buffered read would block the interpreter's exit.
        incomplete_line = b""
        while chunk := os.read(0, 4096):
            *lines, incomplete_line = (incomplete_line + chunk).split(b"\n")
            for line in lines:
                command = json.loads(line)
                if "ban" in command:
                    coordinator.ban(int(command["ban"]))
                elif "admit" in command:
                    coordinator.admit(int(command["admit"]))
                elif "ended" in command:
                    coordinator.note_end(int(command["ended"]))
                elif command.get("command") == "stop":  # an agent's, whose lease is over
                    threading.Thread(target=serve_out, name="serves out", daemon=True).start()
        serve_out()

    def serve_out() -> None:
        coordinator.group.orphaned = True
        last_seen = time.monotonic()
        while not coordinator.group.all_left and time.monotonic() < last_seen + _RETURN and not end.wait(_POLL_SECONDS):
            last_seen = time.monotonic() if coordinator.group.members else last_seen
        end.set()

    threading.Thread(target=watch, name="stdin", daemon=True).start()


if __name__ == "__main__":
    end_process(main())
