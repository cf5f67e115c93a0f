"""Downloads on this machine for another: packages where it has no internet, ``uv`` where it has no Python."""

from __future__ import annotations

import importlib.metadata
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from distributed.agent.environment_builder import PIP_PATIENCE, write_log
from distributed.agent.install_failures import explain
from distributed.machine.link import CACHE
from profiles.errors import BadInput
from profiles.installation import training_python

_OLDEST_GLIBC, _OLDEST_MACOS = 17, 11
_UV_TAGS = {
    "Linux": ("manylinux_2_17_{0}", "manylinux2014_{0}", "musllinux_1_1_{0}"),
    "Darwin": ("macosx_11_0_{0}", "macosx_10_12_{0}"),
}
PINNED_UV = Path(__file__).with_name("uv.txt")
"""Requirements file with the pinned version of uv and the hashes of its wheels."""
_fetched: dict[str, tempfile.TemporaryDirectory[str]] = {}
"""Temporary folders of this process by cache key: machines of the same kind share one download."""
_fetching = threading.Lock()


def fetched_once(cache_key: str, fill: Callable[[Path], None]) -> Path:
    """Return a temporary folder that is filled on first use and removed when this process ends."""
    with _fetching:
        if cache_key not in _fetched:
            folder = tempfile.TemporaryDirectory(prefix="muster-fetched-")
            try:
                fill(Path(folder.name))
            except BaseException:
                folder.cleanup()
                raise
            _fetched[cache_key] = folder
        return Path(_fetched[cache_key].name)


