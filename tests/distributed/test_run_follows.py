"""``distributed-train`` on machines: what it does by itself between the command and the first step."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from distributed.hosts.file import load_hosts, save_hosts
from distributed.planning.documents.document import Planning
from distributed.planning.feedback import PLANNING
from tests.distributed.muster_runs import Muster
from tests.lab.fixtures import MakeLightLab
from training.records.run_folder import RunFolder

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

STEADY = 0.05
"""Seconds of a step, nearly all of them waited: its time is known soon, whoever else computes here."""
AUTO = ("--strategy", "auto", "--max-steps", "10")


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures of other tests must not be found, nor stay."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.usefixtures("own_cache")
def test_measured_once_then_planned_and_the_plan_is_carried_out(make_light_lab: MakeLightLab, tmp_path: Path) -> None:
    lab = make_light_lab("a", "b")
    muster = Muster(tmp_path, lab.hosts_file, pause=STEADY)
    first = muster.run(*muster.train(*AUTO))
    assert first.returncode == 0, first.stderr
    assert "measuring" in first.stderr and "This run takes" in first.stderr
    (folder,) = (tmp_path / "output").iterdir()
    planning = Planning.read(folder / PLANNING)
    metadata = json.loads((folder / "metadata.json").read_text())
    assert planning.settings is not None
    assert metadata["strategy"] == planning.settings.options["strategy"]
    assert [host["name"] for host in metadata["hosts"]] == [member.name for member in planning.settings.members]
    assert "".join(metadata["strategy_reason"].split()) in "".join(first.stderr.split())  # lines are wrapped
    assert planning.best is not None
    prediction = metadata["metrics"]["prediction"]
    assert prediction["predicted_step"] == planning.best.step and prediction["measured_step"] > 0
    assert list((tmp_path / "cache" / "muster" / "measurements").glob("*.json"))

    options = ["task=custom", f"model_path={muster.job}:build", "batch_size=8", "threads=1", "seed=3"]
    options += ["strategy=auto", "max_steps=10"]
    settings = [word for option in options for word in ("--set", option)]
    again = muster.run("plan", "nanogpt", "--hosts", str(lab.hosts_file), *settings, "--json")
    assert again.returncode == 0, again.stderr
    assert again.stderr == ""  # nothing was measured again
    assert json.loads(again.stdout)["settings"]["members"]
    runs = [host.files / ".cache" / "muster" / "runs" for host in lab]
    before = [sorted(path.iterdir()) for path in runs]
    given = muster.run(*muster.train(*AUTO, "--try", "--json", "--plan", str(folder / PLANNING)))
    trial = json.loads(given.stdout)  # a few steps on the machines; nothing of it is kept
    assert trial["plan_hash"] == RunFolder.open(folder).plan().hash()
    assert trial["seconds_per_step"] > 0
    assert [sorted(path.iterdir()) for path in runs] == before
    assert len(list((tmp_path / "output").iterdir())) == 1


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
