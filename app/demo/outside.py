"""The tour's network: machines are discovered, logged in to, checked and measured as recorded.

It replaces connections and discovery, so that everything above it is the product's own code.
"""

from __future__ import annotations

import io
import json
import time
from collections.abc import Mapping, Sequence
from functools import reduce
from itertools import combinations
from pathlib import Path
from typing import Any, ClassVar

from app.demo import ScriptClock
from app.demo.fixture import HERE, TourMachine, fixture
from app.wizard.services.machines import ThisComputer
from app.wizard.services.outside import Outside
from app.wizard.state.records import Tell
from distributed.agent.requests import ProbeMachine, Reach, ReadHealth, read_request
from distributed.checks.examination import MachineExamination, examine
from distributed.discovery.discovery import Sources
from distributed.discovery.network_interfaces import Endpoint, PathKind
from distributed.discovery.sightings import (
    Browsed,
    Failed,
    Identified,
    Observation,
    Problem,
    Sighting,
    SightingKey,
    SightingOrigin,
    State,
    apply,
)  # fmt: skip
from distributed.hosts.file import Hosts, Machine, typed_machine
from distributed.hosts.past_logins import PastLogin
from distributed.machine.link import HERE_NAME, HereConnection, MachineLink
from distributed.measuring.link_figures import AllInterfaces, PairFigures
from distributed.measuring.machine_figures import SpeedFigures
from distributed.measuring.measure import MeasurementResult, MeasureOptions
from distributed.preparation.preflight import Ready, check, ready
from distributed.preparation.prepare import PrepareOptions
from distributed.preparation.wheels import InstallProgress
from distributed.ssh.access import AccessReport, OwnKey, explain, own_key_path
from distributed.ssh.config import ResolvedHost
from distributed.ssh.connection import SshTarget, Trust
from distributed.ssh.errors import (
    ConnectTimeout,
    HostKeyChanged,
    NameUnknown,
    NoKeyAccepted,
    PasswordRefused,
    PortClosed,
    SshError,
    UnknownHostKey,
    UserRefused,
)  # fmt: skip
from distributed.ssh.keys.host_keys import HostKeyInfo, fingerprint
from distributed.ssh.process import Completed, Input, Process, See, unseen
from profiles.errors import MusterError
from profiles.quantities import memory_text
from profiles.schema import Profile
from training.records.plan import RunPlan

USER = "me"
WRONG = "wrong"
"""The only password that is refused."""
APPEAR_EVERY = 0.7
_INSTALLATION = ("making an environment for Python 3.12", "downloading torch (package 61 of 84, 213 MB in all)",
                 "unpacking what was downloaded")  # fmt: skip
_ASKING, _LOOKING, _MEASURING, _INSTALLING = 0.7, 1.6, 0.9, 0.6
_NOWHERE = "a recording"
_REFUSALS = {error.cause: error for error in (ConnectTimeout, HostKeyChanged, PortClosed, UserRefused)}
_ABSENT = ("the tour has no machine of this name", "without --demo it would be looked up and tried")


def _recorded_key() -> OwnKey:
    """Return the key of the recorded computer: the tour makes none."""
    return OwnKey(own_key_path(), "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIRecordedRecordedRecordedRecorded muster@tour")


class TourConnection(HereConnection):
    """A connection to a machine of the tour, which answers a check's commands as recorded."""

    def __init__(self, machine: TourMachine, lacks: Sequence[str]) -> None:
        super().__init__(machine.name)
        self.fingerprint = HereConnection.fingerprint if machine.name == HERE else fingerprint(machine.key_blob)
        self._machine, self._lacks = machine, lacks

    def run(self, argv: Sequence[str], *, input: Input = None, timeout: float | None = 60.0) -> Completed:
        answer: object = None
        request = read_request(io.BytesIO(input).read) if isinstance(input, bytes) else None
        if isinstance(request, ProbeMachine):
            lacking = {"missing": self._lacks, "torch": ""} if self._lacks else {}
            answer = {**self._machine.facts, **lacking, "time": time.time()}
        elif isinstance(request, ReadHealth):
            answer = self._machine.health.model_dump()
        elif isinstance(request, Reach):
            answer = {f"{host} {port}": "" for host, port in request.endpoints}
        return Completed(0, b"" if answer is None else json.dumps(answer).encode(), b"")

    def stream(self, argv: Sequence[str]) -> Process:
        return _Listener()

    def put(self, source: bytes | Path, remote: str, *, mode: int = 0o600, see: See = unseen) -> None:
        """Discard the file."""


class _Listener(Process):
    """A program that listens on a free port while other machines connect to it."""

    stderr = b""

    def write(self, data: bytes) -> None: ...

    def end_input(self) -> None: ...

    def _read_chunk(self, timeout: float | None) -> bytes:
        return b'{"port": 47100}\n'

    def wait(self, timeout: float | None = None) -> int:
        return 0

    def close(self) -> None: ...


