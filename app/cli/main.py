"""The commands: one row each, and the process boundary: what a command raises becomes an exit code and clear lines.

The file of a command is imported when it is called, so that ``--help`` stays quick. With ``--json`` a failure is the
one document on stdout: ``{"error": {"message", "hint"}, "exit_code": n}``.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Callable, Sequence
from typing import Annotated

import typer

from app.cli.arguments import HELP_OPTIONS, new_app
from app.cli.terminal import fail
from app.console import ending_questions, save_traceback
from profiles.bootstrap import begin_to_answer
from profiles.errors import ExitCode, MusterError

COMMANDS = {
    "distributed-train": ("train_command", "Train a model on this machine or on several, with live progress."),
    "launch": ("launch", "Run your own PyTorch training script on several machines, as torchrun does on a cluster."),
    "distributed-check": ("machines", "Check whether all machines are ready to train, and fix what is safe to fix."),
    "doctor": ("doctor", "Check whether this computer can train: everything, or what you name."),
    "access": (
        "access",
        "Check whether machines accept the login, or why not; a password, given once, installs a key.",
    ),
    "clean": ("machines", "Remove Muster from machines again, after showing what would go; live runs are not touched."),
    "attach": (
        "attach",
        "Watch a run in the background, from any number of terminals; shows the dashboard on a terminal.",
    ),
    "logs": ("attach", "Show what the processes of a run have logged."),
    "ask": ("ask", "Pause or resume a live run, write a snapshot, add or drop a machine."),
    "stop": ("ask", "Stop a run in the background, and check that nothing of it is left running on any machine."),
    "transcribe": ("transcribe", "Transcribe sound files."),
    "evaluate": ("models", "Measure WER and CER of a model on a data set, by speaker, length and noise."),
    "export": ("models", "Convert a trained model for other programs, and check that it still transcribes the same."),
    "compare": (
        "compare",
        "Show whether B transcribes better than A, with a 95 % interval; or which strategy suits a profile.",
    ),
    "prepare": (
        "recordings",
        "Make a data set from recordings anywhere: download, check, and split by speaker; resumable.",
    ),
    "segment": (
        "recordings",
        "Cut long recordings at pauses, and assign to each clip the words of the transcript spoken in it.",
    ),
    "patches": (
        "transcripts",
        "Show what the files in a data set's folder 'patches' change: texts, protected samples, samples left out.",
    ),
    "blacklist": (
        "transcripts",
        "List training samples whose transcript is contradicted by a model that never trained on them.",
    ),
    "pseudo-label": (
        "transcripts",
        "Let a model write transcripts of recordings into pseudo.csv; continues where it was interrupted.",
    ),
    "discover": (
        "discover",
        "List the machines on this network and those this computer knows, and show which of them answer.",
    ),
    "announce": (
        "discover",
        "Announce this machine on the network until Ctrl-C. Macs with Remote Login announce themselves.",
    ),
    "measure": ("measure", "Measure machines with a short run of the task, and the links between them with raw TCP."),
    "plan": ("measure", "Predict every way to train a profile on these machines; show the best one and why."),
    "report": ("runs", "Write a report of a run: one HTML file with its charts, machines, traffic and result."),
    "replay": ("attach", "Replay a finished run, in its own time or faster."),
    "track": ("runs", "Send the events of a run to CSV, TensorBoard, Weights & Biases or trackio; follows a live run."),
    "web": ("runs", "Show a run, or the guided set-up, in the browser of this machine."),
    "demo-run": ("attach", "Show a recorded run under invented machine names: nothing trains, nothing is asked."),
    "runs": ("runs", "List, show, compare and clean runs."),
    "profiles": ("profiles", "List, show and check profiles."),
}
"""By name: the file of the command, which is a function of this name or a group of commands, and its line of help."""
WHOLE_COMMANDS = {"launch"}
"""Commands whose first argument begins another command line, whose options are its own."""


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
            settings = {**HELP_OPTIONS, "allow_interspersed_args": name not in WHOLE_COMMANDS}
            app.command(name, help=about, context_settings=settings)(command)
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
    return run_app(lambda: command_tree([called]) if called in COMMANDS else command_list(), arguments, name)


def run_app(made: Callable[[], typer.Typer], arguments: Sequence[str], name: str) -> int:
    """Run a command line and return its exit code; making the commands may fail as they may."""
    as_json = "--json" in arguments
    try:
        app = made()
        if any(word in ("-h", "--help", "--help-all") for word in arguments):
            _keep_names_whole()
        begin_to_answer()  # not sooner: a stop among imports may be caught by them
        with ending_questions():
            result = app(args=list(arguments), prog_name=name, standalone_mode=False)
        sys.stdout.flush()
        if result == ExitCode.STOPPED and not isinstance(result, ExitCode):
            raise KeyboardInterrupt  # typer made a bare 130 of it; a command that told of its stop gives an ExitCode
        return int(result or 0)
    except BrokenPipeError:
        _silence_stdout()
        return ExitCode.DONE
    except SystemExit as error:  # what typer makes of a closed pipe
        if not isinstance(error.__context__, BrokenPipeError):
            raise
        _silence_stdout()
        return ExitCode.DONE
    except MusterError as error:
        return _fail(error.message, error.hint, error.exit_code, as_json)
    except typer.TyperException as error:
        return _fail(*usage_error(error, name), ExitCode.BAD_INPUT, as_json)
    except (KeyboardInterrupt, typer.Abort):
        return _fail("stopped", "", ExitCode.STOPPED, as_json)
    except Exception as error:  # noqa: BLE001 - the process boundary: a person gets one line, the log gets the rest
        line = f"unexpected {type(error).__name__}: {' '.join(str(error).split()) or 'no message'}"
        return _fail(line[:500], f"the traceback is in {save_traceback()}", ExitCode.RUN_FAILED, as_json)


def _keep_names_whole() -> None:
    """Let the name of an option that is too long for its column of the help go on below, instead of being cut."""
    from rich.text import Text
    from typer import rich_utils

    class Whole(rich_utils.OptionHighlighter):
        def __call__(self, text: str | Text) -> Text:
            found = super().__call__(text)
            found.overflow = "fold"
            return found

    rich_utils.highlighter = Whole()


def usage_error(error: typer.TyperException, name: str) -> tuple[str, str]:
    """Return message and hint for wrong use, in one line each."""
    message = " ".join(error.format_message().split())
    near = re.search(r" ?\(?(Did you mean .*\?|Possible options?: .*?)\)?$", message)
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else name
    helps = f"{command} --help lists the options"
    if near:
        return message[: near.start()].rstrip(" ."), near.group(1)
    return message.rstrip("."), helps


def _fail(message: str, hint: str, code: ExitCode, as_json: bool) -> int:
    try:
        fail(message, hint, code, as_json)
    except BrokenPipeError:
        _silence_stdout()
    return int(code)


def _silence_stdout() -> None:
    """Let the interpreter's own flush at exit go nowhere, so that a closed pipe stays quiet."""
    descriptor = os.open(os.devnull, os.O_WRONLY)
    os.dup2(descriptor, 1)
    os.close(descriptor)
