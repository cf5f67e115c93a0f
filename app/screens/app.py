"""The guided set-up as an application that shows the screen of the current step."""

from __future__ import annotations

import importlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from textual.screen import Screen

from app.screens.step_screen import SteeredApp, StepScreen
from app.shell.terminal_app import NO_KEYS
from app.wizard.engine import TaskRecord, Wizard
from app.wizard.services.services import Services
from app.wizard.state import actions
from app.wizard.state.records import ItemStatus
from app.wizard.state.state import Step, TaskKind, WizardState
from app.wizard.step_commands import typed_command
from distributed.ssh.command_log import CommandRecord
from profiles.installation import wizard_line

if TYPE_CHECKING:  # only when a run is watched
    from app.dashboard.dialogs.commands import Commands

SCREENS: Mapping[Step, str] = {
    Step.HOME: "home.HomeScreen", Step.MACHINES: "machines.MachinesScreen", Step.ACCESS: "access.AccessScreen",
    Step.CHECKS: "checks.ChecksScreen", Step.LINKS: "checks.LinksScreen", Step.JOB: "job.JobScreen",
    Step.STRATEGY: "strategy.StrategyScreen", Step.PLAN: "plan.PlanScreen", Step.LAUNCH: "plan.LaunchScreen",
}  # fmt: skip
"""Module and class of the screen of each step: the first paint loads the first one only."""
FRAMES = 0.25
"""Seconds between frames of an activity indicator."""


def load_screen(step: Step) -> type[StepScreen]:
    """Return the class of a step's screen, and load its module."""
    module, name = SCREENS[step].split(".")
    kind: type[StepScreen] = getattr(importlib.import_module(f"app.screens.{module}"), name)
    return kind


def load_screens() -> None:
    """Load the modules of all screens."""
    for step in SCREENS:
        load_screen(step)


def _made(step: Step) -> StepScreen:
    return load_screen(step)()


class WizardApp(SteeredApp):
    """Shows a set-up, one screen per step, and opens the dashboard of the run it has started.

    Args:
        wizard: the set-up; only its state is read, and actions are sent to it.
        ascii_only: nothing but ASCII reaches the terminal.
        clock: seconds since 1970.
        dashboard: makes the screen of a run.
        painted: called once, when the first screen is shown.
    """

    SCREENS: ClassVar[Any] = {step.value: partial(_made, step) for step in SCREENS}

    def __init__(
        self,
        wizard: Wizard,
        *,
        ascii_only: bool = False,
        clock: Callable[[], float] = time.time,
        dashboard: Callable[[Path], Screen[Any]] | None = None,
        keymap: Mapping[str, str] = NO_KEYS,
        painted: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(ascii_only=ascii_only, clock=clock, keymap=keymap)
        self.wizard, self._painted = wizard, painted
        self._dashboard = dashboard or _dashboard
        self._shown: WizardState | None = None
        self._step: Step | None = None
        self._watched = ""
        self._commands: list[Commands] = []
        """Requests to runs, including those whose dashboard is closed."""
        self._pending = threading.Event()

    def on_mount(self) -> None:
        self._step = self.wizard.state.step
        self.push_screen(self._step.value)
        self.set_interval(FRAMES, self._turn)

    def on_ready(self) -> None:
        self._painted()
        threading.Thread(target=load_screens, name="screens", daemon=True).start()  # before they are opened

    # ------------------------------------------------------------------------------------------------- following

    def changed(self) -> None:
        """Schedule a redraw after the set-up has changed; cheap, and safe to call from any thread."""
        if not self._pending.is_set():
            self._pending.set()
            self.call_later(self.follow)

    def follow(self) -> None:
        """Show the current state on the screen of its step."""
        self._pending.clear()
        state = self.wizard.state
        if state is self._shown or not self.is_running:
            return
        self._shown = state
        if state.step is not self._step:
            self._step = state.step
            self._to(state.step)
        screen = self.screen
        if isinstance(screen, StepScreen):
            screen.draw()
        run = state.launch.value.run  # its dashboard opens once, when a launch has made its first step
        if state.step is Step.LAUNCH and state.launch.status is ItemStatus.OK and run and run != self._watched:
            self.open_dashboard(Path(run))

    def _to(self, step: Step) -> None:
        while not isinstance(self.screen, StepScreen) and len(self.screen_stack) > 2:
            self.pop_screen()
        self.switch_screen(step.value)

    def _turn(self) -> None:
        if self.wizard.state.busy and isinstance(self.screen, StepScreen):
            self.screen.draw()

    def open_dashboard(self, run: Path) -> None:
        """Show a run live over the set-up; esc returns, to Home if the run has ended."""
        self._watched = str(run)
        screen = self._dashboard(run)
        if commands := getattr(screen, "commands", None):
            self._commands.append(commands)
        self.push_screen(screen, self._close_dashboard)

    def _close_dashboard(self, alive: bool | None) -> None:
        if alive is False and self.wizard.state.step is Step.LAUNCH:  # nothing is left to be started
            self.wizard.do(actions.go_back())

    # ---------------------------------------------------------------------------------------------------- the shell

    def headless_command(self) -> str:
        return wizard_line("--plain")

    def command_records(self) -> list[CommandRecord]:
        records = [CommandRecord("", line, "ok") for line in self.wizard.state.log]
        ran = super().command_records()
        records += [record for task in self.wizard.asked_for() if (record := self._record(task, ran)) is not None]
        records += [record for commands in self._commands for record in commands.records]
        return [*records, *ran]

    def _record(self, task: TaskRecord, ran: Sequence[CommandRecord]) -> CommandRecord | None:
        """Return the row of a request; ``None`` for a log-in: its command is listed, with the same outcome."""
        state, kind = self.wizard.state, task.task.kind
        name = next((row.name for row in state.listed if row.key == task.task.key), "")
        if kind is TaskKind.ACCESS and any(one.machine == name and one.at >= task.at for one in ran):
            return None
        typed = typed_command(kind, name, [row.entry.login for row in state.picked])
        return CommandRecord(name or "set-up", kind.value, task.outcome, task.at, typed)

    def run_of_interest(self) -> Path | None:
        """Return the run that was watched last, else the one that was started."""
        run = self._watched or self.wizard.state.launch.value.run
        return Path(run) if run else None


def _dashboard(run: Path) -> Screen[Any]:
    from app.dashboard.screen import DashboardScreen  # only when a run is watched

    return DashboardScreen(run)


def run_wizard(
    services: Services,
    profile: str,
    ascii_only: bool,
    left: Callable[[Path], None] | None = None,
    keymap: Mapping[str, str] = NO_KEYS,
) -> int:
    """Run the guided set-up on this terminal and return its exit code.

    Args:
        profile: whose plan to begin at; empty: at home.
        ascii_only: nothing but ASCII reaches the terminal.
        left: told, when the screen is gone, of the run that was started or watched.
    """
    wizard = Wizard(services, profile, waits=True)  # its work would take the processor from the first paint
    app = WizardApp(wizard, ascii_only=ascii_only, keymap=keymap, painted=wizard.start)
    wizard.subscribe(app.changed)
    try:
        app.run()
    finally:
        wizard.close_and_report()
    run = app.run_of_interest()
    if left is not None and run is not None:
        left(run)
    return app.return_code or 0
