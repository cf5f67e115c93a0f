"""The set-up as questions and answers, over a scripted world: it reaches what the state machine reaches."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from app.wizard.engine import Wizard
from app.wizard.plain import plain
from app.wizard.plain.plain_words import check_lines, home_lines
from app.wizard.plain.prompts import BareLines, Questions, prompter
from app.wizard.state import actions as do
from app.wizard.state.dependencies import blockers
from app.wizard.state.records import Check, ItemStatus, JobAnswers, MachineRow, Presence, Tell
from app.wizard.state.state import Step
from distributed.checks.findings import Finding
from distributed.measuring.link_figures import PairFigures
from distributed.ssh.access import AccessReport
from tests.screens.states import at
from tests.waiting import PATIENCE, until_state
from tests.wizard.fake_services import ANNA, BERT, BROKEN, COMPARE, FakeServices, let_in, locked, refused, stranger
from tests.wizard.scripted_person import ScriptedPerson

pytestmark = pytest.mark.slow


run_plain = functools.partial(plain.run_plain, look_for=0.0)


def test_enter_all_the_way_trains_here() -> None:
    services, person = FakeServices(), ScriptedPerson(("Watch it here", "n"))
    assert run_plain(services, ask=person, watch=lambda run: 7) == 0
    assert [row.name for row in services.requests[-1].machines] == ["desk"]
    assert person.said("attach")


def test_home_says_once_who_is_online_and_not_before_all_were_asked() -> None:
    state = at(Step.HOME).state
    assert "\n".join(home_lines(state)).count("; online: 2 of 3 machines") == 1
    unasked = replace(
        state, machines=replace(state.machines, presence={"talk": (Presence("desk", True), Presence("studio"))})
    )
    assert "online" not in "\n".join(home_lines(unasked))


def test_a_whole_network_is_asked_only_after_a_yes() -> None:
    agreed = FakeServices()
    person = ScriptedPerson(("Numbers to pick", "s"), ("Numbers to pick", "s"), ("Ask all 254", "y"))
    assert run_plain(agreed, ask=person) == 0
    assert [asked for asked in agreed.asked if "neighbours" in asked] == ["neighbours", "neighbours 10.9.9.0/24"]
    declined = FakeServices()
    assert run_plain(declined, ask=ScriptedPerson(("Numbers to pick", "s"), ("Numbers to pick", "s"))) == 0
    assert [asked for asked in declined.asked if "neighbours" in asked] == ["neighbours"] * 2


def test_the_run_is_watched_at_once() -> None:
    seen: list[Path] = []
    person = ScriptedPerson()

    def watch(run: Path) -> int:
        seen.append(run)
        return 5

    assert run_plain(FakeServices(), ask=person, watch=watch) == 5
    assert seen == [Path("/runs/1")]


def test_the_same_plan_as_the_state_machine() -> None:
    answers = (
        ("Numbers to pick", "2"),
        ("NAME=VALUE", "learning_rate=0.01"),
        ("every=STEPS", "every=20"),
        ("only save", "n mine"),
    )
    services, person = FakeServices(), ScriptedPerson(*answers)
    assert run_plain(services, ask=person) == 0
    direct = FakeServices()
    wizard = Wizard(direct)
    try:
        for action in (do.new_setup(), do.set_option("learning_rate", "0.01"), do.save_as("mine")):
            wizard.do(action)
        until_state(wizard, lambda state: bool(state.machines.rows))
        wizard.do(do.pick(ANNA.key))
        while wizard.state.step.value != "strategy":
            until_state(wizard, lambda state: not blockers(state))
            wizard.do(do.go_on())
        until_state(wizard, lambda state: state.strategy.status is ItemStatus.OK)
        wizard.do(do.set_interval(20))
        until_state(wizard, lambda state: state.chosen is not None and state.chosen.interval == 20)
        wizard.do(do.go_on())
        until_state(wizard, lambda state: state.plan.status is ItemStatus.OK)
        wizard.do(do.confirm())
        until_state(wizard, lambda state: bool(state.launch.value.run))
    finally:
        wizard.close()
    assert services.requests[-1] == direct.requests[-1]
    assert services.requests[-1].chosen is not None
    assert services.requests[-1].chosen.interval == 20


def test_a_messy_data_set_is_taken_without_what_cannot_be_read() -> None:
    services = FakeServices()
    person = ScriptedPerson(("NAME=VALUE", "dataset=messy"), ("leave out what cannot be read", "l"))
    assert run_plain(services, ask=person) == 0
    assert person.said("messy-readable is taken, with 38 recordings. Left out: 2 not there, such as b.wav")
    assert services.requests[-1].answers.options == (("dataset", "messy-readable"),)


def test_a_stranger_is_compared_and_a_password_given() -> None:
    access = {"anna": stranger(ANNA, "SHA256:x"), "bert": locked(BERT)}
    services = FakeServices(access=access, passwords={"bert": "s3cret-word"})
    person = ScriptedPerson(("Numbers", "2 3"), ("accept it", "y"), ("Password", "wrong"), ("Password", "s3cret-word"))
    assert run_plain(services, ask=person) == 0
    assert person.said("SHA256:x") and person.said(COMPARE)
    assert not person.said("s3cret-word")
    assert len(services.requests[-1].machines) == 3


def test_one_password_is_used_for_others_where_the_person_says_so() -> None:
    access = {"anna": locked(ANNA), "bert": locked(BERT)}
    services = FakeServices(access=access, passwords={"anna": "s3cret-word", "bert": "s3cret-word"})
    person = ScriptedPerson(("Numbers", "2 3"), ("Password", "s3cret-word"), ("same password for bert", "y"))
    assert run_plain(services, ask=person) == 0
    assert len(services.requests[-1].machines) == 3 and not person.said("s3cret-word")


def test_an_ssh_configuration_is_approved_where_it_is_needed() -> None:
    services = FakeServices(access={"anna": refused(ANNA, "ssh_config", demands=("that configuration runs: a",))})
    person = ScriptedPerson(("Numbers", "2"), ("use it", "y"))
    assert run_plain(services, ask=person) == 0
    assert person.said("that configuration runs: a") and "approve anna" in services.asked


class OfUsers(FakeServices):
    """Only ada may log in on anna."""

    def check_access(self, machine: MachineRow, trusted: Sequence[str]) -> AccessReport:
        report = super().check_access(machine, trusted)
        user = machine.entry.user if machine.entry is not None else ""
        return let_in(machine) if user == "ada" else report


@pytest.mark.parametrize(
    ("report", "answers"),
    [
        (locked(ANNA), [("Password", ""), ("log in there as that user", "u ada")]),
        (stranger(ANNA, "SHA256:x"), [("accept it", "u ada")]),
        (refused(ANNA, "user_refused"), [("skip that machine", "u 1 ada")]),
        (refused(ANNA, "user_refused"), [("skip that machine", "u 7 ada"), ("skip that machine", "u 1 ada")]),
        (locked(ANNA), [("Password", ""), ("as that user", "u a b"), ("Password", ""), ("as that user", "u ada")]),
    ],
)
def test_another_user_may_be_named_wherever_a_machine_is_closed(
    report: AccessReport, answers: list[tuple[str, str]]
) -> None:
    services = OfUsers(access={"anna": report})
    assert run_plain(services, ask=ScriptedPerson(("Numbers", "2"), *answers)) == 0
    entries = [row.entry for row in services.requests[-1].machines if row.name == "anna"]
    assert [entry.user for entry in entries if entry is not None] == ["ada"]


def test_a_machine_that_stays_out_is_skipped() -> None:
    services = FakeServices(access={"anna": refused(ANNA, "host_key_changed")})
    person = ScriptedPerson(("Numbers", "2"), ("skip that machine", "s 1"))
    assert run_plain(services, ask=person) == 0
    assert person.said("host_key_changed there") and person.said("fix: repair it")
    assert [row.name for row in services.requests[-1].machines] == ["desk"]


def test_what_can_be_mended_is_mended_on_demand() -> None:
    services = FakeServices(findings={"anna": BROKEN})
    person = ScriptedPerson(("Numbers", "2"), ("install what is missing", "f"))
    assert run_plain(services, ask=person) == 0
    assert person.said("anna: fixed")


def test_a_launch_that_fails_shows_why_and_goes_on_without() -> None:
    services = FakeServices(launch_problems=["anna: gone"])
    person = ScriptedPerson(("Numbers", "2"), ("drop that machine", "d anna"))
    assert run_plain(services, ask=person) == 0
    assert person.said("anna: gone")
    assert len(services.requests[-1].machines) == 1


def test_leaving_starts_nothing() -> None:
    services = FakeServices()
    assert run_plain(services, ask=ScriptedPerson(("only save", "q"))) == 0
    assert "launch" not in services.asked and "save" not in services.asked


def test_hostile_names_are_written_out(capsys: pytest.CaptureFixture[str]) -> None:
    BareLines().say("evil\x1b[2J\u202ename\nnext")
    assert capsys.readouterr().out == "evil\\x1b[2J\\u202ename\nnext\n"


@pytest.mark.parametrize(("term", "kind"), [("dumb", BareLines), ("", BareLines), ("xterm", Questions)])
def test_dumb_terminals_get_bare_lines(monkeypatch: pytest.MonkeyPatch, term: str, kind: type) -> None:
    monkeypatch.setenv("TERM", term)
    assert type(prompter()) is kind


def test_what_is_done_is_told_to_the_end_however_much_it_is() -> None:
    person = ScriptedPerson(("Numbers to pick", "2"), ("Watch it here", "n"))

    class Talkative(FakeServices):
        def measure_links(self, machines: Sequence[MachineRow], job: JobAnswers, tell: Tell) -> Sequence[PairFigures]:
            for number in range(1200):
                tell(f"line {number}")
            end = time.monotonic() + PATIENCE
            while not person.said("line 1199") and time.monotonic() < end:
                threading.Event().wait(0.01)
            tell("one more line")
            return super().measure_links(machines, job, tell)

    assert run_plain(Talkative(), ask=person) == 0
    assert person.said("one more line")


def test_what_is_missing_is_mended_by_a_key_and_its_size_is_told() -> None:
    finding = Finding("ready", "problem", "no torch", "", "distributed-check --fix", True, "about 1.6 GB")
    *_, fix = check_lines([Check("pc", "pc", findings=(finding,))])
    assert fix.strip() == "fix: f installs what is missing, into Muster's own folder there (about 1.6 GB)"
