"""Labs by hand: ``python -m tests.lab up a b c:cores=0.5,mbit=100`` and, from another terminal, the other commands.

``up`` stays in the foreground and takes the lab down when it ends, however it ends.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from tests.lab import network, processes, reaper
from tests.lab.lab import Lab
from tests.lab.spec import HostSpec, LabUnavailable


def parse_spec(text: str) -> HostSpec:
    """Parse ``NAME[:key=value,...]`` with the fields of :class:`~tests.lab.spec.HostSpec`."""
    name, _, options = text.partition(":")
    known = {field.name: field.type for field in fields(HostSpec)}
    given: dict[str, Any] = {}
    for part in options.split(",") if options else []:
        key, _, value = part.partition("=")
        if key not in known or key == "name":
            raise argparse.ArgumentTypeError(f"unknown option '{key}'; there are: {', '.join(known)}")
        given[key] = _convert(str(known[key]), value)
    return HostSpec(name, **given)


def _convert(kind: str, value: str) -> Any:
    if kind.startswith("bool"):
        return value.lower() in ("", "1", "yes", "true", "on")
    if kind.startswith("tuple"):
        return tuple(value.split("+"))
    if kind.startswith(("float", "int")):
        return float(value) if kind.startswith("float") else int(value)
    return value


def up(hosts: Sequence[HostSpec]) -> int:
    """Build a lab, print how to use it, and wait for Ctrl-C or SIGTERM."""
    with Lab(*hosts) as lab:
        print(f"Lab {lab.slot}: this machine is {lab.address}")
        for host in lab:
            print(f"  {host.name:12} {host.address:15} ssh -F {lab.ssh_config} {host.name}")
        print(f"  muster:      python3 cli_typer.py train demo --hosts {lab.hosts_file}")
        print(f"  elsewhere:   .venv/bin/python -m tests.lab cut|mend|kill|rate|run {lab.slot} HOST ...")
        print("Ctrl-C takes it down.", flush=True)
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        try:
            signal.pause()
        except KeyboardInterrupt:
            print()
    return 0


def find_host(slot: int, name: str) -> tuple[int, str]:
    """Return the PID of a host's process 1 in a running lab, and the name of its cable.

    Raises:
        LabUnavailable: there is no such lab or host.
    """
    try:
        hosts = json.loads((reaper.BASE / str(slot) / "hosts.state").read_text())
    except OSError:
        raise LabUnavailable(f"no lab {slot}; see: .venv/bin/python -m tests.lab list") from None
    for number, host in enumerate(hosts):
        if host["name"] == name:
            return int(host["pid"]), f"mu{slot}h{number}"
    raise LabUnavailable(f"no host '{name}' in lab {slot}; there are: {', '.join(h['name'] for h in hosts)}")


def act(command: str, slot: int, name: str, rest: Sequence[str]) -> int:
    """Apply a command to a host of a lab that runs in another terminal."""
    pid, cable = find_host(slot, name)
    if command in ("cut", "mend"):
        network.ip("link", "set", cable, "down" if command == "cut" else "up")
    elif command == "kill":
        network.ip("link", "set", cable, "down")
        processes.kill_now(pid)
    elif command == "rate":
        network.shape(cable, pid, float(rest[0]) if rest and rest[0] != "off" else None)
    else:
        return subprocess.run(["nsenter", "-t", str(pid), "-a", "env", "HOME=/root", *(rest or ["bash"])]).returncode
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.lab", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    build = commands.add_parser("up", help="build a lab and keep it until Ctrl-C")
    build.add_argument("hosts", nargs="*", type=parse_spec, help="NAME[:cores=0.5,mbit=100,...]; default: a b c")
    commands.add_parser("list", help="labs on this machine")
    commands.add_parser("clean", help="remove labs whose owner is dead")
    for word in ("cut", "mend", "kill", "rate", "run"):
        one = commands.add_parser(word, help=f"{word} a host")
        one.add_argument("lab", type=int)
        one.add_argument("host")
        one.add_argument("rest", nargs=argparse.REMAINDER, help="rate: Mbit/s or 'off'; run: a command")
    given = parser.parse_args(argv)
    try:
        return _carry_out(given)
    except LabUnavailable as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _carry_out(given: argparse.Namespace) -> int:
    if given.command == "up":
        return up(given.hosts or [HostSpec("a"), HostSpec("b"), HostSpec("c")])
    if given.command == "list":
        for slot, owner in reaper.labs().items():
            print(f"{slot:3}  {'running' if owner and owner.alive else 'abandoned'}  pid {owner.pid if owner else '?'}")
        return 0
    if given.command == "clean":
        print(f"removed {len(reaper.reap())} labs")
        return 0
    return act(given.command, given.lab, given.host, given.rest)


if __name__ == "__main__":
    sys.exit(main())
