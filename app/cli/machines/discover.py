"""``discover`` and ``announce``: find other machines, and make this one visible to them."""

from __future__ import annotations

import json
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from app.cli.terminal import heard_by
from app.console import command_line, interactive, say, show, show_json, show_line, visible
from distributed.discovery.announce import Announcement
from distributed.discovery.discovery import Discovery, Sources
from distributed.discovery.machine_identity import FoundMachine, machines
from distributed.discovery.mdns_records import SERVICES
from distributed.discovery.neighbours import neighbours
from distributed.discovery.sightings import SightingOrigin
from profiles.errors import ExitCode
from profiles.installation import USUAL_HOSTS
from profiles.quantities import memory_text

_SYMBOLS = {
    "online": "●*",
    "offline": "○-",
    "checking": "…~",
    "not tried yet": "??",
    "key does not match the known one": "✗x",
}
"""Symbol by state, and one for terminals without Unicode."""
_COLUMNS = {"machine": 16, "state": 9, "address": 15, "over": 10, "what": 11, "found by": 9}
"""Relative widths on a narrow terminal: cells at 80 columns, where an IPv4 address fits into one line."""
_WIDE = 120
_PAINT_EVERY = 0.5
_FOLLOW_EVERY = 5.0
_LOOK_EVERY = 0.05


def discover(
    typed: Annotated[
        list[str], typer.Argument(metavar="USER@HOST", help="Further machines to check, as you type them after ssh.")
    ] = [],  # noqa: B006 - typer copies it
    watch: Annotated[bool, typer.Option("--watch", help="Keep watching and show changes, until Ctrl-C.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON on stdout; with --watch one line per change.")
    ] = False,
    timeout: Annotated[
        float | None, typer.Option(metavar="S", min=0.1, help="Seconds to search; 4 without --watch.")
    ] = None,
    hosts: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also check the machines of this hosts file.")
    ] = None,
) -> ExitCode:
    """Find the machines on this network and those this computer knows, and show which respond."""
    file = hosts or (USUAL_HOSTS if USUAL_HOSTS.exists() else None)
    sources = Sources(tuple(typed), ((SightingOrigin.HOSTS_FILE, file),) if file else ())
    seconds = timeout if timeout is not None else (float("inf") if watch else 4.0)
    with until_signal() as stop, Discovery(sources) as discovery:
        if watch:
            show_changes(discovery, seconds, stop, as_json)
        else:
            stop.wait(seconds)
            _tell(discovery, as_json, stop.code)
    return stop.code


def announce(
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port of this machine's SSH server.")] = 22,
    name: Annotated[str, typer.Option(help="Name to announce; default: its host name.")] = "",
) -> ExitCode:
    """Show this machine in other people's lists until Ctrl-C. Macs with Remote Login need no announcement."""
    with until_signal() as stop, Announcement(port, name) as announcement:
        say(f"announced as '{announcement.name}' on {', '.join(announcement.interfaces)}; press Ctrl-C to stop")
        while not stop.wait(_FOLLOW_EVERY):
            if announcement.follow_interfaces():
                say(f"the network changed; announced on {', '.join(announcement.interfaces)}")
    return stop.code


class _Stop:
    """Flag set by a signal that asks to stop."""

    def __init__(self) -> None:
        self.code = ExitCode.DONE
        self.asked = False

    def note(self, number: int, frame: FrameType | None) -> None:
        self.asked = True
        self.code = ExitCode.STOPPED if number == signal.SIGINT else ExitCode.DONE

    def wait(self, seconds: float) -> bool:
        """Wait at most so long; return whether a stop was requested. Polls: a signal handler must not take a lock."""
        end = time.monotonic() + seconds
        while not self.asked and (left := end - time.monotonic()) > 0:
            time.sleep(min(left, _LOOK_EVERY))
        return self.asked


@contextmanager
def until_signal() -> Iterator[_Stop]:
    """Yield a flag that Ctrl-C, kill, or a closed terminal sets."""
    stop = _Stop()
    with heard_by(stop.note):
        yield stop


# ---------------------------------------------------------------------------------------------------------------- watch


def show_changes(discovery: Discovery, seconds: float, stop: _Stop, as_json: bool) -> None:
    if as_json or not interactive():
        for event, machine in _changes(discovery, seconds, stop):
            if as_json:
                show_line(json.dumps({"event": event, "machine": _document(machine)}, default=str))
            else:
                show_line(f"{event}: {machine_line(machine)}")
        return
    end = time.monotonic() + seconds
    console = Console(highlight=False, markup=False, emoji=False)
    # Nothing else writes meanwhile, and what rich puts in place of stdout does not know its encoding.
    with Live(console=console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False) as live:
        while time.monotonic() < end and not stop.asked:
            live.update(machine_table(machines(discovery.state)), refresh=True)
            stop.wait(_PAINT_EVERY)
    _tell_notices(discovery)


