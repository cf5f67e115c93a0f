"""What a screen says is whole: no sentence is cut, and what qualifies a figure stands beside it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from textual.pilot import Pilot

from app.screens.app import WizardApp
from app.wizard.plain.plain_words import job_lines, strategy_lines
from app.wizard.state.launch_records import LaunchProgress, LaunchRow
from app.wizard.state.records import DataSummary, Fit, ItemStatus, JobOption, MachineRow
from app.wizard.state.state import StatePart, Step, TaskKind
from distributed.hosts.file import Machine
from distributed.preparation.provision import InstallProgress
from profiles.options import options_by_name
from tests.screens.pilot import fixed_clock, run, text
from tests.screens.states import DESK, HOME, JOB, MACHINES, STRATEGY, STUDIO, Still, at
from tests.wizard.fake_services import known, pair

DOUBT = "measured while b was busy (other programs used 62 % of its processors)"


def shown(steering: Still, keys: Sequence[str] = (), size: tuple[int, int] = (80, 24)) -> str:
    """Return what a screen shows after some keys, in one line."""
    screens: list[str] = []

    async def drive(pilot: Pilot[Any]) -> None:
        await pilot.press(*keys)
        await pilot.pause()
        screens.append(" ".join(text(pilot.app).split()))

    run(WizardApp(steering, clock=fixed_clock), drive, size)
    return screens[0]


@pytest.mark.slow
def test_times_from_a_busy_machine_are_marked() -> None:
    steering = at(Step.STRATEGY)
    doubtful = replace(STRATEGY, in_use=(DOUBT,))
    steering.state = steering.state.putting(TaskKind.FORECAST, value=doubtful)
    assert f"▲ {DOUBT}: press r to measure again" in shown(steering)
    assert f"  warning: {DOUBT}: m measures again" in list(strategy_lines(steering.state))


@pytest.mark.slow
def test_opening_the_advanced_options_cuts_nothing_at_80_columns() -> None:
    steering, long = at(Step.JOB), options_by_name()["streaming_diloco.outer_weight_decay"]
    path = JobOption(options_by_name()["model_path"], "/home/ada/models/of the kitchen/tiny", default="")
    options = (*JOB.options, JobOption(long, "0.0", default=""), path)
    steering.state = steering.state.putting(TaskKind.JOB, value=replace(JOB, options=options))
    words = shown(steering, ["o"])
    assert "passes, about 600 steps" in words and "samples at a time on one device" in words
    assert "/home/ada/models/of the kitchen/tiny" in shown(steering, ["o", "end"])


@pytest.mark.slow
def test_a_value_that_is_probably_a_slip_is_remarked_on_with_its_steps() -> None:
    steering = at(Step.JOB)
    values = {"epochs": "5000", "learning_rate": "1e-3"}
    options = tuple(
        replace(row, value=values.get(row.name, row.value), changed=True, problem="") for row in JOB.options
    )
    steering.state = steering.state.putting(TaskKind.JOB, value=replace(JOB, options=options))
    words = shown(steering)
    assert "steps: unusually large" in words and "epochs = 5000: unusually large: 500 or less is usual" in words
    assert "These are good values" not in words


@pytest.mark.slow
def test_a_description_stands_under_its_row_only_where_the_row_cuts_it() -> None:
    steering = at(Step.HOME)
    fits = "Whisper tiny on your recordings, by adapters"
    for description, times in ((fits, 1), (f"{fits}, and on those of all your friends", 2)):
        home = replace(HOME, runs=(), profiles=(known("demo", description=description),))
        steering.state = steering.state.putting(TaskKind.HOME, value=home)
        assert shown(steering, ["down"]).count(fits[:30]) == times


@pytest.mark.slow
def test_a_model_of_unknown_size_is_not_said_to_fit() -> None:
    steering = at(Step.JOB)
    unknown = (Fit("SHA256:desk", "desk", 0, 24_000_000_000, status=ItemStatus.OK, words="not known yet"),)
    steering.state = steering.state.putting(TaskKind.FITS, value=unknown)
    words = shown(steering, ["down", "down"])
    assert "fits" not in words and "✓ desk" not in words and "desk: not known yet" in words


@pytest.mark.slow
def test_one_machine_is_named_once_as_the_way_to_train() -> None:
    steering = at(Step.STRATEGY)
    alone = replace(STRATEGY, ways=STRATEGY.ways[-1:], reasons=("desk is the only machine: it trains alone",))
    steering.state = steering.state.putting(TaskKind.FORECAST, value=alone)
    words = shown(steering)
    assert "desk alone" not in words and "Arrow keys" not in words


@pytest.mark.slow
def test_a_long_value_stands_whole_under_its_option() -> None:
    steering, path = at(Step.JOB), "/home/ada/recordings/of the kitchen/2026"
    options = tuple(replace(row, value=path) if row.name == "epochs" else row for row in JOB.options)
    steering.state = steering.state.putting(TaskKind.JOB, value=replace(JOB, options=options))
    assert path in shown(steering, ["down"] * 4)


def test_of_a_long_path_the_end_is_seen() -> None:
    steering, path = at(Step.JOB), Path.home() / "sounds" / "Phone recordings-readable"
    steering.state = steering.state.putting(TaskKind.JOB, value=replace(JOB, dataset=str(path)))
    words = shown(steering)
    assert "…/Phone recordings-readable" in words and str(Path.home()) not in words
    assert "~/sounds/Phone recordings-readable" in shown(steering, size=(160, 45))


def test_each_problem_of_a_table_has_its_line() -> None:
    steering = at(Step.JOB)
    problems = ("table.csv:12: column text is empty", "table.csv:43: 4 fields", "and 12 more in table.csv")
    data = DataSummary(problems=problems)
    steering.state = steering.state.putting(
        TaskKind.DATA, status=ItemStatus.FAILED, value=data, cause="; ".join(problems), fix="press l"
    )
    screens: list[str] = []

    async def drive(pilot: Pilot[Any]) -> None:
        screens.extend(line.strip() for line in text(pilot.app).splitlines())

    run(WizardApp(steering, clock=fixed_clock), drive, (80, 24))
    assert [line for line in screens if "table.csv" in line] == list(problems)
    assert [line.strip() for line in job_lines(steering.state) if "table.csv" in line] == list(problems)


CAUSE = "the answer of a machine far away says in rather many words that something is not as it should be there, END"
FIX = "do what this long sentence says, which is the only way to mend it as far as anybody knows, STOP"


@pytest.mark.parametrize(
    ("step", "kind"),
    [(Step.LINKS, TaskKind.LINKS), (Step.JOB, TaskKind.JOB), (Step.JOB, TaskKind.DATA),
     (Step.STRATEGY, TaskKind.FORECAST), (Step.PLAN, TaskKind.PLAN), (Step.LAUNCH, TaskKind.LAUNCH),
     (Step.CHECKS, TaskKind.CHECKS)],
)  # fmt: skip
def test_what_went_wrong_stands_once_and_whole_at_80_columns(step: Step, kind: TaskKind) -> None:
    steering = at(step)
    failed = replace(steering.state.empty(kind), status=ItemStatus.FAILED, cause=CAUSE, fix=FIX)
    steering.state = steering.state.putting(kind, state_part=failed)
    words = shown(steering)
    assert words.count(CAUSE) == 1 and words.count(FIX) == 1


@pytest.mark.parametrize("step", [Step.ACCESS, Step.MACHINES])
def test_what_is_wrong_with_a_machine_stands_whole_at_80_columns(step: Step) -> None:
    steering = at(step)
    rows = tuple(replace(row, status=ItemStatus.FAILED, cause=CAUSE, fix=FIX) for row in steering.state.machines.rows)
    steering.state = replace(steering.state, machines=replace(steering.state.machines, rows=rows))
    for machine in rows:
        steering.state = steering.state.putting(
            TaskKind.ACCESS, machine.key, StatePart(None, status=ItemStatus.FAILED, cause=CAUSE, fix=FIX)
        )
    words = shown(steering)
    assert words.count(CAUSE) == 1 and words.count(FIX) == 1


def test_what_is_installed_stands_whole_at_80_columns() -> None:
    steering, words = at(Step.CHECKS), "downloading torch-2.13.0+cpu and 41 others, 612 MB of 1.6 GB are here, END"
    steering.state = steering.state.ordering(TaskKind.REPAIR, "", (STUDIO.key,))
    steering.state = steering.state.putting(
        TaskKind.REPAIR, value={STUDIO.name: InstallProgress(words, 0.38, "studio")}
    )
    assert f"38 % {words}" in shown(steering)


@pytest.mark.slow
def test_what_a_machine_prepares_is_told_at_launch() -> None:
    row = LaunchRow(
        "studio", "studio", (), status=ItemStatus.WORKING, phase="preparing the recordings (train) 300/3880"
    )
    launch = StatePart(LaunchProgress(("program", "joined"), (row,)), status=ItemStatus.WORKING)
    assert "studio: preparing the recordings (train) 300/3880" in shown(at(Step.LAUNCH, launch))


LONG = ("whisper-trainer-attic1", "whisper-trainer-cellar", "whisper-trainer-office", "whisper-trainer-studio")
"""Names of 22 characters."""


def with_long_names(step: Step) -> Still:
    """Return a set-up of four machines with long names; the first one is this computer."""
    rows = tuple(replace(STUDIO, key=name, name=name, entry=replace_name(row, name)) for name, row in
                 zip(LONG, (DESK, STUDIO, STUDIO, STUDIO)))  # fmt: skip
    pairs = tuple(pair(one, other, interface_back="en0") for one, other in combinations(LONG, 2))
    steering = at(step)
    state = replace(steering.state, machines=replace(MACHINES, rows=rows)).answering(picked=LONG)
    steering.state = state.putting(TaskKind.LINKS, value=pairs)
    return steering


def replace_name(row: MachineRow, name: str) -> Machine:
    return row.entry.model_copy(update={"name": name})


@pytest.mark.slow
def test_names_of_22_characters_are_not_broken() -> None:
    machines = shown(with_long_names(Step.MACHINES))
    assert "[x] whisper-trainer-attic1 (here)" in machines and all(f"[x] {name}" in machines for name in LONG)
    links = shown(with_long_names(Step.LINKS))
    assert "whisper-trainer-attic1 > whisper-trainer-cellar" in links and "✓ ok" in links


def test_where_machines_are_searched_is_told_whole() -> None:
    steering = with_long_names(Step.MACHINES)
    sources = ("Bonjour on " + ", ".join(f"enx00e04c68000{n}" for n in range(6)), "~/.ssh/config, known hosts and "
               "private networks", "/home/ada/whisper/recordings/distributed_hosts.json (hosts file)")  # fmt: skip
    steering.state = replace(steering.state, machines=replace(steering.state.machines, searched=sources))
    assert shown(steering).split(" enter Continue")[0].endswith("(hosts file)")


@pytest.mark.slow
@pytest.mark.parametrize("step", [Step.STRATEGY, Step.PLAN])
def test_a_large_terminal_shows_the_map_beside_what_is_decided_from_it(step: Step) -> None:
    assert "940 Mbit/s" in shown(with_long_names(step), size=(160, 45))
    assert "940 Mbit/s" not in shown(with_long_names(step))


def test_a_notice_folds_a_path_between_its_folders() -> None:
    async def drive(pilot: Pilot[Any]) -> None:
        pilot.app.notify("report: output/20261130-030143-a139-demo-3-machines/report.html", markup=False)
        await pilot.pause()
        messages = [notification.message for notification in pilot.app._notifications]
        assert messages == ["report: output/20261130-030143-a139-\ndemo-3-machines/report.html"]

    run(WizardApp(at(Step.HOME), clock=fixed_clock), drive)
