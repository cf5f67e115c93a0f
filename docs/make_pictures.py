"""Draw docs/pictures/*.svg: the set-up's screens and the dashboard, from scripted machines.

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
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from app.dashboard.app import DashboardApp
from app.dashboard.screen import DashboardScreen
from app.demo.services import DEMO_START, DemoServices, write_demo_run
from app.follow import Follower
from app.screens.app import WizardApp
from app.shell.base_app import MusterApp
from app.wizard.engine import Wizard
from app.wizard.state import actions as do
from app.wizard.state.records import AccessNeed, ItemStatus
from app.wizard.state.state import WizardState
from training.records.events import Event

MACHINES = 3
SIZE = (116, 24)
SEEN_FOR = 6.0
"""Seconds for which the set-up has looked for machines when it is drawn."""
PATIENCE = 90.0
_QUICK = 1000.0
LOST, LATER = 67.5, 80.0
"""Seconds after the start of the recorded run: a machine is lost; all train again."""
DASHBOARD = {LATER: ("overview", "charts", "network"), LOST: ("machines", "logs")}
_FONT = re.compile(r"@font-face\s*{[^}]*}\s*")
_GOOD = (ItemStatus.OK, ItemStatus.WARNING)


def main() -> None:
    """Draw all pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "pictures")
    folder: Path = parser.parse_args().output
    folder.mkdir(parents=True, exist_ok=True)
    asyncio.run(draw_wizard(folder))
    for seconds, tabs in DASHBOARD.items():
        asyncio.run(draw_dashboard(folder, seconds, tabs))


class Pictures:
    """Takes pictures of an application while it is driven."""

    def __init__(self, app: MusterApp, settle: Callable[[], Awaitable[None]], folder: Path) -> None:
        self._app, self._settle, self._folder = app, settle, folder

    async def take(self, name: str) -> None:
        """Write the screen once it stays as it is: a scrollbar that comes changes how lines are cut."""
        before, drawing = "", self._drawn()
        while drawing != before:
            await self._settle()
            await asyncio.sleep(0.1)
            before, drawing = drawing, self._drawn()
        (self._folder / f"{name}.svg").write_text(_FONT.sub("", drawing))

    def _drawn(self) -> str:
        return self._app.export_screenshot(title=f"python wizard.py --demo {MACHINES}")


async def draw_wizard(folder: Path) -> None:
    """Go from Home to the Plan, and draw the screens on the way."""
    seconds = 0.0
    with tempfile.TemporaryDirectory() as output:
        services = DemoServices(MACHINES, _QUICK, Path(output), clock=lambda: seconds / _QUICK)
        wizard = Wizard(services)
        app = WizardApp(wizard, clock=lambda: DEMO_START)
        wizard.subscribe(app.changed)
        await asyncio.to_thread(wizard.wait, lambda state: bool(state.machines.rows), PATIENCE)  # the search has begun
        seconds = SEEN_FOR
        try:
            async with app.run_test(size=SIZE) as pilot:

                async def settle() -> None:
                    app.follow()
                    await pilot.pause()

                await _tour(wizard, Pictures(app, settle, folder))
                wizard.close()
        finally:
            wizard.close()


async def _tour(wizard: Wizard, pictures: Pictures) -> None:
    wizard.do(do.new_setup())
    await _reach(wizard, lambda state: len(state.machines.rows) == MACHINES and state.machines.seconds == SEEN_FOR)
    for row in wizard.state.machines.rows:
        wizard.do(do.pick(row.key, True))
    await pictures.take("machines")
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
    await pictures.take("links")
    wizard.do(do.go_on())
    await _reach(wizard, lambda state: state.job.status in _GOOD and state.data.status in _GOOD)
    wizard.do(do.go_on())
    await _reach(wizard, lambda state: state.strategy.status in _GOOD)
    await pictures.take("strategy")
    wizard.do(do.go_on())
    await _reach(wizard, lambda state: state.plan.status in _GOOD)
    await pictures.take("plan")


async def _reach(wizard: Wizard, until: Callable[[WizardState], bool]) -> None:
    """Wait until the set-up's state is so and nothing is worked on, letting the screen draw meanwhile."""

    def settled(state: WizardState) -> bool:
        return not state.busy and until(state)

    if not await asyncio.to_thread(wizard.wait, settled, PATIENCE):
        raise SystemExit(f"the set-up came no further than {wizard.state.step.title()}: {wizard.state.notice}")


# ------------------------------------------------------------------------------------------------------- the dashboard


class Still(Follower):
    """A run at one moment: all events until then, and a present that stands still."""

    def __init__(self, path: Path, moment: float) -> None:
        super().__init__(path)
        self._moment = moment

    def events(self) -> Iterator[Event | None]:
        yield from (event for event in super().events() if event is not None)
        while True:
            yield None
            time.sleep(0.02)

    def now(self) -> float:
        return self._moment


class StillScreen(DashboardScreen):
    """The dashboard of a run that goes on, of which one moment is drawn."""

    def __init__(self, path: Path, moment: float) -> None:
        super().__init__(path, Still(path, moment))
        self._replay = False  # keys and title of a live run


async def draw_dashboard(folder: Path, seconds: float, tabs: tuple[str, ...]) -> None:
    """Draw tabs of the dashboard, so many seconds after the start of the scripted run."""
    with tempfile.TemporaryDirectory() as output:
        path = write_demo_run(Path(output), MACHINES, until=seconds)
        app = DashboardApp(path)
        app.dashboard = StillScreen(path, DEMO_START + seconds)
        async with app.run_test(size=SIZE) as pilot:
            end = time.monotonic() + PATIENCE
            while not (app.dashboard.picture.read and app.dashboard.picture.lines):
                if time.monotonic() > end:
                    raise SystemExit(f"the dashboard has not read {path}")
                await pilot.pause(0.05)

            async def settle() -> None:
                await pilot.pause(0.6)

            pictures = Pictures(app, settle, folder)
            for tab in tabs:
                app.dashboard.action_tab(tab)
                await pictures.take(f"dashboard-{tab}")


if __name__ == "__main__":
    main()
