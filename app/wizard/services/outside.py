"""Access of the set-up to machines and data: the seam between code shared by all set-ups and real or recorded answers.

Findings, rows, candidate plans and plans are computed above it, by the same code for both.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from app.console import command_line
from app.wizard.state.records import Tell
from profiles.errors import BadInput, MusterError
from profiles.installation import TYPED_PROGRAM, program_words, training_code, training_python
from profiles.quantities import span_text
from training.lazy import lazy

if TYPE_CHECKING:
    from app.wizard.services import machines as machine_rows
    from app.wizard.services.machines import ThisComputer
    from distributed.checks import examination
    from distributed.checks import recent as recent_checks
    from distributed.checks.examination import MachineExamination
    from distributed.checks.recent import RecentChecks
    from distributed.discovery import discovery
    from distributed.discovery import neighbours as neighbour_table
    from distributed.discovery.discovery import Sources, State
    from distributed.discovery.neighbours import SshAnswers
    from distributed.hosts import past_logins
    from distributed.hosts.file import Hosts
    from distributed.hosts.past_logins import PastLogin
    from distributed.hosts.schema import Machine
    from distributed.machine import link as machine_link
    from distributed.machine import pool as machine_pool
    from distributed.machine.link import MachineLink
    from distributed.machine.pool import ConnectionPool
    from distributed.measuring import measure
    from distributed.measuring.measure import MeasurementResult, MeasureOptions
    from distributed.preparation import code_sync, prepare, transfer
    from distributed.preparation.preflight import Readiness, Ready
    from distributed.preparation.prepare import PrepareOptions
    from distributed.ssh import access
    from distributed.ssh.access import AccessReport
    from distributed.ssh.connection import SshConnection, SshTarget, Trust
    from profiles.schema import Profile
    from training.records.plan import RunPlan
else:  # loaded on first use, so that Home is painted at once
    machine_rows, examination = lazy("app.wizard.services.machines"), lazy("distributed.checks.examination")
    recent_checks = lazy("distributed.checks.recent")
    discovery, measure = lazy("distributed.discovery.discovery"), lazy("distributed.measuring.measure")
    code_sync, prepare = lazy("distributed.preparation.code_sync"), lazy("distributed.preparation.prepare")
    transfer = lazy("distributed.preparation.transfer")
    access, neighbour_table = lazy("distributed.ssh.access"), lazy("distributed.discovery.neighbours")
    past_logins = lazy("distributed.hosts.past_logins")
    machine_link, machine_pool = lazy("distributed.machine.link"), lazy("distributed.machine.pool")

_PATIENCE = 120.0


class Search(Protocol):
    """A continuous search for machines; :class:`distributed.discovery.discovery.Discovery` is one."""

    @property
    def state(self) -> State: ...

    def wait(self, seen: int, timeout: float) -> int:
        """Wait until the state is newer than version ``seen``, at most ``timeout`` seconds; return its version."""

    def close(self) -> None: ...


class Outside:
    """The real machines, networks and data sets.

    Every machine is logged into once: its connection serves all that is asked of it, until :meth:`close`.
    """

    picks_all: ClassVar[bool] = False
    """Whether every online machine is selected automatically."""

    _pool: ConnectionPool | None = None
    _pool_lock = threading.Lock()
    _checked: RecentChecks | None = None

    @property
    def pool(self) -> ConnectionPool:
        """The connections to the machines."""
        with self._pool_lock:
            self._pool = self._pool or machine_pool.ConnectionPool()
            return self._pool

    def dial(self, machine: Machine, hosts: Hosts, trust: Trust | None) -> MachineLink:
        """Return the link to a machine; see :data:`distributed.machine.link.Dial`."""
        return machine_link.link_to(machine, hosts, trust, self.pool)

    def close(self) -> None:
        """Close the connections to the machines; each is made again when it is asked for."""
        if self._pool is not None:
            self._pool.close()

    def now(self) -> float:
        """Return seconds from an arbitrary origin."""
        return time.monotonic()

    def this_computer(self) -> ThisComputer:
        return machine_rows.this_computer()

    def search(self, sources: Sources, browse: bool = True) -> Search:
        """Look for machines until the search is closed."""
        return discovery.Discovery(sources, browse=browse).__enter__()

    def neighbours(self) -> Sequence[str]:
        """Return the addresses in this computer's neighbour table."""
        return neighbour_table.neighbours()

    def home_networks(self) -> Sequence[str]:
        """Return this computer's private networks, ``a.b.c.0/24``."""
        return neighbour_table.home_networks()

    def past_logins(self) -> Sequence[PastLogin]:
        """Return the machines that have let Muster in before, the latest first."""
        return past_logins.past_logins()

    def accepting_ssh(self, addresses: Sequence[str]) -> SshAnswers:
        """Connect to each address, and return those at which an SSH server answers."""
        return neighbour_table.accepting_ssh(addresses)

    def accepting_in(self, networks: Sequence[str], is_ended: Callable[[], bool]) -> SshAnswers:
        """Connect to every address of networks, for a second each, until ``is_ended``; return where SSH answers."""
        addresses = neighbour_table.addresses_in(networks)
        return neighbour_table.accepting_ssh(addresses, timeout=1.0, is_ended=is_ended)

    def check_access(self, target: SshTarget, trust: Trust) -> AccessReport:
        """Try every stage of the login to a machine once."""
        return access.check_access(target, trust=trust, connect=self.pool.using)

    def install_key(self, target: SshTarget, password: str, trust: Trust) -> AccessReport:
        """Install our SSH key with the password, then log in with the key alone.

        Raises:
            MusterError: it was not installed.
        """

        def connect(login: SshTarget, **options: Any) -> AbstractContextManager[SshConnection]:
            return self.pool.using(target, login=login, **options)

        return access.install_key(target, password, trust=trust, connect=connect).report

    def examine(self, hosts: Hosts, task: str, trust: Trust | None = None) -> Sequence[MachineExamination]:
        """Examine all machines in parallel."""
        examined = examination.examine(hosts, task, trust, dial=self.dial)
        ready = (machine.readiness for machine in examined if machine.readiness.problem is None)
        self.checked.note(task, ((one.link, one.facts) for one in ready if one.facts is not None))
        return examined

    def repair(self, examined: Sequence[MachineExamination], tell: Tell, send: bool) -> Sequence[MusterError]:
        """Install packages and return the problems of machines where that failed.

        Args:
            send: send the packages from this computer instead of downloading them.
        """
        return examination.repair(examined, tell, offline_wheels=send)

    def prepare(self, hosts: Hosts, task: str, options: PrepareOptions) -> Sequence[Ready]:
        """Prepare all machines and return them with open connections; those that were checked a moment ago, over the
        same connection, are not asked again.

        Raises:
            NotReady: a machine cannot take part.
        """
        previous = self.recent(hosts, task, options.trust)
        machines = prepare.prepare(hosts, task, replace(options, dial=self.dial, previous=previous))
        self.checked.note(task, machines)
        return machines

    @property
    def checked(self) -> RecentChecks:
        """What machines have reported in this set-up."""
        self._checked = self._checked or recent_checks.RecentChecks(self.dial)
        return self._checked

    def recent(self, hosts: Hosts, task: str, trust: Trust | None) -> Sequence[Readiness]:
        """Return the machines that were checked a moment ago, without a problem."""
        return self.checked.of(hosts, task, trust)

    def measure(self, machines: Sequence[Ready], profile: Profile, options: MeasureOptions) -> MeasurementResult:
        """Measure what is not known yet.

        Raises:
            MusterError: the data or the machines cannot be used.
        """
        return measure.measure_ready(machines, profile, options)

    def look_at_data(self, profile: Profile) -> Mapping[str, Any]:
        """Return the findings of :mod:`training.workers.data_findings` about a profile's data set."""
        return _ask_about_data(profile)

    def select_readable(self, source: str, folder: str, text_column: str, tell: Tell) -> Mapping[str, Any]:
        """Make a data set in ``folder`` of the recordings that can be read, by the command for it; return its document.

        Raises:
            BadInput: nothing could be made.
        """
        return _make_data_set(source, folder, text_column, tell)

    def input_sizes(self, plan: RunPlan) -> Mapping[str, int]:
        """Return the size of each file of code, data and model in bytes, by SHA-256.

        Raises:
            MusterError: they cannot be used.
            OSError: they cannot be read.
        """
        return code_sync.collect(plan).sizes

    def files_there(self, machines: Sequence[Ready], profile: Profile) -> Mapping[str, frozenset[str]]:
        """Return which files of code, data and model each remote machine has, by SHA-256; of those that could be asked.

        Raises:
            MusterError: they cannot be used.
            OSError: they cannot be read.
        """
        trees = code_sync.collect(measure.plan_to_measure(profile, machines)).trees.values()

        def ask(link: MachineLink) -> frozenset[str] | None:
            with suppress(MusterError):
                return transfer.files_there(link, trees)
            return None

        links = [link for link, _ in machines if not link.machine.is_local]
        with ThreadPoolExecutor(max(1, len(links))) as pool:
            answers = zip(links, pool.map(ask, links), strict=True)
            return {link.name: files for link, files in answers if files is not None}


