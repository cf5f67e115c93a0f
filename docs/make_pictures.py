"""Draw docs/pictures/*.svg: the set-up's screens and the dashboard, from the tour; and the tour itself, which moves.

.venv/bin/python docs/make_pictures.py [--output FOLDER]

Clock, chances and sizes are fixed, so the same screens give the same pictures.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from app.dashboard.app import DashboardApp
from app.dashboard.screen import DashboardScreen
from app.demo.run import recorded
from app.demo.services import DEMO_START, DemoServices, recommended, write_demo_run
from app.follow import Follower
from app.screens.app import WizardApp
from app.shell.base_app import MusterApp
from app.wizard.engine import Wizard
from app.wizard.state import actions as do
from app.wizard.state.records import AccessNeed, ItemStatus
from app.wizard.state.state import WizardState
from docs.moving_picture import Scene, moving_picture
from training.records.events import Event, MemberEvent

MACHINES = 3
SIZE = (116, 24)
SEEN_FOR = 6.0
"""Seconds for which the set-up has looked for machines when it is drawn."""
PATIENCE = 90.0
_QUICK = 1000.0
LOST_FOR, BACK_FOR = 1.0, 3.0
"""Seconds after a machine of the recorded run is lost, and after it is back, at which the dashboard is drawn."""
MOVES = "muster tour: three machines are chosen and measured, train, lose one, get it back, and end with a better model"
FRAME, LOOK, END = 0.7, 2.2, 4.5
"""Seconds for which the moving picture shows a moment of training, what is to be read, and the end."""
_FONT = re.compile(r"@font-face\s*{[^}]*}\s*")
_GOOD = (ItemStatus.OK, ItemStatus.WARNING)


def main() -> None:
    """Draw all pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "pictures")
    folder: Path = parser.parse_args().output
    folder.mkdir(parents=True, exist_ok=True)
    scenes = asyncio.run(draw_wizard(folder))
    lost, back = loss_and_return()
    asyncio.run(draw_dashboard(folder, lost + LOST_FOR, ("machines", "logs")))
    asyncio.run(draw_dashboard(folder, back + BACK_FOR, ("overview", "charts", "network")))
    scenes += asyncio.run(draw_training())
    (folder / "tour.svg").write_text(moving_picture(scenes, MOVES))


class Pictures:
    """Takes pictures of an application while it is driven."""

    def __init__(self, app: MusterApp, settle: Callable[[], Awaitable[None]], folder: Path) -> None:
        self._app, self._settle, self._folder = app, settle, folder

    async def take(self, name: str = "") -> str:
        """Return the screen once it stays as it is, and write it if it has a name.

        A scrollbar that comes changes how lines are cut.
        """
        before, drawing = "", self._drawn()
        while drawing != before:
            await self._settle()
            await asyncio.sleep(0.1)
            before, drawing = drawing, self._drawn()
        if name:
            (self._folder / f"{name}.svg").write_text(drawing)
        return drawing

    def _drawn(self) -> str:
        return _FONT.sub("", self._app.export_screenshot(title="muster tour"))


class SteppedClock:
    """Scripted seconds, which pass when they are set."""

    seconds = 0.0

    def __call__(self) -> float:
        return self.seconds / _QUICK


async def draw_wizard(folder: Path) -> list[Scene]:
    """Go from Home to the Plan, draw the screens on the way, and return those of the moving picture."""
    clock = SteppedClock()
    with tempfile.TemporaryDirectory() as output:
        services = DemoServices(MACHINES, _QUICK, Path(output), clock=clock)
        wizard = Wizard(services)
        app = WizardApp(wizard, clock=lambda: DEMO_START)
        wizard.subscribe(app.changed)
        await asyncio.to_thread(wizard.wait, lambda state: bool(state.machines.rows), PATIENCE)  # the search has begun
        try:
            async with app.run_test(size=SIZE) as pilot:

                async def settle() -> None:
                    app.follow()
                    await pilot.pause()

                scenes = await _tour(wizard, clock, Pictures(app, settle, folder))
                wizard.close()
        finally:
            wizard.close()
    return scenes


async def _tour(wizard: Wizard, clock: SteppedClock, pictures: Pictures) -> list[Scene]:
    wizard.do(do.new_setup())
    await _reach(wizard, lambda state: bool(state.machines.rows))
    scenes = [Scene(await pictures.take(), FRAME)]
    clock.seconds = SEEN_FOR
    await _reach(wizard, lambda state: len(state.machines.rows) == MACHINES and state.machines.seconds == SEEN_FOR)
    for row in wizard.state.machines.rows:
        wizard.do(do.pick(row.key, True))
    scenes.append(Scene(await pictures.take("machines"), LOOK))
    wizard.do(do.go_on())
    await _reach(
        wizard, lambda state: bool(state.access) and all(row.need is not AccessNeed.NOTHING for row in state.access)
    )
    await pictures.take("access")
    for row in wizard.state.access:
        if row.need is AccessNeed.TRUST:
            wizard.do(do.trust_key(row.key, row.fingerprint))
        elif row.need is AccessNeed.PASSWORD:
            wizard.give_password(row.key, "scripted")
    await _reach(wizard, lambda state: all(row.status is ItemStatus.OK for row in state.access))
    wizard.do(do.go_on())
    await _reach(wizard, lambda state: any(row.fixable for row in state.checks))
    await pictures.take("checks")
    wizard.do(do.fix_all())
    await _reach(wizard, lambda state: all(row.status in _GOOD for row in state.checks))
    wizard.do(do.go_on())
    await _reach(wizard, lambda state: state.links.status in _GOOD)
    scenes.append(Scene(await pictures.take("links"), LOOK))
    wizard.do(do.go_on())
    await _reach(wizard, lambda state: state.job.status in _GOOD and state.data.status in _GOOD)
    wizard.do(do.go_on())
    await _reach(wizard, lambda state: state.strategy.status in _GOOD)
    scenes.append(Scene(await pictures.take("strategy"), LOOK))
    wizard.do(do.go_on())
    await _reach(wizard, lambda state: state.plan.status in _GOOD)
    await pictures.take("plan")
    return scenes


