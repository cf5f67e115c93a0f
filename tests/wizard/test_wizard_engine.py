"""The set-up from Home to Launch over a scripted world: what is asked when, and what a person meets on the way."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from app.wizard.engine import Wizard
from app.wizard.state import actions as do
from app.wizard.state.dependencies import blockers
from app.wizard.state.records import AccessNeed, ItemStatus, MachineRow
from app.wizard.state.state import Step, TaskKind, WizardState
from tests.waiting import until, until_state
from tests.wizard.fake_services import ANNA, BERT, BROKEN, HERE, FakeServices, locked, refused, stranger

Make = Callable[..., Wizard]


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[Wizard] = []

    def build(services: FakeServices, profile: str = "", **named: float) -> Wizard:
        made.append(Wizard(services, profile, **named))
        return made[-1]

    yield build
    for wizard in made:
        wizard.close()


def on(wizard: Wizard, step: Step) -> WizardState:
    """Go forwards as soon as it goes, until the step is shown."""
    while wizard.state.step is not step:
        here = wizard.state.step
        until_state(wizard, lambda state: not blockers(state))
        wizard.do(do.go_on())
        assert wizard.state.step is not here, wizard.state.notice
    return wizard.state


def with_machines(make: Make, services: FakeServices, *keys: str, **named: float) -> Wizard:
    wizard = make(services, **named)
    wizard.do(do.new_setup())
    until_state(wizard, lambda state: bool(state.machines.rows))
    for key in keys:
        wizard.do(do.pick(key, True))
    return wizard


def launch(wizard: Wizard) -> WizardState:
    on(wizard, Step.PLAN)
    until_state(wizard, lambda state: state.plan.status is ItemStatus.OK and state.strategy.status is ItemStatus.OK)
    wizard.do(do.confirm())
    return until_state(wizard, lambda state: state.launch.status in (ItemStatus.OK, ItemStatus.FAILED))


def test_enter_enter_trains_on_this_computer(make: Make) -> None:
    services = FakeServices()
    wizard = with_machines(make, services)
    state = launch(wizard)
    assert state.launch.value.run == "/runs/1"
    assert services.requests[-1].machines == (HERE,)
    assert not any(name.startswith("access") or name in ("examine", "links") for name in services.asked)


def test_a_machine_that_lets_nobody_in_is_not_noted_as_ok(make: Make) -> None:
    wizard, why = with_machines(make, FakeServices(access={ANNA.name: refused(ANNA)}), ANNA.key), refused(ANNA).problem
    on(wizard, Step.ACCESS)
    until(lambda: [one.outcome for one in wizard.asked_for() if one.task.kind is TaskKind.ACCESS][:1] == [why])


def test_nobody_waits_for_figures_where_there_is_nothing_to_choose(make: Make) -> None:
    services = FakeServices(hold={"forecast": threading.Event()})
    wizard = with_machines(make, services)
    on(wizard, Step.PLAN)
    state = until_state(wizard, lambda state: state.plan.status is ItemStatus.OK)
    assert state.strategy.status is ItemStatus.WORKING
    services.hold["forecast"].set()
    until_state(wizard, lambda state: state.plan.value.way == "alone H=1")


def test_figures_of_this_computer_are_waited_for_where_they_were_asked_for(make: Make) -> None:
    """Else the run would begin beside the measurement."""
    services = FakeServices(hold={"forecast": threading.Event(), "plan": threading.Event()})
    wizard = with_machines(make, services)
    on(wizard, Step.PLAN)
    until(lambda: "plan" in services.asked)
    services.hold["forecast"].set()
    until_state(wizard, lambda state: state.strategy.status is ItemStatus.OK)
    services.hold["forecast"].clear()
    wizard.do(do.measure())
    services.hold["plan"].set()  # a plan that was begun before the measurement was asked for
    until(lambda: all(one.outcome for one in wizard.asked_for() if one.task.kind is TaskKind.PLAN))
    assert blockers(wizard.state) == ("the plan is being made",)
    services.hold["forecast"].set()
    until_state(wizard, lambda state: not blockers(state))
    assert [request.measure for request in services.forecasts] == [False, True]


def test_picked_machines_are_asked_looked_at_and_measured(make: Make) -> None:
    services = FakeServices()
    state = launch(with_machines(make, services, ANNA.key))
    assert [row.name for row in services.requests[-1].machines] == ["desk", "anna"]
    assert {"access anna", "examine", "links", "forecast", "plan", "launch"} <= set(services.asked)
    assert "access desk" not in services.asked
    assert state.plan.value.way == "diloco mxfp4 H=50"


def test_back_and_forth_asks_nothing_again(make: Make) -> None:
    services = FakeServices()
    wizard = with_machines(make, services, ANNA.key)
    on(wizard, Step.PLAN)
    until_state(wizard, lambda state: state.plan.status is ItemStatus.OK and not state.busy)
    answers, asked = wizard.state.answers, list(services.asked)
    while wizard.state.step is not Step.MACHINES:
        wizard.do(do.go_back())
    on(wizard, Step.PLAN)
    assert wizard.state.answers == answers
    assert services.asked == asked


def test_a_changed_answer_asks_for_just_what_depends_on_it(make: Make) -> None:
    services = FakeServices()
    wizard = with_machines(make, services, ANNA.key)
    on(wizard, Step.PLAN)
    until_state(wizard, lambda state: state.plan.status is ItemStatus.OK)
    until_state(wizard, lambda state: not state.busy)
    before = len(services.asked)
    wizard.do(do.go_to(Step.JOB))
    wizard.do(do.set_option("learning_rate", "0.01"))
    on(wizard, Step.PLAN)
    until_state(wizard, lambda state: state.plan.status is ItemStatus.OK and not state.busy)
    assert set(services.asked[before:]) == {"job", "fits", "forecast", "plan"}


def test_a_closed_port_turns_green_by_itself(make: Make) -> None:
    services = FakeServices(access={"anna": refused(ANNA)})
    wizard = with_machines(make, services, ANNA.key, retry_every=0.05)
    wizard.do(do.go_on())
    until_state(wizard, lambda state: services.asked.count("access anna") > 2)
    state = until_state(wizard, lambda state: state.access[0].status is ItemStatus.FAILED)
    assert (state.access[0].cause, state.access[0].fix) == ("port_closed there", "repair it")
    wizard.do(do.go_on())
    assert wizard.state.step is Step.ACCESS
    assert "port_closed there" in wizard.state.notice
    del services.access["anna"]
    until_state(wizard, lambda state: state.access[0].status is ItemStatus.OK)


def test_nobody_is_asked_behind_the_persons_back(make: Make) -> None:
    services = FakeServices(access={"anna": refused(ANNA)})
    wizard = with_machines(make, services, ANNA.key, retry_every=0.02)
    wizard.do(do.go_on())
    until_state(wizard, lambda state: services.asked.count("access anna") > 1)
    wizard.do(do.go_back())
    asked = services.asked.count("access anna")
    threading.Event().wait(0.1)
    assert services.asked.count("access anna") <= asked + 1  # one may have been on its way


def test_a_password_is_used_once_and_kept_nowhere(make: Make) -> None:
    services = FakeServices(access={"anna": locked(ANNA)}, passwords={"anna": "s3cret-word"})
    wizard = with_machines(make, services, ANNA.key)
    seen: list[str] = []
    wizard.subscribe(lambda: seen.append(repr(wizard.state)))
    wizard.do(do.go_on())
    until_state(wizard, lambda state: state.access[0].need is AccessNeed.PASSWORD)
    assert wizard.left_behind() == ""
    wizard.give_password(ANNA.key, "wrong-word")
    state = until_state(wizard, lambda state: "wrong" in state.access[0].cause)
    assert state.access[0].need is AccessNeed.PASSWORD
    wizard.give_password(ANNA.key, "s3cret-word")
    until_state(wizard, lambda state: state.access[0].status is ItemStatus.OK)
    assert services.asked.count("install anna") == 2
    assert not any("s3cret-word" in text for text in seen)
    assert (
        "installed on anna; this removes it: " in wizard.left_behind() and "clean ada@10.0.0.2" in wizard.left_behind()
    )


def test_a_new_host_key_is_trusted_only_as_it_was_shown(make: Make) -> None:
    wizard = with_machines(make, FakeServices(access={"anna": stranger(ANNA, "SHA256:anna")}), ANNA.key)
    wizard.do(do.go_on())
    until_state(wizard, lambda state: state.access[0].need is AccessNeed.TRUST)
    wizard.do(do.trust_key(ANNA.key, "SHA256:other"))
    assert wizard.state.notice == "that is not the host key that the machine shows"
    wizard.do(do.trust_key(ANNA.key, "SHA256:anna"))
    until_state(wizard, lambda state: state.access[0].status is ItemStatus.OK)


def test_a_key_is_not_called_another_one_while_its_machine_does_not_answer(make: Make) -> None:
    wizard = with_machines(make, FakeServices(access={"anna": refused(ANNA)}), ANNA.key)
    wizard.do(do.go_on())
    until_state(wizard, lambda state: state.access[0].status is ItemStatus.FAILED)
    wizard.do(do.trust_key(ANNA.key, "SHA256:anna"))
    assert wizard.state.notice == "anna did not answer meanwhile: compare its key again when it does"


def test_a_changed_key_blocks_until_the_machine_is_skipped(make: Make) -> None:
    services = FakeServices(access={"anna": refused(ANNA, "host_key_changed")})
    wizard = with_machines(make, services, ANNA.key, BERT.key)
    wizard.do(do.go_on())
    until_state(wizard, lambda state: {row.status for row in state.access} == {ItemStatus.OK, ItemStatus.FAILED})
    wizard.do(do.trust_key(ANNA.key, "SHA256:anna"))
    wizard.give_password(ANNA.key, "word")
    assert wizard.state.access[0].status is ItemStatus.FAILED
    wizard.do(do.skip(ANNA.key))
    on(wizard, Step.CHECKS)
    assert [row.name for row in wizard.state.members] == ["desk", "bert"]
    wizard.do(do.go_back())
    wizard.do(do.retry(ANNA.key))
    assert [row.name for row in wizard.state.members] == ["desk", "anna", "bert"]


def test_a_finding_is_mended_and_looked_at_again(make: Make) -> None:
    services = FakeServices(findings={"anna": BROKEN})
    wizard = with_machines(make, services, ANNA.key)
    on(wizard, Step.CHECKS)
    until_state(wizard, lambda state: state.checks[1].status is ItemStatus.FAILED)
    wizard.do(do.fix_all())
    state = until_state(wizard, lambda state: all(row.status is ItemStatus.OK for row in state.checks))
    assert "anna: fixed" in state.log
    assert services.asked.count("examine") == 2
    assert [one.outcome for one in wizard.asked_for() if one.task.kind is TaskKind.CHECKS] == ["1 problem", "ok"]


def test_installing_waits_for_the_checks(make: Make) -> None:
    services = FakeServices(findings={"anna": BROKEN}, hold={"examine": threading.Event()})
    wizard = with_machines(make, services, ANNA.key)
    on(wizard, Step.CHECKS)
    wizard.do(do.fix_all())
    assert (wizard.state.notice, wizard.state.under_repair) == ("installed as soon as it is checked", frozenset())
    services.hold["examine"].set()
    state = until_state(wizard, lambda state: all(row.status is ItemStatus.OK for row in state.checks))
    assert state.notice == "" and services.asked.count("repair") == 1
    wizard.do(do.fix_all())
    assert wizard.state.notice == "nothing is missing"


@pytest.mark.parametrize("machines", [(HERE,), (HERE, ANNA)])
def test_saving_waits_for_the_plan(make: Make, machines: tuple[MachineRow, ...]) -> None:
    """Of this computer alone, the plan is made anew once it is checked."""
    services = FakeServices(hold={"forecast": threading.Event()}, saved={"evening": machines})
    wizard = make(services, "evening")
    until_state(wizard, lambda state: len(state.members) == len(machines))
    wizard.do(do.save_only())
    assert wizard.state.notice == "saved as soon as the plan is made" and "save" not in services.asked
    services.hold["forecast"].set()
    state = until_state(wizard, lambda state: state.saved)
    assert state.notice == "saved: demo-2.ini" and services.asked.count("save") == 1


def test_a_save_that_waits_is_dropped_with_its_step(make: Make) -> None:
    services = FakeServices(hold={"forecast": threading.Event()})
    wizard = with_machines(make, services)
    on(wizard, Step.PLAN)
    wizard.do(do.save_only())
    wizard.do(do.go_to(Step.JOB))
    services.hold["forecast"].set()
    until_state(wizard, lambda state: state.strategy.status is ItemStatus.OK and not state.deferred)
    assert "save" not in services.asked


def test_packages_come_from_here_where_a_person_says_so(make: Make) -> None:
    services = FakeServices(findings={"anna": BROKEN})
    wizard = with_machines(make, services, ANNA.key)
    on(wizard, Step.CHECKS)
    until_state(wizard, lambda state: state.checks[1].status is ItemStatus.FAILED)
    wizard.do(do.send_packages())
    state = until_state(wizard, lambda state: all(row.status is ItemStatus.OK for row in state.checks))
    assert state.repairs.value == {"anna": "anna: fixed"}
    assert "repair with packages from here" in services.asked


def test_packages_are_sent_to_no_machine_that_installs_its_own(make: Make) -> None:
    """Two installations of one machine wrote the same files; one of them failed beside "ready"."""
    installs, repairs = threading.Event(), ("repair", "repair with packages from here")
    services = FakeServices(findings={"anna": BROKEN, "bert": BROKEN}, hold=dict.fromkeys(repairs, installs))
    wizard = with_machines(make, services, ANNA.key, BERT.key)
    on(wizard, Step.CHECKS)
    until_state(wizard, lambda state: all(row.fixable for row in state.checks[1:]))
    wizard.do(do.fix(ANNA.key))
    wizard.do(do.send_packages())
    under_way = {task.inputs for task in wizard.state.tasks if task.kind is TaskKind.REPAIR}
    assert under_way == {(ANNA.key,), (BERT.key,)}
    installs.set()


def test_this_computer_alone_is_equipped_at_checks(make: Make) -> None:
    bare = replace(HERE, unequipped=True)
    services = FakeServices(machines=(bare,), findings={"desk": BROKEN})
    wizard = with_machines(make, services)
    on(wizard, Step.CHECKS)
    until_state(wizard, lambda state: state.checks[0].status is ItemStatus.FAILED)
    assert blockers(wizard.state)
    wizard.do(do.fix_all())
    assert on(wizard, Step.JOB).step is Step.JOB and services.asked.count("repair") == 1


def test_another_user_is_tried_at_once(make: Make) -> None:
    wizard = with_machines(make, FakeServices(access={"anna": refused(ANNA, "no_key_accepted")}), ANNA.key)
    wizard.do(do.go_on())
    until_state(wizard, lambda state: bool(state.access) and state.access[0].status is ItemStatus.FAILED)
    wizard.do(do.set_user(ANNA.key, "bob; rm"))
    assert "cannot be the name of a user" in wizard.state.notice
    wizard.do(do.set_user(ANNA.key, "bob"))
    assert [row.entry.user for row in wizard.state.picked if not row.here] == ["bob"]


def test_the_interval_is_predicted_live_and_falls_back(make: Make) -> None:
    wizard = with_machines(make, FakeServices(), ANNA.key)
    on(wizard, Step.STRATEGY)
    until_state(wizard, lambda state: state.strategy.status is ItemStatus.OK)
    wizard.do(do.set_interval(20))
    until_state(wizard, lambda state: state.chosen is not None and state.chosen.interval == 20)
    wizard.do(do.set_interval(13))
    state = until_state(wizard, lambda state: "unlucky" in state.notice)
    assert state.answers.interval == 20
    wizard.do(do.set_interval(0))
    until_state(wizard, lambda state: state.chosen is not None and state.chosen.interval == 50)


def test_a_launch_that_fails_goes_on_with_fewer_machines(make: Make) -> None:
    services = FakeServices(launch_problems=["anna: gone", "anna: gone"])
    wizard = with_machines(make, services, ANNA.key)
    assert launch(wizard).launch.cause == "anna: gone"
    wizard.do(do.retry())
    until_state(wizard, lambda state: state.launch.status is ItemStatus.FAILED and services.asked.count("launch") == 2)
    wizard.do(do.drop("anna"))
    assert wizard.state.step is Step.PLAN
    assert launch(wizard).launch.value.run
    assert services.requests[-1].machines == (HERE,)


def test_a_saved_profile_begins_at_its_plan(make: Make) -> None:
    services = FakeServices(saved={"evening": (HERE, replace(ANNA, key="saved:anna"))})
    wizard = make(services, "evening")
    state = until_state(wizard, lambda state: state.plan.status is ItemStatus.OK)
    assert state.step is Step.PLAN
    assert [row.name for row in state.members] == ["desk", "anna"]


def test_an_unknown_profile_is_said_at_the_plan(make: Make) -> None:
    wizard = make(FakeServices(), "nonesuch")
    until_state(wizard, lambda state: "nonesuch" in state.job.cause)


def test_a_typed_machine_stays_picked_when_its_key_is_seen(make: Make) -> None:
    services = FakeServices(machines=(HERE,))
    wizard = with_machines(make, services)
    wizard.do(do.add_machine("ada@10.0.0.2"))
    assert wizard.state.answers.picked == ("here", "typed:ada@10.0.0.2")
    assert services.see is not None
    services.machines = (HERE, replace(ANNA, aliases=("typed:ada@10.0.0.2",)))
    services.see(services.sight())
    assert wizard.state.answers.picked == ("here", ANNA.key)
    assert [row.name for row in wizard.state.machines.rows] == ["desk", "anna"]
    until(lambda: services.added == ["ada@10.0.0.2"])
    for text in ("ada@10.0.0.2", "Anna"):  # a listed one is picked, however it is named
        wizard.do(do.pick(ANNA.key, False))
        wizard.do(do.add_machine(text))
        assert (wizard.state.answers.picked, wizard.state.notice) == (("here", ANNA.key), "")


def test_what_was_typed_last_is_what_is_looked_for(make: Make) -> None:
    services = FakeServices(hold={"look for ada@a": threading.Event()})
    wizard = with_machines(make, services)
    wizard.do(do.add_machine("ada@a"))
    until(lambda: "look for ada@a" in services.asked)
    wizard.do(do.add_machine("ada@b"))
    services.hold["look for ada@a"].set()
    until(lambda: services.added == ["ada@a", "ada@b"])
    threading.Event().wait(0.05)
    assert services.added == ["ada@a", "ada@b"]


def test_new_figures_are_measured_on_demand_only(make: Make) -> None:
    services = FakeServices()
    wizard = with_machines(make, services, ANNA.key)
    on(wizard, Step.STRATEGY)
    until_state(wizard, lambda state: state.strategy.status is ItemStatus.OK)
    wizard.do(do.retry())
    until_state(wizard, lambda state: state.strategy.status is ItemStatus.OK and len(services.forecasts) == 2)
    assert [request.measure for request in services.forecasts] == [False, True]


def test_a_result_that_cannot_be_taken_in_has_failed(make: Make) -> None:
    """Else its thread would end unheard, and the step would be worked on for ever."""

    class Nonsense(FakeServices):
        def measure_links(self, *given: Any) -> Any:
            return (None,)

    wizard = with_machines(make, Nonsense(), ANNA.key)
    on(wizard, Step.LINKS)
    state = until_state(wizard, lambda state: state.links.status is ItemStatus.FAILED and not state.busy)
    assert "unexpected" in state.links.cause
