"""``launch`` on other machines: the script's folder travels, and what rank 0 writes comes back."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from distributed.hosts.file import save_hosts
from distributed.hosts.schema import Machine
from tests.distributed.muster_runs import Muster
from tests.lab.fixtures import MakeLab, MakeLightLab
from tests.lab.lab import Lab
from tests.waiting import until
from training.records.events import MachineEvent, MemberEvent
from training.records.run_folder import RunFolder
from training.run.processes import processes_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SCRIPT = """
import json, os, sys
import torch, torch.distributed as dist
import beside

print("begins in", sorted(os.listdir(".")), flush=True)
dist.init_process_group()
total = torch.ones(100_000) * (dist.get_rank() + 1)
dist.all_reduce(total)
open("text.txt", "a").write(beside.WORD)
names = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE"
found = {name: int(os.environ[name]) for name in names.split()}
os.makedirs("out", exist_ok=True)
json.dump([found, total[0].item(), dist.get_backend(), sys.argv[1:]], open(f"out/{dist.get_rank()}.json", "w"))
dist.barrier()
"""
MESSAGE = """
one = torch.ones(1)
dist.send(one, 1) if dist.get_rank() == 0 else dist.recv(one.zero_(), 0)
print("got", one.item(), flush=True)
"""
WAITS = """
import os, subprocess, sys, time, torch.distributed as dist
dist.init_process_group()
subprocess.Popen(["sleep", "1000"], start_new_session=True)
print("waits", flush=True)
while True:
    dist.barrier()
    time.sleep(0.05)
    if sys.argv[1:] == ["fail"] and dist.get_rank() == 1:
        raise ValueError("a bad sample")
