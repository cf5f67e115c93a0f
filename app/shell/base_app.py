"""Base application of the guided set-up and the dashboard: key handling, command palette, command log."""

from __future__ import annotations

import asyncio
import os
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

from rich.text import Text
from textual import events
from textual.app import ScreenStackError, SystemCommand
from textual.binding import Binding
from textual.dom import DOMNode
from textual.screen import Screen
from textual.widgets import Input

from app.console import save_traceback, visible
from app.shell.base_screen import BaseScreen
from app.shell.dialogs import Box, CommandLogDialog, QuestionDialog
from app.shell.jump import JumpScreen
from app.shell.keys import BESIDES, EVERYWHERE, NAMES, OF_APPS, Press, bindings, fit, pressed, too_small
from app.shell.look import theme_after
from app.shell.terminal_app import TerminalApp
from distributed.ssh.command_log import CommandRecord, commands_run
from profiles.errors import ExitCode

_LEAVING = ("ctrl+c", "ctrl+q", "q")
_AT_ANY_TIME = ("ctrl+c", "ctrl+q", "escape")
"""Keys that act at any time: they only leave or close."""
_OVERTAKING = ("ctrl+c", "ctrl+q")
OPENING_PAUSE = float(os.environ.get("MUSTER_OPENING_PAUSE", "0.5"))
"""Seconds during which a screen that opened by itself, or has to be read, takes no keys. The variable is for programs
that press keys: with 0, every key counts, and none is taken for the repeat of a held one."""
_ROUNDS = 3
"""Passes through the queues: for the key, for a message that it caused, for the screen that opened."""
_LOOK = 0.05
_LOOKS = 40
"""Looks of the event loop, so many seconds apart, after which a key does not wait any longer for what came before it. A
loop that is busy looks seldom: then a key waits longer."""
_SILENT_LOOKS, _PATIENT_LOOKS = 10, 200
"""The same until it is said what a key waits for, and until it is given up."""


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
    Input { scrollbar-size-horizontal: 0; }
    SearchIcon { display: none; }
    """

    monotonic: Callable[[], float] = staticmethod(time.monotonic)
    opening_pause = OPENING_PAUSE
    _opened = float("-inf")
    _opener = ""
    """Key that opened the newest screen; empty: it opened by itself."""
    _key: events.Key | None = None
    """The key that is being handled."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._keys: deque[Press] = deque()
        self._last: Press | None = None

    # ------------------------------------------------------------------------------------------------- display

    def command_records(self) -> list[CommandRecord]:
        """Return what was done, and every command that was run on any machine."""
        return commands_run()

    def on_resize(self, event: events.Resize) -> None:
        for screen in self.screen_stack:
            fit(screen, event.size)

    def push_screen(self, *screen: Any, **settings: Any) -> Any:
        self._note_opening()
        return super().push_screen(*screen, **settings)

    def switch_screen(self, *screen: Any, **settings: Any) -> Any:
        self._note_opening()
        return super().switch_screen(*screen, **settings)

    def pop_screen(self) -> Any:
        if self._key is not None:  # it has opened the screen below
            self._note_opening()
        return super().pop_screen()

    def _note_opening(self) -> None:
        if len(self.screen_stack) > 1:  # no key can have been meant for a screen before the first one
            self._opened = self.monotonic()
            self._opener = self._key.key if self._key is not None else ""

    # ------------------------------------------------------------------------------------------------- keys

    async def on_event(self, event: events.Event) -> None:
        """Queue keys, so that each reaches the screen that the one before has opened; ctrl+c and ctrl+q overtake."""
        if not isinstance(event, events.Key) or event.is_forwarded or event.key in _OVERTAKING:
            await super().on_event(event)
            return
        if event.key == "ctrl+j":  # enter, typed before the terminal left its line mode
            typed, event = event, events.Key("enter", "\r")
            event.time = typed.time
        self._last = pressed(event) if self._last is None else self._last.followed_by(event)
        self._keys.append(self._last)
        if len(self._keys) == 1:
            self._taking = asyncio.create_task(self._take_keys())

    async def _take_keys(self) -> None:
        with suppress(ScreenStackError):  # the application has ended
            await self._settle()
            while self._keys:
                press = self._keys[0]
                if not await self._wait_for_meaning(press.event):
                    continue
                if not await self._is_ignored(press):
                    self._key = press.event
                    await super().on_event(press.event)
                    await self._settle()
                    self._key = None
                self._keys.popleft()
        self._keys.clear()

    async def _settle(self) -> None:
        """Wait until a key, and messages that it caused, have had their effect and a screen they opened is there."""
        passing = asyncio.ensure_future(self._pass_queues())
        for _ in range(_LOOKS):
            if (await asyncio.wait({passing}, timeout=_LOOK))[0]:
                passing.result()
                return
        passing.cancel()

    async def _wait_for_meaning(self, event: events.Key) -> bool:
        """Wait until the screen knows what a key does there; return whether it does. After a while this key and those
        behind it are dropped: they may be meant for a dialog that will not open. Escape drops those before it."""
        if event.key in (*_LEAVING, *_AT_ANY_TIME) or isinstance(self.focused, Input):
            return True
        for look in range(_PATIENT_LOOKS):
            screen = self.screen
            reason = screen.awaited_by(event.key) if isinstance(screen, BaseScreen) else ""
            if not reason:
                return True
            if any(press.event.key == "escape" for press in self._keys):
                while self._keys[0].event.key != "escape":
                    self._keys.popleft()
                return False
            if look == _SILENT_LOOKS:
                self.notify(f"{NAMES.get(event.key, event.key)} waits: {reason}", timeout=2)
            await asyncio.sleep(_LOOK)
        self.notify(f"{NAMES.get(event.key, event.key)} was not taken: {reason}", severity="warning")
        self._keys.clear()
        return False

    async def _pass_queues(self) -> None:
        """Go several times, behind all that is waiting, through the queues of the focused widget and of those above."""
        for _ in range(_ROUNDS):
            node: DOMNode | None = self.focused or self.screen
            while node is not None:
                handled = asyncio.Event()
                if node.call_later(handled.set):  # else it is gone
                    await handled.wait()
                node = node.parent

    async def _is_ignored(self, press: Press) -> bool:
        """Whether a key was not meant for the screen as it is, which the user is notified of: another one was there
        until now, or the key that opened it is held down. While no screen is visible, only leaving keys are taken."""
        key = press.event.key
        if too_small(self.size) and key not in _LEAVING:
            return True
        if self._too_early(press.event):
            self.notify(f"{NAMES.get(key, key)} was not taken: this has only just opened", timeout=2)
            return True
        if await self._is_held(press):
            self.notify(f"{NAMES.get(key, key)} is held down: it counts once here", timeout=2)
            return True
        return False

    def _too_early(self, event: events.Key) -> bool:
        """Whether a key came with the opening of a screen that opened by itself or has to be read first. Text that is
        typed into a field is never too early."""
        if self._at(event.time) >= self._opened + self.opening_pause or event.key in _AT_ANY_TIME:
            return False
        if (event.is_printable and isinstance(self.focused, Input)) or isinstance(self.screen, JumpScreen):
            return False
        return not self._opener or (isinstance(self.screen, Box) and self.screen.MUST_BE_READ)

    async def _is_held(self, press: Press) -> bool:
        """Whether a press is the repeat of a held key that has opened this screen; it is known a moment later."""
        if self._opener != press.event.key or not self.opening_pause:
            return False
        while (left := press.undecided_until() - time.monotonic()) > 0:
            await asyncio.sleep(left)
        since = press.held_since()
        return since is not None and self._at(since) <= self._opened

    def _at(self, moment: float) -> float:
        """Return the time of a key by the application's clock."""
        return self.monotonic() - (time.monotonic() - moment)

    def get_system_commands(self, screen: Screen[Any]) -> Iterable[SystemCommand]:
        """Yield the entries of the palette: actions of this screen, then those of every screen."""
        screen_keys = screen.offered_keys() if isinstance(screen, BaseScreen) else ()
        keys = (*screen_keys, *BESIDES, EVERYWHERE[1])
        for key in {key.action: key for key in (*keys, *reversed(keys))}.values():

            async def run(action: str = key.action) -> None:
                await screen.run_action(action)

            title = f"{key.label} ({key.chosen(self.keymap).name})"
            yield SystemCommand(title, key.help or key.label, run)

    def _fatal_error(self) -> None:
        """End with one line instead of a dump of all variables, which might contain a secret."""
        error = self._exception
        summary = Text.assemble(("error: ", "bold red"), visible(f"unexpected: {type(error).__name__}: {error}"))
        summary.append(f"\nhint: please report this; the details are in {save_traceback()}")
        self._exit_renderables[:] = [summary]
        self._close_messages_no_wait()

    # --------------------------------------------------------------------------------------------------- actions

    def action_leave(self) -> None:
        """Leave, after confirmation if the screen has a question."""
        question = self.screen.leave_question() if isinstance(self.screen, BaseScreen) else ""
        if not question:
            self.exit()
            return

        def answered(confirmed: bool | None) -> None:
            if confirmed:
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
