"""Command lines that are none, but whose meaning is plain: the exact command to type instead."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from pathlib import Path

from app.cli.command_entry import WIZARD_OPTIONS
from app.cli.commands import COMMANDS, GROUPS
from profiles.errors import MusterError
from profiles.installation import command_line, wizard_line

_SYNONYMS = {
    **dict.fromkeys(("run", "start", "fit", "finetune", "fine-tune", "resume"), ("distributed-train",)),
    **dict.fromkeys(("ls", "ps", "status"), ("runs", "list")),
    **dict.fromkeys(("watch", "dashboard", "monitor"), ("runs", "attach")),
    **dict.fromkeys(("kill", "cancel", "end"), ("runs", "stop")),
    **dict.fromkeys(("scan", "find", "hosts"), ("machines", "discover")),
    **dict.fromkeys(("system-check", "self-test", "test"), ("doctor", "--self-test")),
    "help": ("--help",),
    "version": ("--version",),
}
"""Commands by the names that other programs have for them."""
_OF_TRAINING = {"resume", "try", "detach", "model", "dataset", "set", "plan", "plan_only", "local"}
_HOSTS_OPTIONS = ("--host", "--hostfile", "--machine", "--machines", "--nodes")
_MACHINES = re.compile(r"[\w.@:-]+(,[\w.@:-]+)+|[\w.-]+@[\w.:-]+")


def intended_line(message: str, arguments: Sequence[str], options: Collection[str] = ("--hosts",)) -> str:
    """Return what to type instead of a refused command line; empty if its meaning is not plain.

    Args:
        message: of the refusal.
        arguments: as typed, without the program.
        options: of the command that refused it.
    """
    word = next((word for word in arguments if not word.startswith("-")), "")
    if message.startswith(f"No such command '{word}'"):
        rest = list(arguments)
        rest.remove(word)
        return _by_word(word, rest)
    option = re.match(r"No such option: (--[\w.-]+)", message)
    if option and arguments[:1] and arguments[0].partition("=")[0] == option[1]:
        return wizard_line(*arguments) if option[1] in WIZARD_OPTIONS else _by_option(option[1], arguments)
    if option and option[1] in _HOSTS_OPTIONS and "--hosts" in options:
        return _with_hosts(arguments)
    if option and option[1] == "--plain" and word in ("train", "distributed-train"):  # it opens no screen by itself
        return command_line(*(typed for typed in arguments if typed != "--plain"))
    surplus = re.match(r"Got unexpected extra argument\(?s?\)? \((.*)\)", message)
    if surplus and "--hosts" in arguments:
        return _with_commas(list(arguments), surplus[1].split())
    return ""


def _by_word(word: str, rest: list[str]) -> str:
    grouped = next((entry.group for key, entry in COMMANDS.items() if entry.group and (entry.name or key) == word), "")
    grouped = grouped or ("runs" if word in ("list", "show") else "")
    if grouped in GROUPS:
        return command_line(grouped, word, *rest)
    if word in _SYNONYMS:
        resumed = ["--resume"] if word == "resume" else []
        return command_line(*_SYNONYMS[word], *resumed, *rest)
    if word.endswith(".py"):
        return command_line("launch", "--", word, *rest)
    if is_profile(word):
        return command_line("distributed-train", word, *rest)
    return wizard_line("--hosts", word, *rest) if is_hosts(word) else ""


def _by_option(option: str, arguments: Sequence[str]) -> str:
    from profiles.options import canonical, options_by_name  # pydantic, which --help does without

    name = canonical(option.lstrip("-").replace("-", "_"))
    is_of_training = name in _OF_TRAINING or name in options_by_name()
    profile = [] if name == "resume" else ["PROFILE"]
    return command_line("distributed-train", *profile, *arguments) if is_of_training else ""


def _with_hosts(arguments: Sequence[str]) -> str:
    """Return the command line with all machines behind one ``--hosts``, whichever options named them."""
    words, machines, at = list[str](), list[str](), -1
    is_machine = False
    for typed in arguments:
        name, equals, value = typed.partition("=")
        if name in (*_HOSTS_OPTIONS, "--hosts"):
            at, is_machine = len(words) if at < 0 else at, True
            machines += [value] if equals else []
        elif typed.startswith("-") or not is_machine or is_profile(typed):
            words.append(typed)
            is_machine = False
        else:
            machines.append(typed)
    return command_line(*words[:at], "--hosts", ",".join(machines), *words[at:])


def _with_commas(arguments: list[str], surplus: Sequence[str]) -> str:
    """Return the command line with the machines after ``--hosts`` in one word."""
    at = arguments.index("--hosts") + 1
    machines = arguments[at : at + 1 + len(surplus)]
    return command_line(*arguments[:at], ",".join(machines), *arguments[at + len(machines) :])


def is_profile(word: str) -> bool:
    """Whether there is a profile of this name."""
    from profiles.files.library import Library  # pydantic, which --help does without

    try:
        return word in Library.open().names("profile")
    except MusterError:
        return False


def is_hosts(word: str) -> bool:
    """Whether a word is a hosts file, or machines as typed after ``ssh``."""
    return _MACHINES.fullmatch(word) is not None or (word.endswith(".json") and Path(word).is_file())
