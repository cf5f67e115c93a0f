"""The first line of a start, said before anything large is imported: with cold caches that takes seconds.

Standard library only, in the syntax of Python 3.8, as :mod:`profiles.bootstrap`.
"""

from __future__ import annotations

import os
import sys

_SILENT = frozenset(["--json", "--help", "-h", "--help-all", "--version"])


def say_first_line(arguments: list[str]) -> None:
    """Say what a command line begins with, on stderr; of a run on this computer alone, only at a terminal."""
    try:
        if line := first_line(arguments, sys.stderr.isatty()):
            print(line, file=sys.stderr, flush=True)
    except (OSError, ValueError, AttributeError):  # nobody reads it, or it is closed
        return


def first_line(arguments: list[str], is_terminal: bool = False) -> str:
    """Return what a start does before anything else can be said; empty: it is no start, or says it soon.

    Args:
        arguments: of the command line, as typed: whether they are right is not known yet.
        is_terminal: whether somebody watches, also a run on this computer alone.
    """
    if arguments[:1] not in (["train"], ["distributed-train"]) or _SILENT.intersection(arguments):
        return ""
    run, hosts = _value(arguments, "--resume"), _value(arguments, "--hosts")
    pairs = zip(["", *arguments[1:]], arguments[1:])  # the command itself is no option, and no profile
    profile = next((word for before, word in pairs if not word.startswith("-") and not _is_option(before)), "")
    reading = f"reading run {run}" if run else f"reading profile {profile}" if profile else "reading the job"
    if hosts:
        machines = f"the machines of {hosts}" if os.path.isfile(hosts) else ", ".join(hosts.split(","))
        reading = f"{reading}, then connecting to {machines}"
    elif not is_terminal:
        return ""
    return "".join(sign if sign.isprintable() else "?" for sign in reading)


def _value(arguments: list[str], option: str) -> str:
    """Return the value of an option: of ``--hosts a,b`` or ``--hosts=a,b``; empty where it is not there."""
    for word, following in zip(arguments, [*arguments[1:], ""]):
        if word == option:
            return following
        if word.startswith(f"{option}="):
            return word.partition("=")[2]
    return ""


def _is_option(word: str) -> bool:
    """Whether a word is an option whose value may be the next word."""
    return word.startswith("-") and "=" not in word
