"""Which action a key sends. The set-up behind it stands still."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from textual.pilot import Pilot
from textual.screen import Screen

from app.dashboard.dialogs.commands import Commands, SentRequest
from app.screens.app import WizardApp, run_wizard
from app.screens.plan import LaunchScreen
from app.screens.step_screen import progress
from app.shell.row_table import RowTable
from app.wizard.state import actions as do
from app.wizard.state.data_actions import leave_out
from app.wizard.state.dependencies import apply
from app.wizard.state.launch_records import LaunchProgress
from app.wizard.state.neighbours import NeighbourAnswers, ask_neighbours
from app.wizard.state.observations import begun
from app.wizard.state.records import Home, ItemStatus, PlanPreview
from app.wizard.state.state import Action, ServiceTask, StatePart, Step, TaskKind
from distributed.measuring.machine_figures import MeasuringProgress
from distributed.ssh.errors import Unequipped
from profiles.files.resolve import profile_from_options
from tests.screens.pilot import fixed_clock, run, text, until, until_text
from tests.screens.states import DESK, FINGERPRINT, at
from tests.wizard.fake_services import FakeServices
from training.records.events import RunEvent
from training.records.run_folder import RunFolder
from training.run.local_plan import plan_local_run

pytestmark = pytest.mark.slow

SENT: list[tuple[Step, list[str], Action | tuple[str, str]]] = [
    (Step.HOME, ["n"], do.new_setup()),
    (Step.HOME, ["d"], do.doctor()),
    (Step.HOME, ["down", "enter"], do.new_setup()),
    (Step.HOME, ["down", "down", "enter"], do.rerun("talk")),
    (Step.HOME, ["r"], do.retry("run:20260921-130000-ab12")),
    (Step.MACHINES, ["space"], do.pick(DESK.key)),
    (Step.MACHINES, ["enter"], do.go_on()),
    (Step.MACHINES, ["n"], do.go_on()),
    (Step.MACHINES, ["a", *"ada", "at", *"pi", "enter"], do.add_machine("ada@pi")),
    (Step.MACHINES, ["a", *"desk", "enter"], do.add_machine("desk")),
    (Step.ACCESS, ["s"], do.skip("SHA256:attic")),
    (Step.ACCESS, ["r"], do.retry("SHA256:attic")),
    (Step.ACCESS, ["down", "down", "enter", *"pw", "enter"], ("SHA256:pc", "pw")),
    (Step.ACCESS, ["down", "down", "down", "enter", "a"], do.trust_key("SHA256:studio", FINGERPRINT)),
    (Step.ACCESS, ["u", *["backspace"] * 3, *"bob", "enter"], do.set_user("SHA256:attic", "bob")),
    (Step.CHECKS, ["F"], do.fix_all()),
    (Step.CHECKS, ["i"], do.send_packages()),
    (Step.CHECKS, ["up", "f"], do.fix("SHA256:studio")),
    (Step.CHECKS, ["f"], do.fix("SHA256:studio")),
    (Step.CHECKS, ["s"], do.skip("SHA256:studio")),
    (Step.LINKS, ["n"], do.go_on()),
    (Step.JOB, ["enter"], do.go_on()),
    (Step.JOB, [*["down"] * 3, "enter", "down", "enter"], do.choose_profile("nanogpt")),
    (Step.JOB, ["down", "down", "enter", *"mine", "enter"], do.set_option("model", "mine")),
    (Step.JOB, [*["down"] * 5, "enter", "8", "enter"], do.set_option("batch_size", "8")),
    (Step.JOB, [*["down"] * 5, "d"], do.reset_option("batch_size")),
    (Step.JOB, ["o", "end", "enter", "down", "enter"], do.set_option("engine", "mesh")),
    (Step.STRATEGY, ["down"], do.choose_strategy(1)),
    (Step.STRATEGY, ["right_square_bracket"], do.set_interval(20)),
    (Step.STRATEGY, ["left_square_bracket"], do.set_interval(5)),
    (Step.STRATEGY, ["p"], do.set_preference("closest-to-exact")),
    (Step.PLAN, ["enter"], do.confirm()),
    (Step.PLAN, ["w"], do.save_only()),
    (Step.JOB, ["l"], leave_out()),
    (Step.PLAN, ["a", *"mine", "enter"], do.save_as("mine")),
    (Step.PLAN, ["escape"], do.go_back()),
    (Step.LAUNCH, ["x"], do.drop("desk")),
    (Step.LAUNCH, ["enter"], do.retry("desk")),
]  # fmt: skip


@pytest.mark.parametrize("step", Step)
def test_keys_send_actions(step: Step) -> None:
    """All keys of a step in one application; what was sent is compared after each."""

    async def drive(pilot: Pilot[Any], steering: Any, keys: list[str], wanted: Any) -> None:
        await pilot.press(*keys)
        await pilot.pause()
        assert wanted in steering.done, (keys, steering.done, text(pilot.app))

    for _, keys, wanted in [sent for sent in SENT if sent[0] is step]:
        steering = at(step)
        run(WizardApp(steering, clock=fixed_clock), lambda pilot, s=steering, k=keys, w=wanted: drive(pilot, s, k, w))


@pytest.mark.parametrize(("interval", "key"), [(6, "right_square_bracket"), (15, "left_square_bracket")])
def test_the_recommended_interval_is_not_passed(interval: int, key: str) -> None:
    steering = at(Step.STRATEGY)
    steering.state = steering.state.answering(interval=interval)

    async def drive(pilot: Pilot[Any]) -> None:
        await pilot.press(key)
        await pilot.pause()
        assert steering.done[-1] == do.set_interval(10)

    run(WizardApp(steering, clock=fixed_clock), drive)


def test_a_whole_network_is_asked_for_ssh_only_after_a_yes() -> None:
    steering = at(Step.MACHINES)

    async def drive(pilot: Pilot[Any]) -> None:
        await pilot.press("s")
        assert steering.done == [ask_neighbours()]
        answers = StatePart(NeighbourAnswers(3, (), ("10.9.9.0/24",)))
        steering.state = steering.state.putting(TaskKind.NEIGHBOURS, state_part=answers)
        await pilot.press("s")
        await until_text(pilot, "Ask all 254 addresses of 10.9.9.0/24")
        assert len(steering.done) == 1
        await pilot.press("escape", "s", "y")
        await pilot.pause()
        assert steering.done[-1] == ask_neighbours(("10.9.9.0/24",))
        assert ask_neighbours(()) in steering.done
        task = ServiceTask(TaskKind.NEIGHBOURS, inputs=("10.9.9.0/24",))
        steering.state = apply(steering.state, begun(task))
        pilot.app.changed()
        await until_text(pilot, "esc ends it")
        await pilot.press("escape")
        assert steering.done[-1] == "end asking"

    run(WizardApp(steering, clock=fixed_clock), drive)


def test_machines_that_are_measured_alike_share_a_line() -> None:
    steps = "measuring steps of 4 samples"
    lines = (
        MeasuringProgress("a", steps, 3.0),
        MeasuringProgress("b", steps, 11.2),
        MeasuringProgress("c", "measured"),
    )
    shown = progress(StatePart(None, progress=lines), "")
    assert shown.plain.splitlines() == [f"a and b: {steps}, about 0:12 left", "c: measured"]


@pytest.mark.parametrize("status", [ItemStatus.FAILED, ItemStatus.WORKING])
def test_a_plan_that_lacks_a_machine_goes_on_without_it(status: ItemStatus) -> None:
    """At once, if it is known to be away; not only when the log-in there has timed out."""
    steering = at(Step.PLAN)
    failed = steering.state.putting(TaskKind.PLAN, status=status, value=PlanPreview(), cause="no route")
    away = next(row for row in failed.members if not row.here)
    rows = tuple(
        replace(row, status=ItemStatus.FAILED if row is away else ItemStatus.OK) for row in failed.machines.rows
    )
    steering.state = replace(failed, machines=replace(failed.machines, rows=rows))

    async def drive(pilot: Pilot[Any]) -> None:
        await until_text(pilot, f"o goes on without {away.name}")
        await pilot.press("o")
        await pilot.pause()
        assert steering.done == [do.skip(away.key)]

    run(WizardApp(steering, clock=fixed_clock), drive)


def test_a_plan_that_lacks_packages_leads_to_the_checks_which_install_them() -> None:
    steering = at(Step.PLAN)
    lacking = {"cause": "loft: nothing is installed there yet", "failure": Unequipped.cause}
    steering.state = steering.state.putting(TaskKind.PLAN, status=ItemStatus.FAILED, value=PlanPreview(), **lacking)

    async def drive(pilot: Pilot[Any]) -> None:
        await until_text(pilot, "c goes to the checks, where f installs what is missing")
        await pilot.press("c")
        await until(pilot, lambda: steering.done == [do.go_to(Step.CHECKS)])

    run(WizardApp(steering, clock=fixed_clock), drive)


@pytest.mark.parametrize("step", [Step.STRATEGY, Step.PLAN])
def test_measuring_can_be_skipped_while_it_goes_on(step: Step) -> None:
    steering = at(step)
    predicted = steering.state.strategy
    working = steering.state.putting(TaskKind.FORECAST, status=ItemStatus.WORKING)
    steering.state = working.putting(TaskKind.PLAN, status=ItemStatus.WORKING)

    async def drive(pilot: Pilot[Any]) -> None:
        await until_text(pilot, "s Skip measuring")
        await pilot.press("s")
        await until(pilot, lambda: steering.done == ["skip measuring"])
        steering.state = steering.state.putting(TaskKind.FORECAST, state_part=predicted)
        pilot.app.changed()
        await pilot.press("s")
        await pilot.pause()
        assert "Skip measuring" not in text(pilot.app) and steering.done == ["skip measuring"]

    run(WizardApp(steering, clock=fixed_clock), drive)


def test_start_is_offered_when_the_plan_is_made_and_not_before() -> None:
    steering = at(Step.PLAN)
    made, forecast = steering.state.part(TaskKind.PLAN), replace(steering.state.strategy, progress=("as recorded",))
    steering.state = steering.state.putting(TaskKind.FORECAST, state_part=forecast).putting(
        TaskKind.PLAN, state_part=StatePart(PlanPreview(), status=ItemStatus.WORKING, inputs=made.inputs)
    )

    async def drive(pilot: Pilot[Any]) -> None:
        shown = text(pilot.app)
        assert "as recorded" in shown and "e Command" in shown
        assert not any(word in shown for word in ("enter Start", "Enter starts", "w Only save"))
        steering.state = steering.state.putting(TaskKind.PLAN, state_part=made)
        pilot.app.changed()
        await until_text(pilot, "enter Start")

    run(WizardApp(steering, clock=fixed_clock), drive)


def test_a_plan_that_was_started_starts_another_run_by_its_own_key_only() -> None:
    launch = StatePart(LaunchProgress(run="output/20260921-130000-ab12-talk"), status=ItemStatus.OK)
    steering = at(Step.PLAN, launch)

    async def drive(pilot: Pilot[Any]) -> None:
        assert "Started: 20260921-130000-ab12. Enter shows it, n starts another one." in text(pilot.app)
        await pilot.press("enter")
        assert steering.done == [do.confirm()]
        await pilot.press("n")
        assert steering.done == [do.confirm(), do.confirm(another=True)]

    run(WizardApp(steering, clock=fixed_clock), drive)


def test_a_run_that_has_ended_does_not_go_on_in_the_background(tmp_path: Path) -> None:
    plan = plan_local_run(profile_from_options("p", {"task": "custom", "model_path": "a.b:c"}), 1)
    with RunFolder.create(tmp_path, plan, []) as folder:
        screen = at(Step.LAUNCH, StatePart(LaunchProgress(run=str(folder.path)), status=ItemStatus.OK))

        folder.finish("cancelled", {})

    async def ended(pilot: Pilot[Any]) -> None:
        assert "The run has ended: stopped" in text(pilot.app)
        assert "background" not in text(pilot.app)

    run(WizardApp(screen, clock=fixed_clock, dashboard=lambda run: Screen()), ended)


@pytest.mark.parametrize("kept", [True, False])
def test_what_to_do_with_a_model_is_said_where_its_run_ends(tmp_path: Path, kept: bool) -> None:
    plan = plan_local_run(profile_from_options("p", {"model_path": "m", "dataset_path": "d"}), 1)
    with RunFolder.create(tmp_path, plan, []) as folder:
        if kept:
            (folder.path / "model").mkdir(exist_ok=True)
            (folder.path / "model" / "config.json").touch()
        folder.finish("completed", {})
        screen = at(Step.LAUNCH, StatePart(LaunchProgress(run=str(folder.path)), status=ItemStatus.OK))

    async def ended(pilot: Pilot[Any]) -> None:
        said = "".join(text(pilot.app).split())  # a long path folds its line anywhere
        assert all((word in said) == kept for word in ("transcribe", "compare", "--toctranslate2"))

    run(WizardApp(screen, clock=fixed_clock, dashboard=lambda run: Screen()), ended)


class Watched(Screen[Any]):
    """A dashboard in which something was asked for."""

    commands = Commands(Path(), [SentRequest("1", "snapshot", 0.0)])


def test_a_live_run_opens_and_escape_comes_back() -> None:
    opened: list[Path] = []

    def dashboard(folder: Path) -> Screen[Any]:
        opened.append(folder)
        return Watched()

    async def drive(pilot: Pilot[Any]) -> None:
        await pilot.press("enter")
        assert opened == [Path("output/20260921-130000-ab12-talk")] and steering.done == []
        pilot.app.pop_screen()
        await pilot.pause()
        assert [done.rule.__name__ for done in steering.done] == ["retry"]  # it may have ended meanwhile
        assert any(one.command.endswith(" snapshot") for one in app.command_records())

    steering = at(Step.HOME)
    app = WizardApp(steering, clock=fixed_clock, dashboard=dashboard)
    assert app.run_of_interest() is None
    run(app, drive)
    assert app.run_of_interest() == opened[0]


def test_enter_at_home_opens_the_row_on_which_it_was_pressed_though_runs_appear_meanwhile() -> None:
    steering = at(Step.HOME)
    whole = steering.state
    unread = StatePart(Home(), status=ItemStatus.WORKING)
    steering.state = whole.putting(TaskKind.HOME, state_part=unread)
    app = WizardApp(steering, clock=fixed_clock)

    async def drive(pilot: Pilot[Any]) -> None:
        table = app.screen.query_one("#rows", RowTable)
        assert table.cursor == "new"
        table.action_choose()
        steering.state = whole
        app.follow()
        await until_text(pilot, "Running now")
        assert (table.cursor, steering.done) == ("new", [do.new_setup()])

    run(app, drive)


@pytest.mark.parametrize("key", ["d", "escape"])
@pytest.mark.parametrize("ended", [True, False])
def test_whoever_leaves_a_run_that_has_ended_comes_home(tmp_path: Path, key: str, ended: bool) -> None:
    plan = plan_local_run(profile_from_options("p", {"task": "custom", "model_path": "a.b:c"}), 1)
    with RunFolder.create(tmp_path, plan, []) as folder:
        folder.begin("running")
        if ended:
            folder.append(RunEvent(status="completed"))
            folder.finish("completed", {})
            folder.close()
        steering = at(Step.LAUNCH, StatePart(LaunchProgress(run=str(folder.path)), status=ItemStatus.OK))
        app = WizardApp(steering, clock=fixed_clock)

        async def drive(pilot: Pilot[Any]) -> None:
            app.open_dashboard(folder.path)
            await until_text(pilot, "d Leave" if ended else "d Detach")
            await pilot.press(key)
            await until(pilot, lambda: isinstance(app.screen, LaunchScreen))
            assert (do.go_back() in steering.done) == ended

        run(app, drive)


def test_who_leaves_is_told_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """The screen is gone, and with it what it said: how to come back to the run that was started."""
    told: list[Path] = []
    monkeypatch.setattr(WizardApp, "run", lambda app: app.open_dashboard(Path("output/one")))
    monkeypatch.setattr(WizardApp, "push_screen", lambda app, *_: None)
    run_wizard(FakeServices(), "", False, left=told.append)
    assert told == [Path("output/one")]
