"""Entry point of the command line: exceptions of commands become exit codes and one-line messages.

With ``--json`` a failure is the one document on stdout: ``{"error": {"message", "hint"}, "exit_code": n}``.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Sequence
from typing import Annotated

import typer

from app.cli.commands import COMMANDS, GROUPS, command_list, command_tree
from app.cli.entry import called_set_up
from app.cli.spellings import intended_line
from app.cli.terminal import fail
from app.console import ctrl_c_ends_questions, save_traceback
from profiles.bootstrap import restore_interrupts
from profiles.errors import ExitCode, MusterError
from profiles.installation import program
from profiles.other_names import HINTS, LAUNCH_HINTS

_PLAIN_TYPES = {"<str>": "TEXT", "<list[str]>": "TEXT", "<int range>": "N", "<float range>": "X", "<path>": "FILE"}
"""What the help calls the values of options by the names that typer has for them."""


def _version(is_requested: bool) -> None:
    if is_requested:
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
    help_all: Annotated[bool, typer.Option("--help-all", help="List all commands.")] = False,
) -> None:
    """Train one model on the machines you already own.

    'wizard' opens the guided set-up; 'tour' shows it with recorded machines, and only leaves a recorded run.
    """
    if context.invoked_subcommand is None:
        typer.echo(context.get_help(), nl=False)


def main(arguments: Sequence[str], name: str = "cli_typer.py") -> int:
    """Run one command line and return its exit code; ``muster`` without arguments opens the guided set-up."""
    if (open_set_up := called_set_up(arguments, name)) is not None:
        return open_set_up()
    completed = os.environ.get("COMP_WORDS", os.environ.get("_TYPER_COMPLETE_ARGS", "")).split()[1:]
    completing = f"_{name.upper()}_COMPLETE" in os.environ  # a shell asks what the words may go on with
    words = [word for word in (completed if completing else arguments) if not word.startswith("-")]
    return run_app(lambda: _program(words, "--help-all" in arguments), arguments, name)


def _program(words: Sequence[str], include_advanced: bool) -> typer.Typer:
    """Return the part of the program that a command line needs."""
    app = command_tree(words) if words and words[0] in {*COMMANDS, *GROUPS, "train"} else command_list(include_advanced)
    app.info.help = root.__doc__
    app.callback(invoke_without_command=True)(root)
    return app


def run_app(make_app: Callable[[], typer.Typer], arguments: Sequence[str], name: str) -> int:
    """Run a command line and return its exit code, also if making the app fails."""
    as_json = "--json" in arguments
    try:
        app = make_app()
        if any(word in ("-h", "--help", "--help-all") for word in arguments):
            _make_help_plain()
        restore_interrupts()  # not sooner: a stop among imports may be caught by them
        with ctrl_c_ends_questions():
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
        return _fail(*usage_error(error, name, arguments), ExitCode.BAD_INPUT, as_json)
    except (KeyboardInterrupt, typer.Abort):
        return _fail("stopped", "", ExitCode.STOPPED, as_json)
    except Exception as error:  # noqa: BLE001 - the process boundary: a person gets one line, the log gets the rest
        line = f"unexpected {type(error).__name__}: {' '.join(str(error).split()) or 'no message'}"
        return _fail(line[:500], f"the traceback is in {save_traceback()}", ExitCode.RUN_FAILED, as_json)


def _make_help_plain() -> None:
    """Let the name of an option that is too long for its column of the help go on below, instead of being cut; a value
    is called ``TEXT``, ``N`` or ``X``, and an argument or an option that is given or not shows no type."""
    from rich.text import Text
    from typer import rich_utils
    from typer.core import TyperArgument, TyperOption

    typed, argument_typed = TyperOption.display_type_rich, TyperArgument.display_type_rich

    def type_of(option: TyperOption, *, ctx: typer.Context) -> str | None:
        text = typed(option, ctx=ctx)
        return None if option.is_flag else _PLAIN_TYPES.get(text or "", text)

    def type_of_argument(argument: TyperArgument, *, ctx: typer.Context) -> str | None:
        return argument_typed(argument, ctx=ctx) if argument.type_descriptor.is_choice else None

    class Whole(rich_utils.OptionHighlighter):
        def __call__(self, text: str | Text) -> Text:
            highlighted = super().__call__(text)
            highlighted.overflow = "fold"
            return highlighted

    rich_utils.highlighter = Whole()
    # Typer has no setting for it; mypy refuses a function in place of a method.
    TyperOption.display_type_rich = type_of  # type: ignore[method-assign, assignment]
    TyperArgument.display_type_rich = type_of_argument  # type: ignore[method-assign, assignment]


def usage_error(error: typer.TyperException, name: str, arguments: Sequence[str]) -> tuple[str, str]:
    """Return message and hint for a usage error, one line each."""
    message = " ".join(error.format_message().split())
    suggestion = re.search(r" ?\(?(Did you mean .*\?|Possible options?: .*?)\)?$", message)
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else name
    called = program(*command.removeprefix(name).split())
    helps = f"{called} --help lists the {'commands' if message.startswith('No such command') else 'options'}"
    unknown = re.match(r"No such option: -+([\w.-]+)", message)
    hints = LAUNCH_HINTS if command.endswith(" launch") else HINTS
    if unknown and (hint := hints.get(unknown.group(1).replace("-", "_").lower())):
        return unknown.group(0), hint
    parameters = context.command.params if context is not None else ()
    if line := intended_line(message, arguments, [name for parameter in parameters for name in parameter.opts]):
        return message[: suggestion.start() if suggestion else None].rstrip(" ."), f"type: {line}"
    if suggestion:
        at_top = message.startswith("No such command") and command == name
        shown = re.sub(r"'([\w-]+)'", _listed, suggestion.group(1)) if at_top else suggestion.group(1)
        return message[: suggestion.start()].rstrip(" ."), shown
    return message.rstrip("."), helps


def _listed(quoted: re.Match[str]) -> str:
    """Return a command by the words under which the help lists it."""
    name = quoted[1]
    entry = COMMANDS.get(name)
    return f"'{f'{entry.group} {entry.name or name}'.strip()}'" if entry is not None else quoted[0]


def _fail(message: str, hint: str, code: ExitCode, as_json: bool) -> int:
    try:
        fail(message, hint, code, as_json)
    except BrokenPipeError:
        _silence_stdout()
    return int(code)


def _silence_stdout() -> None:
    """Redirect stdout to the null device, so that the flush at exit does not fail on a closed pipe."""
    descriptor = os.open(os.devnull, os.O_WRONLY)
    os.dup2(descriptor, 1)
    os.close(descriptor)