async def _reach(wizard: Wizard, until: Callable[[WizardState], bool]) -> None:
    """Wait until the set-up's state is so and nothing is worked on, letting the screen draw meanwhile."""

    def settled(state: WizardState) -> bool:
        return not state.busy and until(state)

    if not await asyncio.to_thread(wizard.wait, settled, PATIENCE):
        raise SystemExit(f"the set-up came no further than {wizard.state.step.title()}: {wizard.state.notice}")


# ------------------------------------------------------------------------------------------------------- the dashboard


def loss_and_return() -> tuple[float, float]:
    """Return the seconds after the start of the recorded run at which a machine is lost, and trains again."""
    told = [event for event in recorded(recommended(MACHINES).plan) if isinstance(event, MemberEvent)]
    lost = next(event for event in told if event.status == "lost")
    back = next(event for event in told if event.status == "ready" and event.time > lost.time)
    return lost.time, back.time


class Still(Follower):
    """A run at one moment: the events until then, and a present that stands still until another moment is set."""

    def __init__(self, path: Path, moment: float) -> None:
        super().__init__(path)
        self.moment, self.reached = moment, 0.0

    def events(self) -> Iterator[Event | None]:
        for event in super().events():
            while event is not None and event.time > self.moment:
                yield self._wait()
            if event is not None:
                yield event
        while True:
            yield self._wait()

    def now(self) -> float:
        return self.moment

    def _wait(self) -> None:
        self.reached = self.moment
        time.sleep(0.02)


class StillScreen(DashboardScreen):
    """The dashboard of a run that goes on, of which one moment is drawn."""

    def __init__(self, path: Path, still: Still) -> None:
        super().__init__(path, still)
        self._replay = False  # keys and title of a live run


@asynccontextmanager
async def dashboard_of(
    path: Path, folder: Path, still: Still | None = None
) -> AsyncIterator[tuple[DashboardScreen, Pictures]]:
    """Show the dashboard of a run, as it stands in its folder or at one moment."""
    app = DashboardApp(path)
    if still is not None:
        app.dashboard = StillScreen(path, still)
    async with app.run_test(size=SIZE) as pilot:

        async def settle() -> None:
            end = time.monotonic() + PATIENCE
            while not app.dashboard.picture.read or (still is not None and still.reached < still.moment):
                if time.monotonic() > end:
                    raise SystemExit(f"the dashboard has not read {path}")
                await pilot.pause(0.05)
            await pilot.pause(0.6)

        yield app.dashboard, Pictures(app, settle, folder)


async def draw_dashboard(folder: Path, seconds: float, tabs: tuple[str, ...]) -> None:
    """Draw tabs of the dashboard, so many seconds after the start of the recorded run."""
    with tempfile.TemporaryDirectory() as output:
        path = write_demo_run(Path(output), MACHINES, until=seconds)
        async with dashboard_of(path, folder, Still(path, DEMO_START + seconds)) as (dashboard, pictures):
            for tab in tabs:
                dashboard.action_tab(tab)
                await pictures.take(f"dashboard-{tab}")


async def draw_training() -> list[Scene]:
    """Draw the recorded run from its first evaluation to its end, for the moving picture."""
    lost, back = loss_and_return()
    whole = recorded(recommended(MACHINES).plan)[-1].time
    moments = [(seconds, FRAME) for seconds in (20.0, 35.0, 50.0, 65.0)]
    moments += [(lost + LOST_FOR, LOOK), (back + BACK_FOR, LOOK), (back + 12.0, FRAME), (whole - 11.0, FRAME)]
    scenes = []
    with tempfile.TemporaryDirectory() as output:
        path = write_demo_run(Path(output) / "going-on", MACHINES, until=whole - 1)
        still = Still(path, DEMO_START)
        async with dashboard_of(path, Path(output), still) as (_, pictures):
            for seconds, shown in moments:
                still.moment = DEMO_START + seconds
                scenes.append(Scene(await pictures.take(), shown))
        path = write_demo_run(Path(output) / "ended", MACHINES)
        async with dashboard_of(path, Path(output)) as (_, pictures):
            scenes.append(Scene(await pictures.take(), END))
    return scenes


if __name__ == "__main__":
    main()
