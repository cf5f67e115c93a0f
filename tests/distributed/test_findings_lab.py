"""The whole check, against machines that answer."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from distributed.checks.examination import examine
from distributed.checks.findings import Finding
from distributed.hosts.file import save_hosts
from distributed.hosts.schema import Machine
from distributed.machine import link
from distributed.machine.link import MachineLink, Tell
from distributed.preparation import provision
from distributed.ssh.errors import SshError
from tests.distributed.muster_runs import Muster
from tests.lab.fixtures import MakeLightLab

ASTRAY = """import socket, sys
dial = socket.create_connection
socket.create_connection = lambda place, **more: dial((place[0], 9), **more)
if sys.argv[2] == "readhealth":
    print("torn {")
    sys.exit()
"""
"""Before a program that looks at a machine: its connections go to another port, what it says of itself is torn."""


def of(findings: list[Any], check: str) -> list[str]:
    return [finding["seen"] for finding in findings if finding["check"] == check]


@pytest.mark.slow
def test_machines_are_looked_at_side_by_side(make_light_lab: MakeLightLab, tmp_path: Path) -> None:
    names = ["a", "b"]
    lab = make_light_lab(*names)
    done = Muster(tmp_path, lab.hosts_file).run("distributed-check", "--hosts", str(lab.hosts_file), "--json")
    machines = json.loads(done.stdout)["machines"]
    assert [machine["name"] for machine in machines] == names
    for machine in machines:
        findings = machine["findings"]
        ways = sorted(of(findings, "ways"))
        others = [name for name in (*names, "this machine") if name != machine["name"]]
        assert ways == [f"reaches {name}" for name in others]
        assert any(seen.endswith("GFLOP/s") for seen in of(findings, "device"))
        assert {"arch", "python", "torch", "memory", "disk", "clock", "power", "sleep", "heat", "ports"} <= {
            finding["check"] for finding in findings
        }


@pytest.mark.slow
def test_this_machine_may_be_one_of_them(make_light_lab: MakeLightLab, tmp_path: Path) -> None:
    lab = make_light_lab("a")
    here = Machine(name="mine", address="localhost", python=sys.executable, project_path=str(tmp_path))
    hosts = lab.hosts().model_copy(update={"machines": (here, *lab.hosts().machines)})
    found = {one.name: [f.seen for f in one.findings if f.check == "ways"] for one in examine(hosts)}
    assert found == {"mine": ["reaches a"], "a": ["reaches mine"]}
    assert [path.name for path in tmp_path.iterdir()] == []  # a look writes nothing


@pytest.mark.slow
def test_a_closed_way_and_a_torn_answer_are_findings(
    make_light_lab: MakeLightLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab = make_light_lab("a", "b")
    source = link.program
    monkeypatch.setattr(link, "program", lambda module: ASTRAY.encode() + source(module))
    found = examine(lab.hosts())
    for one in found:
        assert not one.ready
        levels = {finding.seen: finding.level for finding in one.findings if finding.check in ("ways", "health")}
        assert levels[next(seen for seen in levels if "this machine" in seen)] == "problem"
        assert levels["its hardware could not be read: exit code 0"] == "warning"
        assert "warning" in [finding.level for finding in one.findings if finding.check == "ways"]


@pytest.mark.slow
def test_fix_gives_an_environment_and_tells_what_did_not_go(
    make_light_lab: MakeLightLab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from app.cli.main import main

    lab = make_light_lab("a")
    save_hosts(lab.hosts(python=""), lab.hosts_file)
    asked: list[tuple[str, bool]] = []

    def fails(link: MachineLink, say: Tell, offline_wheels: bool = False) -> str:
        asked.append((link.name, offline_wheels))
        say("collecting")
        raise SshError(link.name, "the disk is full", "free some space there")

    monkeypatch.setattr(provision, "provision", fails)
    assert main(["distributed-check", "--hosts", str(lab.hosts_file), "--offline-wheels", "--json"]) == 3
    out, err = capsys.readouterr()
    assert asked == [("a", True)] and "a: collecting" in err and "error: a: the disk is full" in err
    safe = [Finding(**finding) for finding in json.loads(out)["machines"][0]["findings"] if finding["safe"]]
    assert [finding.check for finding in safe] == ["ready"]
    assert f"machines check --hosts {lab.hosts_file} --fix installs" in safe[0].fix  # to be pasted as it is
