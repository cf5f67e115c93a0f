"""The set-up's services over the tour's network: no machine is contacted, nothing trains, nothing is saved."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from app.console import is_of_tour
from app.demo import CONFIG, JOB, MOST, ScriptClock
from app.wizard.services.services import Services
from app.wizard.state.launch_records import LaunchProgress
from app.wizard.state.records import Assessment, Home, ItemStatus, PlanPreview, Tell
from app.wizard.state.state import Answers, PlanRequest
from profiles.errors import BadInput
from profiles.installation import RUNS_FOLDER, program_words, wizard_line

if TYPE_CHECKING:
    from app.demo.outside import TourOutside
    from distributed.joining.share_client import SharedOffer
    from distributed.launcher import PlannedRun

DEMO_START = 1_767_258_000.0
"""2026-01-01 09:00 UTC: start time of a finished demo run."""
_AT_ONCE = 1e9
NOT_DONE = "In the tour Enter only plays a recorded run, in a run folder; with your machines all of this would be done."


class DemoServices(Services):
    """The services of the tour.

    Args:
        number: number of machines, including this computer.
        speed: playback speed relative to the recording.
        output: folder of the run folders.
        clock: monotonic seconds, by which machines appear.
        open_doors: whether all machines accept the login and have their packages from the start.

    Raises:
        BadInput: fewer than one machine, or more than the tour has.
    """

    changes_machines: ClassVar[bool] = False

    def __init__(
        self,
        number: int,
        speed: float = 1.0,
        output: Path = RUNS_FOLDER,
        clock: Callable[[], float] = time.monotonic,
        open_doors: bool = False,
    ) -> None:
        if not 1 <= number <= MOST:
            raise BadInput(f"--demo {number}: the tour has 1 to {MOST} machines", "try: --demo 3")
        super().__init__(CONFIG, output)
        self._number = number
        self._clock = ScriptClock(speed, clock)
        self._open_doors = open_doors

    @cached_property
    def outside(self) -> TourOutside:
        """The tour's network, loaded on first use so that the first screen does not wait for it."""
        from app.demo.outside import TourOutside

        return TourOutside(self._number, self._clock, self._open_doors)

    def home(self) -> Home:
        home = super().home()
        return replace(home, runs=tuple(run for run in home.runs if is_of_tour(run.profile)))

    def share(self) -> SharedOffer:
        """Refuse: nothing joins the tour.

        Raises:
            BadInput: always.
        """
        raise BadInput("no machine joins recorded ones", "without --demo a code would be shown")

    def plan(self, request: PlanRequest) -> PlanPreview:
        plan = super().plan(request)
        changes = tuple(change for change in plan.changes if change.what not in plan.files)
        demo_plan = replace(plan, changes=changes, files=(), command=command_of(self._number))
        note = Assessment(status=ItemStatus.WARNING, cause=NOT_DONE)
        return replace(demo_plan, way=f"{plan.way}. {NOT_DONE}", assessment=note)

    def save(self, request: PlanRequest) -> tuple[str, ...]:
        """Reject saving: the choices of a tour are not saved.

        Raises:
            BadInput: always.
        """
        raise BadInput("recorded machines are not saved", "without --demo the profile would be")

    def launch(self, request: PlanRequest, see: Callable[[LaunchProgress], None], tell: Tell) -> Path:
        from app.demo.run import start_demo_run
        from app.wizard.services.launching import follow

        planned = self.planned(request)
        command = command_of(self._number).split()
        path = start_demo_run(self._output, planned, command, speed=self._clock.speed)
        return follow(path, planned.plan, see)

    def planned(self, request: PlanRequest) -> PlannedRun:
        """Return the planned run that the Plan screen shows.

        Raises:
            BadInput: the choices are inconsistent.
        """
        from app.wizard.services.forecasting import Forecast
        from app.wizard.services.plan import choices

        planned = choices(request, CONFIG).planned
        if planned is None:
            raise BadInput("nothing fits these machines", "pick others")
        if isinstance(request.planning, Forecast) and request.planning.measurements.speeds:
            return replace(planned, figures=request.planning.measurements.figures)
        return planned

    def close(self) -> None:
        self._clock.close()


def command_of(number: int) -> str:
    """Return the command that starts this tour."""
    return wizard_line("--demo", str(number))


def recommended(machines: int) -> PlannedRun:
    """Return the run that the set-up recommends for a number of machines of the tour.

    Raises:
        BadInput: the tour has fewer machines.
    """
    from app.wizard.services.machines import Naming
    from distributed.discovery import discovery

    tour = DemoServices(machines, _AT_ONCE, open_doors=True)
    discovered = discovery.machines(tour.outside.search(discovery.Sources()).state)
    request = PlanRequest(Naming((), (), tour.outside.this_computer).rows(discovered), Answers(profile=JOB))
    strategy = tour.forecast(request, lambda line: None)
    chosen = next((candidate for candidate in strategy.ways if candidate.recommended), None)
    return tour.planned(replace(request, chosen=chosen, planning=strategy.planning))


def write_demo_run(
    folder: Path, machines: int = 3, seed: int = 0, start: float = DEMO_START, until: float | None = None
) -> Path:
    """Write a finished run into the output folder ``folder``, and return its run folder.

    Args:
        machines: number of machines that take part.
        seed: see :func:`app.demo.run.pace_of`; the same seed and start give the same events.
        start: Unix time of the run's start.
        until: seconds after the start at which the run is left unfinished; ``None``: it is finished.

    Raises:
        BadInput: too many machines, the run exists already, or the folder cannot be written.
    """
    from app.demo.run import Player, create, pace_of, recorded

    planned = recommended(machines)
    identifier = f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime(start))}-{seed & 0xFFFF:04x}"
    plan = planned.plan.model_copy(update={"run_id": identifier})
    command = [program_words()[-1], "demo-run", "--machines", str(machines)]
    with create(folder, replace(planned, plan=plan), command) as run:
        Player(run, recorded(plan), start, pace_of(seed)).write(until)
        return run.path
