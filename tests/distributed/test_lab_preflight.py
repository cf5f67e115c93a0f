"""Machines that are not ready: one clear line each, the machine's name in it, exit code 3; 2 for the hosts file."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from distributed.hosts.file import save_hosts
from distributed.hosts.schema import Hosts, Machine
from tests.distributed.muster_runs import Muster
from tests.lab.lab import Lab
from tests.lab.spec import HostSpec

pytestmark = [pytest.mark.lab, pytest.mark.timeout(120)]

OTHER_TORCH = """#!/bin/sh
PYTHONPATH="$HOME/other" exec {python} "$@"
"""


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    specs = [HostSpec("good"), HostSpec("full", home_mb=3), HostSpec("closed", sshd=False)]
    specs.append(HostSpec("late", clock_offset=300.0))
    with Lab(*specs) as built:
        yield built


def train(lab: Lab, folder: Path, *machines: Machine) -> tuple[int, str]:
    """Return exit code and stderr of a training on these machines."""
    hosts_file = folder / "hosts.json"
    save_hosts(Hosts(machines=machines, ssh_config=str(lab.ssh_config)), hosts_file)
    muster = Muster(folder, hosts_file)
    done = muster.run(*muster.train("--max-steps", "2"))
    assert not (folder / "output").exists()
    assert "Traceback" not in done.stderr
    return done.returncode, done.stderr


def machine(lab: Lab, name: str, **fields: Any) -> Machine:
    given: dict[str, Any] = {"name": name, "address": lab[name].address, "python": sys.executable, **fields}
    return Machine(**given)


@pytest.mark.parametrize(
    ("name", "fields", "said"),
    [
        ("closed", {}, "error: closed: "),
        ("good", {"user": "nobody-here"}, "error: good: "),
        ("good", {"python": "/opt/none/bin/python3"}, "error: good: no Python there: /opt/none/bin/python3"),
        ("full", {}, "error: full: its disk is full: "),
        ("late", {}, r"error: late: its clock is [45] min ahead of this machine's"),  # the answer took the rest
    ],
)
def test_one_line_and_what_to_do(lab: Lab, tmp_path: Path, name: str, fields: dict[str, object], said: str) -> None:
    code, stderr = train(lab, tmp_path, machine(lab, name, **fields))
    assert code == 3
    first, *before, error, hint = stderr.strip().splitlines()
    assert re.match(said, error) and hint.startswith("hint: ")
    assert first.startswith("reading profile ") and all(line.startswith("looking for ") for line in before)


def test_two_entries_of_one_machine(lab: Lab, tmp_path: Path) -> None:
    twin = Machine(name="twin", address="good", python=sys.executable)
    code, stderr = train(lab, tmp_path, machine(lab, "good"), twin)
    assert code == 3
    assert "error: twin: is the same machine as good" in stderr


def test_different_versions_of_torch(lab: Lab, tmp_path: Path) -> None:
    package = lab["good"].files / "other" / "torch-1.0.0.dist-info"
    package.mkdir(parents=True, exist_ok=True)
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 1.0.0\n")
    python = lab["good"].files / "python3"
    python.write_text(OTHER_TORCH.replace("{python}", sys.executable))
    python.chmod(0o755)
    here = Machine(name="here", address="localhost", python=sys.executable, project_path=str(tmp_path / "muster"))
    code, stderr = train(lab, tmp_path, here, machine(lab, "good", python="~/python3"))
    assert code == 3
    assert "error: good: has torch 1.0.0, but here has 2." in stderr


def test_an_unknown_host_key_is_refused_without_a_person_and_taken_with_trust_new(lab: Lab, tmp_path: Path) -> None:
    known = lab.folder / "known_hosts"
    before = known.read_text()
    known.write_text("\n".join(line for line in before.splitlines() if not line.startswith("good")) + "\n")
    try:
        code, stderr = train(lab, tmp_path, machine(lab, "good"))
        assert code == 3 and "first contact" in stderr and "--trust-new" in stderr
        done = Muster(tmp_path, tmp_path / "hosts.json").run(
            "distributed-check", "--hosts", str(tmp_path / "hosts.json"), "--trust-new"
        )
        assert done.returncode == 0 and "SHA256:" in done.stderr
    finally:
        known.write_text(before)


def test_a_changed_host_key_is_refused_even_with_trust_new(lab: Lab, tmp_path: Path) -> None:
    known = lab.folder / "known_hosts"
    before = known.read_text()
    other = lab["full"].host_key
    known.write_text(before.replace(lab["good"].host_key, other))
    try:
        code, stderr = train(lab, tmp_path, machine(lab, "good"))
        assert code == 3 and "error: good: another machine answers" in stderr
        check = ("distributed-check", "--hosts", str(tmp_path / "hosts.json"), "--trust-new", "--json")
        done = Muster(tmp_path, tmp_path / "hosts.json").run(*check)
        assert done.returncode == 3
        assert json.loads(done.stdout)["machines"][0]["ready"] is False
    finally:
        known.write_text(before)


def test_a_missing_comma_in_the_hosts_file(lab: Lab, tmp_path: Path) -> None:
    hosts_file = tmp_path / "hosts.json"
    hosts_file.write_text('{"master": "a"\n "workers": ["b"]}')
    muster = Muster(tmp_path, hosts_file)
    done = muster.run(*muster.train())
    assert done.returncode == 2
    _, error, *_ = done.stderr.splitlines()
    assert error.startswith("error: ") and "hosts.json" in error
