"""The real machines behind the set-up: :class:`app.wizard.services.Services` over :mod:`distributed`.

Everything heavy is imported by the call that needs it, so that Home is painted at once. torch is never imported here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.console import command_line
from app.wizard.outside import OUTSIDE, Outside
from app.wizard.records import (
    DataSummary,
    Examination,
    Fit,
    Home,
    Job,
    JobAnswers,
    Launch,
    MachineRow,
    Plan,
    Strategy,
    Way,
)
from app.wizard.services import Request, Sight, Tell, Watch
from profiles.errors import MachinesNotReady, MusterError

if TYPE_CHECKING:  # modules that load SSH, which the first screen does without
    from distributed.checks.findings import Finding
    from distributed.measuring.link_figures import PairFigures
    from distributed.ssh.access import AccessReport
    from profiles.schema import Profile

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
        self._memory: dict[str, tuple[int, int]] = {}
        self._trusted: tuple[str, ...] = ()

    @property
    def outside(self) -> Outside:
        """Machines and data, real or recorded."""
        return self._outside

    # ---------------------------------------------------------------------------------------------- home and machines

    def home(self) -> Home:
        from app.wizard.saved_profiles import known_profiles
        from training.runs import list_runs

        runs = tuple(sorted(list_runs(self._output)[:RUNS], key=lambda run: not run.live))
        return Home(runs=runs, profiles=known_profiles(self._config))

    def doctor(self) -> Sequence[Finding]:
        from app.wizard.machines import HERE_KEY

        here = MachineRow(HERE_KEY, self.outside.this_computer().name, here=True)
        return self._examine([here], "whisper")[0].findings

    def watch(self, see: Callable[[Sight], None]) -> Watch:
        from app.wizard.discovery_watch import DiscoveryWatch

        return DiscoveryWatch(see, self._config, self.outside)

    def saved_machines(self, profile: str) -> Sequence[MachineRow]:
        from app.wizard.machines import row_of
        from app.wizard.saved_profiles import saved_hosts
        from distributed.hosts.file import load_hosts, without_strange_pythons

        path = saved_hosts(self._config).get(profile)
        if path is None:
            return ()
        hosts = without_strange_pythons(load_hosts(path))
        return tuple(row_of(machine, hosts.ssh_config) for machine in hosts.machines)

    # ------------------------------------------------------------------------------------------- access, checks, links

    def check_access(self, machine: MachineRow, trusted: Sequence[str]) -> AccessReport:
        from app.wizard.machines import target_of, trust_in

        self._trusted = tuple(trusted)
        return self.outside.check_access(target_of(machine), trust_in(trusted))

    def install_key(self, machine: MachineRow, password: str, trusted: Sequence[str]) -> AccessReport:
        from app.wizard.machines import target_of, trust_in
        from distributed.ssh.access import explain

        target = target_of(machine)
        try:
            return self.outside.install_key(target, password, trust_in(trusted))
        except MusterError as error:
            return explain(target, None, error)

    def examine(self, machines: Sequence[MachineRow], job: JobAnswers) -> Sequence[Examination]:
        found = self._examine(machines, self._task(job))
        self._memory.update({row.key: one.memory for row, one in zip(machines, found, strict=True)})
        return found

    def _examine(self, machines: Sequence[MachineRow], task: str) -> Sequence[Examination]:
        from app.wizard.machines import hosts_of, trust_in

        found = self.outside.examine(hosts_of(machines), task, trust_in(self._trusted))
        return [Examination(tuple(one.findings), one.memory) for one in found]

    def repair(self, machines: Sequence[MachineRow], job: JobAnswers, check: str, tell: Tell) -> None:
        """Give machines without packages an environment of ours.

        Raises:
            MachinesNotReady: where that did not go.
        """
        from app.wizard.machines import hosts_of

        found = self.outside.examine(hosts_of(machines), self._task(job))
        problems = self.outside.repair(found, tell)
        if problems:
            raise MachinesNotReady("; ".join(problem.message for problem in problems), problems[0].hint)

    def measure_links(self, machines: Sequence[MachineRow], job: JobAnswers, tell: Tell) -> Sequence[PairFigures]:
        from app.wizard.machines import hosts_of, trust_in
        from distributed.measuring.measure import MeasureOptions

        profile = self._profile(job)
        ready = self.outside.ready(hosts_of(machines), profile.model.task, trust_in(self._trusted))
        try:
            return self.outside.measure(ready, profile, MeasureOptions(links=True, machines=False), tell).pairs
        finally:
            for link, _ in ready:
                link.close()

    def _profile(self, job: JobAnswers) -> Profile:
        """Return the profile with the answers, also where it is not complete yet."""
        from app.wizard.job_view import resolved

        return resolved(job, self._config, complete=False).profile

    def _task(self, job: JobAnswers) -> str:
        return self._profile(job).model.task

    # ------------------------------------------------------------------------------------------------------------ job

    def job(self, answers: JobAnswers) -> Job:
        from app.wizard.job_view import job_of

        return job_of(answers, self._config)

    def look_at_data(self, answers: JobAnswers) -> DataSummary:
        from app.wizard.job_view import data_of

        return data_of(self._profile(answers), self.outside)

    def fits(self, machines: Sequence[MachineRow], answers: JobAnswers) -> Sequence[Fit]:
        from app.wizard.job_view import fits_of

        return fits_of(machines, self._profile(answers), self._memory)

    # --------------------------------------------------------------------------------------------------- way and plan

    def forecast(self, request: Request, tell: Tell) -> Strategy:
        from app.wizard.forecasting import make_forecast, strategy_of
        from app.wizard.job_view import resolved

        self._check_code(request.job)
        profile = resolved(request.job, self._config).profile
        return strategy_of(make_forecast(request, profile, tell, self.outside))

    def with_interval(self, planning: Any, index: int, steps: int) -> Way:
        from app.wizard.forecasting import moved

        return moved(planning, index, steps)

    def plan(self, request: Request) -> Plan:
        from app.wizard.plan_view import plan_of

        return plan_of(request, self._config, self.outside)

    def save(self, request: Request) -> tuple[str, ...]:
        from app.wizard.plan_view import chosen_planning
        from app.wizard.save import saving

        return saving(request, chosen_planning(request), self._config).write(self._config)

    def launch(self, request: Request, see: Callable[[Launch], None], tell: Tell) -> Path:
        from app.wizard.launching import launch

        self._check_code(request.job)
        return launch(request, see, tell, self._config)

    def _check_code(self, job: JobAnswers) -> None:
        """Let no code run that a file names and no person stands behind; what is typed here a person has named."""
        from app.wizard.job_view import resolved
        from distributed.preparation.custom_code import check_code

        found = resolved(job, self._config)
        source = found.origins["model_path"].file
        hint = f"look at it, then: {command_line('plan', job.profile, '--trust-code')}"
        check_code(found.profile, source, hint, named=source is None)

    def close(self) -> None:
        """Nothing is held between calls."""
