"""Which Python a machine is used with when the hosts file names none."""

from __future__ import annotations

import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from distributed.cleaning.clean import survey
from distributed.hosts.file import RUN_HOSTS, load_hosts, save_hosts
from distributed.hosts.schema import Hosts, Machine
from distributed.launcher import DistributedLauncher
from distributed.machine.link import HereConnection, MachineLink, link_to
from distributed.preparation import preflight, prepare
from distributed.preparation.prepare import updated_hosts
from distributed.preparation.provision import find_tools, training_recipe
from distributed.ssh.errors import NoKeyAccepted
from profiles.files.resolve import profile_from_options
from tests.distributed.muster_runs import REPOSITORY, Muster
from tests.lab.fixtures import MakeLightLab
from tests.lab.light import LightLab

KEY = """import sys; sys.path.insert(0, sys.argv[1])
from distributed.agent.environment_builder import key
print(key(sys.argv[2]))"""


@pytest.fixture
def lab(make_light_lab: MakeLightLab) -> LightLab:
    lab = make_light_lab("a")
    save_hosts(lab.hosts(python=""), lab.hosts_file)
    return lab


def give_environment(lab: LightLab) -> Path:
    """Put what a build leaves behind: a Python that has all packages, this one's."""
    hosts = lab.hosts(python="")
    with closing(link_to(hosts.machines[0], hosts)) as link:
        base = find_tools(link).python
    words = [base, "-c", KEY, str(REPOSITORY), training_recipe().digest]
    key = subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()
    python = lab["a"].files / ".cache" / "muster" / "envs" / key / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    return python


@pytest.mark.slow
def test_a_python_without_packages_is_named_with_the_command_that_gives_them(lab: LightLab) -> None:
    (one,) = preflight.check(lab.hosts(python=""))
    one.link.close()
    assert one.problem is not None and one.problem.message == "a: nothing is installed there yet"
    assert one.provisionable and "machines check --fix" in one.problem.hint


@pytest.mark.slow
def test_a_named_python_is_never_replaced(lab: LightLab) -> None:
    give_environment(lab)
    (one,) = preflight.check(lab.hosts(python=look_for_python(lab)))
    one.link.close()
    assert one.problem is not None and not one.provisionable and "-m pip install" in one.problem.hint


def look_for_python(lab: LightLab) -> str:
    hosts = lab.hosts(python="")
    with closing(link_to(hosts.machines[0], hosts)) as link:
        return find_tools(link).python


@pytest.mark.slow
def test_an_environment_that_lacks_a_package_is_not_made_again(lab: LightLab) -> None:
    base = look_for_python(lab)
    give_environment(lab).write_text(f'#!/bin/sh\nexec {base} -S "$@"\n')
    (one,) = preflight.check(lab.hosts(python=""))
    one.link.close()
    assert one.problem is not None and not one.provisionable
    assert "envs" in one.problem.message and "-m pip install" in one.problem.hint


@pytest.mark.slow
def test_the_launcher_takes_the_environment_and_writes_it_down(lab: LightLab, tmp_path: Path) -> None:
    python = give_environment(lab)
    options = {"task": "custom", "model_path": "a.b:c", "output_dir": str(tmp_path)}
    launcher = DistributedLauncher(lab.hosts(python=""), profile_from_options("p", options))
    plan = launcher.plan()
    try:
        folder = launcher._folder(plan, [], tmp_path)
    finally:
        assert launcher._standby is not None
        launcher._standby.dismiss()
    assert load_hosts(folder / RUN_HOSTS).machines[0].python == str(python)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_run_on_a_machine_without_packages_of_its_own(lab: LightLab, tmp_path: Path) -> None:
    give_environment(lab)
    muster = Muster(tmp_path, lab.hosts_file)
    done = muster.run(*muster.train("--max-steps", "2"))
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_only_machines_without_a_chosen_python_get_one(lab: LightLab) -> None:
    hosts = lab.hosts("a")
    link = MachineLink(hosts.machines[0], lambda: HereConnection("a"))
    assert updated_hosts(hosts, [link]) == hosts


def test_clean_knows_an_environment_in_a_project_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "work" / "envs" / ("ab" * 8) / "bin").mkdir(parents=True)
    (tmp_path / "work" / "envs" / ".lock").touch()
    found = survey(HereConnection("a"), "", ["~/work"])
    assert [Path(part.path).name for part in found.parts] == ["envs"] and found.left_alone == ()


class WithoutPython(MachineLink):
    """A machine that has none."""

    def probe(self, modules: object, dial: str = "") -> dict[str, object]:
        raise preflight.SshError(self.name, f"no Python there: {self.python}", "install one")


@pytest.mark.slow
def test_what_provisioning_needs_is_said_of_a_machine_without_python(tmp_path: Path) -> None:
    hosts = Hosts(machines=(Machine(name="bare", address="bare", project_path=str(tmp_path)),))
    (one,) = preflight.check(hosts, dial=lambda machine, *_: WithoutPython(machine, lambda: HereConnection("bare")))
    assert one.provisionable and one.problem is not None and one.problem.message == "bare: no Python there: python3"


def test_nothing_is_installed_for_a_run_that_cannot_begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def dial(machine: Machine, *_: object) -> MachineLink:
        return WithoutPython(machine, lambda: HereConnection("bare")) if machine.name == "bare" else shut(machine)

    def shut(machine: Machine) -> MachineLink:
        def refuse() -> HereConnection:
            raise NoKeyAccepted(machine.name, "none of our keys is accepted")

        return MachineLink(machine, refuse)

    monkeypatch.setattr(prepare, "provision_all", lambda *_: pytest.fail("installs"))
    machines = [Machine(name=name, address=name, project_path=str(tmp_path)) for name in ("bare", "shut")]
    with pytest.raises(preflight.NotReady) as caught:
        prepare.prepare(Hosts(machines=tuple(machines)), "", prepare.PrepareOptions(dial=dial))
    assert str(caught.value.message) == "shut: none of our keys is accepted"
