"""The dashboard as an application of its own."""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Mapping
from pathlib import Path

from app.console import command_line
from app.dashboard.screen import DashboardScreen
from app.follow import Follower
from app.shell.base_app import MusterApp
from app.shell.terminal_app import NO_KEYS
from distributed.ssh.command_log import CommandRecord
from profiles.errors import ExitCode

TERMINAL = 1.0
"""Seconds between two checks that the terminal still exists."""
_HANGUP = 128 + signal.SIGHUP


def _end_without_terminal() -> None:
    """Exit where the terminal is gone without a SIGHUP: there is nothing to ask or to write to."""
    watched = select.poll()
    watched.register(0, select.POLLHUP)
    if any(happened & (select.POLLHUP | select.POLLNVAL | select.POLLERR) for _, happened in watched.poll(0)):
        os._exit(_HANGUP)


class DashboardApp(MusterApp):
    """Shows one run in an application of its own.

    Args:
        source: of its events, where they do not come live from the folder (a replay).
        ascii_only: write only ASCII to the terminal.
    """

    def __init__(
        self,
        run_dir: Path,
        source: Follower | None = None,
        *,
        ascii_only: bool = False,
        keymap: Mapping[str, str] = NO_KEYS,
    ) -> None:
        super().__init__(ascii_only=ascii_only, keymap=keymap)
        self.dashboard = DashboardScreen(run_dir, source)

    def on_mount(self) -> None:
        self.push_screen(self.dashboard)
        if not self.is_headless and os.isatty(0):
            self.set_interval(TERMINAL, _end_without_terminal)

    def headless_command(self) -> str:
        return self.dashboard.headless()

    def brief_command(self) -> str:
        picture = self.dashboard.picture
        run = picture.plan.run_id[-4:] if picture.plan is not None else ""  # the end of an id is enough
        words = ("replay", run) if picture.replayed else ("attach", "--plain", run)
        return command_line("runs", *filter(None, words)) + " | cat" * picture.replayed

    def command_records(self) -> list[CommandRecord]:
        return [*self.dashboard.commands.records, *super().command_records()]


def run_dashboard(
    run_dir: Path, ascii_only: bool = False, *, source: Follower | None = None, keymap: Mapping[str, str] = NO_KEYS
) -> int:
    """Show a run on this terminal until the person leaves, and return the exit code.

    It is 130 after Ctrl-C, else the run's own where it has ended and was read to the end, else 0.
    """
    app = DashboardApp(run_dir, source, ascii_only=ascii_only, keymap=keymap)
    app.run()
    if app.return_code:
        return app.return_code
    ended = app.dashboard.picture.ended
    return int(ended.outcome.exit_code if ended is not None and source is None else ExitCode.DONE)
