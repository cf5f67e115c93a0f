"""The set-up with real SSH servers, from the list of machines to a run that trains."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.cli.main import main
from app.wizard.engine import Wizard
from app.wizard.services.services import Services
from app.wizard.state import actions as do
from app.wizard.state.dependencies import blockers
from app.wizard.state.records import ItemStatus, MachineRow
from app.wizard.state.state import Step, WizardState
from distributed.preparation.custom_code import code_of
from profiles.files import library
from profiles.files.resolve import load_profile
from profiles.installation import command_line
from tests.distributed.muster_runs import JOB, ours
from tests.lab.fixtures import MakeLab
from tests.lab.spec import HostSpec
from tests.waiting import until_state
from training.records.plan import read_plan
from training.records.run_folder import RunFolder

PROFILE = """# Mine.
[profile:tiny]
description = a small job
task = custom
model_path = {job}:build
batch_size = 8
threads = 1
# Enough to be stopped.
max_steps = 4000
eval_before = false
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a ``config.ini`` that the set-up and the command line take for the project's."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "job.py").write_text(JOB.format(model="nn.Linear(2, 2)", pause=0.05, gate=""))
    (tmp_path / "config.ini").write_text(PROFILE.format(job=tmp_path / "job.py"))
    monkeypatch.setattr(library, "CONFIG", tmp_path / "config.ini")
    return tmp_path


@pytest.fixture
def wizard(project: Path) -> Iterator[Wizard]:
    made = Wizard(Services())
    yield made
    made.close()


def approve_code() -> None:
    """Stand behind the profile's code, as who wrote it does."""
    code = code_of(load_profile("tiny").profile)
    assert code is not None
    code.approve()


def on(wizard: Wizard, step: Step) -> None:
    while wizard.state.step is not step:
        until_state(wizard, lambda state: not blockers(state))
        wizard.do(do.go_on())


def of_the_lab(state: WizardState) -> list[MachineRow]:
    """Machines of the lab's hosts file; others may be announced on the same network."""
    return [row for row in state.machines.rows if "hosts file" in row.found_by]


def replanned(profile: str) -> set[str]:
    """Return the machines of a set-up that begins at the Plan of a saved profile."""
    wizard = Wizard(Services(), profile)
    try:
        state = until_state(wizard, lambda state: state.plan.status is ItemStatus.OK and bool(state.plan.value.hash))
        assert f"train {profile}" in state.plan.value.command
        return {row.name for row in state.members}
    finally:
        wizard.close()


@pytest.mark.lab
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_what_was_chosen_is_what_runs(make_lab: MakeLab, project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lab = make_lab(HostSpec("a", mbit=100), HostSpec("b", mbit=100))  # to measure a fast link keeps processors busy
    shutil.copy(lab.hosts_file, project / "distributed_hosts.json")
    approve_code()
    config = (project / "config.ini").read_bytes()
    wizard = Wizard(Services())
    try:
        wizard.do(do.new_setup())
        wizard.do(do.choose_profile("tiny"))
        until_state(wizard, lambda state: [row.status for row in of_the_lab(state)] == [ItemStatus.OK, ItemStatus.OK])
        for row in of_the_lab(wizard.state):
            wizard.do(do.pick(row.key, True))
        wizard.do(do.pick("here", False))
        on(wizard, Step.CHECKS)
        assert [row.status for row in wizard.state.access] == [ItemStatus.OK, ItemStatus.OK]
        until_state(wizard, lambda state: all(row.status is not ItemStatus.WORKING for row in state.checks))
        on(wizard, Step.PLAN)
        state = until_state(wizard, lambda state: state.plan.status is ItemStatus.OK)
        assert len(state.links.value) >= 1
        assert {row.name for row in state.members} == {"a", "b"}
        assert not (project / "profiles").exists()
        assert state.plan.value.hash
        wizard.do(do.save_only())
        until_state(wizard, lambda state: state.saved)
        assert [host.logins for host in lab] == [1, 1]
        capsys.readouterr()
        words = state.plan.value.command.split()
        assert main([*words[2:], "--plan-only", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["plan_hash"] == state.plan.value.hash
        assert replanned(state.plan.value.profile) == {"a", "b"}
        before = [host.logins for host in lab]
        wizard.do(do.confirm())
        state = until_state(wizard, lambda state: state.launch.status in (ItemStatus.OK, ItemStatus.FAILED))
        assert state.launch.status is ItemStatus.OK, state.launch
        after = [host.logins for host in lab]
        assert [end - begin for begin, end in zip(before, after, strict=True)] == [1, 1]  # of the run's own process
        run = Path(state.launch.value.run)
        assert read_plan(run / "plan.json").hash() == state.plan.value.hash
        assert command_line(*RunFolder.open(run).metadata.command[1:]).split() == words
    finally:
        wizard.close()
    assert main(["stop", "--kill", run.name[:20]]) == 0
    assert [ours(host) for host in lab] == [[], []]
    assert (project / "config.ini").read_bytes() == config
