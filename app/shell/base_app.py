"""The application under the guided set-up and the dashboard: colours, ASCII, and the keys that work everywhere."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from typing import Any

from rich.text import Text
from textual import events
from textual.app import SystemCommand
from textual.binding import Binding
from textual.screen import Screen
from textual.widgets import Input

from app.console import save_traceback, visible
from app.shell.base_screen import BaseScreen
from app.shell.dialogs import Box, CommandLogDialog, QuestionDialog
from app.shell.jump import JumpScreen
from app.shell.keys import BESIDES, EVERYWHERE, OF_APPS, bindings, fit, too_small
from app.shell.look import theme_after
from app.shell.terminal_app import TerminalApp
from distributed.ssh.command_log import CommandRecord, commands_run
from profiles.errors import ExitCode

_LEAVING = ("ctrl+c", "ctrl+q", "q")
_AT_ANY_TIME = ("ctrl+c", "ctrl+q", "escape")
"""Keys that decide nothing but to go."""
OPENING_PAUSE = float(os.environ.get("MUSTER_OPENING_PAUSE", "0.5"))
"""Seconds in which a screen that has just opened takes no key; the variable is for programs that press keys."""


class MusterApp(TerminalApp):
    """Base of both applications."""

    TITLE = "Muster"
    ENABLE_COMMAND_PALETTE = True
    BINDINGS = [  # noqa: RUF012 - as Textual declares it
        *bindings(OF_APPS),
        Binding("ctrl+c", "leave_at_once", show=False, priority=True),
        Binding("ctrl+z", "suspend_process", show=False, priority=True),
    ]
    CSS = """
    * { scrollbar-size-vertical: 1; scrollbar-size-horizontal: 1; scrollbar-color: $primary 60%;
        scrollbar-background: $background; scrollbar-background-hover: $background;
        scrollbar-background-active: $background; scrollbar-color-hover: $primary; scrollbar-color-active: $primary;
        scrollbar-corner-color: $background; }
    MusterApp:nocolor *:focus { text-style: none; }
    SearchIcon { display: none; }
    """

    monotonic: Callable[[], float] = staticmethod(time.monotonic)
    opening_pause = OPENING_PAUSE
    _opened = float("-inf")

    # ------------------------------------------------------------------------------------------- what is shown

    def command_records(self) -> list[CommandRecord]:
        """Return what was done, and every command that was run on any machine."""
        return commands_run()

    def on_resize(self, event: events.Resize) -> None:
        for screen in self.screen_stack:
            fit(screen, event.size)

    def push_screen(self, *screen: Any, **settings: Any) -> Any:
        self._opened = self.monotonic()
        return super().push_screen(*screen, **settings)

    def switch_screen(self, *screen: Any, **settings: Any) -> Any:
        self._opened = self.monotonic()
        return super().switch_screen(*screen, **settings)

    async def on_event(self, event: events.Event) -> None:
        """Let no key act on a screen that cannot be seen, or that opened under the finger that presses it."""
        if isinstance(event, events.Key) and not event.is_forwarded:
            unseen = too_small(self.size) and event.key not in _LEAVING
            if unseen or self._too_early(event):
                return
        await super().on_event(event)

    def _too_early(self, event: events.Key) -> bool:
        """Whether a key was meant for what was there before; what is typed into a field decides nothing yet."""
        typed = (event.is_printable and isinstance(self.focused, Input)) or isinstance(self.screen, JumpScreen)
        pressed = self.monotonic() - (time.monotonic() - event.time)
        return pressed < self._opened + self.opening_pause and not typed and event.key not in _AT_ANY_TIME

    def get_system_commands(self, screen: Screen[Any]) -> Iterable[SystemCommand]:
        """Yield what the palette offers: what this screen can do, then what every screen can."""
        own = screen.offered_keys() if isinstance(screen, BaseScreen) else ()
        for key in (*own, *BESIDES, EVERYWHERE[1]):

            async def run(action: str = key.action) -> None:
                await screen.run_action(action)

            title = f"{key.label} ({key.chosen(self.keymap).name})"
            yield SystemCommand(title, key.help or key.label, run)

    def _fatal_error(self) -> None:
        """End in one line instead of a picture of all variables, in which a secret might stand."""
        error = self._exception
        about = Text.assemble(("error: ", "bold red"), visible(f"unexpected: {type(error).__name__}: {error}"))
        about.append(f"\nhint: please report this; the details are in {save_traceback()}")
        self._exit_renderables[:] = [about]
        self._close_messages_no_wait()

    # --------------------------------------------------------------------------------------------------- actions

    def action_leave(self) -> None:
        """Leave, after asking where the screen has something to ask."""
        question = self.screen.leave_question() if isinstance(self.screen, BaseScreen) else ""
        if not question:
            self.exit()
            return

        def answered(sure: bool | None) -> None:
            if sure:
                self.exit()

        self.push_screen(QuestionDialog(question, "Leave", "Stay"), answered)

    def action_leave_at_once(self) -> None:
        if isinstance(self.screen, Box) and self.screen.HOLDS_CTRL_C:
            self.screen.dismiss()
            return
        self.exit(return_code=ExitCode.STOPPED)

    async def action_quit(self) -> None:
        self.action_leave()

    def action_next_theme(self) -> None:
        self.theme = theme_after(self.theme)
        self.notify(self.theme, timeout=1.5)

    def action_command_log(self) -> None:
        self.push_screen(CommandLogDialog(self.command_records()))
