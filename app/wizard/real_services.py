"""The real machines behind the set-up: :class:`app.wizard.services.Services` over :mod:`distributed`.

Everything heavy is imported by the call that needs it, so that Home is painted at once. torch is never imported here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.console import command_line
from app.wizard.outside import OUTSIDE, Outside
from app.wizard.services import JobAnswers, Request, Sight, Tell, Watch
from app.wizard.state import (
    AccessRow,
    CheckRow,
    DataRow,
    FitRow,
    Home,
    Job,
    Launch,
    MachineRow,
    Plan,
    Status,
    Strategy,
    Way,
)

if TYPE_CHECKING:  # modules that load SSH, which the first screen does without
    from distributed.checks.findings import Finding
    from distributed.measuring.link_figures import PairFigures

RUNS = 20


class RealServices:
    """The world as it is.

    Args:
        config: another ``config.ini`` with its saved profiles beside it; ``None``: the project's.
        output: folder of the run folders.
        outside: machines and data.
    """

    def __init__(self, config: Path | None = None, output: Path = Path("output"), outside: Outside = OUTSIDE) -> None:
        self._outside = outside
        self._config = config
        self._output = output
        self._checks: dict[str, CheckRow] = {}
        self._trusted: tuple[str, ...] = ()

    @property
    def outside(self) -> Outside:
        """Machines and data, real or recorded."""
        return self._outside

    # ---------------------------------------------------------------------------------------------- home and machines

    def home(self) -> Home:
        from app.wizard.saved_profiles import profile_rows
        from training.runs import list_runs

        runs = tuple(sorted(list_runs(self._output)[:RUNS], key=lambda run: not run.live))
        return Home(runs=runs, profiles=profile_rows(self._config), status=Status.OK)

    def doctor(self) -> Sequence[Finding]:
        from app.wizard.machine_looks import doctor

        return doctor(self.outside)

    def watch(self, see: Callable[[Sight], None]) -> Watch:
        from app.wizard.lookout import Lookout

        return Lookout(see, self._config, self.outside)

    def saved_machines(self, profile: str) -> Sequence[MachineRow]:
        from app.wizard.machine_entries import row_of
        from app.wizard.saved_profiles import saved_hosts
        from distributed.hosts.file import load_hosts
        from distributed.hosts.local_python import without_strange_pythons

        path = saved_hosts(self._config).get(profile)
        if path is None:
            return ()
        hosts = without_strange_pythons(load_hosts(path))
        return tuple(row_of(machine, hosts.ssh_config) for machine in hosts.machines)

    # ------------------------------------------------------------------------------------------- access, checks, links

    def check_access(self, machine: MachineRow, trusted: Sequence[str]) -> AccessRow:
        from app.wizard.machine_looks import access_row

        self._trusted = tuple(trusted)
        return access_row(machine, trusted, self.outside)

    def install_key(self, machine: MachineRow, password: str, trusted: Sequence[str]) -> AccessRow:
        from app.wizard.machine_looks import row_after_password

        return row_after_password(machine, password, trusted, self.outside)

    def examine(self, machines: Sequence[MachineRow], job: JobAnswers) -> Sequence[CheckRow]:
        from app.wizard.machine_looks import check_rows

        rows = check_rows(machines, self._task(job), self._trusted, self.outside)
        self._checks.update({row.key: row for row in rows})
        return rows

    def repair(self, machines: Sequence[MachineRow], job: JobAnswers, check: str, tell: Tell) -> None:
        from app.wizard.machine_looks import mend

        mend(machines, self._task(job), tell, self.outside)

    def measure_links(self, machines: Sequence[MachineRow], job: JobAnswers, tell: Tell) -> Sequence[PairFigures]:
        from app.wizard.job_looks import resolved
        from app.wizard.machine_looks import measure_links

        profile = resolved(job, self._config, complete=False).profile
        return measure_links(machines, profile, self._trusted, tell, self.outside)

    def _task(self, job: JobAnswers) -> str:
        from app.wizard.job_looks import resolved

        return resolved(job, self._config, complete=False).profile.model.task

    # ------------------------------------------------------------------------------------------------------------ job

    def job(self, answers: JobAnswers) -> Job:
        from app.wizard.job_looks import job_of

        return job_of(answers, self._config)

    def look_at_data(self, answers: JobAnswers) -> DataRow:
        from app.wizard.job_looks import data_of, resolved

        return data_of(resolved(answers, self._config, complete=False).profile, self.outside)

    def fits(self, machines: Sequence[MachineRow], answers: JobAnswers) -> Sequence[FitRow]:
        from app.wizard.job_looks import fit_rows, resolved

        return fit_rows(machines, resolved(answers, self._config, complete=False).profile, self._checks)

    # --------------------------------------------------------------------------------------------------- way and plan

    def forecast(self, request: Request, tell: Tell) -> Strategy:
        from app.wizard.forecasting import make_forecast, strategy_of
        from app.wizard.job_looks import resolved

        self._check_code(request.job)
        profile = resolved(request.job, self._config).profile
        return strategy_of(make_forecast(request, profile, tell, self.outside))

    def with_interval(self, planning: Any, index: int, steps: int) -> Way:
        from app.wizard.forecasting import moved

        return moved(planning, index, steps)

    def plan(self, request: Request) -> Plan:
        from app.wizard.planning_looks import plan_of

        return plan_of(request, self._config, self.outside)

    def save(self, request: Request) -> tuple[str, ...]:
        from app.wizard.keeping import keeping
        from app.wizard.planning_looks import chosen_planning

        return keeping(request, chosen_planning(request), self._config).write(self._config)

    def launch(self, request: Request, see: Callable[[Launch], None]) -> Path:
        from app.wizard.launching import launch

        self._check_code(request.job)
        return launch(request, see, self._config)

    def _check_code(self, job: JobAnswers) -> None:
        """Let no code run that a file names and no person stands behind; what is typed here a person has named."""
        from app.wizard.job_looks import resolved
        from distributed.preparation.custom_code import check_code

        found = resolved(job, self._config)
        source = found.origins["model_path"].file
        hint = f"look at it, then: {command_line('plan', job.profile, '--trust-code')}"
        check_code(found.profile, source, hint, named=source is None)

    def close(self) -> None:
        """Nothing is held between calls."""
