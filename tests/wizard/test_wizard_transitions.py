"""The set-up's pure function under any sequence of actions and observations."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.wizard.state import actions as do
from app.wizard.state.assessment import THIS_NETWORK, named, of_run
from app.wizard.state.data_actions import Selection, leave_out
from app.wizard.state.dependencies import apply, begin, blockers, inputs, is_unsaved, tasks_to_start
from app.wizard.state.launch_records import LaunchProgress
from app.wizard.state.neighbours import NeighbourAnswers, ask_neighbours, is_unnamed, unasked_networks
from app.wizard.state.observations import begun, done, failed, launch_seen, log_line, origin_of, sighted
from app.wizard.state.records import (
    Assessment,
    DataSummary,
    DiscoveredMachines,
    Home,
    ItemStatus,
    JobForm,
    JobOption,
    PlanPreview,
    StrategyRanking,
)
from app.wizard.state.state import (
    BETWEEN_MACHINES,
    ORDER,
    Action,
    ServiceTask,
    StatePart,
    Step,
    TaskKind,
    Transition,
    WizardState,
    after,
    before,
    visited,
)
from distributed.discovery.neighbours import SshNeighbour
from distributed.hosts.schema import Machine
from distributed.measuring.link_figures import PairFigures
from profiles.options import options_by_name
from tests.wizard.fake_services import (
    ANNA,
    BERT,
    BROKEN,
    CANDIDATES,
    FINE,
    HERE,
    known,
    known_machine,
    let_in,
    locked,
    moved,
    pair,
    refused,
    stranger,
)
from training.records.plan import RunMetadata
from training.records.runs import RunSummary

KEYS = st.sampled_from(["here", ANNA.key, BERT.key, "typed:ada@c", "nobody", ""])
TEXT = st.text(max_size=12)
ASSESSED = st.builds(Assessment, status=st.sampled_from([ItemStatus.OK, ItemStatus.WARNING, ItemStatus.FAILED]))
ACTIONS = st.one_of(
    st.just(do.go_on()), st.just(do.go_back()), st.just(do.new_setup()), st.just(do.doctor()), st.just(do.retry()),
    st.builds(do.go_to, st.sampled_from(list(Step))), st.builds(do.rerun, st.sampled_from(["demo", "evening"])),
    st.builds(do.pick, KEYS, st.sampled_from([None, True, False])),
    st.builds(do.add_machine, TEXT | st.just("ada@c")), st.builds(do.remove_machine, TEXT | st.just("ada@c")),
    st.builds(do.trust_key, KEYS, TEXT), st.builds(do.install_key, KEYS), st.builds(do.retry, KEYS),
    st.builds(do.skip, KEYS), st.builds(do.fix, KEYS), st.just(do.fix_all()), st.just(do.send_packages()),
    st.builds(do.set_user, KEYS, TEXT), st.builds(do.approve, KEYS), st.just(leave_out()), st.just(ask_neighbours()),
    st.builds(do.choose_profile, TEXT), st.builds(do.set_option, TEXT, TEXT), st.builds(do.reset_option, TEXT),
    st.builds(do.choose_strategy, st.integers(-2, 5)), st.builds(do.set_interval, st.integers(-5, 10**9)),
    st.builds(do.set_preference, TEXT | st.just("least-traffic")), st.builds(do.save_as, TEXT),
    st.just(do.save_only()), st.builds(do.confirm, another=st.booleans()), st.builds(do.drop, KEYS),
)  # fmt: skip
ROWS = st.lists(st.sampled_from([HERE, ANNA, BERT, replace(ANNA, aliases=("typed:ada@c",))]), unique_by=lambda r: r.key)
UNAPPROVED = refused(ANNA, "ssh_config", demands=("that configuration runs: a",))
REPORTS = st.sampled_from([let_in(ANNA), refused(ANNA), stranger(ANNA, "SHA256:x"), locked(ANNA), UNAPPROVED])
PAIRS = [(), (pair("a", "b"),), (pair("a", "b", 9),), (PairFigures(source="a", target="b"),)]
EXAMINED = st.dictionaries(st.sampled_from(["here", ANNA.key, BERT.key]), st.sampled_from([BROKEN, FINE]))
FOUND = {
    TaskKind.HOME: st.just(Home()),
    TaskKind.DOCTOR: st.just(()),
    TaskKind.SAVED_MACHINES: ROWS.map(tuple),
    TaskKind.NEIGHBOURS: st.builds(
        NeighbourAnswers,
        st.just(2),
        st.sampled_from([(), ("10.9.9.9",), ("10.9.9.9", ANNA.entry.host)]).map(
            lambda addresses: [SshNeighbour(address) for address in addresses]
        ),
    ),
    TaskKind.ACCESS: REPORTS,
    TaskKind.APPROVAL: st.none(),
    TaskKind.INSTALL_KEY: REPORTS,
    TaskKind.CHECKS: EXAMINED,
    TaskKind.REPAIR: st.none(),
    TaskKind.LINKS: st.sampled_from(PAIRS),
    TaskKind.JOB: st.builds(JobForm, assessment=ASSESSED),
    TaskKind.DATA: st.builds(DataSummary, assessment=ASSESSED),
    TaskKind.FITS: st.just(()),
    TaskKind.SELECTING: st.just(Selection("clips-readable", 3, ())),
    TaskKind.FORECAST: st.builds(StrategyRanking, ways=st.just(CANDIDATES) | st.just(()), assessment=ASSESSED),
    TaskKind.INTERVAL: st.builds(moved, st.just(CANDIDATES[0]), st.integers(1, 500)),
    TaskKind.PLAN: st.builds(PlanPreview, assessment=ASSESSED),
    TaskKind.SAVE: st.just(("a.ini",)),
    TaskKind.LAUNCH: st.just("/runs/1"),
}


@st.composite
def changes(draw: st.DrawFn, state: WizardState) -> Transition:
    """An action, or something that may be seen in this state: of a wanted task, or of one that is stale."""
    if draw(st.booleans()):
        return cast(Action, draw(ACTIONS))
    if draw(st.integers(0, 3)) == 0:
        return sighted(DiscoveredMachines(tuple(draw(ROWS))))
    asked = tasks_to_start(state)
    kind, key = draw(st.sampled_from(list(TaskKind))), draw(KEYS)
    task = ServiceTask(kind, key, draw(st.sampled_from([inputs(state, kind, key), "stale"])))
    is_wanted = draw(st.booleans())
    if asked and is_wanted:
        task = asked[draw(st.integers(0, len(asked) - 1))]
    found = st.builds(done, st.just(task), FOUND[task.kind])
    seen: Transition = draw(
        st.one_of(found, st.builds(failed, st.just(task), TEXT), st.just(begun(task)), st.just(log_line(task, "x")))
    )
    return seen


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(st.data())
def test_nothing_raises_and_moving_loses_no_answer(data: st.DataObject) -> None:
    state = begin()
    for _ in range(data.draw(st.integers(1, 25))):
        change = data.draw(changes(state))
        new = apply(state, change)
        if change.rule.__name__ in ("go_on", "go_back", "go_to", "new_setup", "confirm", "save_only"):
            assert new.answers == state.answers
        assert len(set(new.answers.picked)) == len(new.answers.picked)
        assert len({row.key for row in new.machines.rows}) == len(new.machines.rows)
        assert ORDER.index(new.step) <= ORDER.index(new.reached)
        blockers(new)
        state = new


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(st.data())
def test_what_is_asked_for_comes_to_rest(data: st.DataObject) -> None:
    """Whatever was done, answering what is asked for ends: nothing is asked again and again."""
    state = begin()
    for _ in range(data.draw(st.integers(1, 15))):
        state = apply(state, data.draw(changes(state)))
    for _ in range(30):
        asked = tasks_to_start(state)
        if not asked:
            break
        for task in asked:
            state = apply(state, begun(task))
            if data.draw(st.booleans()):
                state = apply(state, failed(task, "no"))
            else:
                found = {row.key: FINE for row in state.picked} if task.kind is TaskKind.CHECKS else None
                state = apply(state, done(task, found or data.draw(FOUND[task.kind])))
    assert not tasks_to_start(state)


def test_recordings_too_long_for_the_model_bring_the_profile_that_hears_them() -> None:
    def after_data(state: WizardState) -> WizardState:
        task = ServiceTask(TaskKind.DATA, "", inputs(state, TaskKind.DATA))
        return apply(state, done(task, DataSummary(instead="whisper-scratch")))

    assert after_data(begin()).answers.profile == "whisper-scratch"
    chosen = apply(begin(), do.set_option("model", "mine"))
    assert after_data(chosen).answers.profile == "demo"


def test_few_recordings_are_passed_over_more_often_unless_the_user_says_how_often() -> None:
    def after_data(state: WizardState, epochs: str) -> dict[str, str]:
        task = ServiceTask(TaskKind.DATA, "", inputs(state, TaskKind.DATA))
        return dict((given := apply(state, done(task, DataSummary(35, epochs=epochs)))).answers.options) | {
            "other": apply(given, do.set_option("dataset", "others")).answers.options
        }

    mine = apply(begin(), do.set_option("dataset", "mine"))
    longer = {"dataset": "mine", "epochs": "30", "eval_interval": "0.25"}
    assert after_data(mine, "30") == {**longer, "other": (("dataset", "others"),)}
    assert after_data(apply(mine, do.set_option("eval_interval", "7")), "30")["eval_interval"] == "7"
    assert "epochs" not in after_data(mine, "")
    assert "epochs" not in after_data(begin(), "30")
    assert after_data(apply(mine, do.set_option("epochs", "2")), "30")["epochs"] == "2"
    assert "epochs" not in after_data(apply(mine, do.set_option("max_steps", "9")), "30")


def test_a_step_back_is_the_step_before() -> None:
    for needless in (frozenset(), BETWEEN_MACHINES | {Step.STRATEGY}):
        shown = visited(needless)
        assert all(after(before(step, needless), needless) is step for step in shown[1:])
        assert all(before(step, needless) in shown for step in ORDER)


def test_one_machine_has_no_links_and_no_strategy_to_choose() -> None:
    state = apply(begin(), sighted(DiscoveredMachines((HERE, ANNA))))
    assert Step.STRATEGY in state.needless
    both = apply(state, do.pick(ANNA.key))
    assert not both.needless
    assert apply(both, do.skip(ANNA.key)).needless == {Step.LINKS, Step.STRATEGY}


@pytest.mark.parametrize(("typed", "name"), [("ada@10.0.0.9", "c"), ("ada@studio.local", "studio.local")])
def test_a_machine_typed_by_its_address_takes_the_name_that_it_tells(typed: str, name: str) -> None:
    state = apply(apply(begin(), sighted(DiscoveredMachines((HERE,)))), do.add_machine(typed))
    key = state.answers.picked[-1]
    task = ServiceTask(TaskKind.ACCESS, key, inputs(state, TaskKind.ACCESS, key))
    report = replace(let_in(known_machine("x", "10.0.0.9")), host_name="c.fritz.box")
    state = apply(state, done(task, report))
    assert [row.name for row in state.members] == ["desk", name]
    assert state.listed[-1].name == name and state.members[-1].entry.host in typed
    assert apply(state, done(replace(task, kind=TaskKind.INSTALL_KEY), report)).notice.startswith(f"{name}: accepts")


def test_this_computer_is_picked_once() -> None:
    seen = sighted(DiscoveredMachines((HERE, ANNA)))
    state = apply(apply(begin(), seen), do.pick("here", False))
    assert apply(state, seen).answers.picked == ()


def test_online_machines_of_the_hosts_file_are_picked_once() -> None:
    listed = replace(ANNA, found_by=("hosts file", "ssh config"), status=ItemStatus.FAILED)
    state = apply(begin(), sighted(DiscoveredMachines((HERE, listed))))
    assert state.answers.picked == ("here",)  # it is offline
    waiting = replace(listed, status=ItemStatus.WARNING)  # for an approval
    assert apply(begin(), sighted(DiscoveredMachines((HERE, waiting)))).answers.picked == ("here", ANNA.key)
    seen = sighted(DiscoveredMachines((HERE, replace(listed, status=ItemStatus.OK))))
    state = apply(state, seen)
    assert state.answers.picked == ("here", ANNA.key)
    assert apply(apply(state, do.pick(ANNA.key, False)), seen).answers.picked == ("here",)


def test_neighbours_that_accept_ssh_are_listed_once_and_not_picked() -> None:
    state = apply(apply(begin(), sighted(DiscoveredMachines((HERE, ANNA)))), ask_neighbours())
    (task,) = [task for task in state.tasks if task.kind is TaskKind.NEIGHBOURS]
    machines = (SshNeighbour("10.9.9.9", "Debian", "attic"), SshNeighbour(ANNA.entry.host))
    answered = NeighbourAnswers(2, machines, ("10.9.9.0/24",))
    state = apply(state, done(task, answered))
    assert [row.name for row in state.machines.rows] == ["desk", "anna", "attic"]
    assert "1 more machine" in state.notice and state.machines.rows[-1].found_by == (THIS_NETWORK,)
    entry = Machine(name="10.9.9.9", address="10.9.9.9")
    row = replace(ANNA, key="SHA256:n", name="10.9.9.9", aliases=("typed:10.9.9.9",), found_by=("typed",), entry=entry)
    (_, row) = apply(state, sighted(DiscoveredMachines((HERE, row)))).machines.rows
    assert (row.name, row.system, origin_of(row)) == ("attic", "Debian", "answers SSH on this network")
    assert named(row, replace(let_in(row), host_name="loft.lan")).name == "loft"  # its own word, after Access
    assert is_unnamed(replace(row, name="10.9.9.9")) and not is_unnamed(row)
    assert state.answers.picked == ("here",) and state.answers.typed == ("10.9.9.9",)
    assert unasked_networks(state) == ("10.9.9.0/24",)
    ordered = apply(state, ask_neighbours(unasked_networks(state)))
    (whole,) = [task for task in ordered.tasks if task.kind is TaskKind.NEIGHBOURS]
    again = apply(ordered, done(whole, replace(answered, asked=254, networks=())))
    assert len(again.machines.rows) == 3 and unasked_networks(again) == ()
    assert again.notice == "asked 254 addresses: no other one accepts SSH; a adds one by its address"


def test_no_machine_is_picked_by_itself_behind_the_person_s_back() -> None:
    listed = replace(ANNA, found_by=("hosts file",), status=ItemStatus.OK)
    state = apply(begin(), sighted(DiscoveredMachines((HERE,))))
    state = apply(apply(state, do.new_setup()), do.go_on())
    assert apply(state, sighted(DiscoveredMachines((HERE, listed)))).answers.picked == ("here",)


def test_a_machine_with_a_strange_name_is_no_machine() -> None:
    for text in ("", "-oProxyCommand=x", "a b", "user@", "\x1b[31mred", "a;b", "u@h:99999", "a/b"):
        state = apply(begin(), do.add_machine(text))
        assert state.answers.typed == ()
        assert state.notice


def test_the_profiles_own_value_takes_a_change_back() -> None:
    job = JobForm((JobOption(options_by_name()["epochs"], "3", "3"),))
    state = begin().putting(TaskKind.JOB, state_part=StatePart(job, status=ItemStatus.OK))
    state = apply(state, do.set_option("epochs", "5"))
    assert dict(state.answers.options)["epochs"] == "5"
    state = state.putting(TaskKind.JOB, value=job)
    assert apply(state, do.set_option("epochs", " 3 ")).answers.options == ()


def test_a_stale_result_changes_nothing() -> None:
    state = apply(begin(), sighted(DiscoveredMachines((HERE, ANNA))))
    state = apply(apply(state, do.pick(ANNA.key, True)), do.go_to(Step.HOME))
    old = ServiceTask(TaskKind.LINKS, "", inputs(state, TaskKind.LINKS))
    state = apply(state, do.pick(ANNA.key, False))
    assert apply(state, done(old, (pair("a", "b"),))).links.value == ()


def test_what_was_begun_for_a_machine_that_is_no_more_picked_ends_too() -> None:
    """Else a spinner would turn for ever."""
    state = apply(begin(), sighted(DiscoveredMachines((HERE, ANNA))))
    state = apply(apply(state, do.pick(ANNA.key, True)), do.new_setup())
    task = ServiceTask(TaskKind.ACCESS, ANNA.key, inputs(state, TaskKind.ACCESS, ANNA.key))
    state = apply(state, begun(task))
    assert state.busy == ("connecting to anna",)
    state = apply(apply(state, do.pick(ANNA.key, False)), failed(task, "no"))
    assert state.busy == ()


def test_of_each_machine_the_newest_line_of_progress_is_shown() -> None:
    state = apply(begin(), sighted(DiscoveredMachines((HERE, ANNA, BERT))))
    task = ServiceTask(TaskKind.JOB, "", inputs(state, TaskKind.JOB, ""))
    names = (ANNA.name, "attic")  # one whose row has only its address
    for line in ("measuring", *(f"{name}: {n} of 3 MB" for n in (1, 2) for name in names), "attic: reading the data"):
        state = apply(state, log_line(task, line))
    assert state.part(TaskKind.JOB, "").progress == (
        "measuring", f"{ANNA.name}: 2 of 3 MB", "attic: reading the data"
    )  # fmt: skip
    assert f"{ANNA.name}: 1 of 3 MB" in state.log


def test_two_machines_of_one_name_stay_two() -> None:
    twin = replace(known_machine("twin", "10.0.0.9"), name="anna")
    state = apply(begin(), sighted(DiscoveredMachines((HERE, ANNA, twin))))
    state = apply(apply(state, do.pick(ANNA.key, True)), do.pick(twin.key, True))
    assert [row.key for row in state.members] == ["here", ANNA.key, twin.key]


def started() -> WizardState:
    """A set-up whose run has made its first step."""
    at_plan = apply(apply(begin(), sighted(DiscoveredMachines((HERE, ANNA)))), do.new_setup())
    at_plan = replace(at_plan, step=Step.PLAN).putting(TaskKind.PLAN, status=ItemStatus.OK)
    launched = apply(at_plan, do.confirm())
    assert launched.step is Step.LAUNCH
    done = launched.putting(TaskKind.LAUNCH, status=ItemStatus.OK, value=LaunchProgress(run="output/1"))
    return replace(done, orders=())


def test_a_plan_that_was_started_starts_no_second_run_unless_another_one_is_asked_for() -> None:
    state = apply(started(), do.go_to(Step.PLAN))
    assert state.step is Step.PLAN
    again = apply(state, do.confirm())
    assert again.step is Step.LAUNCH  # it is shown
    assert again.launch is state.launch and not tasks_to_start(again)  # and nothing is started
    another = apply(state, do.confirm(another=True))
    assert (another.step, another.launch.status, another.launch.value.run) == (Step.LAUNCH, ItemStatus.WORKING, "")


def test_back_from_a_run_that_trains_leads_home_and_a_new_set_up_starts_its_own_run() -> None:
    state = apply(started(), do.go_back())
    assert state.step is Step.HOME
    state = replace(apply(state, do.new_setup()), step=Step.PLAN)
    assert apply(state, do.confirm()).launch.status is ItemStatus.WORKING


def test_a_start_that_failed_may_be_tried_again() -> None:
    failed = started().putting(TaskKind.LAUNCH, status=ItemStatus.FAILED)
    assert apply(failed, do.go_back()).step is Step.PLAN
    assert apply(apply(failed, do.go_back()), do.confirm()).launch.status is ItemStatus.WORKING


def test_the_plan_of_a_start_that_failed_is_saved() -> None:
    plan = PlanPreview(files=("profiles/saved/demo-2.ini",))
    at_plan = started()
    at_plan = at_plan.putting(TaskKind.PLAN, value=plan, inputs=inputs(at_plan, TaskKind.PLAN))
    waiting = at_plan.putting(TaskKind.LAUNCH, status=ItemStatus.WORKING, value=LaunchProgress())
    assert is_unsaved(waiting)
    seen = apply(waiting, launch_seen(LaunchProgress())).putting(TaskKind.LAUNCH, status=ItemStatus.FAILED)
    assert seen.plan.value.files and not is_unsaved(seen)
    assert is_unsaved(seen.putting(TaskKind.PLAN, inputs="changed since"))


@pytest.mark.parametrize(("word", "mark"), [("completed", ItemStatus.OK), ("cancelled", ItemStatus.STOPPED)])
def test_a_run_that_was_stopped_has_no_tick(word: str, mark: ItemStatus) -> None:
    metadata = RunMetadata.model_validate({"run_id": "1", "start_time": "", "profile": "x", "status": word})
    run = RunSummary(Path("x"), "1", metadata, "", live=False)
    assert of_run(run).status is mark
    assert of_run(replace(run, live=True)).status is ItemStatus.WORKING


@pytest.mark.parametrize(("needs", "step"), [("", Step.PLAN), ("dataset", Step.JOB), ("model", Step.JOB)])
def test_a_profile_that_lacks_its_data_opens_where_they_are_chosen(needs: str, step: Step) -> None:
    shown = known("mine")
    home = Home(profiles=(replace(shown, entry=replace(shown.entry, needs=needs)),))
    state = begin().putting(TaskKind.HOME, value=home)
    assert apply(state, do.rerun("mine")).step is step
