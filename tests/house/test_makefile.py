from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.markers import Marker
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
TARGETS = {
    "setup",
    "demo",
    "site",
    "wizard",
    "test",
    "test-fast",
    "conformance",
    "lint",
    "format",
    "lock",
    "lab",
    "lab-test",
    "bench",
    "clean",
    "help",
}

ALONE = "-m pytest -m alone"

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="needs make")


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A folder with the Makefile and a .venv whose programs write down what they are asked."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt", "requirements.lock", "requirements-train.lock"):
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    folder = tmp_path / ".venv" / "bin"
    folder.mkdir(parents=True)
    for name in ("python", "muster"):
        (folder / name).write_text('#!/bin/sh\necho "$@" >>asked\n')
        (folder / name).chmod(0o755)
    return tmp_path


def _make(folder: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    # without the flags of a make that runs these tests
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("MAKE", "MFLAGS", "PYTHON"))}
    environment |= variables
    command = ["make", *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60, check=False)


def _asked(folder: Path) -> list[str]:
    log = folder / "asked"
    lines = log.read_text().splitlines() if log.exists() else []
    log.unlink(missing_ok=True)
    return lines


def test_help_names_every_target() -> None:
    listed = re.findall(r"^make (\S+)", _make(ROOT).stdout, re.MULTILINE)
    assert set(listed) == TARGETS


def test_all_but_torch_is_installed_by_hash_and_nothing_else_is_fetched(clone: Path) -> None:
    assert _make(clone, "setup").returncode == 0
    hashed, torch, own = _asked(clone)
    assert hashed.endswith("--no-deps --require-hashes --only-binary :all: -r requirements.lock")
    assert "-c constraints.txt" in torch and "torch==2.13.0" in torch
    assert own.endswith("--no-deps --no-build-isolation -e .")


@pytest.mark.skipif(sys.platform != "linux", reason="a Mac has one build of PyTorch")
@pytest.mark.parametrize(
    ("has_card", "lacking", "last"),
    [
        (True, "", "constraints.txt torch==2.13.0"),
        (False, "", "--quiet torch==2.13.0+cpu"),
        (False, "+cpu", "--index-url https://download.pytorch.org/whl/cpu torch==2.13.0"),
        (False, "cpu", "constraints.txt torch==2.13.0"),
    ],
)
def test_pytorch_is_for_the_card_that_is_there(clone: Path, has_card: bool, lacking: str, last: str) -> None:
    (clone / ".venv" / "bin" / "python").write_text(
        f'#!/bin/sh\necho "$@" >>asked\ncase "$*" in *"{lacking or "nothing"}"*) exit 1;; esac\n'
    )
    tools = clone / "tools"
    tools.mkdir()
    for name in ("sh", "sed", "cat", "cksum", "tr", "uname", "rm", "touch", "make"):
        (tools / name).symlink_to(str(shutil.which(name)))
    if has_card:
        (tools / "nvidia-smi").symlink_to("/bin/true")
    assert _make(clone, "setup", PATH=str(tools)).returncode == 0
    assert _asked(clone)[-2].endswith(last)


def test_the_demo_installs_no_tools_of_developers_and_the_tests_do_afterwards(clone: Path) -> None:
    _make(clone, "demo")
    hashed, *others = _asked(clone)
    assert hashed.endswith("--require-hashes --only-binary :all: -r requirements-train.lock") and len(others) == 3
    _make(clone, "test")
    assert _asked(clone)[0].endswith("-r requirements.lock")
    _make(clone, "demo")
    assert _asked(clone) == ["train demo --local 2 --strategy diloco"]


def test_the_lock_of_the_demo_is_a_part_of_the_other_one() -> None:
    part, whole = (
        {re.sub(r" ; [^\\]*", " ", package) for package in re.split(r"\n(?=\w)", (ROOT / name).read_text().strip())[1:]}
        for name in ("requirements-train.lock", "requirements.lock")
    )
    assert part < whole


def _pins(name: str) -> dict[tuple[str, str], str]:
    """Markers by package and version."""
    found = re.findall(r"^([\w.-]+)==([^\s;]+) *;? *([^\\\n]*)", (ROOT / name).read_text(), re.MULTILINE)
    return {(canonicalize_name(package), version): marker.strip() for package, version, marker in found}


