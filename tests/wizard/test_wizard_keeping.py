"""What confirming a plan writes: one profile and its files, and nothing else."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from app.wizard.services.forecasting import Forecast, ranked
from app.wizard.services.outside import Outside
from app.wizard.services.plan import plan_of, saving
from app.wizard.services.services import known_profiles, saved_hosts
from app.wizard.state.records import JobAnswers
from app.wizard.state.state import Answers, PlanRequest
from distributed.hosts.file import load_hosts
from distributed.measuring.machine_figures import SpeedFigures
from distributed.measuring.measure import MeasurementResult
from distributed.planning.documents.document import Workload
from distributed.planning.planner import plan
from profiles.errors import BadInput
from profiles.files.resolve import load_profile
from profiles.schema import Profile
from tests.distributed.planner_figures import TINY, job, machine, measured_pair
from tests.wizard.fake_services import ANNA, BERT, HERE

CONFIG = """# Everybody's.
[group:speech]
task = whisper
max_grad_norm = 0.5
[model:tiny]
model_path = ./tiny
from_scratch = true
[dataset:voices]
dataset_path = ./voices
[profile:mine]
group = speech
model = tiny
dataset = voices
learning_rate = 1e-3  # quick
[distributed:mine]
strategy = allreduce
"""


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("tiny", "voices"):
        (tmp_path / name).mkdir()
    (tmp_path / "tiny" / "config.json").touch()
    (tmp_path / "config.ini").write_text(CONFIG)
    return tmp_path / "config.ini"


MINE = JobAnswers("mine", (("epochs", "7"),))


def request(job: JobAnswers = MINE, save_as: str = "", **changes: Any) -> PlanRequest:
    answers = Answers(profile=job.profile, options=job.options, save_as=save_as)
    return replace(PlanRequest((HERE, ANNA), answers), **changes)


def test_a_saved_profile_stands_by_itself(config: Path) -> None:
    before = config.read_bytes()
    files = saving(request(), config).write(config)
    assert files == ("profiles/saved/mine-2-machines.ini", "profiles/saved/mine-2-machines.hosts.json")
    assert config.read_bytes() == before
    found = load_profile("mine-2-machines", {}, config).profile
    base = load_profile("mine", {"epochs": "7"}, config).profile
    assert (found.model, found.data, found.training) == (base.model, base.data, base.training)
    assert (found.model_name, found.dataset_name, found.strategy.strategy) == ("tiny", "voices", "auto")
    hosts = load_hosts(Path(found.run.hosts))
    assert [(machine.name, machine.is_local) for machine in hosts.machines] == [("desk", True), ("anna", False)]
    assert (hosts.machines[1].address, hosts.machines[1].user) == ("10.0.0.2", "ada")


def test_a_way_that_feeds_no_errors_back_is_kept_so(config: Path) -> None:
    work = Workload(trainable=TINY, total=TINY, samples=32_000)
    figures = [SpeedFigures(machine=machine(name), workload=work) for name in "ab"]
    found = MeasurementResult(["a", "b"], [measured_pair()], figures)
    wanted = job(samples=100_000, texts=True, max_loss_increase=0.2, codec="fp32")
    planning = plan(found.figures.cluster, wanted)
    row = next(one for one in ranked(planning, None).ways if one.choice.strategy == "noloco")
    asked = JobAnswers("mine", (("strategy", "auto"), ("error_feedback", "true")))
    kept = saving(request(asked, chosen=row, planning=Forecast(Profile(name="p"), (), found, planning)), config)
    kept.write(config)
    assert kept.planning is not None
    strategy = load_profile(kept.name, {}, config).profile.strategy
    assert (strategy.strategy, strategy.error_feedback) == ("noloco", False)


def test_saving_again_changes_one_section_and_keeps_comments(config: Path) -> None:
    kept = saving(request(save_as="evening"), config)
    kept.write(config)
    text = kept.ini.read_text() + "\n# a note of mine\n[model:other]\nmodel_path = ./tiny\n"
    kept.ini.write_text(text.replace("epochs = 7.0\n", "epochs = 7.0\n# seven is enough\n"))
    again = request(save_as="evening", job=JobAnswers("mine", (("epochs", "9"),)))
    saving(again, config).write(config)
    new = kept.ini.read_text()
    assert "# seven is enough\n" in new and new.endswith("\n# a note of mine\n[model:other]\nmodel_path = ./tiny\n")
    assert load_profile("evening", {}, config).profile.training.epochs == 9


def test_a_name_is_made_up_and_used_again_for_the_same_choices(config: Path) -> None:
    saving(request(), config).write(config)
    assert saving(request(), config).name == "mine-2-machines"
    other = request(job=JobAnswers("mine", (("epochs", "8"),)))
    assert saving(other, config).name == "mine-2-machines-2"
    assert saving(request(machines=(HERE,)), config).name == "mine-here"
    saved = request(job=JobAnswers("mine-2-machines"))
    assert saving(saved, config).name == "mine-2-machines"


@pytest.mark.parametrize("name", ["mine", "../out", "MINE", "a b", ""])
def test_a_name_that_cannot_be_leaves_nothing_behind(config: Path, name: str) -> None:
    if not name:
        return
    with pytest.raises(BadInput):
        saving(request(save_as=name), config).write(config)
    folder = config.parent / "profiles" / "saved"
    assert not folder.exists() or list(folder.iterdir()) == []


def test_two_machines_of_one_name_get_numbers(config: Path) -> None:
    twin = replace(ANNA, key="SHA256:twin")
    kept = saving(request(machines=(ANNA, twin)), config)
    assert [machine.name for machine in kept.hosts.machines] == ["anna", "anna-2"]


def test_a_name_of_the_network_cannot_escape(config: Path) -> None:
    evil = replace(ANNA, name="../\x1b[2J[red]evil/..")
    kept = saving(request(machines=(evil,)), config)
    (machine,) = kept.hosts.machines
    assert machine.name.isprintable() and "/" not in machine.name


def test_home_lists_saved_profiles_first_with_their_machines(config: Path) -> None:
    saving(request(), config).write(config)
    rows = known_profiles(config)
    assert [row.name for row in rows] == ["mine-2-machines", "mine"]
    assert [machine.name for machine in rows[0].machines] == ["desk", "anna"]
    assert saved_hosts(config) == {"mine-2-machines": config.parent / "profiles/saved/mine-2-machines.hosts.json"}
    (config.parent / "profiles/saved/mine-2-machines.hosts.json").unlink()
    assert "no such hosts file" in known_profiles(config)[0].entry.error


def test_a_run_without_an_absent_machine_keeps_it_in_the_saved_profile(config: Path) -> None:
    """Off for one evening is no reason to leave the set-up: the next run has it again."""
    three = saving(request(machines=(HERE, ANNA, BERT)), config)
    three.write(config)
    evening = request(machines=(HERE, ANNA), left_out=(BERT,), job=JobAnswers(three.name))
    partial = saving(evening, config)
    partial.write(config)
    assert [machine.name for machine in partial.hosts.machines] == ["desk", "anna"]
    assert [machine.name for machine in known_profiles(config)[0].machines] == ["desk", "anna", "bert"]
    assert partial.arguments == ("distributed-train", three.name, "--allow-missing")
    assert (partial.plan_file.name, three.plan_file.name) == (
        "mine-3-machines.partial.plan.json",
        "mine-3-machines.plan.json",
    )
    preview = plan_of(evening, config, Outside())
    assert preview.left_out == "this run without bert; the saved profile keeps it"
    assert not plan_of(replace(evening, left_out=()), config, Outside()).left_out
    gone = saving(replace(evening, left_out=()), config)  # deselected at Machines
    gone.write(config)
    assert [machine.name for machine in known_profiles(config)[0].machines] == ["desk", "anna"]