def run_pip(command: str, options: Sequence[str], problem: str, see: Callable[[str], None] = lambda line: None) -> None:
    """Download wheels with pip.

    Args:
        see: told each line that pip prints.

    Raises:
        BadInput: they cannot be downloaded here.
    """
    argv = [python_with_pip()[0], "-m", "pip", command, "--progress-bar=off", "--disable-pip-version-check"]
    lines: list[str] = []
    with subprocess.Popen(
        [*argv, *PIP_PATIENCE, *options], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as pip:
        for line in map(str.strip, pip.stdout or ()):
            lines.append(line)
            see(line)
    if pip.returncode != 0:
        failure = explain(lines)
        log = write_log(Path(CACHE).expanduser(), lines)
        fixes = [failure.fix or "is this computer on the internet? pip config list shows the index that is asked"]
        fixes += [f"all that pip wrote: {log}"] if log else []
        raise BadInput(f"{problem}: {failure.problem}", "; ".join(fixes))


@lru_cache
def python_with_pip() -> tuple[str, bool]:
    """Return a local Python with pip, and whether it has our version: an environment made by uv has no pip.

    Raises:
        BadInput: there is none.
    """
    program = "import sys, pip; print(sys.version_info[:2])"
    candidates = (shutil.which(name) for name in (f"python3.{sys.version_info.minor}", "python3"))
    for python in dict.fromkeys(filter(None, (sys.executable, training_python(), *candidates))):
        done = subprocess.run([python, "-c", program], capture_output=True, text=True)
        if done.returncode == 0:
            return python, done.stdout.strip() == str(sys.version_info[:2])
    raise BadInput(
        "no Python here has pip", "install it: sudo apt install python3-pip, or on a Mac: brew install python"
    )


def is_like_here(target: Mapping[str, Any]) -> bool:
    """Whether wheels for this machine run on the target."""
    has_same_version = tuple(target["version"][:2]) == sys.version_info[:2]
    return has_same_version and (target["system"], target["machine"]) == (platform.system(), platform.machine())


def locked_for(lock: str, target: Mapping[str, Any], requirements: Sequence[str] = ()) -> list[str]:
    """Return the pins of a lock file that apply to the Python of another machine.

    pip evaluates markers for the Python it runs on, so they are evaluated here.

    Args:
        requirements: only pins that these depend on, as far as this machine's packages tell; none: all pins.
    """
    lines = (line for line in lock.splitlines() if line.strip() and not line.startswith("#"))
    return [pin for line in lines if (pin := _applicable_pin(line, target, requirements))]


def hashed_for(hashes: str, target: Mapping[str, Any], requirements: Sequence[str]) -> str:
    """Return the entries of a file of hashed pins that some requirements need on another machine.

    Dependencies that this machine does not know of are left out, and so is torch, whose build is chosen there.
    """
    entries = []
    for entry in re.findall(r"^[\w.-]+==.*(?:\n .*)*", hashes, re.MULTILINE):
        head, *files = entry.splitlines()
        if requirements and (pin := _applicable_pin(head.rstrip(" \\"), target, requirements)):
            entries.append("\n".join([f"{pin} \\", *files]))
    return "\n".join(entries)


def _applicable_pin(line: str, target: Mapping[str, Any], requirements: Sequence[str]) -> str:
    """Return a pin without its marker; empty where it does not apply there, or none of the requirements needs it."""
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    pin, facts = Requirement(line), _marker_environment(target)
    applies = pin.marker is None or pin.marker.evaluate(facts)
    is_needed = not requirements or canonicalize_name(pin.name) in _needed(tuple(requirements), **facts)
    return f"{pin.name}{pin.specifier}" if applies and is_needed else ""


def knows_dependencies(requirements: Sequence[str], target: Mapping[str, Any]) -> bool:
    """Whether all that these need on another machine is installed here, so that nothing is missing in a list of it."""
    return all(_distribution(name) is not None for name in _needed(tuple(requirements), **_marker_environment(target)))


@lru_cache
def _needed(requirements: tuple[str, ...], **facts: str) -> set[str]:
    """Return the names of packages and of all their dependencies there."""
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    seen: set[tuple[str, str]] = set()
    pending = [Requirement(line) for line in requirements]
    while pending:
        requirement = pending.pop()
        for extra in {"", *requirement.extras}:
            if (requirement.name, extra) in seen:
                continue
            seen.add((requirement.name, extra))
            package = _distribution(requirement.name)
            dependencies = [Requirement(line) for line in (package.requires if package else None) or ()]
            environment = {**facts, "extra": extra}
            pending += [d for d in dependencies if d.marker is None or d.marker.evaluate(environment)]
    return {canonicalize_name(name) for name, _ in seen}


def _distribution(name: str) -> importlib.metadata.Distribution | None:
    """Return a package that is installed in this Python or the training one."""
    training_prefix = Path(training_python() or sys.executable).parent.parent
    for paths in (sys.path, list(map(str, training_prefix.glob("lib/python*/site-packages")))):
        for distribution in importlib.metadata.Distribution.discover(name=name, path=paths):
            return distribution
    return None


def _marker_environment(target: Mapping[str, Any]) -> dict[str, str]:
    """Return the values of environment markers on another machine."""
    major, minor, micro = target["version"]
    return {
        "python_version": f"{major}.{minor}",
        "python_full_version": f"{major}.{minor}.{micro}",
        "platform_system": str(target["system"]),
        "sys_platform": str(target["system"]).lower(),
        "platform_machine": str(target["machine"]),
    }


def target_options(target: Mapping[str, Any]) -> list[str]:
    """Return pip's options for the wheels of a Python on another machine."""
    major, minor, _ = target["version"]
    options = ["--implementation", "cp", "--python-version", f"{major}.{minor}", "--abi", f"cp{major}{minor}"]
    options += ["--abi", "abi3", "--abi", "none"]
    return [*options, *(word for name in platforms(target) for word in ("--platform", name))]


def platforms(target: Mapping[str, Any]) -> list[str]:
    """Return the platform tags of wheels that run on a machine, newest first; pip adds the older ones of a Mac."""
    machine = str(target["machine"])
    if target["system"] == "Darwin":
        match = re.match(r"[1-9][0-9](?!\d)", str(target["macos"]))
        return [f"macosx_{max(int(match[0]) if match else 0, _OLDEST_MACOS)}_0_{machine}"]
    match = re.fullmatch(r"glibc 2\.([0-9]{1,3})[\d.]*", " ".join(map(str, target["libc"])))
    newest = int(match[1]) if match else _OLDEST_GLIBC
    tags = [f"manylinux_2_{minor}_{machine}" for minor in range(newest, _OLDEST_GLIBC - 1, -1)]
    return [*tags, f"manylinux2014_{machine}", f"linux_{machine}"]


# ------------------------------------------------------------------------------------------------------------------ uv


def uv_for(system: str, machine: str) -> Path:
    """Return a ``uv`` that runs on a system and processor, as ``uname -sm`` names them.

    Raises:
        BadInput: there is none for it, or it cannot be downloaded here.
    """
    local = local_uv()
    if local is not None and (system, machine) == (platform.system(), platform.machine()):
        return local
    tags = [tag.format(machine) for tag in _UV_TAGS.get(system, ())]
    if not tags:
        raise BadInput(f"there is no uv for {system} on {machine}", "install Python 3.10 or newer there")

    def fill(folder: Path) -> None:
        options = ["--no-deps", "--require-hashes", "--only-binary=:all:", "-r", str(PINNED_UV)]
        options += [word for tag in tags for word in ("--platform", tag)]
        run_pip("install", [*options, "--target", str(folder)], "uv cannot be downloaded here")

    return fetched_once(f"uv for {system} {machine}", fill) / "bin" / "uv"


def local_uv() -> Path | None:
    """Return the ``uv`` of this machine."""
    sibling = Path(sys.executable).with_name("uv")
    path = str(sibling) if sibling.is_file() else shutil.which("uv")
    return Path(path) if path else None