def test_the_lock_has_the_versions_that_are_pinned() -> None:
    pinned, locked = _pins("constraints.txt"), _pins("requirements.lock")
    site = "deepmerge ghp-import griffelib mergedeep mkdocs mkdocs-autorefs mkdocs-get-deps mkdocstrings"
    site += " mkdocstrings-python pymdown-extensions pyyaml-env-tag watchdog zensical"
    extras = "cattrs coremltools flatbuffers google-cloud-bigquery ml-dtypes onnx onnx-ir onnxruntime onnxscript pyaml"
    outside = {*extras.split(), *site.split(), "bitsandbytes", "sounddevice", "torch", "wandb"}
    assert {package for package, _ in pinned.keys() - locked.keys()} == outside
    for other in locked.keys() - pinned.keys():
        assert not Marker(locked[other]).evaluate()  # of systems that are not ours


def test_the_lock_is_hashes_of_packages_and_names_no_place() -> None:
    shape = re.compile(r"# |    --hash=sha256:[0-9a-f]{64}( \\)?$|[\w.-]+==\S+( ; [^\\]+)? \\$")
    assert [line for line in (ROOT / "requirements.lock").read_text().splitlines() if not shape.match(line)] == []


def test_the_second_set_up_has_nothing_to_do(clone: Path) -> None:
    _make(clone, "setup")
    _asked(clone)
    os.utime(clone / "pyproject.toml", (1, 1))
    os.utime(clone / "constraints.txt")
    assert _make(clone, "setup").returncode == 0
    assert _asked(clone) == []


def test_other_pins_are_installed(clone: Path) -> None:
    _make(clone, "setup")
    _asked(clone)
    (clone / "constraints.txt").write_text("torch==9.9\n")
    _make(clone, "setup")
    assert "torch==9.9" in _asked(clone)[1]


def test_a_failed_set_up_is_tried_again(clone: Path) -> None:
    (clone / ".venv" / "bin" / "python").write_text("#!/bin/sh\nexit 1\n")
    assert _make(clone, "setup").returncode != 0
    assert not list((clone / ".venv").glob(".setup*"))


@pytest.mark.parametrize(
    ("target", "commands"),
    [
        ("demo", ["train demo --local 2 --strategy diloco"]),
        ("wizard", ["wizard"]),
        ("test", ["-m pytest -n auto --dist worksteal -m not alone", ALONE]),
        ("test-fast", ["-m pytest -n auto -m not slow and not lab"]),
        ("conformance", ["-m pytest -q tests/exchange/conformance.py"]),
        ("lab-test", ["-m pytest -n auto --dist worksteal -m lab and not alone", ALONE]),
    ],
)
def test_a_target_sets_up_and_then_runs(target: str, commands: list[str], clone: Path) -> None:
    assert _make(clone, target).returncode == 0
    assert _asked(clone)[3:] == commands  # after the three of the set-up


def test_a_set_up_ends_with_what_comes_next(clone: Path) -> None:
    assert _make(clone, "setup").stdout.splitlines()[-1] == "Done. Next: .venv/bin/muster opens the guided set-up"


def test_bench_runs_every_script_that_is_one(clone: Path) -> None:
    (clone / "benchmarks").mkdir()
    (clone / "benchmarks" / "speed.py").write_text('if __name__ == "__main__":\n    pass\n')
    (clone / "benchmarks" / "helpers.py").write_text("x = 1\n")
    assert _make(clone, "bench").returncode == 0
    assert _asked(clone)[3:] == ["benchmarks/speed.py"]


def test_a_python_that_is_too_old_is_one_clear_line(clone: Path) -> None:
    shutil.rmtree(clone / ".venv")
    old = clone / "old"
    old.write_text("#!/bin/sh\nexit 1\n")
    old.chmod(0o755)
    done = _make(clone, "setup", f"PYTHON={old}")
    assert done.returncode == 2
    assert done.stderr.splitlines()[0].startswith(f"No Python 3.10 or newer among: {old}.")
    assert not (clone / ".venv").exists()


def test_ci_runs_what_a_developer_types() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert subprocess.run(["bash", "-n", script], check=False).returncode == 0
    assert re.findall(r"^make (\S+)", script.read_text(), re.MULTILINE) == [
        "setup",
        "lint",
        "site",
        "test",
        "conformance",
    ]
