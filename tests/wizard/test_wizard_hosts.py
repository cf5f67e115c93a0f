"""A set-up that was opened with a hosts file begins with its machines."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from app.wizard.engine import Wizard
from app.wizard.services.machines import hosts_of, row_of, this_computer
from app.wizard.services.outside import Outside
from app.wizard.services.services import Services
from app.wizard.state import actions as do
from app.wizard.state.dependencies import blockers
from app.wizard.state.records import AccessNeed, ItemStatus, JobAnswers
from app.wizard.state.state import Step
from distributed.hosts.file import Hosts, Machine
from distributed.measuring.measure import MeasurementResult, MeasureOptions
from distributed.preparation.preflight import Ready
from distributed.preparation.prepare import PrepareOptions
from profiles.errors import BadInput
from profiles.schema import Profile
from tests.waiting import until_state
from tests.wizard.fake_services import ANNA, BERT, HERE, FakeServices
from tests.wizard.ssh_failures import InSight


def test_only_its_machines_are_picked() -> None:
    services = FakeServices(hosts=Path("bert.json"), saved={"demo": (BERT,)})
    with closing(Wizard(services)) as wizard:
        until_state(wizard, lambda state: [row.name for row in state.picked] == ["bert"])
        assert wizard.state.step is Step.MACHINES


def test_they_take_the_place_of_a_profiles_machines(tmp_path: Path) -> None:
    with closing(Services(tmp_path / "config.ini", hosts=Path("ada@studio,mini"))) as services:
        assert [row.name for row in services.saved_machines("demo")] == ["studio", "mini"]


class MeasuringOutside(Outside):
    """Measures nothing, and keeps how old figures of links might have been."""

    def __init__(self) -> None:
        self.accepted_ages: list[float] = []

    def prepare(self, hosts: Hosts, task: str, options: PrepareOptions) -> Sequence[Ready]:
        return []

    def measure(self, machines: Sequence[Ready], profile: Profile, options: MeasureOptions) -> MeasurementResult:
        self.accepted_ages.append(options.max_age)
        return MeasurementResult([])


def test_links_that_are_measured_again_are_measured_anew() -> None:
    outside, job = MeasuringOutside(), JobAnswers("demo-scratch")
    with closing(Services(outside=outside)) as services:
        for rows in ([ANNA], [ANNA, BERT], [ANNA, BERT], [ANNA, BERT]):
            services.measure_links(rows, job, lambda line: None)
    day = MeasureOptions().max_age
    assert outside.accepted_ages == [day, day, 0.0, 0.0]


def test_a_python_of_this_computer_that_a_hosts_file_names_is_approved_at_access(tmp_path: Path) -> None:
    program = tmp_path / "python"
    program.write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\n")
    program.chmod(0o755)
    here = row_of(Machine(name="me", address="localhost", python=str(program)), this_computer())
    with pytest.raises(BadInput, match=f"names the interpreter {program}"):
        hosts_of([here])
    with closing(Wizard(InSight(here))) as wizard:
        until_state(wizard, lambda state: bool(state.machines.rows))
        for action in (do.new_setup(), do.pick(here.key, True), do.go_on()):
            wizard.do(action)
        until_state(wizard, lambda state: bool(state.access) and state.access[0].need is AccessNeed.APPROVAL)
        assert blockers(wizard.state) == ("me: approve what its hosts file names, or skip it",)
        wizard.do(do.set_user(here.key, "ada"))
        assert wizard.state.picked[0].here
        wizard.do(do.approve(here.key))
        until_state(wizard, lambda state: state.access[0].status is ItemStatus.OK)
        wizard.do(do.go_on())
        assert wizard.state.step is Step.JOB
    assert hosts_of([here]).machines[0].python == str(program)
    assert not (tmp_path / "ran").exists()


def at_checks(wizard: Wizard) -> None:
    until_state(wizard, lambda state: bool(state.machines.rows))
    for action in (do.new_setup(), do.pick(ANNA.key, True), do.go_on()):
        wizard.do(action)
    until_state(wizard, lambda state: not blockers(state))
    wizard.do(do.go_on())
    assert wizard.state.step is Step.CHECKS


def test_the_data_set_is_read_while_machines_are_checked() -> None:
    services = FakeServices(hold={"examine": threading.Event()})
    with closing(Wizard(services)) as wizard:
        at_checks(wizard)
        until_state(wizard, lambda state: state.data.status is ItemStatus.OK)
        services.hold["examine"].set()


def test_a_computer_without_packages_reads_the_data_set_after_its_checks() -> None:
    services = FakeServices(machines=(replace(HERE, unequipped=True), ANNA))
    with closing(Wizard(services)) as wizard:
        at_checks(wizard)
        until_state(wizard, lambda state: all(row.status is ItemStatus.OK for row in state.checks))
        assert "data" not in services.asked
