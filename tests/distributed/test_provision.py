"""Environments on machines with nothing but SSH and a Python; a recipe of one small package of our own."""

from __future__ import annotations

import hashlib
import json
import shutil
import signal
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from distributed.agent import environment_builder as builder
from distributed.agent.requests import BuildEnvironment, FindEnvironment, frame
from distributed.hosts.schema import Machine
from distributed.machine.link import HereConnection, MachineLink, link_to
from distributed.machine.packing import program
from distributed.preparation import downloads
from distributed.preparation import provision as provisioning
from distributed.preparation.code_sync import folder_tree
from distributed.preparation.downloads import hashed_for
from distributed.preparation.provision import Recipe, find_environment, find_tools, provision, training_recipe
from distributed.preparation.transfer import send_trees
from distributed.ssh.errors import SshError
from distributed.ssh.process import Completed
from profiles.errors import BadInput
from tests.lab.light import LightHost, LightLab
from tests.preloaded.python import python_itself

RECIPE = Recipe(("musterling",), "musterling==1.0\n")
NO_INDEX = "[global]\nindex-url = http://127.0.0.1:9/simple\nextra-index-url =\nfind-links =\nretries = 0\n"


@pytest.fixture(scope="module")
def lab() -> Iterator[LightLab]:
    with LightLab("a") as built:
        yield built


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one wheel."""
    folder = tmp_path_factory.mktemp("wheels")
    info = "musterling-1.0.dist-info"
    with zipfile.ZipFile(folder / "musterling-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("musterling.py", "here = True\n")
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: musterling\nVersion: 1.0\n")
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")
    return folder


@pytest.fixture(scope="module")
def host(lab: LightLab) -> LightHost:
    """A machine whose pip finds no index."""
    (lab["a"].files / ".config" / "pip").mkdir(parents=True)
    (lab["a"].files / ".config" / "pip" / "pip.conf").write_text(NO_INDEX)
    return lab["a"]


@pytest.fixture
def link(lab: LightLab, host: LightHost) -> Iterator[MachineLink]:
    hosts = lab.hosts("a", python="")
    with closing(link_to(hosts.machines[0], hosts)) as made:
        yield made


def envs(host: LightHost) -> list[str]:
    folder = host.files / ".cache" / "muster" / "envs"
    return sorted(path.name for path in folder.iterdir() if path.name != ".lock") if folder.exists() else []


@pytest.mark.slow
def test_without_internet_one_line_names_the_machine_and_the_fix(link: MachineLink, host: LightHost) -> None:
    with pytest.raises(SshError) as caught:
        provision(link, lambda line: None, RECIPE)
    assert caught.value.message.startswith("a: the package index cannot be reached")
    assert "--offline-wheels" in caught.value.hint
    assert envs(host) == [] and find_environment(link, RECIPE) == ""


def hashed(recipe: Recipe, content: bytes) -> Recipe:
    """Return the recipe with the hash of its one package's file."""
    digest = hashlib.sha256(content).hexdigest()
    return replace(recipe, hashes=f"musterling==1.0 \\\n    --hash=sha256:{digest}\n")


def no_uv(system: str, machine: str) -> Path:
    raise BadInput("uv cannot be downloaded here")


