"""The tour through the set-up itself, by actions only."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from app.demo import MOST, ScriptClock
from app.demo.outside import TourOutside
from app.demo.services import DemoServices
from app.wizard.engine import Wizard
from app.wizard.state import actions as do
from app.wizard.state.records import AccessNeed, ItemStatus
from app.wizard.state.state import Step, WizardState
from distributed.ssh.config import SshTarget
from tests.waiting import PATIENCE, until_state
from training.records.run_folder import RunFolder
from training.run.requests.request_book import leave_request

pytestmark = pytest.mark.slow

FAST = 40.0
_AT_ONCE = 1e9


@pytest.fixture
def tour(tmp_path: Path) -> Iterator[Callable[..., Wizard]]:
    opened: list[Wizard] = []

    def start(number: int, speed: float = FAST) -> Wizard:
        opened.append(Wizard(DemoServices(number, speed, tmp_path)))
        return opened[-1]

    yield start
    for wizard in opened:
        wizard.close()


def picked_all(wizard: Wizard, number: int) -> None:
    wizard.do(do.new_setup())
    rows = until_state(wizard, lambda state: len(state.machines.rows) == number).machines.rows
    for row in rows:
        wizard.do(do.pick(row.key, True))
    wizard.do(do.go_on())


def let_in(wizard: Wizard) -> None:
    """Accept keys, give passwords, wait for what mends itself, leave out the rest."""
    deadline = time.monotonic() + PATIENCE
    while any(row.status is not ItemStatus.OK for row in wizard.state.access if row.status is not ItemStatus.SKIPPED):
        assert time.monotonic() < deadline, wizard.state.access
        for row in wizard.state.access:
            if row.need is AccessNeed.TRUST:
                wizard.do(do.trust_key(row.key, row.fingerprint))
            elif row.need is AccessNeed.PASSWORD:
                wizard.give_password(row.key, "any")
            elif row.words in ("key changed", "user refused"):
                wizard.do(do.skip(row.key))
        time.sleep(0.02)


def to_the_plan(wizard: Wizard, number: int) -> WizardState:
    picked_all(wizard, number)
    if number > 1:
        let_in(wizard)
        wizard.do(do.go_on())
        checks = until_state(wizard, lambda state: all(row.status in _SETTLED for row in state.checks)).checks
        if any(row.fixable for row in checks):
            wizard.do(do.fix_all())
            until_state(wizard, lambda state: all(row.status in _GOOD for row in state.checks))
        wizard.do(do.go_on())
        until_state(wizard, lambda state: state.links.status in _GOOD)
        wizard.do(do.go_on())
    until_state(wizard, lambda state: state.step is Step.JOB and state.job.status in _GOOD)
    until_state(wizard, lambda state: state.data.status in _GOOD)
    wizard.do(do.go_on())
    until_state(wizard, lambda state: state.strategy.status in _GOOD)
    wizard.do(do.go_on())
    return until_state(wizard, lambda state: state.plan.status in _GOOD)


_GOOD = (ItemStatus.OK, ItemStatus.WARNING, ItemStatus.SKIPPED)
_SETTLED = (*_GOOD, ItemStatus.FAILED)


@pytest.mark.parametrize("number", [1, 2, 3, MOST])
def test_every_number_of_machines_reaches_the_plan(tour: Callable[[int], Wizard], number: int) -> None:
    wizard = tour(number)
    state = to_the_plan(wizard, number)
    assert state.plan.value.hash and state.plan.value.changes and "recorded" in state.plan.cause
    assert "recorded run, in a run folder" in state.plan.value.way and "nothing" not in state.plan.value.way
    assert state.chosen is not None
    refused = {"demo-air", "demo-mini"} if number == MOST else set()  # they let nobody in
    assert len(state.chosen.choice.members) <= number - len(refused) and refused.isdisjoint(state.chosen.choice.members)


def test_three_machines_meet_every_kind_of_trouble(
    tour: Callable[[int], Wizard], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    wizard = tour(3)
    picked_all(wizard, 3)
    rows = until_state(wizard, lambda s: len(s.access) == 2 and all(r.status in _SETTLED for r in s.access)).access
    assert {row.name: row.need for row in rows} == {"demo-studio": AccessNeed.TRUST, "demo-pc": AccessNeed.PASSWORD}
    pc = next(row for row in wizard.state.access if row.need is AccessNeed.PASSWORD)
    wizard.give_password(pc.key, "wrong")
    until_state(wizard, lambda state: any(row.words == "wrong password" for row in state.access))
    assert "wrong" not in repr(wizard.state.log)
    assert not (tmp_path / "home").exists()  # no key was made


def test_another_user_is_tried_and_let_in() -> None:
    clock = ScriptClock(_AT_ONCE)
    air = next(machine for machine in TourOutside(MOST, clock).machines if machine.name == "demo-air")
    outside = TourOutside(MOST, clock)
    refused, admitted = (
        outside.check_access(SshTarget(air.name, air.address, user=user), lambda key: True) for user in ("", "ada")
    )
    assert (refused.cause, refused.user) == ("user_refused", "me")
    assert (admitted.failed, admitted.user) == (None, "ada")


def test_h_moves_the_prediction(tour: Callable[[int], Wizard]) -> None:
    wizard = tour(3)
    before = to_the_plan(wizard, 3).chosen
    assert before is not None and before.periodic
    wizard.do(do.go_back())
    wizard.do(do.set_interval(4 * before.interval))
    after = until_state(wizard, lambda s: s.chosen is not None and s.chosen.interval == 4 * before.interval).chosen
    assert after is not None and after.candidate.bytes_per_hour < before.candidate.bytes_per_hour


@pytest.mark.slow
def test_launch_ends_in_a_live_run(tour: Callable[..., Wizard]) -> None:
    wizard = tour(3, FAST / 4)  # the run must not be over before it is looked at
    expected = to_the_plan(wizard, 3).plan.value.hash
    wizard.do(do.confirm())
    path = Path(until_state(wizard, lambda state: state.launch.status is ItemStatus.OK).launch.value.run)
    run = RunFolder.open(path)
    assert run.live and run.plan().hash() == expected
    leave_request(path, "kill")
