"""``distributed-train`` on machines: what it does by itself between the command and the first step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from distributed.hosts.file import load_hosts, save_hosts
from distributed.planning.documents.document import Planning
from distributed.planning.feedback import FIGURES, PLANNING
from tests.distributed.muster_runs import Muster, ours
from tests.distributed.test_measure_lab import STEADY, measured_in
from tests.lab.fixtures import MakeLab, MakeLightLab
from tests.lab.spec import HostSpec
from training.records.events import BUSY
from training.records.run_folder import RunFolder

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

AUTO = ("--strategy", "auto", "--max-steps", "10")


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures of other tests must not be found, nor stay."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.lab
@pytest.mark.usefixtures("own_cache")
def test_measured_once_then_planned_and_the_plan_is_carried_out(make_lab: MakeLab, tmp_path: Path) -> None:
    lab = make_lab(HostSpec("a", mbit=100), HostSpec("b", mbit=100))  # to measure a fast link keeps processors busy
    muster = Muster(tmp_path, lab.hosts_file, pause=STEADY)
    first = muster.run(*muster.train(*AUTO))
    assert first.returncode == 0, first.stderr
    assert "measuring" in first.stderr and measured_in(first.stderr) == ["a", "b"]
    assert "This run takes" in first.stderr
    assert list((tmp_path / "cache" / "muster" / "measurements").glob("*.json"))
    (folder,) = (tmp_path / "output").iterdir()
    assert_carried_out(folder, first.stderr)
    assert [ours(host) + host.pids("listaddresses") for host in lab] == [[], []]
    assert [path for host in lab for path in host.files.rglob("runs/*")] == []

    options = ["task=custom", f"model_path={muster.job}:build", "batch_size=8", "threads=1", "seed=3"]
    options += ["strategy=auto", "max_steps=10"]
    task = ["nanogpt", *(word for option in options for word in ("--set", option))]
    machines = ["--hosts", str(lab.hosts_file)]
    again = muster.run("measure", *task, *machines, "--json", "--out", "figures.json")
    figures = json.loads((folder / FIGURES).read_text())["cluster"]["machines"]
    assert measured_in(again.stderr) == in_use(figures)
    assert [one["batch"] for one in json.loads(again.stdout)["machines"][0]["measurements"]] == [4, 8]
    plan = muster.run("plan", *task, "--figures", "figures.json", "--explain")
    assert plan.returncode == 0, plan.stderr
    assert "2" in plan.stdout
    planned = muster.run("plan", *task, *machines, "--json")
    assert planned.returncode == 0, planned.stderr
    assert planned.stderr == ""  # nothing was measured again
    assert json.loads(planned.stdout)["settings"]["members"]
    given = muster.run(*muster.train(*AUTO, "--try", "--json", "--plan", str(folder / PLANNING)))
    trial = json.loads(given.stdout)  # a few steps on the machines; nothing of it is kept
    assert trial["plan_hash"] == RunFolder.open(folder).plan().hash()
    assert trial["seconds_per_step"] > 0
    assert [path for host in lab for path in host.files.rglob("runs/*")] == []
    assert len(list((tmp_path / "output").iterdir())) == 1


def assert_carried_out(folder: Path, said: str) -> None:
    """Check that a run is as its planning says, and that its metadata tell why, and what was predicted."""
    planning = Planning.read(folder / PLANNING)
    metadata = json.loads((folder / "metadata.json").read_text())
    assert planning.settings is not None
    assert metadata["strategy"] == planning.settings.options["strategy"]
    assert [host["name"] for host in metadata["hosts"]] == [member.name for member in planning.settings.members]
    assert "".join(metadata["strategy_reason"].split()) in "".join(said.split())  # lines are wrapped
    assert planning.best is not None
    prediction = metadata["metrics"]["prediction"]
    assert prediction["predicted_step"] == planning.best.step and prediction["measured_step"] > 0


def in_use(machines: list[dict[str, Any]]) -> list[str]:
    """Return the names of those that others used meanwhile: their figures do not stay."""
    return [m["name"] for m in machines if any(run["others"] >= BUSY for run in m["measurements"])]


def without(lab_hosts: Path, name: str, folder: Path) -> Path:
    """Return a hosts file in which one machine has an address that nobody listens at."""
    hosts = load_hosts(lab_hosts)
    machines = tuple(m.model_copy(update={"address": "127.9.9.9"}) if m.name == name else m for m in hosts.machines)
    save_hosts(hosts.model_copy(update={"machines": machines}), folder / "hosts-away.json")
    return folder / "hosts-away.json"


def test_an_absent_machine_ends_it_in_time_or_is_done_without(make_light_lab: MakeLightLab, tmp_path: Path) -> None:
    lab = make_light_lab("a", "b")
    muster = Muster(tmp_path, without(lab.hosts_file, "b", tmp_path))
    refused = muster.run(*muster.train("--max-steps", "4", "--no-input"))  # waits no longer than its patience
    assert refused.returncode == 3
    lines = refused.stderr.splitlines()
    assert (
        sum(line.startswith("error: b: ") for line in lines) == 1
        and sum(line.startswith("hint: ") for line in lines) == 1
    )
    assert not (tmp_path / "output").exists()

    done = muster.run(*muster.train("--max-steps", "4", "--no-input", "--allow-missing"))
    assert done.returncode == 0, done.stderr
    assert "continuing without b" in done.stderr
