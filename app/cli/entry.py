"""Whether a command line calls the guided set-up, which paints its first screen without loading the commands."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from app.cli.command_entry import WIZARD_OPTIONS
from profiles.bootstrap import command_words

INSTALLED = "muster"
"""Name of the installed program."""


def called_set_up(arguments: Sequence[str], name: str) -> Callable[[], int] | None:
    """Return the function that opens the guided set-up and returns the exit code; ``None`` if a command is called."""
    words = command_words([*arguments])
    is_named = words[:1] in (["wizard"], ["tour"])
    is_wizard = not is_named and (not arguments or arguments[0].partition("=")[0] in WIZARD_OPTIONS)
    if f"_{name.upper()}_COMPLETE" in os.environ:  # a shell asks what the words may go on with
        return None
    if not is_named and not (name == INSTALLED and is_wizard):
        return None

    def open_set_up() -> int:
        from app.cli.wizard import main as wizard  # its own options, and textual

        if is_wizard:
            return wizard(arguments, name)
        rest = [*arguments]
        rest.remove(words[0])
        return wizard(rest, f"{name} {words[0]}", tour=words[:1] == ["tour"])

    return open_set_up
