"""The wheel in a bare environment: the light core alone, without PyTorch and without the sources beside it."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.preloaded.python import python_itself

ROOT = Path(__file__).parents[2]
IMPORT_ALL = """
import importlib, pkgutil, sys
for room in ("app", "distributed", "muster", "speech.commands", "speech.inputs", "speech.report"):
    for module in pkgutil.walk_packages(importlib.import_module(room).__path__, room + "."):
        importlib.import_module(module.name)
print("torch" in sys.modules, "numpy" in sys.modules)
"""


def closure(names: list[str]) -> set[str]:
    """Return distributions and all that they need here."""
    seen: set[str] = set()
    while names:
        name = names.pop()
        if name not in seen:
            seen.add(name)
            wanted = map(Requirement, importlib.metadata.requires(name) or [])
            names += [one.name for one in wanted if one.marker is None or one.marker.evaluate({"extra": ""})]
    return seen


def core() -> list[str]:
    """Return the packages that the light core asks for on this system."""
    lines = map(Requirement, importlib.metadata.requires("muster-train") or [])
    return [one.name for one in lines if one.marker is None or one.marker.evaluate({"extra": ""})]


def size_of(name: str) -> int:
    """Return the bytes of an installed distribution, without what Python compiled of it."""
    files = (file.locate() for file in importlib.metadata.files(name) or () if file.suffix != ".pyc")
    return sum(Path(str(file)).stat().st_size for file in files)


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what an installation of the wheel has: its own files, and the packages of the core."""
    top = tmp_path_factory.mktemp("bare")
    sources = top / "sources"
    ignored = shutil.ignore_patterns("__pycache__", "saved")
    for folder in ("app", "distributed", "examples", "muster", "profiles", "speech", "training"):
        shutil.copytree(ROOT / folder, sources / folder, ignore=ignored)
    for file in (path for path in ROOT.iterdir() if path.is_file()):
        shutil.copy(file, sources)
    pip = [python_itself(), "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run(
        [*pip, "install", "--no-deps", "--no-build-isolation", "--target", top / "site", sources], check=True
    )
    for name in closure(core()):
        for file in importlib.metadata.files(name) or ():
            entry = file.parts[0]
            if entry != ".." and not (top / "site" / entry).exists():
                (top / "site" / entry).symlink_to(Path(str(importlib.metadata.distribution(name).locate_file(entry))))
    return top


def muster(bare: Path, *words: str, **asked: str) -> subprocess.CompletedProcess[str]:
    variables = {"PYTHONPATH": str(bare / "site"), "HOME": str(bare), "PATH": os.environ["PATH"], **asked}
    command = [python_itself(), "-S", *words]
    return subprocess.run(command, cwd=bare, env=variables, capture_output=True, text=True, check=False)


def test_the_core_stays_light() -> None:
    assert len(core()) <= 18, "each package more is one that everybody downloads before the first screen"
    assert sum(map(size_of, closure(core()))) <= 145e6


@pytest.mark.slow
def test_screens_and_machines_need_the_core_alone(bare: Path) -> None:
    done = muster(bare, "-c", IMPORT_ALL)
    assert (done.stdout.split(), done.stderr) == (["False", "False"], "")


@pytest.mark.slow
def test_profiles_and_examples_come_along(bare: Path) -> None:
    done = muster(bare, "-m", "muster", "profiles", "show", "demo-scratch")
    assert done.returncode == 0, done.stderr
    assert "muster/shared/examples/spoken_commands" in done.stdout


@pytest.mark.slow
def test_runs_lie_in_the_users_folder(bare: Path) -> None:
    told = muster(bare, "-m", "muster", "runs", "list").stderr
    assert str(bare / ".local/share/muster/runs" if sys.platform == "linux" else "muster/runs") in told
    assert "start one with: muster train PROFILE" in told


@pytest.mark.slow
def test_without_a_terminal_the_commands_of_the_installed_program_are_named(bare: Path) -> None:
    told = muster(bare, "-m", "muster").stderr
    assert "muster machines check --hosts FILE" in told
    assert ".py" not in told


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("chat", "no runs in"),
        ("model generate nothing Hi", "no run 'nothing'"),
        ("train no-such-profile", "there is no profile"),
        ("train demo --no-such-option 3", "No such option"),
    ],
)
def test_nothing_is_installed_for_a_command_that_would_fail(bare: Path, line: str, problem: str) -> None:
    done = muster(bare, "-m", "muster", *line.split(), "--json")
    assert done.returncode == 2
    assert problem in done.stdout + done.stderr
    assert "installing" not in done.stderr


@pytest.mark.slow
def test_without_a_terminal_commands_of_this_installation_are_named(bare: Path) -> None:
    told = muster(bare, "-m", "muster").stderr
    assert "muster machines discover" in told
    assert "cli_typer" not in told and "make " not in told


@pytest.mark.slow
@pytest.mark.parametrize(
    ("typed", "offered"),
    [("muster mach", "machines"), ("muster machines disc", "discover"), ("muster runs rep", "report")],
)
def test_a_shell_completes_commands(bare: Path, typed: str, offered: str) -> None:
    asked = {"_MUSTER_COMPLETE": "complete_bash", "COMP_WORDS": typed, "COMP_CWORD": str(typed.count(" "))}
    done = muster(bare, "-m", "muster", **asked)
    assert offered in done.stdout.split(), done.stderr


@pytest.mark.slow
def test_a_recorded_run_plays_to_its_end(bare: Path) -> None:
    done = muster(bare, "-m", "muster", "demo-run", "--speed", "1000")
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_a_foreign_package_of_one_of_our_names_is_named(bare: Path) -> None:
    stranger = bare / "site" / "distributed" / "py.typed"
    stranger.rename(bare / "gone")
    try:
        done = muster(bare, "-m", "muster", "--version")
    finally:
        (bare / "gone").rename(stranger)
    assert done.returncode == 2
    assert "another package has overwritten Muster's 'distributed'" in done.stderr
