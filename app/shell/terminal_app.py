"""The application as its screens and dialogs see it: colours, ASCII, the user's keys, the clock, the clipboard."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

from textual.app import App
from textual.filter import Monochrome, NoColor
from textual.message_pump import MessagePump
from textual.notifications import Notification, Notifications
from textual.scrollbar import ScrollBar

from app.console import command_line, visible
from app.shell.folding import folded
from app.shell.look import FOR_ALL, THEMES, PureAscii, ThinBar, WithoutColour

if TYPE_CHECKING:  # typing has it from Python 3.11 on
    from typing_extensions import Self

_NOTICE, _NOTICE_FRAME = 60, 4
"""Cells of a notice at most, which is half of the terminal where that is less, and of its frame."""
NO_KEYS: Mapping[str, str] = MappingProxyType({})


class LatestNotifications(Notifications):
    """Notifications of which a new one replaces what it repeats: the same text, and the last plain piece of news, which
    was about the key before or about the beginning of what has ended now. Warnings stay until they have expired."""

    def add(self, notification: Notification) -> Self:
        for shown in [*self]:
            if shown.severity == "information" or shown.message == notification.message:
                del self[shown]
        return super().add(notification)


class TerminalApp(App[None]):
    """Base of :class:`app.shell.base_app.MusterApp`.

    Args:
        ascii_only: send only ASCII to the terminal.
        clock: seconds since 1970; tests pass a fixed one.
        keymap: the user's keys by action (:func:`app.shell.keymap.read_keymap`).
    """

    def __init__(
        self, *, ascii_only: bool = False, clock: Callable[[], float] = time.time, keymap: Mapping[str, str] = NO_KEYS
    ) -> None:
        super().__init__()
        self._notifications = LatestNotifications()
        self.keymap = keymap
        self.set_keymap(dict(keymap))
        # With another encoding, a terminal would show every other character as an escape of six characters.
        self.ascii_only = ascii_only = ascii_only or not _has_unicode_terminal()
        self.clock = clock
        self.no_color = bool(os.environ.get("NO_COLOR"))
        for theme in THEMES:
            self.register_theme(theme)
        self.theme = "muster-dark"
        ScrollBar.renderer = ThinBar
        self._filters = [
            line_filter for line_filter in self._filters if not isinstance(line_filter, Monochrome | NoColor)
        ]
        if self.no_color:
            self._filters.insert(0, WithoutColour())
        if ascii_only:
            self._filters.append(PureAscii())

    def get_theme_variable_defaults(self) -> dict[str, str]:
        return FOR_ALL

    def spinner(self) -> str:
        """Return the current frame of the activity indicator; there are four per second."""
        frames = "|/-\\" if self.ascii_only else "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
        return frames[int(self.clock() * 4) % len(frames)]

    def headless_command(self) -> str:
        """Return the command that does the same without a screen."""
        return command_line("--help")

    def brief_command(self) -> str:
        """Return a shorter one that does the same in most cases."""
        return self.headless_command()

    def action_leave(self) -> None:
        """Leave the application."""
        self.exit()

    def notify(self, message: str, **settings: Any) -> None:
        """Show a notice, folded as other texts are: a path between its folders."""
        width = min(_NOTICE, self.size.width // 2) - _NOTICE_FRAME
        super().notify("\n".join(line for text in message.split("\n") for line in folded(text, width)), **settings)

    def copy(self, text: str) -> None:
        """Copy a text to the user's clipboard, and notify."""
        if not text:
            return
        copied = _copy_on_desktop(text)
        if not copied:
            self.copy_to_clipboard(text)
        title = "Copied" if copied else "Sent to the terminal's clipboard"  # which may ignore it without notice
        self.notify(visible(text), title=title, timeout=2, markup=False)


def app_of(node: MessagePump) -> TerminalApp:
    """Return the application of a screen or widget."""
    return cast(TerminalApp, node.app)


def _has_unicode_terminal() -> bool:
    return (getattr(sys.__stderr__, "encoding", None) or "utf-8").lower().startswith("utf")


def _copy_on_desktop(text: str) -> bool:
    """Copy with the desktop's clipboard program, unless over SSH, where it is another desktop; return success."""
    programs = {
        ("pbcopy",): sys.platform == "darwin",
        ("wl-copy",): "WAYLAND_DISPLAY" in os.environ,
        ("xclip", "-selection", "clipboard"): "DISPLAY" in os.environ,
    }
    for command, is_usable in programs.items():
        if is_usable and "SSH_CONNECTION" not in os.environ and shutil.which(command[0]):
            with suppress(OSError, subprocess.SubprocessError):
                # xclip keeps running to serve the clipboard: it must not inherit our pipes.
                quiet = subprocess.DEVNULL
                subprocess.run(command, input=text, text=True, timeout=2, check=True, stdout=quiet, stderr=quiet)
                return True
    return False
