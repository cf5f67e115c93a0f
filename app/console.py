"""The one module that writes to the terminal: diagnostics to stderr, data to stdout.

Text that comes from outside (names, messages, transcripts) passes through :func:`visible`, so that escape codes in it
are shown and never obeyed; markup is never parsed.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import signal
import sys
import tempfile
import threading
import time
import traceback
import unicodedata
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from profiles.bootstrap import release_keys
from profiles.errors import StoppedByUser
from profiles.installation import command_about as command_about
from profiles.installation import command_line as command_line

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

PIPE_WIDTH = 10_000
"""Columns of a pipe or a file: each row of a table stays in one line."""
_LOOK = 0.2
_JOINERS = "\u200c\u200d"
"""Zero-width joiners: Persian, Hindi and others need them, and they neither move nor hide anything."""
_stopped = threading.Event()
KEPT_CRASH_LOGS = 20


def visible(text: object) -> str:
    """Return ``text`` in one line with every control or direction-changing character written out.

    The joiners of letters that many scripts need stay.
    """
    return "".join(map(_visible, str(text)))


def _visible(char: str) -> str:
    if char.isprintable() or char in _JOINERS:
        return char
    return " " if char in "\n\t" or unicodedata.category(char) == "Zs" else char.encode("unicode_escape").decode()


def short_names(names: Sequence[str], cells: int) -> list[str]:
    """Return names cut to ``cells``, without their common suffix where they would look alike."""
    shown = [_short(name, cells) for name in names]
    if len(set(shown)) == len(set(names)):
        return shown
    common = sum(1 for _ in takewhile(lambda ends: len({*ends}) == 1, zip(*(name[::-1] for name in names))))
    return [_short(name[: len(name) - common], cells) for name in names]


def _short(name: str, cells: int) -> str:
    """Return a name with its middle left out where it is too long: names of machines often differ at the ends."""
    from rich.cells import cell_len, set_cell_size  # as diagnostics below

    if cell_len(name) <= cells:
        return name
    if len(name) != cell_len(name):
        return f"{set_cell_size(name, cells - 1).rstrip()}…"
    head = cells // 2 - 1
    return f"{name[:head]}…{name[len(name) - (cells - head - 1) :]}"


@lru_cache(maxsize=1)
def diagnostics() -> Console:
    """Return the console on stderr; colours only on a terminal and without NO_COLOR."""
    from rich.console import Console  # 0.1 s, not needed for plain data

    return Console(stderr=True, highlight=False, markup=False, emoji=False)


def interactive() -> bool:
    """Whether a person watches stderr on a terminal that can move its cursor."""
    return sys.stderr.isatty() and os.environ.get("TERM") not in ("dumb", "")


def say(text: str) -> None:
    """Write one plain line to stderr; errors are ignored, because a closed stderr must not end a run."""
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def say_error(message: str, hint: str = "") -> None:
    """Write an error and its hint to stderr."""
    for label, text, style in (("error", message, "bold red"), ("hint", hint, "cyan")):
        if not text:
            continue
        if interactive():
            from rich.text import Text

            line = Text.assemble((f"{label}:", style), " ", visible(text))
            diagnostics().print(line, soft_wrap=True)
        else:
            say(f"{label}: {visible(text)}")


def answered_yes(question: str) -> bool:
    """Ask the person at the terminal a question; only ``y`` and ``yes`` count as yes."""
    release_keys()
    say(f"{question} [y/N] ")
    with ctrl_c_heard():
        if threading.current_thread() is not threading.main_thread():
            _wait_for_line()
        return sys.stdin.readline().strip().lower() in ("y", "yes")


def _wait_for_line() -> None:
    while not select.select([sys.stdin], [], [], _LOOK)[0]:
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGURG)
        raise_if_stopped()


def raise_if_stopped() -> None:
    """Stop a thread that asks questions after Ctrl-C.

    Raises:
        StoppedByUser: Ctrl-C was pressed within :func:`ctrl_c_ends_questions`.
    """
    if _stopped.is_set():
        raise StoppedByUser("stopped")


@contextlib.contextmanager
def ctrl_c_ends_questions() -> Iterator[None]:
    """Let Ctrl-C, which only the main thread receives, end the questions of other threads too.

    Without that, the main thread would wait for a thread that waits for an answer. Such a thread wakes the main thread
    regularly to check for signals, as :func:`ctrl_c_heard` does.
    """

    def press(*_: object) -> None:
        _stopped.set()
        raise KeyboardInterrupt

    _stopped.clear()
    heard = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if not heard or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, press)
    ignored = signal.signal(signal.SIGURG, lambda *_: None)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGURG, ignored)


@contextlib.contextmanager
def ctrl_c_heard() -> Iterator[None]:
    """Lose no Ctrl-C within the context, in the main thread; in other threads it does nothing.

    Python checks for signals between bytecode instructions. A signal between the last check and a blocking read would
    wait for the next line, and the terminal has discarded what was typed before it. A ``KeyboardInterrupt`` raised in
    the callback of a weak reference is dropped. So a thread makes Python check every 0.2 s, and a press that has had no
    effect two checks later is raised again.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    pressed, looks, raising = False, 0, True
    over, main, default_hook = threading.Event(), threading.main_thread().ident or 0, sys.unraisablehook

    def unraisable(args: sys.UnraisableHookArgs) -> None:
        if not issubclass(args.exc_type, KeyboardInterrupt):
            default_hook(args)

    def press(*_: object) -> None:
        nonlocal pressed, looks
        pressed, looks = True, 0
        if raising:
            raise KeyboardInterrupt

    def look(*_: object) -> None:
        nonlocal looks
        looks += pressed
        if raising and looks == 2:
            raise KeyboardInterrupt

    def remind() -> None:
        while not over.wait(_LOOK):
            signal.pthread_kill(main, signal.SIGURG)

    before = {}
    try:
        sys.unraisablehook = unraisable
        for number, handler in ((signal.SIGURG, look), (signal.SIGINT, press)):
            before[number] = signal.signal(number, handler)
        threading.Thread(target=remind, name="ctrl+c", daemon=True).start()
        yield
    finally:
        raising = False
        over.set()
        sys.unraisablehook = default_hook
        for number, earlier in before.items():
            signal.signal(number, earlier)
    if pressed:
        raise KeyboardInterrupt