class TourSearch:
    """A search in which machines appear one after the other, and a sleeping one wakes up.

    Args:
        typed: the only machine to look for; ``None``: all.
    """

    def __init__(self, machines: Sequence[TourMachine], clock: ScriptClock, typed: Machine | None) -> None:
        self._machines, self._clock, self._typed = machines, clock, typed

    @property
    def state(self) -> State:
        return reduce(apply, self._observations(), State())

    def wait(self, seen: int, timeout: float) -> int:
        self._clock.work(min(timeout * self._clock.speed, APPEAR_EVERY))
        return seen + 1

    def close(self) -> None:
        """Do nothing: no search is running."""

    def _observations(self) -> Sequence[Observation]:
        if self._typed is None:
            this_machine = Sighting(SightingKey(SightingOrigin.HERE, "", HERE), HERE)
            present = self._machines[1 : 1 + int(self._clock.passed / APPEAR_EVERY)]
            return [
                Browsed((_NOWHERE,)),
                this_machine,
                *(observation for machine in present for observation in self._seen(machine)),
            ]
        for machine in self._machines[1:]:
            if self._typed.host in (machine.name, machine.address, f"{machine.name}.local"):
                return self._seen(machine, SightingOrigin.TYPED, self._typed.host)
        key = SightingKey(SightingOrigin.TYPED, "", self._typed.host)
        return [Sighting(key, self._typed.name, self._typed.host, problem=Problem("name_unknown", *_ABSENT))]

    def _seen(
        self, machine: TourMachine, origin: SightingOrigin | None = None, host: str = ""
    ) -> Sequence[Observation]:
        origin = origin or SightingOrigin(machine.found_by)
        endpoint = Endpoint(machine.address, machine.interface, kind=PathKind(machine.kind))
        key = SightingKey(origin, "", host or machine.name)
        details = (("devices", machine.chip), ("memory", str(machine.memory)), ("system", machine.system))
        sighted = Sighting(key, host or machine.name, host, (endpoint,), details)
        trouble = machine.trouble
        if trouble is not None and trouble.error == ConnectTimeout.cause and self._clock.passed < trouble.seconds:
            asleep = Problem(trouble.error, "nothing answers there: asleep, or switched off", "wake it up")
            return sighted, Failed(endpoint, asleep)
        return sighted, Identified(endpoint, fingerprint(machine.key_blob))


