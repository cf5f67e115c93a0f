"""The command line that does what a request of the set-up does, where there is one."""

from __future__ import annotations

from collections.abc import Sequence

from app.wizard.state.state import TaskKind
from profiles.installation import command_line


def typed_command(kind: TaskKind, machine: str, picked: Sequence[str]) -> str:
    """Return it as one could type it; empty: a request of the set-up alone.

    Args:
        machine: what the request is about; empty: no single one.
        picked: log-ins of the machines that are picked.
    """
    hosts = ("--hosts", ",".join(picked))
    match kind:
        case TaskKind.HOME:
            return command_line("runs", "list")
        case TaskKind.DOCTOR:
            return command_line("machines", "doctor")
        case TaskKind.NEIGHBOURS:
            return command_line("machines", "discover")
        case TaskKind.ACCESS | TaskKind.INSTALL_KEY if machine:
            return command_line("machines", "access", machine)
        case TaskKind.CHECKS if picked:
            return command_line("machines", "check", *hosts)
        case _:
            return ""