"""


def job(folder: Path, text: str) -> str:
    (folder / "job" / "data").mkdir(parents=True)
    (folder / "job" / "train.py").write_text(text)
    (folder / "job" / "beside.py").write_text("WORD = 'word'")
    (folder / "job" / "text.txt").write_text("a ")
    (folder / "job" / "data" / "kept.txt").write_text("as it was")
    return str(folder / "job" / "train.py")


def only_run(folder: Path) -> RunFolder:
    (path,) = (folder / "output").iterdir()
    return RunFolder.open(path)


def test_a_script_runs_on_two_machines_and_its_files_come_back(make_light_lab: MakeLightLab, tmp_path: Path) -> None:
    """One of them is this machine."""
    lab = make_light_lab("a")
    here = Machine(name="me", address="localhost", python=sys.executable, project_path=str(tmp_path / "muster"))
    hosts = lab.hosts("a")
    save_hosts(hosts.model_copy(update={"machines": (*hosts.machines, here)}), lab.hosts_file)
    muster = Muster(tmp_path, lab.hosts_file)
    script = job(tmp_path, SCRIPT)
    words = ["--hosts", str(lab.hosts_file), "--nproc-per-machine", "2", "--", script, "--x"]
    done = muster.run("launch", *words)
    assert done.returncode == 0, done.stderr
    run = only_run(tmp_path)
    files = {path.relative_to(run.path / "files").as_posix(): path for path in (run.path / "files").rglob("*.*")}
    assert sorted(files) == ["out/0.json", "out/1.json", "text.txt"]
    found, total, backend, arguments = json.loads(files["out/1.json"].read_text())
    assert list(found.values()) == [1, 4, 1, 2, 0, 2]
    assert (total, backend, arguments) == (10, "muster", ["--x"])
    assert files["text.txt"].read_text() == "a wordword"
    assert (tmp_path / "job" / "text.txt").read_text() == "a "
    assert {log.stem for log in run.logs.glob("*.log")} >= {"a-0", "a-1", "me-0", "me-1"}
    assert re.search(r"^a-1: begins in .*'data', 'text.txt', 'train.py'", done.stdout, re.M)
    assert processes_of(run.metadata.run_id) == []
    assert not list(lab["a"].files.glob(".cache/muster/runs/*"))
    assert not list((tmp_path / "muster").glob("runs/*"))


def test_a_folder_with_too_much_is_refused_before_anything_is_asked(tmp_path: Path) -> None:
    muster = Muster(tmp_path, tmp_path / "hosts.json")
    (tmp_path / "hosts.json").write_text('{"machines": [{"name": "nowhere.invalid"}]}')
    script = job(tmp_path, SCRIPT)
    for number in range(2000):
        (tmp_path / "job" / "data" / f"{number}.txt").touch()
    refused = muster.run("launch", "--hosts", "hosts.json", "--", script)
    assert refused.returncode == 2
    assert "more than 2000 files" in refused.stderr and "nowhere" not in refused.stderr
    assert not (tmp_path / "output").exists()


def test_one_that_fails_is_told_with_its_traceback_and_its_machine(
    make_light_lab: MakeLightLab, tmp_path: Path
) -> None:
    lab = make_light_lab("a", "b")
    muster = Muster(tmp_path, lab.hosts_file)
    failed = muster.run("launch", "--hosts", str(lab.hosts_file), "--", job(tmp_path, WAITS), "fail")
    assert failed.returncode == 1
    lines = failed.stderr.splitlines()
    assert lines.index("Traceback (most recent call last):") < lines.index("error: b: ValueError: a bad sample")
    assert {"a: nothing left running", "b: nothing left running"} <= set(lines)


def waiting(folder: Path, hosts_file: Path) -> subprocess.Popen[str]:
    """Launch the script that waits, and return the command when it does on both machines."""
    process = Muster(folder, hosts_file).popen("launch", "--hosts", str(hosts_file), "--", job(folder, WAITS))
    until(lambda: list((folder / "output").glob("*/logs/b.log")))
    until(lambda: all("waits" in (only_run(folder).logs / f"{name}.log").read_text() for name in "ab"), 120)
    return process


def test_ctrl_c_ends_all(make_light_lab: MakeLightLab, tmp_path: Path) -> None:
    process = waiting(tmp_path, make_light_lab("a", "b").hosts_file)
    until(lambda: any(isinstance(event, MachineEvent) for event in only_run(tmp_path).events()))
    process.send_signal(signal.SIGINT)
    _, complained = process.communicate(timeout=120)
    assert process.returncode == 130, complained
    assert {"a: nothing left running", "b: nothing left running"} <= set(complained.splitlines())
    assert processes_of(only_run(tmp_path).metadata.run_id) == []


def test_nothing_is_left_where_what_watches_a_script_is_killed(make_light_lab: MakeLightLab, tmp_path: Path) -> None:
    process = waiting(tmp_path, make_light_lab("a", "b").hosts_file)
    run = only_run(tmp_path)
    started = (event for event in run.events() if isinstance(event, MemberEvent) and event.status == "started")
    os.kill(next(int(event.message.removeprefix("pid ")) for event in started if event.name == "b"), signal.SIGKILL)
    _, complained = process.communicate(timeout=120)
    assert process.returncode == 1, complained
    assert {"a: nothing left running", "b: nothing left running"} <= set(complained.splitlines())
    assert processes_of(run.metadata.run_id) == []


@pytest.fixture
def lab(make_lab: MakeLab) -> Lab:
    return make_lab("a", "b")


def left(lab: Lab) -> list[int]:
    return [pid for host in lab for pid in host.pids("script_start", "training.workers.script_worker", "agent.py")]


@pytest.mark.lab
def test_a_host_whose_cable_is_pulled_is_named_and_the_other_ends(lab: Lab, tmp_path: Path) -> None:
    process = waiting(tmp_path, lab.hosts_file)
    lab["b"].cut()
    _, complained = process.communicate(timeout=200)
    assert process.returncode == 1, complained
    said = only_run(tmp_path).metadata.error_message  # whoever notices first: its agent's lease, or the group
    assert said.startswith("b ended before its work was done") or "with rank 1 (b) is lost" in said, complained
    until(lambda: left(lab) == [], 120)


DDP = Path(__file__).parents[2] / "examples" / "launch" / "ddp.py"
AFTER_DDP = "import runpy\nrunpy.run_path('ddp.py', run_name='__main__')\n"


@pytest.mark.lab
def test_hosts_that_cannot_dial_one_another_meet_at_the_relay(lab: Lab, tmp_path: Path) -> None:
    """What knows nothing of us trains there first; trainers of others run on one machine in ``test_cli_launch.py``."""
    for one, other in (("a", "b"), ("b", "a")):
        lab[one].run(["ip", "route", "add", "blackhole", f"{lab[other].address}/32"], check=True)
    muster = Muster(tmp_path, lab.hosts_file)
    script = job(tmp_path, AFTER_DDP + SCRIPT + MESSAGE)
    shutil.copy(DDP, tmp_path / "job")
    done = muster.run("launch", "--hosts", str(lab.hosts_file), "--", script, "--steps", "5", "--out", "model.pt")
    assert done.returncode == 0, done.stderr + done.stdout
    assert "a: muster with 2 ranks: loss" in done.stdout
    assert "b: got 1.0" in done.stdout
    files = only_run(tmp_path).path / "files"
    assert (files / "model.pt").stat().st_size > 0
    found = json.loads((files / "out" / "0.json").read_text())
    assert found[1:3] == [3, "muster"]
    assert left(lab) == []


def test_the_interface_of_the_hosts_file_is_where_ranks_listen(make_light_lab: MakeLightLab, tmp_path: Path) -> None:
    lab = make_light_lab("a", "b")
    hosts = lab.hosts()
    machines = [one.model_copy(update={"interface": name}) for one, name in zip(hosts.machines, ("lo", "nothere0"))]
    save_hosts(hosts.model_copy(update={"machines": tuple(machines)}), lab.hosts_file)
    failed = Muster(tmp_path, lab.hosts_file).run("launch", "--hosts", str(lab.hosts_file), "--", job(tmp_path, SCRIPT))
    assert failed.returncode == 1
    assert "b: no address on interface 'nothere0' of the hosts file; this machine has: " in failed.stderr
