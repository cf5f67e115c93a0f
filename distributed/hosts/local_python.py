"""Interpreters of this computer that a hosts file names: a file of somebody else's may name a program of theirs.

The one that runs now, and what is found by its bare name, need nobody; of others a person stands behind the content.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from distributed.hosts.schema import Hosts, Machine
from training.approvals import approve, digest_of, is_approved


def strange_pythons(hosts: Hosts) -> list[Path]:
    """Return the interpreters for this computer that nobody stands behind."""
    return [_program(machine) for machine in hosts.machines if _strange(machine)]


def accept_pythons(hosts: Hosts) -> None:
    """Use them from now on: a person has named the hosts file, or agreed to them."""
    for program in strange_pythons(hosts):
        approve(_digest(program), f"interpreter {program}")


def without_strange_pythons(hosts: Hosts) -> Hosts:
    """Return the machines with the usual interpreter here instead of one that nobody stands behind."""
    machines = (m.model_copy(update={"python": ""}) if _strange(m) else m for m in hosts.machines)
    return hosts.model_copy(update={"machines": tuple(machines)})


def _strange(machine: Machine) -> bool:
    if not machine.here or "/" not in machine.python_command:
        return False
    program = _program(machine)
    return program != Path(sys.executable) and not is_approved(_digest(program))


def _program(machine: Machine) -> Path:
    return Path(os.path.abspath(os.path.expanduser(machine.python_command)))


def _digest(program: Path) -> str:
    return digest_of("python", [program])