def show(content: RenderableType) -> None:
    """Write requested data to stdout; a pipe or file gets every row in one line, without blanks at its end."""
    from rich.console import Console

    console = Console(highlight=False, markup=False, emoji=False, width=None if sys.stdout.isatty() else PIPE_WIDTH)
    if sys.stdout.isatty():
        console.print(content)
        return
    with console.capture() as capture:
        console.print(content)
    for line in capture.get().rstrip("\n").split("\n"):
        show_line(line.rstrip())


def show_line(text: str) -> None:
    """Write one line of data to stdout, unchanged."""
    print(text, flush=True)


def show_piece(text: str) -> None:
    """Write a piece of a text to stdout without a line end, flushed; its newlines and tabs stay."""
    print("".join(char if char in "\n\t" else _visible(char) for char in text), end="", flush=True)


def show_json(document: Any) -> None:
    """Write the one JSON document of a ``--json`` command to stdout."""
    from training.records.run_files import finite  # loads pydantic, which --help can do without

    json.dump(finite(document), sys.stdout, indent=2, ensure_ascii=True, allow_nan=False, default=str)
    sys.stdout.write("\n")
    sys.stdout.flush()


_TOUR = re.compile(r"(demo-here|demo-\d-machines)-recorded|scripted-demo")
"""Profiles of runs of the tour, of earlier versions, too."""


def tour_profile(machines: int) -> str:
    """Return the name of the profile of a run of the tour: the one under which the set-up saves its plan, marked."""
    return f"{'demo-here' if machines == 1 else f'demo-{machines}-machines'}-recorded"


def is_of_tour(profile: str) -> bool:
    """Whether a run with a profile of this name is one of the tour, which trained nothing."""
    return _TOUR.fullmatch(profile) is not None


def profile_text(name: str) -> str:
    """Return the name of a run's profile; runs of the tour are marked first, so that no narrow column cuts that."""
    return f"tour: {name.removesuffix('-recorded')}" if is_of_tour(name) else name


def purpose_of(command: str) -> str:
    """Return what a command that begins something is for; empty for the others, which say so themselves."""
    purposes = {
        command_line(): "your own machines: the set-up",
        command_line("distributed-train", "demo"): "train this on your computer",
    }
    return purposes.get(command, "")


def can_only_print() -> bool:
    """Whether the terminal, by ``TERM``, has no escape codes."""
    return os.environ.get("TERM", "") in ("", "dumb", "unknown")


def save_traceback() -> Path:
    """Write the traceback of the current exception into the user's log folder and return the file's path."""
    import platformdirs  # only after a fault

    try:
        folder = Path(platformdirs.user_log_dir("muster", ensure_exists=True))
        for path in sorted(folder.glob("crash-*.log"))[: -KEPT_CRASH_LOGS + 1]:
            with contextlib.suppress(OSError):
                path.unlink()
        return _write_traceback(folder)
    except OSError:
        return _write_traceback(Path(tempfile.gettempdir()))


def _write_traceback(folder: Path) -> Path:
    prefix = time.strftime("crash-%Y%m%d-%H%M%S-")
    descriptor, name = tempfile.mkstemp(prefix=prefix, suffix=".log", dir=folder)
    with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
        stream.write(traceback.format_exc())
    return Path(name)
