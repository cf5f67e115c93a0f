"""The commands: one row each. The file of a command is imported when it is called, so that ``--help`` stays quick."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Annotated

import typer

from app.cli.arguments import new_app
from app.cli.boundary import run_app

COMMANDS = {
    "distributed-train": (
        "train_command",
        "Train a model with workers of this machine or of several, live progress, and a result to use.",
    ),
    "distributed-check": ("check", "Ask all machines whether they are ready to train, and fix what is safe to fix."),
    "access": ("access", "See whether machines accept the login, and why not; a password, given once, installs a key."),
    "clean": ("clean", "Take everything of ours off machines again, after showing it; live runs are not touched."),
    "attach": (
        "attach",
        "Watch a run that goes on in the background; any number of terminals may. On a terminal: the dashboard.",
    ),
    "logs": ("attach", "Show what the processes of a run have logged."),
    "ask": ("ask", "Ask a live run for something: a pause, a snapshot, a machine more or less."),
    "stop": ("ask", "Stop a run in the background, and show for every machine that nothing of it is left."),
    "transcribe": ("transcribe", "Transcribe sound files."),
    "evaluate": ("evaluate", "Measure WER and CER of a model on a data set, by speaker, length and noise."),
    "export": ("export", "Convert a trained model for other programs, and check that it hears the same."),
    "compare": ("evaluate", "Show whether B hears better than A, with a 95 % interval; no model runs."),
    "prepare": (
        "prepare",
        "Make a data set from recordings anywhere: download, check, and split by speaker; resumable.",
    ),
    "segment": (
        "segment",
        "Cut long recordings at pauses, and assign to each clip the words of the transcript spoken in it.",
    ),
    "patches": (
        "patches",
        "Show what the files in a data set's folder 'patches' change: texts, protected samples, samples left out.",
    ),
    "blacklist": (
        "blacklist",
        "List training samples whose transcript is contradicted by a model that never trained on them.",
    ),
    "pseudo-label": (
        "pseudo_label",
        "Let a model write transcripts of recordings into pseudo.csv; an interrupted call resumes.",
    ),
    "discover": ("discover", "Find the machines on this network and those this computer knows, and show which answer."),
    "announce": (
        "discover",
        "Show this machine in other people's lists until Ctrl-C. Macs with Remote Login need no announcement.",
    ),
    "measure": ("measure", "Measure machines with a short run of the task, and the links between them with raw TCP."),
    "plan": ("plan", "Predict every way to train a profile on these machines, and show the best one and why."),
    "report": ("run_outputs", "Write a report of a run: one HTML file with its charts, machines, traffic and result."),
    "replay": ("replay", "Replay a finished run, in its own time or faster."),
    "track": (
        "run_outputs",
        "Send the events of a run to CSV, TensorBoard, Weights & Biases or trackio; follows a live run.",
    ),
    "web": ("run_outputs", "Show a run, or the guided set-up, in the browser of this machine."),
    "demo-run": (
        "replay",
        "Show a recorded run under the names of invented machines: no machine trains, nothing is asked.",
    ),
    "runs": ("runs", "List, show, compare and clean runs."),
    "profiles": ("profiles", "List, show and check profiles."),
}
"""By name: the file of the command, which is a function of this name or a group of commands, and its line of help."""


def _version(wanted: bool) -> None:
    if wanted:
        import importlib.metadata  # slow, and --help does not need it

        try:
            version = importlib.metadata.version("muster-train")
        except importlib.metadata.PackageNotFoundError:  # started from a folder that was never installed
            version = "unknown"
        typer.echo(f"muster {version}")
        raise typer.Exit


def root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Train one model on the machines you already own."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help(), nl=False)


def command_tree(names: Sequence[str] = tuple(COMMANDS)) -> typer.Typer:
    """Return the program with these commands."""
    app = new_app(help=root.__doc__)
    app.callback(invoke_without_command=True)(root)
    for name in names:
        file, about = COMMANDS[name]
        command = getattr(importlib.import_module(f"app.cli.{file}"), name.replace("-", "_"))
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=name, help=about, invoke_without_command=True)
        else:
            app.command(name, help=about)(command)
    return app


def command_list() -> typer.Typer:
    """Return the program with the names of all commands, for a call that names none of them."""
    app = command_tree(())
    for name, (_, about) in COMMANDS.items():
        app.command(name, help=about)(lambda: None)
    return app


def main(arguments: Sequence[str], name: str = "cli_typer.py") -> int:
    """Run one command line and return its exit code."""
    called = next((word for word in arguments if not word.startswith("-")), "")
    return run_app(command_tree([called]) if called in COMMANDS else command_list(), arguments, name)
