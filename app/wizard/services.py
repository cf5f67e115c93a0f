"""What the guided set-up asks of the machines, over :mod:`distributed`; :mod:`app.demo` has a scripted one.

All calls block and are made from threads of the :class:`app.wizard.engine.Wizard`. They may raise
``profiles.errors.MusterError``; the set-up shows its message and hint in the row or screen concerned.
Everything heavy is imported by the call that needs it, so that Home is painted at once. torch is never imported here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
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
    KnownProfile,
    Launch,
    MachineRow,
    Plan,
    Sight,
    Strategy,
    Tell,
    Way,
)
from app.wizard.state import Request
from profiles.errors import BadInput, MachinesNotReady, MusterError
from profiles.library import Library
from profiles.locations import absolute_path
from profiles.resolve import ProfileEntry, list_profiles

if TYPE_CHECKING:  # modules that load SSH, which the first screen does without
    from app.wizard.discovery_watch import DiscoveryWatch
    from distributed.checks.findings import Finding
    from distributed.measuring.link_figures import PairFigures
    from distributed.ssh.access import AccessReport
    from profiles.schema import Profile

RUNS = 20


class Services:
    """The world, as the set-up sees it.

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
        """Return live and recent runs, and profiles, the newest first."""
        from training.runs import list_runs

        runs = tuple(sorted(list_runs(self._output)[:RUNS], key=lambda run: not run.live))
        return Home(runs=runs, profiles=known_profiles(self._config))

    def doctor(self) -> Sequence[Finding]:
        """Check this computer."""
        from app.wizard.machines import this_row

        return self._examine([this_row(self.outside.this_computer())], "whisper")[0].findings

    def watch(self, see: Callable[[Sight], None]) -> DiscoveryWatch:
        """Look for machines; ``see`` is called at once and after every change, from a thread of its own."""
        from app.wizard.discovery_watch import DiscoveryWatch

        return DiscoveryWatch(see, saved_hosts(self._config), self.outside)

    def saved_machines(self, profile: str) -> Sequence[MachineRow]:
        """Return the machines that a saved profile names; none: this computer."""
        from app.wizard.machines import row_of, this_row
        from distributed.hosts.file import load_hosts, without_strange_pythons

        path = saved_hosts(self._config).get(profile)
        if path is None:
            return (this_row(self.outside.this_computer()),)
        hosts = without_strange_pythons(load_hosts(path))
        return tuple(row_of(machine, self.outside.this_computer(), hosts.ssh_config) for machine in hosts.machines)

    # ------------------------------------------------------------------------------------------- access, checks, links

    def check_access(self, machine: MachineRow, trusted: Sequence[str]) -> AccessReport:
        """Go the whole way to a machine once. A new host key is accepted only if its fingerprint is ``trusted``."""
        from app.wizard.machines import target_of, trust_in

        self._trusted = tuple(trusted)
        return self.outside.check_access(target_of(machine), trust_in(trusted))

    def install_key(self, machine: MachineRow, password: str, trusted: Sequence[str]) -> AccessReport:
        """Install our key with the password, and return how the way goes with the key alone."""
        from app.wizard.machines import target_of, trust_in
        from distributed.ssh.access import explain

        target = target_of(machine)
        try:
            return self.outside.install_key(target, password, trust_in(trusted))
        except MusterError as error:
            return explain(target, None, error)

    def examine(self, machines: Sequence[MachineRow], job: JobAnswers) -> Sequence[Examination]:
        """Check all machines side by side; one result a machine, in their order."""
        found = self._examine(machines, self._profile(job).model.task)
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

        found = self.outside.examine(hosts_of(machines), self._profile(job).model.task)
        problems = self.outside.repair(found, tell)
        if problems:
            raise MachinesNotReady("; ".join(problem.message for problem in problems), problems[0].hint)

    def measure_links(self, machines: Sequence[MachineRow], job: JobAnswers, tell: Tell) -> Sequence[PairFigures]:
        """Measure every pair, or return what is known and fresh."""
        from app.wizard.machines import hosts_of, trust_in
        from distributed.measuring.measure import MeasureOptions

        profile = self._profile(job)
        ready = self.outside.ready(hosts_of(machines), profile.model.task, trust_in(self._trusted))
        try:
            return self.outside.measure(ready, profile, MeasureOptions(links=True, machines=False, tell=tell)).pairs
        finally:
            for link, _ in ready:
                link.close()

    # ------------------------------------------------------------------------------------------------------------ job

    def _profile(self, job: JobAnswers) -> Profile:
        """Return the profile with the answers, also where it is not complete yet."""
        from app.wizard.job_view import resolved

        return resolved(job, self._config, complete=False).profile

    def job(self, answers: JobAnswers) -> Job:
        """Return the options with their values and errors, and what can be chosen; quick, no data is read."""
        from app.wizard.job_view import job_of

        return job_of(answers, self._config)

    def look_at_data(self, answers: JobAnswers) -> DataSummary:
        """Read the data set: samples, hours, columns, broken files."""
        from app.wizard.job_view import data_of

        return data_of(self._profile(answers), self.outside)

    def fits(self, machines: Sequence[MachineRow], answers: JobAnswers) -> Sequence[Fit]:
        """Say for each machine whether the model fits its memory."""
        from app.wizard.job_view import fits_of

        return fits_of(machines, self._profile(answers), self._memory)

    # --------------------------------------------------------------------------------------------------- way and plan

    def forecast(self, request: Request, tell: Tell) -> Strategy:
        """Measure what is not known yet, and rank all ways to train."""
        from app.wizard.forecasting import make_forecast, strategy_of
        from app.wizard.job_view import resolved

        self._check_code(request.job)
        profile = resolved(request.job, self._config).profile
        return strategy_of(make_forecast(request, profile, tell, self.outside))

    def with_interval(self, planning: Any, index: int, steps: int) -> Way:
        """Predict a candidate with another H; pure and quick."""
        from app.wizard.forecasting import moved

        return moved(planning, index, steps)

    def plan(self, request: Request) -> Plan:
        """Say what will be done. Changes nothing anywhere."""
        from app.wizard.plan import plan_of

        return plan_of(request, self._config, self.outside)

    def save(self, request: Request) -> tuple[str, ...]:
        """Write profile, machines and plan; return the files."""
        from app.wizard.plan import saving

        return saving(request, self._config).write(self._config)

    def launch(self, request: Request, see: Callable[[Launch], None], tell: Tell) -> Path:
        """Save, start the run in the background, and return its folder when the first step is made.

        ``see`` hears every change on the way; the run goes on if the caller stops listening.
        """
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
        """Let go of everything that is still held: nothing is, between calls."""


