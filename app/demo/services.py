"""The set-up's world with scripted machines: no network, no training, nothing is changed on any machine.

Planner, run folders and pydantic are loaded where they are needed, so that the first screen does not wait for them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from app.demo.entry import Entry
from app.demo.examination import Examination
from app.demo.lookout import Lookout, machine_row
from app.demo.machines import HERE, ScriptedMachine, scripted_machine, scripted_machines
from app.demo.pace import Pace
from app.wizard.services import JobAnswers, Request, Sight, Tell
from app.wizard.state import (
    AccessRow,
    CandidateRow,
    CheckRow,
    DataRow,
    FindingRow,
    FitRow,
    Home,
    Job,
    Launch,
    LinkRow,
    MachineRow,
    Plan,
    ProfileRow,
    Status,
    Strategy,
)
from profiles.counts import counted
from profiles.errors import BadInput

if TYPE_CHECKING:
    from app.demo.forecast import Forecast
    from distributed.planning.document import Planning
    from distributed.planning.job import Preference
    from training.plan import RunPlan

MEASURING = 0.9
PROFILE_NAME = "demo"
"""What the set-up begins with; here it stands for the scripted job."""


class DemoServices:
    """The scripted world.

    Args:
        number: of machines, this computer included.
        speed: how much faster than the script.
        output: where the scripted run's folder goes.
        seed: of all chances.
        clock: seconds since any moment; decides what has appeared by now.
    """

    def __init__(
        self,
        number: int,
        speed: float = 1.0,
        output: Path = Path("output"),
        seed: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._machines = scripted_machines(number)
        self._pace = Pace(speed, clock)
        self._entry = Entry(self._pace)
        self._examination = Examination(self._pace)
        self._output = output
        self._seed = seed

    # ------------------------------------------------------------------------------------------------ home, machines

    def home(self) -> Home:
        """Scripted runs that can be attached to, and the one scripted profile."""
        from app.demo.home import run_rows
        from training.runs import list_runs

        profile = ProfileRow(
            PROFILE_NAME,
            PROFILE_NAME,
            Status.OK,
            description=f"{counted(len(self._machines), 'scripted machine')}: nothing trains",
        )
        return Home(run_rows(list_runs(self._output)), (profile,), status=Status.OK)

    def doctor(self) -> Sequence[FindingRow]:
        here = self._machines[0]
        return self._examination.look([(machine_row(here, here=True), here)])[0].findings

    def watch(self, see: Callable[[Sight], None]) -> Lookout:
        return Lookout(self._machines, self._pace, see)

    def saved_machines(self, profile: str) -> Sequence[MachineRow]:
        return ()

    # ---------------------------------------------------------------------------------------------- access to links

    def check_access(self, machine: MachineRow, trusted: Sequence[str]) -> AccessRow:
        return self._entry.check(machine, self._scripted(machine), trusted)

    def install_key(self, machine: MachineRow, password: str, trusted: Sequence[str]) -> AccessRow:
        return self._entry.install_key(machine, self._scripted(machine), password)

    def examine(self, machines: Sequence[MachineRow], job: JobAnswers) -> Sequence[CheckRow]:
        return self._examination.look(self._pairs(machines))

    def repair(self, machines: Sequence[MachineRow], job: JobAnswers, check: str, tell: Tell) -> None:
        self._examination.mend(self._pairs(machines), check, tell)

    def measure_links(self, machines: Sequence[MachineRow], job: JobAnswers, tell: Tell) -> Sequence[LinkRow]:
        from app.demo.figures import link_between
        from app.demo.plan_form import link_row

        rows = []
        pairs = list(combinations([self._scripted(row) for row in machines], 2))
        for number, (one, other) in enumerate(pairs, 1):
            pair = f"{one.name} - {other.name}"
            tell(f"{pair}: link {number} of {len(pairs)}, both directions")
            self._pace.work(MEASURING)
            link = link_between(one, other)
            tell(f"{pair}: {link.mbit:.0f} and {link.mbit_back:.0f} Mbit/s")
            rows.append(link_row(link, one, other))
        return rows

    # ------------------------------------------------------------------------------------------------ job, strategy

    def job(self, answers: JobAnswers) -> Job:
        from app.demo.job_form import job_of

        return job_of(answers)

    def look_at_data(self, answers: JobAnswers) -> DataRow:
        from app.demo.job_form import scripted_data

        self._pace.work(0.5)
        return scripted_data()

    def fits(self, machines: Sequence[MachineRow], answers: JobAnswers) -> Sequence[FitRow]:
        from app.demo.job_form import fits

        return fits(self._pairs(machines), answers)

    def forecast(self, request: Request, tell: Tell) -> Strategy:
        from app.demo.forecast import strategy_of

        for row in request.machines:
            self._pace.work(0.5)
            tell(f"{row.name}: a short run of the task with 2, 4 and 8 samples (scripted)")
        return strategy_of(self._forecast(request))

    def with_interval(self, planning: Any, index: int, steps: int) -> CandidateRow:
        from app.demo.forecast import with_interval

        return with_interval(planning, index, steps)

    # -------------------------------------------------------------------------------------------------- plan, launch

    def plan(self, request: Request) -> Plan:
        from app.demo.plan_form import plan_of

        found = self._forecast(request)
        return plan_of(self._run_plan(request, found)[0], found.candidate(request.chosen), len(self._machines))

    def save(self, request: Request) -> tuple[str, ...]:
        """Nothing: a scripted choice is worth no file.

        Raises:
            BadInput: always.
        """
        raise BadInput("scripted machines are not saved", "without --demo the profile would be")

    def launch(self, request: Request, see: Callable[[Launch], None]) -> Path:
        from app.demo.launching import follow_start
        from app.demo.run import start_demo_run

        plan, planning = self._run_plan(request, self._forecast(request))
        command = ["wizard.py", "--demo", str(len(self._machines))]
        path = start_demo_run(self._output, plan, planning, command, self._seed, self._pace.speed)
        follow_start(path, plan, see, self._pace)
        return path

    def close(self) -> None:
        self._pace.close()

    # ------------------------------------------------------------------------------------------------------- helpers

    def _forecast(self, request: Request) -> Forecast:
        from app.demo.forecast import Forecast, forecast

        if isinstance(request.planning, Forecast):
            return request.planning
        machines = [self._scripted(row) for row in request.machines] or list(self._machines[:1])
        return forecast(machines, request.job, cast("Preference", request.preference))

    def _run_plan(self, request: Request, found: Forecast) -> tuple[RunPlan, Planning]:
        from app.demo.run_plan import run_plan
        from training.run_folder import new_run_id

        chosen = found.candidate(request.chosen)
        if chosen is None:
            raise BadInput("nothing fits these machines", "pick others")
        return run_plan(found.planning, chosen, found.cluster, found.job, found.profile, new_run_id())

    def _pairs(self, rows: Sequence[MachineRow]) -> list[tuple[MachineRow, ScriptedMachine]]:
        return [(row, self._scripted(row)) for row in rows]

    def _scripted(self, row: MachineRow) -> ScriptedMachine:
        """Return the machine of a row.

        Raises:
            BadInput: it is typed, and not in the script.
        """
        if row.here:
            return scripted_machine(HERE)
        for machine in self._machines:
            if row.fingerprint == machine.fingerprint or row.address in (machine.address, machine.name):
                return machine
        raise BadInput(f"{row.name} is not in the script", "leave it out; without --demo it would be tried")
