"""How a command is declared."""

from __future__ import annotations

from dataclasses import dataclass

WIZARD_OPTIONS = ("--hosts", "--profile", "--plain", "--demo", "--ascii")
"""Options of the guided set-up, with which ``muster`` opens it."""


@dataclass(frozen=True)
class CommandEntry:
    """A command, or a group of commands."""

    module: str
    """Module in which the function has the command's key as its name; relative to ``app.cli`` with a dot before it."""
    about: str
    group: str = ""
    """Group that it belongs to, as in ``machines check``; empty: none."""
    name: str = ""
    """Name in its group, or on its own; empty: its key."""
    trains: bool = False
    """Whether it needs the training packages on this computer."""
    wraps_command: bool = False
    """Whether its first argument begins another command line, with options of its own."""