def _changes(discovery: Discovery, seconds: float, stop: _Stop) -> Iterator[tuple[str, FoundMachine]]:
    """Yield each change as a word (found, changed, gone) and the machine."""
    end, version = time.monotonic() + seconds, 0
    shown: dict[str, FoundMachine] = {}
    while not stop.asked and time.monotonic() < end:
        newest = discovery.wait(version, 0.2)
        if newest == version:
            continue
        version, now = newest, {machine.id: machine for machine in machines(discovery.state)}
        for identity in shown.keys() - now.keys():
            yield "gone", shown[identity]
        for identity, machine in now.items():
            before = shown.get(identity)
            if before is None or machine_line(before) != machine_line(machine):
                yield "changed" if before else "found", machine
        shown = now


def machine_line(machine: FoundMachine) -> str:
    location = f" at {_best(machine)}" if machine.paths else ""
    why = f" ({visible(machine.problem.message)})" if machine.problem else ""
    return f"{visible(machine.name)} {machine.status.value}{location}{why}"


# ----------------------------------------------------------------------------------------------------------------- once


def _tell(discovery: Discovery, as_json: bool, code: ExitCode) -> None:
    state = discovery.state
    found_machines = machines(state)
    if as_json:
        problems = [vars(problem) for problem in state.browsed.problems]
        browsed = {"interfaces": list(state.browsed.interfaces), "problems": problems}
        documents = [_document(machine) for machine in found_machines]
        show_json({"machines": documents, "browsed": browsed, "ignored": state.ignored, "exit_code": int(code)})
        return
    show(machine_table(found_machines))
    for machine in found_machines:
        if machine.problem is not None:
            show_line(f"{visible(machine.name)}: {visible(machine.problem.message)}")
            if machine.problem.hint:
                show_line(f"  fix: {visible(machine.problem.hint)}")
    _tell_notices(discovery)


def machine_table(found_machines: tuple[FoundMachine, ...]) -> Table:
    narrow = sys.stdout.isatty() and shutil.get_terminal_size().columns < _WIDE
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold", expand=narrow)
    for heading, share in _COLUMNS.items():
        table.add_column(heading, overflow="fold", ratio=share if narrow else None)
    for machine in found_machines:
        table.add_row(*(Text(visible(cell)) for cell in _cells(machine)))
    return table


def _cells(machine: FoundMachine) -> tuple[str, ...]:
    unicode = (sys.stdout.encoding or "").lower().startswith("utf")
    sign = _SYMBOLS[machine.status.value][0 if unicode else 1]
    best, details = machine.paths[0].endpoint if machine.paths and not machine.here else None, machine.details
    over = f"{best.kind.value} {best.interface}" if best else ""
    memory = details.get("memory", "")
    size = memory_text(float(memory)) if memory.isdecimal() and len(memory) < 16 else ""
    hardware = ", ".join(text for text in (details.get("devices") or details.get("model", ""), size) if text)
    found_by = ", ".join(origin.value for origin in machine.found_by)
    return machine.name, f"{sign} {machine.status.value}", _best(machine), over, hardware, found_by


def _best(machine: FoundMachine) -> str:
    if not machine.paths:
        return f"through {machine.through}" if machine.through else "-"
    best = machine.paths[0].endpoint
    others = sum(path.status is machine.paths[0].status for path in machine.paths) - 1
    others_note = f" +{others}" if others else ""
    return f"{best.host_port}{others_note}"


def _tell_notices(discovery: Discovery) -> None:
    """Report problems of the search itself on stderr, and what to do if it found no machine."""
    state = discovery.state
    for problem in state.browsed.problems:
        say(f"{visible(problem.message)}; {visible(problem.hint)}")
    if state.ignored:
        say(f"too many announcements: {state.ignored} were ignored, the last from {state.ignored_from}")
    if not all(machine.here for machine in machines(state)):
        return
    interfaces = ", ".join(state.browsed.interfaces) or "no interface"
    say(f"no machine found: listened for {', '.join(SERVICES)} on {interfaces}, read ~/.ssh/config and known_hosts")
    if discovery.hashed_names:
        say(f"{discovery.hashed_names} names in known_hosts are hashed and cannot be listed; type their names")
    if addresses := neighbours():
        check = command_line("machines", "discover", addresses[0])
        say(f"this network also has {', '.join(addresses)}; to check one: {check}")
    say("Mac: System Settings > General > Sharing > Remote Login. Elsewhere: start sshd there, and run")
    say(
        f"{command_line('machines', 'announce')} on it. Or name it: {command_line('machines', 'discover', 'USER@HOST')}"
    )


def _document(machine: FoundMachine) -> dict[str, Any]:
    """Return a machine as a JSON document, with the fields of each endpoint merged into its path."""
    machine_document = asdict(machine)
    del machine_document["id"]
    for path, path_document in zip(machine.paths, machine_document["paths"]):
        path_document |= {**path_document.pop("endpoint"), "address": path.endpoint.scoped}
    return machine_document