class TourOutside(Outside):
    """The machines of the tour, with the repairs made so far.

    Args:
        number: number of machines, including this computer.
        open_doors: whether all machines accept the login and have their packages from the start.
    """

    picks_all: ClassVar[bool] = True

    def __init__(self, number: int, clock: ScriptClock, open_doors: bool = False) -> None:
        self.machines = fixture().machines[:number]
        self.clock = clock
        self._mended = {machine.name for machine in self.machines if open_doors}
        self._equipped = set(self._mended)
        self._tried: dict[str, float] = {}
        """Scripted time of the first attempt to connect to each machine, from which temporary troubles are timed."""

    def now(self) -> float:
        return self.clock.passed

    def this_computer(self) -> ThisComputer:
        machine = self.machines[0]
        return ThisComputer(machine.name, machine.chip, memory_text(machine.memory), machine.system, "python3")

    def search(self, sources: Sources, browse: bool = True) -> TourSearch:
        return TourSearch(self.machines, self.clock, None if browse else typed_machine(sources.typed[0]))

    def neighbours(self) -> Sequence[str]:
        return ()  # the tour asks no real machine

    def home_networks(self) -> Sequence[str]:
        return ()

    def past_logins(self) -> Sequence[PastLogin]:
        return ()  # nor remembers any

    # ---------------------------------------------------------------------------------------------------- connections

    def dial(self, machine: Machine, hosts: Hosts, trust: Trust | None) -> MachineLink:
        """Return the link to a machine; see :data:`distributed.machine.link.Dial`."""
        return MachineLink(
            machine, lambda: self._connect(machine, trust), "127.0.0.1" if machine.is_local else machine.host
        )

    def check_access(self, target: SshTarget, trust: Trust) -> AccessReport:
        self.clock.work(_ASKING)
        machine = Machine(name=target.name, address=target.host, user=target.user)
        tour_machine = self._tour_machine(machine)
        address = tour_machine.address if tour_machine else target.host
        host = ResolvedHost(target.name, address, 22, target.user or USER)
        try:
            connection = self._connect(machine, trust)
        except SshError as error:
            return explain(target, host, error, own_key=_recorded_key)
        assert tour_machine is not None  # the connection was made
        return AccessReport(
            target.name, host.host_port, host.user, fingerprint=connection.fingerprint, system=tour_machine.uname
        )

    def install_key(self, target: SshTarget, password: str, trust: Trust) -> AccessReport:
        if password == WRONG:
            raise PasswordRefused(target.name, "it refused this password")
        tour_machine = self._tour_machine(Machine(name=target.name, address=target.host))
        if tour_machine is not None:
            self._mended.add(tour_machine.name)
        return self.check_access(target, trust)

    def _tour_machine(self, machine: Machine) -> TourMachine | None:
        if machine.is_local:
            return self.machines[0]
        names = (machine.host, machine.found_at, machine.host.removesuffix(".local"))
        return next(
            (candidate for candidate in self.machines if candidate.name in names or candidate.address in names), None
        )

    def _connect(self, machine: Machine, trust: Trust | None) -> HereConnection:
        """Connect to a machine, or raise its recorded trouble.

        Raises:
            SshError: it cannot be reached, or refuses the login.
        """
        tour_machine = self._tour_machine(machine)
        if tour_machine is None:
            raise NameUnknown(machine.name, *_ABSENT)
        trouble = tour_machine.trouble
        if trouble is not None and trouble.error == UserRefused.cause and machine.user not in ("", USER):
            self._mended.add(tour_machine.name)
        waited = self.clock.passed - self._tried.setdefault(tour_machine.name, self.clock.passed)
        if trouble is None or tour_machine.name in self._mended or 0 < trouble.seconds <= waited:
            lacks = trouble.lacks if trouble is not None and tour_machine.name not in self._equipped else ()
            return TourConnection(tour_machine, lacks)
        key = HostKeyInfo(machine.name, tour_machine.name, "ssh-ed25519", tour_machine.key_blob)
        if trouble.error == UnknownHostKey.cause and trust is not None and trust(key):
            self._mended.add(tour_machine.name)
            return self._connect(machine, trust)
        if trouble.error == UnknownHostKey.cause:
            raise UnknownHostKey(key)
        if trouble.error == NoKeyAccepted.cause:
            raise NoKeyAccepted(machine.name, trouble.problem, trouble.hint, True)
        raise _REFUSALS[trouble.error](machine.name, trouble.problem, trouble.hint)

    # ------------------------------------------------------------------------------------------ checks and measurements

    def examine(self, hosts: Hosts, task: str, trust: Trust | None = None) -> Sequence[MachineExamination]:
        self.clock.work(_LOOKING)
        return examine(hosts, task, trust, dial=self.dial)

    def repair(self, examined: Sequence[MachineExamination], tell: Tell, send: bool) -> Sequence[MusterError]:
        for name in [machine.name for machine in examined if machine.readiness.provisionable]:
            for number, step in enumerate(_INSTALLATION):
                tell(InstallProgress(step, number / len(_INSTALLATION), name))
                self.clock.work(_INSTALLING)
            self._equipped.add(name)
        return []

    def prepare(self, hosts: Hosts, task: str, options: PrepareOptions) -> Sequence[Ready]:
        return ready(check(hosts, task, options.trust, dial=self.dial))

    def measure(self, machines: Sequence[Ready], profile: Profile, options: MeasureOptions) -> MeasurementResult:
        names = {
            link.name: tour_machine.name for link, _ in machines if (tour_machine := self._tour_machine(link.machine))
        }
        this_machine = next((link.name for link, _ in machines if link.machine.is_local), HERE_NAME)
        measurement = MeasurementResult(
            [*dict.fromkeys([*names, this_machine])], local_name=this_machine, model_path=profile.model.model_path
        )
        recorded_names = {**names, this_machine: HERE}
        if options.links:
            measurement.pairs = [
                self._pair(source, target, recorded_names, options.tell)
                for source, target in combinations(measurement.names, 2)
            ]
        for name in names if options.machines else ():
            options.tell(f"{name}: a short run of the task, as recorded")
            self.clock.work(_MEASURING)
            speed = next(machine.speed for machine in self.machines if machine.name == names[name])
            workload = fixture().workload
            measurement.speeds.append(SpeedFigures(machine=speed.model_copy(update={"name": name}), workload=workload))
        measurement.interfaces = AllInterfaces()
        return measurement

    def _pair(self, name: str, peer: str, recorded_names: Mapping[str, str], tell: Tell) -> PairFigures:
        self.clock.work(_MEASURING)
        recorded = fixture().pair(recorded_names[name], recorded_names[peer])
        ends = (name, peer) if recorded.source == recorded_names[name] else (peer, name)
        tell(f"{name} - {peer}: as recorded")
        return recorded.model_copy(update={"source": ends[0], "target": ends[1]})

    def look_at_data(self, profile: Profile) -> Mapping[str, Any]:
        self.clock.work(_ASKING)
        return fixture().data

    def input_sizes(self, plan: RunPlan) -> Mapping[str, int]:
        return {"recorded": fixture().input_bytes}

    def files_there(self, machines: Sequence[Ready], profile: Profile) -> Mapping[str, frozenset[str]]:
        return {}  # in the recorded run they are copied when it starts