def _make_data_set(source: str, folder: str, text_column: str, tell: Tell) -> Mapping[str, Any]:
    """Run ``data prepare`` in the Python that can decode."""
    words = [
        "data",
        "prepare",
        source,
        "--out",
        folder,
        "--json",
        *(["--text-column", text_column] if text_column else []),
    ]
    environment = {**os.environ, "PYTHONPATH": str(training_code()), TYPED_PROGRAM: shlex.join(program_words())}
    command = [training_python() or sys.executable, "-m", "muster", *words]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        for line in process.stderr:
            tell(line.strip())
        answer = process.stdout.read()
    try:
        document = dict(json.loads(answer))
    except ValueError as error:
        raise BadInput(f"no data set could be made of {source}", "see the log (g)") from error
    if problem := document.get("error"):
        raise BadInput(problem["message"], _hint_here(problem["hint"], source, folder))
    return document


def _hint_here(hint: str, source: str, folder: str) -> str:
    """Return a hint of ``data prepare``, with the whole command if it names an option, which the set-up has not."""
    if " --" not in hint:
        return hint
    return (
        f"{hint}, in a terminal: {command_line('data', 'prepare', source, '--out', folder)}; then choose {folder} here"
    )


def _ask_about_data(profile: Profile) -> Mapping[str, Any]:
    """Read the data set in a separate process: this one never loads torch."""
    environment = {**os.environ, "PYTHONPATH": str(training_code()), "HF_HUB_OFFLINE": "1"}
    command = [training_python() or sys.executable, "-m", "training.workers.data_findings"]
    try:
        done = subprocess.run(
            command, input=profile.model_dump_json().encode(), capture_output=True, timeout=_PATIENCE, env=environment
        )
        return dict(json.loads(done.stdout))
    except subprocess.TimeoutExpired:
        return {"splits": {}, "note": f"not read completely within {span_text(_PATIENCE)}"}
    except ValueError:
        error_lines = done.stderr.decode(errors="replace").strip().splitlines()
        return {"error": f"it could not be read: {error_lines[-1] if error_lines else 'no answer'}", "hint": ""}
