"""The process boundary: whatever a command raises becomes an exit code and one or two clear lines.

With ``--json`` the same failure is the one document on stdout: ``{"error": {"message", "hint"}, "exit_code": n}``.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence

import typer

from app.cli.terminal import fail
from app.console import save_traceback
from profiles.bootstrap import begin_to_answer
from profiles.errors import ExitCode, MusterError


def run_app(app: typer.Typer, arguments: Sequence[str], name: str) -> int:
    """Run a command line and return its exit code."""
    as_json = "--json" in arguments
    try:
        begin_to_answer()
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
