"""Data that stay on machines: looked at before a run, left out of what is sent, and never seen elsewhere after it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from distributed.agent.data_probe import inspect_path
from distributed.checks.machine_data import LocalData, judge_machine_data, machine_data_findings
from distributed.hosts.file import load_hosts, parse_hosts, save_hosts
from distributed.hosts.schema import Machine
from distributed.machine.link import HereConnection, MachineLink
from distributed.preparation.code_sync import collect
from distributed.preparation.members import devices_of, member_of
from profiles.files.resolve import profile_from_options
from profiles.schema import Profile
from tests.distributed.muster_runs import Muster
from tests.lab.fixtures import MakeLightLab
from training.records.events import EvaluationEvent, StepEvent
from training.records.run_folder import RunFolder
from training.run.local_plan import plan_local_run
from training.workers.data_findings import check_data

JOB = """
from pathlib import Path
import torch
from torch import nn
from torch.utils.data import TensorDataset

def build(profile):
    rows = [[float(cell) for cell in line.split(",")] for line in Path(profile.data.dataset_path, "points.txt").open()]
    points = torch.tensor(rows)
    data = TensorDataset(points, points.sum(1, keepdim=True))
    return nn.Linear(2, 1), data, data, nn.functional.mse_loss
"""


def profile_of(**options: Any) -> Profile:
    given = {"task": "whisper", "model_path": "owner/name", "local_data": "true", **options}
    return profile_from_options("voices", given)


def test_what_is_at_a_path(tmp_path: Path) -> None:
    found = {"path": str(tmp_path), "problem": "is empty", "columns": []}
    assert inspect_path(str(tmp_path)) == found
    (tmp_path / ".hidden").touch()
    assert inspect_path(str(tmp_path)) == found
    (tmp_path / "train.csv").write_text("audio_path;text\n")
    assert inspect_path(str(tmp_path)) == {**found, "columns": ["audio_path", "text"]}
    (tmp_path / "train.csv").write_text('\ufeffaudio_path,"text"\na.wav,private words\n')
    assert inspect_path(str(tmp_path)) == {**found, "problem": "", "columns": ["audio_path", "text"]}
    (tmp_path / "train.csv").write_bytes(b"\xff\xfe\x00")
    assert inspect_path(str(tmp_path))["problem"] == "cannot be read (not a table in UTF-8)"
    lines = tmp_path / "lines.jsonl"
    lines.write_text('{"response": "b", "prompt": "a"}\n')
    assert inspect_path(str(lines))["columns"] == ["prompt", "response"]
    assert inspect_path("no/such/folder") == {
        "path": f"{Path.home()}/no/such/folder",
        "problem": "is not there",
        "columns": [],
    }


@pytest.mark.parametrize(
    ("columns", "level", "said"),
    [
        (("audio", "text"), "ok", "its data: /d; they stay there"),
        (("audio", "words"), "problem", "no column 'text'"),
        (("path", "text"), "warning", "its table has the columns path, text, that of b audio, text"),
        ((), "ok", "its data"),
    ],
)
def test_columns_are_those_of_the_others(columns: tuple[str, ...], level: str, said: str) -> None:
    all_columns = {("a", "/d"): columns, ("b", "/d"): ("audio", "text"), ("c", "/d"): ("audio", "text")}
    seen = LocalData(path="/d", problem="", columns=columns)
    found = judge_machine_data(profile_of(), ("a", "/d"), seen, all_columns)
    assert (found.level, bool(found.fix)) == (level, level != "ok") and said in found.seen


@pytest.mark.slow
def test_each_machine_is_asked_for_its_own_place(tmp_path: Path) -> None:
    (tmp_path / "voices").mkdir()
    (tmp_path / "voices" / "train.csv").write_text("audio,text\na.wav,b\n")
    machines = [Machine(name="a", data=str(tmp_path / "voices")), Machine(name="b", devices=("cuda:0", "cuda:1"))]
    profile = profile_of(dataset_path=str(tmp_path / "nothing"))
    names = [(machine, name) for machine in machines for name in devices_of(machine)]
    members = [member_of(machine, name, rank, profile) for rank, (machine, name) in enumerate(names)]
    links = [MachineLink(machine, lambda: HereConnection("x")) for machine in machines]
    found = machine_data_findings(profile, links, members)
    assert [one.level for one in found["a"]] == ["ok"] and str(tmp_path / "voices") in found["a"][0].seen
    (absent,) = found["b"]
    assert absent.level == "problem" and absent.seen == f"its data: {tmp_path}/nothing is not there"
    assert "'data' of this machine in the hosts file" in absent.fix


def test_a_data_set_that_stays_is_not_sent_nor_looked_for_here(tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "train.txt").write_text("private")
    options = {"task": "causal_lm", "dataset_path": str(tmp_path / "text")}
    stays, sent = (collect(plan_local_run(profile_of(**options, local_data=how), 2)) for how in ("true", "false"))
    assert "inputs/dataset" in sent.trees and sent.plan.profile.data.dataset_path == "inputs/dataset"
    assert sorted(stays.trees) == ["inputs/code"] and stays.plan.members[1].data == str(tmp_path / "text")
    check_data(profile_of(task="causal_lm", dataset_path=str(tmp_path / "elsewhere")))


def test_a_machine_of_the_hosts_file_names_its_data() -> None:
    text = json.dumps({"machines": ["a", {"name": "b", "data": "/Volumes/voices"}]})
    profile = profile_of(dataset_path="~/voices")
    members = [
        member_of(machine, machine.name, rank, profile) for rank, machine in enumerate(parse_hosts(text).machines)
    ]
    assert [(one.machine, one.data) for one in members] == [("a", "~/voices"), ("b", "/Volumes/voices")]


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_two_hosts_train_on_what_each_has(make_light_lab: MakeLightLab, tmp_path: Path) -> None:
    """One has its data where the profile says, the other elsewhere, and at first nothing."""
    lab = make_light_lab("a", "b")
    hosts = load_hosts(lab.hosts_file)
    mine, other = hosts.machines
    there = other.model_copy(update={"data": "elsewhere"})
    save_hosts(hosts.model_copy(update={"machines": (mine, there)}), lab.hosts_file)
    texts = {"a": "1.25,2.5\n" * 20, "b": "9.75,7.5\n" * 6}
    (lab["a"].files / "voices").mkdir()
    (lab["a"].files / "voices" / "points.txt").write_text(texts["a"])
    muster = Muster(tmp_path, lab.hosts_file)
    muster.job.write_text(JOB)
    options = ["--dataset", "~/voices", "--set", "local_data=true", "--epochs", "2"]
    refused = muster.run(*muster.train(*options))
    assert refused.returncode == 3 and "b: its data: " in refused.stderr and "elsewhere is not there" in refused.stderr
    assert not (tmp_path / "output").exists()
    (lab["b"].files / "elsewhere").mkdir()
    (lab["b"].files / "elsewhere" / "points.txt").write_text(texts["b"])
    done = muster.run(*muster.train(*options))
    assert done.returncode == 0, done.stderr
    assert "the data stay on each machine: only weights or gradients leave it" in done.stderr
    (folder,) = (tmp_path / "output").iterdir()
    events = list(RunFolder.open(folder).events())
    steps = [event for event in events if isinstance(event, StepEvent)]
    assert {event.member for event in steps} == {0, 1} and sum(event.samples for event in steps) >= 2 * 26
    assert {event.samples for event in events if isinstance(event, EvaluationEvent)} == {26}
    for name, elsewhere in (("a", lab["b"].files), ("b", lab["a"].files)):
        for place in (elsewhere, tmp_path):
            files = (path for path in place.rglob("*") if path.is_file())
            assert not [path for path in files if texts[name].encode() in path.read_bytes()]