@pytest.mark.slow
def test_wheels_of_this_machine_build_it_and_a_second_time_is_instant(
    link: MachineLink, host: LightHost, wheels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    monkeypatch.setattr(provisioning, "uv_for", no_uv)
    before = {path for path in host.files.rglob("*") if ".cache" not in path.parts}
    said: list[str] = []
    recipe = hashed(RECIPE, next(wheels.iterdir()).read_bytes())
    python = provision(link, said.append, recipe, offline_wheels=True)
    done = link.connection().run([python, "-c", "import musterling, sys; print(musterling.here, sys.prefix)"])
    folder = Path(python).parents[1]
    assert done.stdout.decode().split() == ["True", str(folder)]
    assert folder.parent == host.files / ".cache" / "muster" / "envs" and envs(host) == [folder.name]
    assert {path for path in host.files.rglob("*") if ".cache" not in path.parts} == before
    assert [path.name for path in (host.files / ".cache").iterdir()] == ["muster"]
    assert "2/3 sending 1 package, what is missing there" in said
    assert any(line.startswith("3/3 making an environment") for line in said)
    assert any("unpacking" in line for line in said), "pip does it where uv cannot be sent"

    again: list[str] = []
    assert provision(link, again.append, recipe) == python == find_environment(link, recipe)
    assert again == []  # nothing was made or installed


NO_ENSUREPIP = """#!/bin/sh
case "$*" in *without-pip*) ;; "-m venv "*) exit 1 ;; esac
exec THIS_ONE "$@"
"""
"""Stands in for a Python as Debian has it without python3-venv; its own pip fills the environment."""


@pytest.mark.slow
def test_a_package_with_another_hash_is_refused(wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = tmp_path / "python"
    python.write_text(NO_ENSUREPIP.replace("THIS_ONE", python_itself()))
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    recipe = hashed(RECIPE, b"another file")
    lines = hashed_for(recipe.hashes, builder.find(tmp_path, FindEnvironment(recipe.digest)), recipe.requirements)
    order = BuildEnvironment(recipe.digest, recipe.requirements, recipe.lock, lines, "", str(wheels))
    reply = builder.build(tmp_path, order)
    assert "musterling==1.0 differs from the file that was tested" in reply["problem"] and reply["offline"]
    assert "DO NOT MATCH THE HASHES" in Path(reply["log"]).read_text()


@pytest.mark.slow
def test_another_lock_is_another_environment(link: MachineLink) -> None:
    assert find_environment(link, Recipe(RECIPE.requirements, "musterling==1.1\n")) == ""


def test_the_usual_recipe_is_what_muster_asks_for_in_tested_versions() -> None:
    recipe = training_recipe()
    assert any(line.startswith("torch") for line in recipe.requirements)
    assert not any("extra" in line for line in recipe.requirements)
    assert not any(line.startswith("textual") for line in recipe.requirements), "nothing draws there"
    assert "\ntorch==" in recipe.lock


class Bare(HereConnection):
    """A machine on which nothing is found."""

    def run(self, argv: Sequence[str], **_: object) -> Completed:
        return Completed(1, b"", b"python3: not found")


def test_a_machine_with_no_python_at_all() -> None:
    bare = MachineLink(Machine(name="bare"), lambda: Bare("bare"))
    assert find_tools(bare).python == ""
    with pytest.raises(SshError, match="bare: no Python 3.10 or newer there, and none to install: python3") as caught:
        provision(bare, lambda line: None, RECIPE)
    assert "astral.sh/uv" in caught.value.hint


UV = """#!/bin/sh
[ "$1 $2" = "python install" ] || exit 1
mkdir -p "$UV_PYTHON_INSTALL_DIR/cpython-$3-stand-in/bin"
ln -s THIS_ONE "$UV_PYTHON_INSTALL_DIR/cpython-$3-stand-in/bin/python$3"
"""
"""Stands in for the program: the Python that it gets is this one."""


class NoPython(HereConnection):
    """A machine with the usual tools of a shell, and no Python anywhere."""

    def run(self, argv: Sequence[str], **options: Any) -> Completed:
        usual = "/usr/local/bin:/opt/homebrew/bin:$HOME/.local/bin:$HOME/.cargo/bin:"
        return super().run([word.replace(usual, "") for word in argv], **options)


@pytest.mark.slow
def test_a_machine_with_no_python_at_all_gets_uv_and_a_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tools").mkdir()
    for tool in ("sh", "mkdir", "rm", "ln", "uname"):
        (tmp_path / "tools" / tool).symlink_to(str(shutil.which(tool)))
    (tmp_path / "uv").write_text(UV.replace("THIS_ONE", sys.executable))
    monkeypatch.setenv("PATH", str(tmp_path / "tools"))
    monkeypatch.setattr(downloads, "local_uv", lambda: tmp_path / "uv")
    monkeypatch.setattr(provisioning, "_build", lambda link, base, *_: f"{base.python} by {base.uv}")
    said: list[str] = []
    with closing(MachineLink(Machine(name="a", project_path=str(tmp_path / "far")), lambda: NoPython("a"))) as link:
        assert find_tools(link).python == find_tools(link).uv == ""
        built = provision(link, said.append, RECIPE)
    envs = tmp_path / "far" / "envs"
    version = f"3.{sys.version_info.minor}"
    assert built == f"{envs}/.python/cpython-{version}-stand-in/bin/python{version} by {envs}/.uv/bin/uv"
    assert said == ["there is no Python 3.10 or newer: getting one with uv", "sending the installer"]
    assert not (envs / ".scratch.part").exists()


def test_a_system_without_a_uv_is_named() -> None:
    with pytest.raises(BadInput, match="no uv for Plan9"):
        downloads.uv_for("Plan9", "mips")


def test_a_python_of_our_own_is_found_first(tmp_path: Path) -> None:
    own = tmp_path / "envs" / ".python" / "cpython-3-here" / "bin" / f"python3.{sys.version_info.minor}"
    own.parent.mkdir(parents=True)
    own.symlink_to(sys.executable)
    with closing(MachineLink(Machine(name="a", project_path=str(tmp_path)), lambda: HereConnection("a"))) as link:
        assert find_tools(link).python == str(own)


# --------------------------------------------------------------------------------------------- the builder, on its own


ORDER = BuildEnvironment(hashlib.sha256(b"r").hexdigest(), [], "", "", uv="", wheels="")


STAND_IN = f"""#!/bin/sh
[ "$1" = venv ] || exit 0
mkdir -p "$4/bin" && ln -s {shutil.which("true")} "$4/bin/python"
"""
"""In place of uv: the one file that matters."""


@pytest.mark.parametrize(("gpu", "needed"), [(False, "1.6 GB"), (True, "5.6 GB")])
def test_a_disk_without_room_for_the_packages_is_named_before_they_are_fetched(
    gpu: bool, needed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(builder, "has_cuda", lambda: gpu)
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=1_200_000_000))
    reply = builder.build(tmp_path, replace(ORDER, requirements=["torch>=2.6"]))
    assert reply["problem"] == f"its packages take {needed}, and 1.2 GB are free at {tmp_path / 'envs'}"


def test_a_torn_build_is_never_used(tmp_path: Path) -> None:
    uv = tmp_path / "uv"
    uv.write_text(f"{STAND_IN}kill -9 $PPID\n")  # nothing is tidied up
    uv.chmod(0o755)
    words, order = [python_itself(), "-c", program().decode(), str(tmp_path)], replace(ORDER, uv=str(uv))
    killed = subprocess.run(words, input=frame(order), capture_output=True, timeout=60)
    assert killed.returncode == -signal.SIGKILL
    assert len(list((tmp_path / "envs").glob(".*.part"))) == 2
    assert builder.ready(tmp_path, ORDER.recipe) == ""

    uv.write_text(STAND_IN)
    assert builder.build(tmp_path, order) == {"python": builder.ready(tmp_path, ORDER.recipe)}
    assert builder.ready(tmp_path, ORDER.recipe) != ""
    assert list((tmp_path / "envs").glob(".*.part")) == []


def test_an_environment_whose_python_is_gone_is_not_ready(tmp_path: Path) -> None:
    python = tmp_path / "envs" / builder.key("r") / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.symlink_to("/gone/python3")
    assert builder.ready(tmp_path, "r") == ""


def test_an_installation_says_package_size_and_share() -> None:
    headway = builder.InstallLog(4)
    assert headway.describe("Collecting torch==2.13.0 (from -r hashed.txt (line 1))") == ""
    assert headway.describe("Downloading torch-2.13.0-cp311-manylinux.whl (190.5 MB)").startswith(
        "downloading torch (pack"
    )
    headway.describe("Collecting soxr==1.0")
    line = headway.describe("Downloading https://files/soxr-1.0-cp311.whl (500 kB)")
    assert line == "downloading soxr (package 2 of 4, 191 MB in all)" and 0.4 < headway.share < 0.5
    assert headway.describe("Installing collected packages: torch, soxr") == "unpacking what was downloaded"
    assert headway.describe("Using cached pip") == ""


def test_a_long_download_without_output_says_how_much_has_arrived(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log, told = builder.InstallLog(4), threading.Event()
    log.describe("Downloading torch-2.13.0-cp311-cp311-manylinux_2_28_x86_64.whl (900 MB)")
    growth = builder.DiskGrowth(log, (tmp_path,))
    assert growth() == ""
    (tmp_path / "part").write_bytes(bytes(2_000_000))

    def text() -> str:
        told.set()
        return growth()

    with builder.heartbeat(text, every=0.001):
        assert told.wait(60)
    (line,) = map(json.loads, capsys.readouterr().out.splitlines())
    assert line["say"] == "downloading torch (900 MB in all); 2.0 MB are on the disk"


def test_an_environment_that_is_being_made_says_how_much_of_it_is_there(tmp_path: Path) -> None:
    empty = builder.EmptyEnvironment("making an environment", tmp_path)
    (tmp_path / "pip").write_bytes(bytes(11_500_000))
    assert empty() == "making an environment: 11.5 MB of about 23.0 MB" and empty.share() == pytest.approx(0.015)
    (tmp_path / "more").write_bytes(bytes(20_000_000))
    assert empty() and empty.share() == 0.03
    log = builder.InstallLog(100)
    log.describe("Collecting torch==2.13.0")
    assert 0.03 < log.share < 0.05  # it goes on from there


def test_uv_names_sizes_and_no_share() -> None:
    headway = builder.InstallLog(80)
    assert headway.describe("Downloading torch (10.0MiB)") == "downloading torch (10.5 MB in all)"
    assert headway.share == 0.0 and headway.describe("Resolved 80 packages in 1.2s") == "installing 80 packages"
    assert headway.describe("Installed 80 packages in 255ms") == "Installed 80 packages"


@pytest.mark.slow
def test_what_is_there_is_not_sent_again(link: MachineLink, wheels: Path) -> None:
    link.python = find_tools(link).python
    link.put_agent()
    send_trees(link, [folder_tree(wheels)])
    assert send_trees(link, [folder_tree(wheels)]) == 0
