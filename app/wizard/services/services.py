"""Services of the guided set-up, implemented with :mod:`distributed`; :mod:`app.demo` has a scripted implementation.

All calls block and are made from threads of the :class:`app.wizard.engine.Wizard`. They may raise
``profiles.errors.MusterError``; the set-up shows its message and hint in the row or screen concerned.
Heavy modules are imported by the calls that need them, so that Home is painted at once. torch is never imported here.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from app.console import command_line
from app.wizard.services.outside import Outside
from app.wizard.state.data_actions import Selection
from app.wizard.state.launch_records import LaunchProgress
from app.wizard.state.neighbours import NeighbourAnswers
from app.wizard.state.records import (
    CandidateRow,
    DataSummary,
    DiscoveredMachines,
    Fit,
    Home,
    JobAnswers,
    JobForm,
    KnownProfile,
    MachineRow,
    PlanPreview,
    StrategyRanking,
    Tell,
)
from app.wizard.state.state import PlanRequest
from profiles.errors import BadInput, MachinesNotReady, MusterError
from profiles.installation import RUNS_FOLDER
from profiles.locations import absolute_path
from training.lazy import lazy

if TYPE_CHECKING:
    from app.wizard.services import discovery_watch, forecasting, job_view, launching, machines, plan
    from app.wizard.services.discovery_watch import DiscoveryWatch
    from distributed.checks.findings import Finding, Health
    from distributed.hosts import file as hosts_file
    from distributed.joining.share_client import SharedOffer
    from distributed.measuring import measure
    from distributed.measuring.link_figures import PairFigures
    from distributed.preparation import custom_code, prepare, wheels
    from distributed.ssh import access
    from distributed.ssh import config as ssh_config
    from distributed.ssh.access import AccessReport
    from profiles import schema
    from profiles.files import library as profile_library
    from profiles.files import resolve as profile_files
    from profiles.files.library import Library
    from profiles.files.resolve import ProfileEntry
    from profiles.schema import Profile
    from training.records import runs as run_list
else:  # loaded on first use: most load SSH, which the first screen does without
    discovery_watch, forecasting, job_view, launching, machines, plan = (
        lazy(f"app.wizard.services.{name}")
        for name in ("discovery_watch", "forecasting", "job_view", "launching", "machines", "plan")
    )
    hosts_file, measure = lazy("distributed.hosts.file"), lazy("distributed.measuring.measure")
    custom_code, prepare = lazy("distributed.preparation.custom_code"), lazy("distributed.preparation.prepare")
    wheels = lazy("distributed.preparation.wheels")
    access, ssh_config = lazy("distributed.ssh.access"), lazy("distributed.ssh.config")
    run_list = lazy("training.records.runs")
    profile_library, profile_files = lazy("profiles.files.library"), lazy("profiles.files.resolve")
    schema = lazy("profiles.schema")

RUNS = 20


class Services:
    """The calls that the set-up makes to machines, profiles and data.

    Args:
        config: another ``config.ini`` with its saved profiles beside it; ``None``: the project's.
        output: folder of the run folders.
        outside: access to machines and data; default: to the real ones.
        hosts: hosts file whose machines are used in place of a profile's.
    """

    changes_machines: ClassVar[bool] = True
    """``False``: they are recorded ones, and nothing is installed on them."""

    def __init__(
        self,
        config: Path | None = None,
        output: Path = RUNS_FOLDER,
        outside: Outside | None = None,
        hosts: Path | None = None,
    ) -> None:
        self.hosts = hosts
        self._outside = outside or Outside()
        self._config = config
        self._output = output
        self._health: dict[str, Health] = {}
        self._trusted: tuple[str, ...] = ()
        self._asking_ended = threading.Event()
        self._skip = threading.Event()
        self._measured_hosts: hosts_file.Hosts | None = None
        """Machines whose links were measured last."""

    @property
    def outside(self) -> Outside:
        """Access to machines and data, real or recorded."""
        return self._outside

    # ---------------------------------------------------------------------------------------------- home and machines

    def home(self) -> Home:
        """Return recent runs, live ones first, and all profiles."""
        runs = tuple(sorted(run_list.list_all_runs(self._output)[:RUNS], key=lambda run: not run.live))
        return Home(runs=runs, profiles=known_profiles(self._config))

    def doctor(self) -> Sequence[Finding]:
        """Check this computer."""
        here = machines.this_row(self.outside.this_computer())
        return self._examine([here], schema.DEFAULT_TASK)[here.key]

    def watch(self, see: Callable[[DiscoveredMachines], None]) -> DiscoveryWatch:
        """Look for machines; ``see`` is called at once and after every change, from a separate thread."""
        return discovery_watch.DiscoveryWatch(see, saved_hosts(self._config), self.outside, self.hosts)

    def saved_machines(self, profile: str) -> Sequence[MachineRow]:
        """Return the machines of the hosts file, else of a saved profile; this computer if it names none."""
        path = self.hosts or saved_hosts(self._config).get(profile)
        if path is None:
            return (machines.this_row(self.outside.this_computer()),)
        hosts = hosts_file.load_hosts(path)
        return tuple(
            machines.row_of(machine, self.outside.this_computer(), hosts.ssh_config) for machine in hosts.machines
        )

    def share(self) -> SharedOffer:
        """Open a code with which a machine joins.

        Raises:
            MachinesNotReady: the door does not start, or takes no more codes.
        """
        from distributed.joining.share_client import OpenShare  # loads SSH

        return OpenShare()

    # ------------------------------------------------------------------------------------------- access, checks, links

    def neighbours(self, networks: Sequence[str]) -> NeighbourAnswers:
        """Ask the machines that this computer has met which of them accept SSH; with networks, all their addresses,
        until :meth:`end_asking`."""
        self._asking_ended.clear()
        if networks:
            return NeighbourAnswers(*self.outside.accepting_in(networks, self._asking_ended.is_set))
        answers = self.outside.accepting_ssh(self.outside.neighbours())
        return NeighbourAnswers(*answers, tuple(self.outside.home_networks()))

    def end_asking(self) -> None:
        """Let :meth:`neighbours` return with the answers so far."""
        self._asking_ended.set()

    def check_access(self, machine: MachineRow, trusted: Sequence[str]) -> AccessReport:
        """Try every stage of the login once. A new host key is accepted only if its fingerprint is in ``trusted``.

        Of this computer: whether the interpreter that its hosts file names is approved.
        """
        self._trusted = tuple(trusted)
        if machine.here:
            return machines.access_here(machine)
        return self.outside.check_access(machines.target_of(machine), machines.trust_in(trusted))

    def approve(self, machine: MachineRow) -> None:
        """Use the SSH configuration or Python that the machine's hosts file names, as long as it stays the same."""
        ssh_config.accept(machine.ssh_config)
        hosts_file.accept_pythons(hosts_file.Hosts(machines=(machine.entry,)))

    def install_key(self, machine: MachineRow, password: str, trusted: Sequence[str]) -> AccessReport:
        """Install our SSH key with the password, and return the report of a login with the key alone."""
        target = machines.target_of(machine)
        try:
            return self.outside.install_key(target, password, machines.trust_in(trusted))
        except MusterError as error:
            report = access.explain(target, None, error)
            if report.cause != "password_refused":
                return report
            host = ssh_config.resolve(target)  # the user is the first thing to compare
            return replace(report, where=host.host_port, user=host.user)

    def examine(self, rows: Sequence[MachineRow], job: JobAnswers) -> Mapping[str, tuple[Finding, ...]]:
        """Check all machines in parallel; return the findings of each by its row's key."""
        return self._examine(rows, self._profile(job).model.task)

    def _examine(self, rows: Sequence[MachineRow], task: str) -> Mapping[str, tuple[Finding, ...]]:
        examined = self.outside.examine(machines.hosts_of(rows), task, machines.trust_in(self._trusted))
        keys = {machine.name: key for key, machine in machines.entries_of(rows).items()}
        self._health |= {keys[one.name]: one.health for one in examined if one.health is not None}
        return {keys[one.name]: tuple(one.findings) for one in examined}

    def repair(self, rows: Sequence[MachineRow], job: JobAnswers, tell: Tell, send: bool = False) -> None:
        """Install missing packages on machines, in Muster's own environment there.

        Args:
            send: send the packages from this computer to all of them, not only to those without internet.

        Raises:
            MachinesNotReady: an installation failed; the cause was passed to ``tell`` for each machine.
        """
        hosts = machines.hosts_of(rows)
        examined = self.outside.examine(hosts, self._profile(job).model.task, machines.trust_in(self._trusted))
        problems = self.outside.repair(examined, tell, send)
        for problem in problems:
            machine = getattr(problem, "machine", "")
            fix = f" ({problem.hint})" if problem.hint else ""
            tell(wheels.InstallProgress(f"{problem.message_for(machine)}{fix}", 0.0, machine))
        if problems:
            raise MachinesNotReady(problems[0].message, problems[0].hint)

    def measure_links(self, rows: Sequence[MachineRow], job: JobAnswers, tell: Tell) -> Sequence[PairFigures]:
        """Measure every pair of machines, or return recent measurements; asked once more, measure them again."""
        profile, hosts = self._profile(job), machines.hosts_of(rows)
        options = prepare.PrepareOptions(tell, machines.trust_in(self._trusted), repair=False)
        measuring = measure.MeasureOptions(links=True, machines=False, tell=tell)
        if hosts == self._measured_hosts:
            measuring = replace(measuring, max_age=0.0)
        ready = self.outside.prepare(hosts, profile.model.task, options)
        try:
            pairs = self.outside.measure(ready, profile, measuring).pairs
        finally:
            for link, _ in ready:
                link.close()
        self._measured_hosts = hosts
        return pairs

    # ------------------------------------------------------------------------------------------------------------ job

    def _profile(self, job: JobAnswers) -> Profile:
        """Return the profile with the answers, even if it is incomplete."""
        return job_view.resolved(job, self._config, complete=False).profile

    def job(self, answers: JobAnswers) -> JobForm:
        """Return the options with values and errors, and the available choices; quick, as no data is read."""
        return job_view.job_of(answers, self._config)

    def look_at_data(self, answers: JobAnswers) -> DataSummary:
        """Read the data set: samples, hours, columns, broken files."""
        return job_view.data_of(self._profile(answers), self.outside)

    def select_readable(self, answers: JobAnswers, tell: Tell) -> Selection:
        """Make a data set of the recordings that can be read, in a folder beside them."""
        return job_view.selection_of(self._profile(answers), self.outside, tell)

    def fits(self, rows: Sequence[MachineRow], answers: JobAnswers) -> Sequence[Fit]:
        """Return for each machine whether the model fits its memory."""
        return job_view.fits_of(rows, self._profile(answers), self._health)

    # ---------------------------------------------------------------------------------------------- strategy and plan

    def forecast(self, request: PlanRequest, tell: Tell) -> StrategyRanking:
        """Measure what is not known yet, until :meth:`skip_measuring`, and rank the candidate plans."""
        self._skip.clear()
        self._check_code(request.answers.job)
        profile = job_view.resolved(request.answers.job, self._config).profile
        return forecasting.strategy_of(forecasting.make_forecast(request, profile, tell, self.outside, self._skip))

    def skip_measuring(self) -> None:
        """Let :meth:`forecast` go on with the figures so far, and guess the speed of machines that have none."""
        self._skip.set()

    def with_interval(self, planning: forecasting.Forecast, index: int, steps: int) -> CandidateRow:
        """Predict a candidate plan with another sync interval; pure and quick."""
        return planning.with_interval(index, steps)

    def plan(self, request: PlanRequest) -> PlanPreview:
        """Describe what the run will do. Changes nothing."""
        return plan.plan_of(request, self._config, self.outside)

    def save(self, request: PlanRequest) -> tuple[str, ...]:
        """Write profile, machines and plan; return the files."""
        return plan.saving(request, self._config).write(self._config)

    def launch(self, request: PlanRequest, see: Callable[[LaunchProgress], None], tell: Tell) -> Path:
        """Save and start the run in the background, and return its run folder once the first step is done.

        ``see`` is called for every change of the progress; the run continues if the caller stops listening.
        """
        self._check_code(request.answers.job)
        return launching.launch(request, see, tell, self._config, self.outside)

    def _check_code(self, job: JobAnswers) -> None:
        """Reject user code named by a file unless the user approved it; code named in the set-up counts as approved."""
        resolved = job_view.resolved(job, self._config)
        hint = f"read it, then: {command_line('machines', 'plan', job.profile, '--trust-code')}"
        for option in resolved.profile.user_code:
            source = resolved.origins[option].file
            custom_code.check_code(resolved.profile, source, hint, is_named=source is None, option=option)

    def close(self) -> None:
        """Close the connections to the machines."""
        self.outside.close()


