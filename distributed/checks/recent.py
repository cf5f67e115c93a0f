"""What machines reported a moment ago: the steps of a set-up follow one another, and each needs the same facts."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from distributed.hosts.schema import Hosts, Machine
from distributed.machine.link import Connection, Dial
from distributed.preparation.preflight import Facts, Readiness, Ready
from distributed.ssh.connection import Trust
from profiles.errors import MusterError

MOST_AGE = 60.0
"""Seconds for which facts hold: disks fill up, and packages go."""


@dataclass(frozen=True)
class _Report:
    """The facts of a machine, with when, over which connection and by which Python they came."""

    at: float
    task: str
    connection: Connection
    python: str
    root: str
    facts: Facts


class RecentChecks:
    """Facts of machines without a problem, as long as the connection lasts over which they came."""

    def __init__(self, dial: Dial, clock: Callable[[], float] = time.monotonic) -> None:
        self._dial, self._clock = dial, clock
        self._reports: dict[Machine, _Report] = {}

    def note(self, task: str, machines: Iterable[Ready]) -> None:
        """Note what machines have reported in a check for a task; facts that were noted before become no newer."""
        for link, facts in machines:
            earlier = self._reports.get(link.machine)
            if earlier is None or earlier.facts != facts:
                with contextlib.suppress(MusterError):  # it is gone again, which whoever needs it next will say
                    report = _Report(self._clock(), task, link.connection(), link.python, link.root, facts)
                    self._reports[link.machine] = report

    def of(self, hosts: Hosts, task: str, trust: Trust | None = None) -> list[Readiness]:
        """Return the machines that need not be asked again before they run a task, connected."""
        recent = (self._recent(machine, hosts, task, trust) for machine in hosts.machines)
        return [readiness for readiness in recent if readiness is not None]

    def _recent(self, machine: Machine, hosts: Hosts, task: str, trust: Trust | None) -> Readiness | None:
        report = self._reports.get(machine)
        if report is None or report.task != task or self._clock() - report.at > MOST_AGE:
            return None
        link = self._dial(machine, hosts, trust)
        try:
            if link.connection() is not report.connection:
                return None
        except MusterError:  # the check will say it
            return None
        link.python, link.root = report.python, report.root
        return Readiness(link, report.facts)
