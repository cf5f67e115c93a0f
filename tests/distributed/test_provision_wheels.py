"""Wheels for another machine than this one."""

from __future__ import annotations

import platform
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distributed.agent.environment_builder import CPU_INDEX
from distributed.preparation import downloads, wheels
from distributed.preparation.downloads import (
    hashed_for,
    is_like_here,
    locked_for,
    platforms,
    target_options,
)
from distributed.preparation.provision import training_recipe
from distributed.preparation.wheels import collect_wheels
from profiles.errors import BadInput
from profiles.installation import TOP

HERE = {
    "version": list(sys.version_info[:3]), "system": platform.system(), "machine": platform.machine(),
    "libc": list(platform.libc_ver()), "macos": platform.mac_ver()[0],
}  # fmt: skip
MAC = {"version": [3, 10, 2], "system": "Darwin", "machine": "arm64", "libc": ["", ""], "macos": "14.5"}
LOCK = """# comment
numpy==2.4.6; python_version >= "3.11"
numpy==2.2.6; python_version < "3.11"
nvidia==1.0; platform_system == "Linux"
"""


def test_pins_are_chosen_for_the_python_there() -> None:
    assert locked_for(LOCK, MAC) == ["numpy==2.2.6"]
    assert locked_for(LOCK, {**MAC, "version": [3, 12, 0], "system": "Linux"}) == ["numpy==2.4.6", "nvidia==1.0"]


@pytest.mark.slow
def test_only_what_the_requirements_need_in_the_end_is_taken() -> None:
    lock = (TOP / "constraints.txt").read_text()
    names = {line.partition("==")[0].lower() for line in locked_for(lock, MAC, training_recipe().requirements)}
    assert names >= {"torch", "numpy", "sympy", "cryptography", "pyarrow", "huggingface-hub", "python-dateutil"}
    assert not names & {"pytest", "mypy", "textual", "tensorboard", "wandb"}


def test_what_is_installed_by_hash_is_what_is_needed_there_and_all_but_torch() -> None:
    recipe = training_recipe()
    text = hashed_for(recipe.hashes, MAC, recipe.requirements)
    pins = re.findall(r"^([\w.-]+==\S+) \\\n    --hash=sha256:", text, re.MULTILINE)
    wanted = [pin for pin in locked_for(recipe.lock, MAC, recipe.requirements) if not pin.startswith("torch==")]
    assert len(wanted) > 30 and sorted(pins) == sorted(wanted)


def test_pip_takes_older_wheels_for_a_mac_too() -> None:
    from pip._internal.utils.compatibility_tags import get_supported

    taken = {tag.platform for tag in get_supported("310", platforms(MAC), "cp", ["cp310", "abi3", "none"])}
    assert {"macosx_14_0_arm64", "macosx_14_0_universal2", "macosx_11_0_arm64", "macosx_10_9_universal2"} <= taken


def test_the_platforms_of_linux() -> None:
    linux = {**MAC, "system": "Linux", "machine": "x86_64", "libc": ["glibc", "2.31"]}
    assert platforms(linux)[0] == "manylinux_2_31_x86_64" and "manylinux_2_28_x86_64" in platforms(linux)
    assert "manylinux_2_34_x86_64" not in platforms(linux)


@given(st.lists(st.text(max_size=8), max_size=3), st.text(max_size=8), st.sampled_from(["Linux", "Darwin"]))
def test_any_answer_gives_a_bounded_list(libc: list[str], macos: str, system: str) -> None:
    found = platforms({**MAC, "system": system, "libc": libc, "macos": macos})
    assert 0 < len(found) < 1100


def test_this_machine_is_like_itself_only() -> None:
    assert is_like_here(HERE) and not is_like_here({**HERE, "machine": "other"})
    assert "--python-version" in target_options(MAC)


@pytest.mark.slow
def test_a_package_that_is_not_to_be_had_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(BadInput, match="cannot be collected on this computer: .*has no muster-none==1 ") as refused:
        collect_wheels(["muster-none"], "muster-none==1", HERE, lambda line: None)  # pip calls that a conflict
    assert str(tmp_path / ".cache/muster/install.log") in refused.value.hint
    assert "ResolutionImpossible" in (tmp_path / ".cache/muster/install.log").read_text()


class Pip:
    """Stands in for pip: notes the packages and options of each call."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, list[str]]] = []

    def __call__(self, command: str, options: list[str], problem: str, see: Callable[[str], None]) -> None:
        self.calls.append((Path(options[options.index("-r") + 1]).read_text(), options))
        for line in self.calls[-1][0].splitlines():
            see(f"Collecting {line} (from -r requirements.txt (line 1))")

    @property
    def of_torch_index(self) -> list[str]:
        return [packages for packages, options in self.calls if CPU_INDEX in options]


@pytest.fixture
def pip(monkeypatch: pytest.MonkeyPatch) -> Pip:
    stand_in = Pip()
    monkeypatch.setattr(wheels, "run_pip", stand_in)
    return stand_in


@pytest.mark.parametrize(("target", "is_small", "said"), [
    ({}, True, False), ({"cuda": True}, False, False), ({"cuda": True, "machine": "other"}, True, True),
])  # fmt: skip
def test_the_build_of_torch_is_one_that_loads_there(
    target: dict[str, Any], is_small: bool, said: bool, pip: Pip
) -> None:
    told: list[str] = []
    collect_wheels(["torch>=2.6"], f"torch==2.13.0\n# {target}", {**HERE, "system": "Linux", **target}, told.append)
    assert pip.of_torch_index == (["torch==2.13.0"] if is_small else [])
    assert any("stays unused" in line for line in told) == said


@pytest.mark.slow
@pytest.mark.parametrize("target", [{}, {"machine": "other"}])
def test_each_package_is_asked_for_once_and_only_torch_at_its_own_index(target: dict[str, Any], pip: Pip) -> None:
    recipe, told = training_recipe(), list[str]()
    there = {**HERE, "system": "Linux", **target}
    collect_wheels(recipe.requirements, recipe.lock, there, told.append, recipe.hashes)
    pins = [line.split()[0] for packages, _ in pip.calls for line in packages.splitlines() if "==" in line]
    assert sorted(pins) == sorted(locked_for(recipe.lock, there, recipe.requirements))
    assert [packages.partition("==")[0] for packages in pip.of_torch_index] == ["torch"]
    assert all("--no-deps" in options for _, options in pip.calls)
    assert "--require-hashes" in next(options for packages, options in pip.calls if "sha256" in packages)
    assert any(line.startswith("collecting packages: ") and "(numpy" in line for line in told)
    assert max(getattr(line, "share", 0.0) for line in told) > 0.8


def test_lines_of_pip_are_seen_and_its_error_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python, seen = tmp_path / "python", list[str]()
    python.write_text("#!/bin/sh\necho 'Collecting numpy==2.4 (from x)'\necho '  Downloading numpy.whl (16 MB)'\n")
    python.chmod(0o755)
    monkeypatch.setattr(downloads, "python_with_pip", lambda: (str(python), True))
    downloads.run_pip("download", [], "no packages", seen.append)
    assert seen == ["Collecting numpy==2.4 (from x)", "Downloading numpy.whl (16 MB)"]
    python.write_text("#!/bin/sh\necho 'ERROR: no internet' >&2\nexit 1\n")
    with pytest.raises(BadInput, match="no packages: .*ERROR: no internet"):
        downloads.run_pip("download", [], "no packages")
