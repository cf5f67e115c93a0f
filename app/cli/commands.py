"""The commands of Muster by name: group and description of each.

A command's module is imported only when it is called, so that ``--help`` stays fast. Every command can also be called
by its key here, whatever its group; the top-level help does not list these names.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import typer

from app.cli.arguments import HELP_OPTIONS, new_app
from app.cli.command_entry import CommandEntry
from profiles.errors import BadInput
from profiles.installation import IS_CHECKOUT, can_train, load_plugin, plugins

GROUPS = {
    "runs": "Watch, control, compare and clean runs.",
    "model": "Use a trained model: transcribe, generate, chat, evaluate, compare, export.",
    "data": "Make a data set from recordings, and find what is wrong in one.",
    "machines": "Find machines, check and measure them, get access, and clean up.",
}


def plugin_commands() -> dict[str, CommandEntry]:
    """Return the commands of plug-ins; a broken one is named, and the others are still there."""
    commands: dict[str, CommandEntry] = {}
    for point in plugins("muster.commands"):
        try:
            commands |= load_plugin(point)
        except BadInput as error:
            print(f"warning: {error.message}; {error.hint}", file=sys.stderr)
    return commands


def _also(name: str) -> str:
    """Return a sentence with the name of a command that the script of a checkout has besides the listed one."""
    return f" Also: {name}." if IS_CHECKOUT else ""


_FIRST = ("train", "launch", *GROUPS)
"""Entries of the top-level help."""
COMMANDS: dict[str, CommandEntry] = {
    **plugin_commands(),
    "distributed-train": CommandEntry(
        ".train.command",
        f"Train a model on this machine or on several, with live progress.{_also('distributed-train')}",
        name="train",
        trains=True,
    ),
    "launch": CommandEntry(
        ".train.launch",
        "Run your own PyTorch training script on several machines, as torchrun does on a cluster.",
        trains=True,
        wraps_command=True,
    ),
    "runs": CommandEntry(".runs.listing", GROUPS["runs"]),
    "sweep": CommandEntry(
        ".sweep.sweep",
        "Train a profile with several values of an option, over idle machines, and show which is best.",
        "runs",
        trains=True,
    ),
    "attach": CommandEntry(
        ".runs.attach",
        "Watch a run in the background, from any number of terminals; shows the dashboard on a terminal.",
        "runs",
    ),
    "logs": CommandEntry(".runs.attach", "Show what the processes of a run have logged.", "runs"),
    "ask": CommandEntry(".runs.ask", "Pause or resume a live run, write a snapshot, add or drop a machine.", "runs"),
    "stop": CommandEntry(
        ".runs.ask",
        "Stop a run in the background, and check that nothing of it is left running on any machine.",
        "runs",
    ),
    "fetch": CommandEntry(
        ".runs.ask", "Get the events and the model of a run that its machines carried on without this one.", "runs"
    ),
    "report": CommandEntry(
        ".runs.listing",
        "Write a report of a run: one HTML file with its charts, machines, traffic and result.",
        "runs",
    ),
    "replay": CommandEntry(".runs.attach", "Replay a finished run, in its own time or faster.", "runs"),
    "track": CommandEntry(
        ".runs.listing",
        "Send the events of a run to CSV, TensorBoard, Weights & Biases or trackio; follows a live run.",
        "runs",
    ),
    "web": CommandEntry(".runs.listing", "Show a run, or the guided set-up, in the browser of this machine.", "runs"),
    "generate": CommandEntry(
        ".model.generate", "Let a language model answer a prompt, or go on from a text.", "model", trains=True
    ),
    "chat": CommandEntry(".model.generate", "Talk with a language model.", "model", trains=True),
    "evaluate": CommandEntry(
        ".model.evaluate",
        "Measure WER and CER of a model on a data set; of a language model loss and perplexity.",
        "model",
        trains=True,
    ),
    "compare": CommandEntry(
        ".train.compare",
        "Show whether B transcribes better than A, with a 95 % interval; or which strategy suits a profile.",
        "model",
        trains=True,
    ),
    "serve": CommandEntry(
        ".model.serve",
        "Answer commands of another program, a JSON list a line on stdin, with the models kept loaded.",
        "model",
        trains=True,
    ),
    "discover": CommandEntry(
        ".machines.discover",
        "List the machines on this network and those this computer knows, and show which of them answer.",
        "machines",
    ),
    "announce": CommandEntry(
        ".machines.discover",
        "Announce this machine on the network until Ctrl-C. Macs with Remote Login announce themselves.",
        "machines",
    ),
    "access": CommandEntry(
        ".machines.access",
        "Check whether machines accept the login, or why not; a password, given once, installs a key.",
        "machines",
    ),
    "share": CommandEntry(
        ".machines.joining",
        "Show a code with which a machine joins that has no SSH server, or accepts no connections.",
        "machines",
    ),
    "join": CommandEntry(
        ".machines.joining", "Join the computer that shares a code: it can then train on this one.", "machines"
    ),
    "lent": CommandEntry(
        ".machines.joining", "Show what has run on this computer for those that it has joined.", "machines"
    ),
    "leave": CommandEntry(
        ".machines.joining", "Leave what this computer has joined; or remove a machine that has joined it.", "machines"
    ),
    "distributed-check": CommandEntry(
        ".machines.check",
        f"Check whether all machines are ready to train, and fix what is safe to fix.{_also('distributed-check')}",
        "machines",
        "check",
    ),
    "doctor": CommandEntry(
        ".machines.doctor", "Check whether this computer can train: everything, or what you name.", "machines"
    ),
    "measure": CommandEntry(
        ".train.measure",
        "Measure machines with a short run of the job, and the links between them.",
        "machines",
        trains=True,
    ),
    "plan": CommandEntry(
        ".train.measure",
        "Predict every way to train a profile on these machines; show the best one and why.",
        "machines",
        trains=True,
    ),
    "clean": CommandEntry(
        ".machines.check",
        "Remove Muster from machines again, after showing what would go; live runs are not touched.",
        "machines",
    ),
    "setup": CommandEntry(".setup", "Install on this computer what trains: PyTorch and other packages.", "machines"),
    "profiles": CommandEntry(".profiles", "List, show and check profiles."),
    "demo-run": CommandEntry(
        ".runs.attach", "Show a recorded run under invented machine names: nothing trains, nothing is asked."
    ),
}
"""Commands by the name that works without a group; plug-ins name theirs in entry points ``muster.commands``."""
SCREENS = {
    "wizard": "Open the guided set-up: machines, job, the fastest way to train, a live dashboard.",
    "tour": "Open the guided set-up with recorded machines; nothing is changed, no network is needed.",
}
"""The guided set-up is not part of this tree: its options are those of ``wizard.py``."""


def command_tree(words: Sequence[str] | None = None) -> typer.Typer:
    """Return the program with the commands that a command line calls; without ``words``, with all commands.

    Args:
        words: words of the command line, without options.
    """
    app = new_app(not IS_CHECKOUT)
    called = next(iter(words or ()), "")
    for key, command in COMMANDS.items():
        shown = command.name or key
        if key not in GROUPS and (words is None or called == key):
            _add(app, key, key)
        if key not in GROUPS and not command.group and shown != key and (words is None or called == shown):
            _add(app, shown, key)
    for group in GROUPS if words is None else (called,):
        if group in GROUPS:
            app.add_typer(_group(group, words), name=group, help=GROUPS[group], invoke_without_command=group == "runs")
    return app


def command_list(include_advanced: bool = False) -> typer.Typer:
    """Return the program with names and descriptions only, for a command line that calls no command.

    Args:
        include_advanced: also list the commands that the top-level help omits.
    """
    app = new_app(not IS_CHECKOUT)
    for name, about in _names(include_advanced):
        app.command(name, help=about)(lambda: None)
    hidden = {*COMMANDS, *SCREENS} - {name for name, _ in _names(include_advanced)}
    for name in sorted(hidden):
        app.command(name, hidden=True)(lambda: None)
    return app


def _names(include_advanced: bool) -> Iterator[tuple[str, str]]:
    alone = {command.name or key: command.about for key, command in COMMANDS.items() if not command.group}
    lines = {**SCREENS, **alone, **GROUPS}
    yield from ((name, lines[name]) for name in _FIRST)
    if include_advanced:
        yield from ((name, about) for name, about in lines.items() if name not in _FIRST)


def _group(name: str, words: Sequence[str] | None) -> typer.Typer:
    """Return a group with the commands that ``words`` call, and descriptions of the others; without words, with all."""
    app = _function("runs") if name == "runs" else new_app(no_args_is_help=True)
    for key, command in COMMANDS.items():
        shown = command.name or key
        if command.group == name and (words is None or shown in words):
            _add(app, shown, key)
        elif command.group == name:
            app.command(shown, help=command.about)(lambda: None)
    return app


def _add(app: typer.Typer, name: str, key: str) -> None:
    command = _function(key)
    if isinstance(command, typer.Typer):
        app.add_typer(command, name=name, help=COMMANDS[key].about, invoke_without_command=True)
    else:
        settings = {**HELP_OPTIONS, "allow_interspersed_args": not COMMANDS[key].wraps_command}
        app.command(name, help=COMMANDS[key].about, context_settings=settings)(command)


def _function(key: str) -> Any:
    function: Callable[..., Any] | typer.Typer = getattr(
        importlib.import_module(COMMANDS[key].module, "app.cli"), key.replace("-", "_")
    )
    if COMMANDS[key].trains and not can_train():
        from app.cli.handover import handed_over  # only in a light core

        return handed_over(function, uses_model=COMMANDS[key].group == "model")
    return function