# --------------------------------------------------------------------------------------- profiles and their machines


def saved_hosts(config: Path | None = None) -> dict[str, Path]:
    """Return the hosts file of every saved profile that names one."""
    try:
        library = profile_library.Library.open(config)
    except BadInput:
        return {}
    paths = {}
    for file in library.saved:
        for heading, section in file.sections.items():
            kind, _, name = heading.partition(":")
            if kind == "profile" and "hosts" in section.entries and section.entries["hosts"].value:
                paths[name] = Path(absolute_path(section.entries["hosts"].value, file.path.parent))
    return paths


def known_profiles(config: Path | None = None) -> tuple[KnownProfile, ...]:
    """Return all profiles: the saved ones, newest first, then those of ``config.ini`` in its order.

    Raises:
        BadInput: ``config.ini`` cannot be read.
    """
    library, hosts = profile_library.Library.open(config), saved_hosts(config)
    profiles = [_known_profile(entry, library, hosts.get(entry.name)) for entry in profile_files.list_profiles(config)]
    return tuple(sorted(profiles, key=lambda one: -one.entry.source.stat().st_mtime if one.saved else 1.0))


def _known_profile(entry: ProfileEntry, library: Library, hosts: Path | None) -> KnownProfile:
    saved = entry.source != library.config.path
    try:
        return KnownProfile(entry, saved, hosts_file.load_hosts(hosts).machines if hosts is not None else ())
    except BadInput as error:
        return KnownProfile(replace(entry, error=str(error)), saved)
