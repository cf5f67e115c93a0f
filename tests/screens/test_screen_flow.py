"""The set-up driven by keys: the shortest way, back without loss, a password that is only ever dots, nothing found."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest
from textual.events import Paste
from textual.pilot import Pilot
from textual.screen import Screen
from textual.widgets import Input

from app.screens.app import WizardApp
from app.screens.job import DATASET, GO
from app.shell.row_table import RowTable
from app.wizard.engine import Wizard
from app.wizard.state import actions
from app.wizard.state.dependencies import blockers, busy_here
from app.wizard.state.records import DiscoveredMachines, ItemStatus, JobForm
from app.wizard.state.state import Step, TaskKind, WizardState
from distributed.machine.link import HereConnection
from distributed.ssh.command_log import note
from tests.screens.pilot import choose, fixed_clock, run, text, until, until_text
from tests.screens.states import at
from tests.wizard.fake_services import ANNA, BERT, COMPARE, HERE, FakeServices, locked, stranger

pytestmark = pytest.mark.slow

SECRET = "correct horse"


@contextmanager
def set_up(services: FakeServices, opened: list[Path] | None = None) -> Iterator[WizardApp]:
    """The application over the real engine and a world without machines."""
    wizard = Wizard(services)

    def dashboard(run_folder: Path) -> Screen[Any]:
        (opened if opened is not None else []).append(run_folder)
        return Screen()

    app = WizardApp(wizard, clock=fixed_clock, dashboard=dashboard)
    wizard.subscribe(app.changed)
    try:
        yield app
    finally:
        wizard.close()


def drive_set_up(
    services: FakeServices, drive: Callable[[Pilot[Any], WizardApp], Awaitable[None]], opened: list[Path] | None = None
) -> None:
    with set_up(services, opened) as app:

        async def whole(pilot: Pilot[Any]) -> None:
            await until(pilot, lambda: app.wizard.state.home.value.profiles)
            await drive(pilot, app)

        run(app, whole)


def step_of(app: WizardApp) -> Step:
    """The step whose screen is shown."""
    return getattr(app.screen, "STEP", Step.HOME)


async def go_to(pilot: Pilot[Any], app: WizardApp, step: Step, key: str = "n") -> None:
    """Press the key that leads on until a step is shown."""

    def free(state: WizardState) -> bool:
        return not busy_here(state) and not blockers(state)

    while step_of(app) is not step:
        before = step_of(app)
        await until(pilot, lambda: free(app.wizard.state))
        await pilot.press("enter" if before is Step.MACHINES else key)
        await until(pilot, lambda before=before: step_of(app) is not before)


def test_enter_and_enter_again_trains_on_this_computer() -> None:
    opened: list[Path] = []

    async def drive(pilot: Pilot[Any], app: WizardApp) -> None:
        await pilot.press("down")
        await choose(pilot, "new")
        await pilot.press("enter")
        await until(pilot, lambda: step_of(app) is Step.MACHINES)
        await go_to(pilot, app, Step.PLAN, "enter")
        await until(pilot, lambda: not blockers(app.wizard.state))
        await pilot.press("enter")
        await until(pilot, lambda: opened)

    drive_set_up(FakeServices(), drive, opened)
    assert len(opened) == 1


def test_own_recordings_train_on_this_computer_after_eight_keys() -> None:
    services, opened, keys = FakeServices(machines=(HERE,)), list[Path](), list[str]()

    async def drive(pilot: Pilot[Any], app: WizardApp) -> None:
        async def press(key: str, reached: Callable[[], object]) -> None:
            await until(pilot, lambda: not app.wizard.state.busy)
            keys.append(key)
            await pilot.press(key)
            await until(pilot, reached)

        def cursor() -> str:
            return app.screen.query_one("#rows", RowTable).cursor

        await press("enter", lambda: step_of(app) is Step.MACHINES)
        await press("enter", lambda: step_of(app) is Step.JOB and app.wizard.state.data.status is ItemStatus.OK)
        await press("down", lambda: cursor() == DATASET)
        await press("enter", lambda: list(app.screen.query(Input)))
        app.screen.query_one(Input).post_message(Paste("'/home/ada/my recordings'"))  # a dragged folder: one key
        keys.append("paste")
        await press("enter", lambda: app.wizard.state.answers.options)
        await until(pilot, lambda: cursor() == GO)
        await press("enter", lambda: step_of(app) is Step.PLAN and not blockers(app.wizard.state))
        await press("enter", lambda: opened)

    drive_set_up(services, drive, opened)
    assert services.requests[-1].answers.options == (("dataset", "/home/ada/my recordings"),)
    assert len(keys) == 8


def test_the_cursor_is_on_a_data_set_that_is_not_chosen() -> None:
    steering = at(Step.JOB)
    steering.state = steering.state.putting(TaskKind.JOB, value=JobForm())
    steering.state = steering.state.putting(TaskKind.DATA, status=ItemStatus.FAILED, cause="no data set is chosen")

    async def drive(pilot: Pilot[Any]) -> None:
        table = pilot.app.screen.query_one("#rows", RowTable)
        assert table.cursor == DATASET
        await pilot.press("up")
        assert table.cursor == GO and "no data set is chosen" in text(pilot.app)
        await pilot.press("enter")
        assert table.cursor == DATASET and steering.done == []

    run(WizardApp(cast(Any, steering), clock=fixed_clock), drive)


def test_back_from_the_plan_to_the_machines_and_forward_again_loses_no_answer() -> None:
    async def drive(pilot: Pilot[Any], app: WizardApp) -> None:
        await pilot.press("n")
        await until(pilot, lambda: len(app.wizard.state.machines.rows) == 3)
        await choose(pilot, ANNA.key)
        await pilot.press("space")
        await go_to(pilot, app, Step.JOB)
        await pilot.press("end")
        await go_to(pilot, app, Step.PLAN)
        answers = app.wizard.state.answers
        while step_of(app) is not Step.MACHINES:
            before = step_of(app)
            await pilot.press("escape")
            await until(pilot, lambda before=before: step_of(app) is not before)
        assert "[x] anna" in text(app)
        await go_to(pilot, app, Step.PLAN)
        assert app.wizard.state.answers == answers

    drive_set_up(FakeServices(), drive)


async def to_access(pilot: Pilot[Any], app: WizardApp) -> None:
    await pilot.press("n")
    await until(pilot, lambda: len(app.wizard.state.machines.rows) == 3)
    for key in (ANNA.key, BERT.key):
        await choose(pilot, key)
        await pilot.press("space")
    await pilot.press("enter")


@pytest.mark.parametrize(("answer", "status"), [("a", "ok"), ("enter", "warning")])
def test_a_password_is_dots_on_the_screen_and_nowhere_after_it_was_used_for_all_that_have_it(
    answer: str, status: str
) -> None:
    services = FakeServices(access={"anna": locked(ANNA), "bert": locked(BERT)})
    services.passwords = {"anna": SECRET, "bert": SECRET}

    async def drive(pilot: Pilot[Any], app: WizardApp) -> None:
        await to_access(pilot, app)
        await until_text(pilot, "enter Password")
        await pilot.press("enter")
        await until(pilot, lambda: list(app.screen.query(Input)))
        field = app.screen.query_one(Input)
        await pilot.press(*("space" if letter == " " else letter for letter in SECRET))
        shown = text(app)
        assert field.value == SECRET and SECRET not in shown and "•" * len(SECRET) in shown
        await pilot.press("enter")
        await until_text(pilot, "Use the same password for bert, too?")
        assert services.asked.count("install bert") == 0
        await pilot.press(answer)
        await until(pilot, lambda: "Use the same" not in text(app) and not app.wizard.state.busy)
        assert app.wizard.state.access[1].status.value == status
        assert app.screen.query_one("#rows", RowTable).cursor == (BERT.key if answer == "enter" else ANNA.key)
        assert field.value == "" and SECRET not in repr(vars(app.screen))
        assert SECRET not in repr(app.wizard.state) and SECRET not in text(app)
        await pilot.press("g")
        await pilot.pause()
        assert SECRET not in text(app)

    drive_set_up(services, drive)


def test_an_accepted_password_is_offered_after_the_screen_was_left() -> None:
    services = FakeServices(access={"anna": locked(ANNA), "bert": locked(BERT)})
    services.passwords = {"anna": SECRET, "bert": SECRET}

    async def drive(pilot: Pilot[Any], app: WizardApp) -> None:
        await to_access(pilot, app)
        app.wizard.do(actions.skip(BERT.key))
        app.wizard.give_password(ANNA.key, SECRET)
        await until(pilot, lambda: app.wizard.state.access[0].status is ItemStatus.OK)
        await pilot.press("escape")
        await until(pilot, lambda: step_of(app) is Step.MACHINES)
        app.wizard.do(actions.unskip(BERT.key))
        await pilot.press("enter")
        await choose(pilot, BERT.key)
        await until_text(pilot, "enter Password")
        await pilot.press("enter")
        await until_text(pilot, "Use the same password for bert, too?")
        await pilot.press("a")
        await until(pilot, lambda: all(row.status is ItemStatus.OK for row in app.wizard.state.access))

    drive_set_up(services, drive)


def test_after_a_host_key_was_accepted_the_cursor_is_on_what_is_left_to_do() -> None:
    access = {"anna": stranger(ANNA, "SHA256:a"), "bert": stranger(BERT, "SHA256:b")}
    services = FakeServices(access=access)

    async def drive(pilot: Pilot[Any], app: WizardApp) -> None:
        await to_access(pilot, app)
        await until_text(pilot, "enter Compare key")
        for name in ("anna", "bert"):
            await pilot.press("enter")
            await until_text(pilot, f"Is this {name}?")
            await pilot.press("a")
        await until(pilot, lambda: all(row.status is ItemStatus.OK for row in app.wizard.state.access))

    drive_set_up(services, drive)


def test_nothing_found_says_what_was_looked_at_and_takes_a_typed_machine() -> None:
    services = FakeServices(machines=())

    async def drive(pilot: Pilot[Any], app: WizardApp) -> None:
        await pilot.press("n")
        await until(pilot, lambda: step_of(app) is Step.MACHINES)
        assert services.see is not None
        looked = DiscoveredMachines(
            (), ("_ssh._tcp on eth0", "~/.ssh/config"), 6.0, nothing_found=("switch on Remote Login there",)
        )
        await asyncio.to_thread(services.see, looked)
        await until_text(pilot, "No other machine found so far.")
        assert "switch on Remote Login there" in text(app)
        assert "Searching for 6 s: _ssh._tcp on eth0, ~/.ssh/config" in text(app)
        await pilot.press("a")
        await until(pilot, lambda: list(app.screen.query(Input)))
        await pilot.press(*"ada", "at", *"studio", "enter")
        await until(pilot, lambda: services.added == ["ada@studio"])
        await until_text(pilot, "[x] studio")
        await until(pilot, lambda: "switch on Remote Login there" not in text(app))

    drive_set_up(services, drive)


def test_a_new_host_key_is_accepted_only_after_it_was_shown_with_the_way_to_compare_it() -> None:
    services = FakeServices()
    print_, command = "SHA256:abc", COMPARE
    services.access["anna"] = stranger(ANNA, print_)

    async def drive(pilot: Pilot[Any], app: WizardApp) -> None:
        await pilot.press("n")
        await until(pilot, lambda: len(app.wizard.state.machines.rows) == 3)
        await choose(pilot, ANNA.key)
        await pilot.press("space", "enter")
        await until_text(pilot, "enter Compare key")
        await pilot.press("enter")
        await until_text(pilot, "Is this anna?")
        assert print_ in text(app) and command in text(app)
        await pilot.press("escape")
        assert app.wizard.state.answers.trusted == ()
        await pilot.press("enter", "enter")
        assert app.wizard.state.answers.trusted == ()
        await pilot.press("enter", "a")
        await until(pilot, lambda: (ANNA.key, print_) in app.wizard.state.answers.trusted)

    drive_set_up(services, drive)


def test_the_log_of_commands_has_every_action_and_every_command() -> None:
    async def drive(pilot: Pilot[Any], app: WizardApp) -> None:
        for number in range(30):  # those of other tests of this process are there, too
            HereConnection("of others").run(["true", f"{number}" * 40])
        HereConnection("of this test").run(["true", "x" * 110, "import sys\n" * 3])
        await pilot.press("d")
        await until(pilot, lambda: not app.wizard.state.busy)
        records = app.command_records()
        assert "checking this computer" in [one.command for one in records]
        (ran,) = [one for one in records if one.machine == "of this test"]
        assert (ran.command, ran.outcome) == (f"true {'x' * 100}... <a program of Muster's, 4 lines>", "ok")
        await pilot.press("g")
        await until_text(pilot, "checking this computer")  # the newest, above those
        assert " doctor" in text(app).partition("checking this computer")[2]  # what one could type

    drive_set_up(FakeServices(), drive)


def test_the_log_lists_a_log_in_once_and_no_failure_as_ok() -> None:
    """A log-in is its command; an action without one has its own row, with the line that does the same."""
    services = FakeServices(access={"anna": locked(ANNA)})

    async def drive(pilot: Pilot[Any], app: WizardApp) -> None:
        await to_access(pilot, app)
        of_anna = [one for one in app.command_records() if one.machine == ANNA.name]
        assert [one.command for one in of_anna] == ["connecting to a machine"] and of_anna[0].outcome != "ok"
        assert of_anna[0].typed.endswith(f"machines access {ANNA.name}")
        note(ANNA.name, ["ssh", ANNA.name]).outcome = of_anna[0].outcome
        assert [one.command for one in app.command_records() if one.machine == ANNA.name] == [f"ssh {ANNA.name}"]

    drive_set_up(services, drive)


def test_ctrl_c_leaves_at_once_with_130() -> None:
    async def drive(pilot: Pilot[Any], app: WizardApp) -> None:
        await pilot.press("n")
        await until(pilot, lambda: step_of(app) is Step.MACHINES)
        await pilot.press("a", "ctrl+c")
        await pilot.pause()
        assert app.return_code == 130

    drive_set_up(FakeServices(), drive)


def test_what_measuring_brings_to_other_machines_is_said_before_it_is_brought() -> None:
    services = FakeServices(hold={"data": threading.Event()})

    async def drive(pilot: Pilot[Any], app: WizardApp) -> None:
        await pilot.press("n")
        await until(pilot, lambda: len(app.wizard.state.machines.rows) == 3)
        await choose(pilot, ANNA.key)
        await pilot.press("space")
        await go_to(pilot, app, Step.JOB)
        said = "Enter copies code and data to anna and measures the speed there."
        await until_text(pilot, said)  # also while something is looked at
        assert "forecast" not in services.asked
        services.hold["data"].set()
        await go_to(pilot, app, Step.STRATEGY)
        await until(pilot, lambda: "forecast" in services.asked and not app.wizard.state.busy)
        await pilot.press("escape")
        await until(pilot, lambda: step_of(app) is Step.JOB)
        assert said not in text(app)  # it is there

    drive_set_up(services, drive)


def test_a_saved_profile_with_other_machines_says_that_they_are_measured() -> None:
    async def drive(pilot: Pilot[Any]) -> None:
        await choose(pilot, "profile:talk")
        await until_text(pilot, "enter copies code and data to its machines")

    app = WizardApp(at(Step.HOME), clock=fixed_clock)
    run(app, drive)


def test_work_of_a_step_that_was_left_is_not_said_at_another_one() -> None:
    services = FakeServices(hold={"data": threading.Event()})

    async def drive(pilot: Pilot[Any], app: WizardApp) -> None:
        await pilot.press("n")
        await until(pilot, lambda: len(app.wizard.state.machines.rows) == 3)
        await choose(pilot, ANNA.key)
        await pilot.press("space")
        await go_to(pilot, app, Step.JOB)
        await until_text(pilot, "reading the data")
        await pilot.press("escape", "escape")
        await until(pilot, lambda: step_of(app) is Step.CHECKS)
        assert app.wizard.state.busy and "reading the data" not in text(app)
        assert "Checking changes nothing on any machine." in text(app)
        services.hold["data"].set()

    drive_set_up(services, drive)
