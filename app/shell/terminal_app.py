"""The application as its screens and dialogs know it: colours, ASCII, the person's keys, the clock, the clipboard."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import MappingProxyType
from typing import cast

from textual.app import App
from textual.filter import Monochrome, NoColor
from textual.message_pump import MessagePump
from textual.scrollbar import ScrollBar

from app.console import command_line, visible
from app.shell.look import FOR_ALL, THEMES, PureAscii, ThinBar, WithoutColour

NO_KEYS: Mapping[str, str] = MappingProxyType({})


class TerminalApp(App[None]):
    """Base of :class:`app.shell.base_app.MusterApp`.

    Args:
        ascii_only: nothing but ASCII reaches the terminal.
        clock: seconds since 1970; a test gives its own, so that nothing moves.
        keymap: the person's keys by action (:func:`app.shell.keymap.read_keymap`).
    """

    def __init__(
        self, *, ascii_only: bool = False, clock: Callable[[], float] = time.time, keymap: Mapping[str, str] = NO_KEYS
    ) -> None:
        super().__init__()
        self.keymap = keymap
        self.set_keymap(dict(keymap))
        # A terminal with another encoding would show each sign as an escape code of six.
        self.ascii_only = ascii_only = ascii_only or not _speaks_unicode()
        self.clock = clock
        self.no_color = bool(os.environ.get("NO_COLOR"))
        for theme in THEMES:
            self.register_theme(theme)
        self.theme = "muster-dark"
        ScrollBar.renderer = ThinBar
        self._filters = [one for one in self._filters if not isinstance(one, Monochrome | NoColor)]
        if self.no_color:
            self._filters.insert(0, WithoutColour())
        if ascii_only:
            self._filters.append(PureAscii())

    def get_theme_variable_defaults(self) -> dict[str, str]:
        return FOR_ALL

    def spinner(self) -> str:
        """Return the frame of the moment for something that goes on; there are four a second."""
        frames = "|/-\\" if self.ascii_only else "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
        return frames[int(self.clock() * 4) % len(frames)]

    def headless_command(self) -> str:
        """Return the command for a person who cannot use this screen."""
        return command_line("--help")

    def action_leave(self) -> None:
        """Leave the application."""
        self.exit()

    def copy(self, text: str) -> None:
        """Copy a text to the clipboard of the person, and say so."""
        if not text:
            return
        copied = _copied(text)
        if not copied:
            self.copy_to_clipboard(text)
        title = "Copied" if copied else "Sent to the terminal's clipboard"  # which may not take it, and does not say so
        self.notify(visible(text), title=title, timeout=2, markup=False)


def app_of(node: MessagePump) -> TerminalApp:
    """Return the application that a screen or widget is in."""
    return cast(TerminalApp, node.app)


def _speaks_unicode() -> bool:
    return (getattr(sys.__stderr__, "encoding", None) or "utf-8").lower().startswith("utf")


def _copied(text: str) -> bool:
    """Copy with the desktop's own program, which over SSH is another desktop's; whether there was one, and it did."""
    programs = {
        ("pbcopy",): sys.platform == "darwin",
        ("wl-copy",): "WAYLAND_DISPLAY" in os.environ,
        ("xclip", "-selection", "clipboard"): "DISPLAY" in os.environ,
    }
    for command, there in programs.items():
        if there and "SSH_CONNECTION" not in os.environ and shutil.which(command[0]):
            with suppress(OSError, subprocess.SubprocessError):
                # xclip stays, to answer who pastes: it must not hold our pipes.
                quiet = subprocess.DEVNULL
                subprocess.run(command, input=text, text=True, timeout=2, check=True, stdout=quiet, stderr=quiet)
                return True
    return False
