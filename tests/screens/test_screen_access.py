"""The Access screen over real SSH servers: every failure with its cause and its command, and what was mended."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from textual.pilot import Pilot

from app.screens.app import WizardApp
from app.wizard.engine import Wizard
from app.wizard.state import actions as do
from app.wizard.state.records import ItemStatus
from app.wizard.state.state import Step
from tests.lab import ssh_setup
from tests.lab.light import LightLab
from tests.screens.pilot import choose, fixed_clock, lines, run, text, until
from tests.waiting import until_state
from tests.wizard.ssh_failures import FAILURES, Impatient, InSight, failing_lab, row, silent_server

pytestmark = pytest.mark.slow

ALL = (*FAILURES, ("mute", "stalled", "is this the port of its SSH server?"))


def bare(words: str) -> str:
    """A text without its white space and the bar beside it, as it is the same however it is folded."""
    return "".join(words.replace("┃", " ").split())


async def mended(pilot: Pilot[Any], name: str) -> None:
    """Wait until a row says by itself that all is well."""
    await until(pilot, lambda: any(line.split()[-1:] == ["ok"] and name in line for line in lines(pilot.app)))


def shown(app: WizardApp, name: str, code: str, command: str) -> bool:
    """Whether the row failed for its own reason, and the screen says so and what to do."""
    row = next(one for one in app.wizard.state.access if one.key == name)
    said = bare(text(app))
    return (
        row.status is ItemStatus.FAILED
        and row.report is not None
        and row.report.cause == code
        and bare(row.cause) in said
        and bare(command) in said
    )


def mend(lab: LightLab) -> None:
    """Start one server, and install our key on another, as their owner would."""
    lab["off"].start_sshd()
    (lab["keyless"].folder / "authorized_keys").write_text(ssh_setup.public_key(lab.key) + "\n")


def test_seven_failures_are_shown_with_cause_and_command_and_mended_ones_turn_green() -> None:
    with failing_lab() as lab, silent_server() as port:
        machines = [row(name, lab.ssh_config) for name, *_ in FAILURES]
        wizard = Wizard(InSight(*machines, row("mute", lab.ssh_config, "127.0.0.1", port), outside=Impatient(port)))
        until_state(wizard, lambda state: bool(state.machines.rows))
        wizard.do(do.new_setup())
        for name, *_ in ALL:
            wizard.do(do.pick(name, True))
        wizard.do(do.go_on())
        app = WizardApp(wizard, clock=fixed_clock)
        wizard.subscribe(app.changed)

        async def drive(pilot: Pilot[Any]) -> None:
            assert wizard.state.step is Step.ACCESS
            for name, code, command in ALL:
                await choose(pilot, name)
                await until(pilot, partial(shown, app, name, code, command))
            mend(lab)
            await mended(pilot, "off")
            await mended(pilot, "keyless")
            assert "2 of 7 accept the login" in text(app)

        try:
            run(app, drive)
        finally:
            wizard.close()
