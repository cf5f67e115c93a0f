"""Machines that were checked a moment ago are not asked again by the next step of a set-up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from distributed.checks.recent import MOST_AGE, RecentChecks
from distributed.hosts.schema import Hosts, Machine
from distributed.machine.link import HereConnection, MachineLink
from distributed.preparation.preflight import Facts, Ready
from distributed.preparation.prepare import PrepareOptions, prepare
from distributed.ssh.errors import SshError

FACTS = Facts((3, 11, 7), "2.13.0", (), 0.1, 10**11, True, "/home/a", "Linux", 0, "eth0", HereConnection.fingerprint)
HOSTS = Hosts(machines=(Machine(name="a", address="a"),))
TASK = "causal_lm"


class Network:
    """Machines on pooled connections that count how often each is asked for its facts."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.now = 0.0
        self.connection = HereConnection("a")
        self.recent = RecentChecks(self.dial, lambda: self.now)

    def dial(self, machine: Machine, *_: object) -> MachineLink:
        link = MachineLink(machine, lambda: self.connection, shares=True)
        link.probe = lambda modules, dial="": self._report(machine)  # type: ignore[method-assign]  # no program runs
        return link

    def _report(self, machine: Machine) -> dict[str, Any]:
        self.asked.append(machine.name)
        return {**vars(FACTS), "time": 0.0}

    def prepared(self, hosts: Hosts = HOSTS, task: str = TASK) -> Sequence[Ready]:
        options = PrepareOptions(dial=self.dial, previous=self.recent.of(hosts, task))
        machines = prepare(hosts, task, options)
        self.recent.note(task, machines)
        return machines


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> Network:
    monkeypatch.setattr("distributed.preparation.preflight.CLOCK_TOLERANCE", float("inf"))
    network = Network()
    network.prepared()
    return network


def test_a_machine_that_was_checked_a_moment_ago_is_not_asked_again(network: Network) -> None:
    network.now = MOST_AGE - 1
    ((link, facts),) = network.prepared()
    assert network.asked == ["a"] and facts.root == FACTS.root and link.connection() is network.connection


def test_facts_that_are_used_again_become_no_newer(network: Network) -> None:
    for network.now in (MOST_AGE - 1, MOST_AGE + 1):
        network.prepared()
    assert network.asked == ["a", "a"]


def test_a_machine_that_was_connected_anew_is_asked(network: Network) -> None:
    network.connection = HereConnection("a")
    network.prepared()
    assert network.asked == ["a", "a"]


def test_another_task_needs_other_packages(network: Network) -> None:
    network.prepared(task="whisper")
    assert network.asked == ["a", "a"]


def test_another_login_is_another_machine(network: Network) -> None:
    network.prepared(Hosts(machines=(HOSTS.machines[0].model_copy(update={"user": "ada"}),)))
    assert network.asked == ["a", "a"]


def test_a_machine_with_a_problem_is_asked_again(network: Network) -> None:
    (readiness,) = network.recent.of(HOSTS, TASK)
    previous = [replace(readiness, problem=SshError("a", "its disk is full"))]
    prepare(HOSTS, TASK, PrepareOptions(dial=network.dial, previous=previous))
    assert network.asked == ["a", "a"]