# ------------------------------------------------------------------------------------- profiles, with their machines


def saved_hosts(config: Path | None = None) -> dict[str, Path]:
    """Return the hosts file of every saved profile that names one."""
    try:
        library = Library.open(config)
    except BadInput:
        return {}
    found = {}
    for file in library.saved:
        for heading, section in file.sections.items():
            kind, _, name = heading.partition(":")
            if kind == "profile" and "hosts" in section.entries and section.entries["hosts"].value:
                found[name] = Path(absolute_path(section.entries["hosts"].value, file.path.parent))
    return found


def known_profiles(config: Path | None = None) -> tuple[KnownProfile, ...]:
    """Return all profiles: the saved ones, newest first, then those of ``config.ini`` in its order.

    Raises:
        BadInput: ``config.ini`` cannot be read.
    """
    library, hosts = Library.open(config), saved_hosts(config)
    found = [_known(entry, library, hosts.get(entry.name)) for entry in list_profiles(config)]
    return tuple(sorted(found, key=lambda one: -one.entry.source.stat().st_mtime if one.saved else 1.0))


def _known(entry: ProfileEntry, library: Library, hosts: Path | None) -> KnownProfile:
    from distributed.hosts.file import load_hosts  # pydantic's models; what lists no saved profile does without

    saved = entry.source != library.config.path
    try:
        return KnownProfile(entry, saved, load_hosts(hosts).machines if hosts is not None else ())
    except BadInput as error:
        return KnownProfile(replace(entry, error=str(error)), saved)
