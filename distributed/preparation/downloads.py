"""What is fetched on this machine for another: packages where there is no internet, ``uv`` where there is no Python."""

from __future__ import annotations

import importlib.metadata
import json
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

from distributed.preparation.environment_builder import CPU_INDEX
from profiles.errors import BadInput
from profiles.installation import SETUP, training_python

_OLDEST_GLIBC, _OLDEST_MACOS = 17, 11
_UV_TAGS = {
    "Linux": ("manylinux_2_17_{0}", "manylinux2014_{0}", "musllinux_1_1_{0}"),
    "Darwin": ("macosx_11_0_{0}", "macosx_10_12_{0}"),
}
PINNED_UV = Path(__file__).with_name("uv.txt")
"""The one version of uv that is fetched, with the hashes of its wheels, as pip reads it."""
_fetched: dict[str, tempfile.TemporaryDirectory[str]] = {}
"""Folders of this process, by what is in them: the second machine of a kind gets what the first one got."""
_fetching = threading.Lock()


def collect_wheels(
    requirements: Sequence[str], lock: str, target: Mapping[str, Any], say: Callable[[str], None]
) -> Path:
    """Return a folder with wheels of all requirements for a machine; it is removed when this process ends.

    Args:
        requirements: packages, as pip takes them.
        lock: constraints; the whole closure of the requirements.
        there: ``version``, ``system``, ``machine``, ``libc``, ``macos``, ``cuda`` of the Python there.

    Raises:
        BadInput: a package is not to be had here.
    """
    platform_facts = [target.get(fact) for fact in ("version", "system", "machine", "libc", "macos", "cuda")]
    cache_key = json.dumps([list(requirements), lock, platform_facts])

    def fill(files: Path) -> None:
        say("collecting the packages on this machine")
        (files / "lock.txt").write_text(lock)
        is_same_platform = is_like_here(target) and _python_with_pip()[1]
        if not is_same_platform and not training_python():  # nothing here tells what else the requirements need
            raise BadInput("the packages cannot be collected on this computer yet", f"first install them here: {SETUP}")
        packages = requirements if is_same_platform else locked_for(lock, target, requirements)
        (files / "requirements.txt").write_text("\n".join(packages))
        options = ["-r", str(files / "requirements.txt")]
        options += ["-c", str(files / "lock.txt")] if is_same_platform else ["--no-deps", *target_options(target)]
        needs_torch = any(line.startswith("torch") for line in requirements)
        if needs_torch and target["system"] == "Linux" and not target.get("cuda"):
            options += ["--extra-index-url", CPU_INDEX]  # the small build of torch
        options += ["--only-binary=:all:", "--dest", str(files / "wheels")]
        _pip("download", options, "the packages cannot be collected")

    return _kept(cache_key, fill) / "wheels"


def _kept(cache_key: str, fill: Callable[[Path], None]) -> Path:
    """Return a folder of this process that was filled once; it is removed when the process ends."""
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


def _pip(command: str, options: Sequence[str], problem: str) -> None:
    """Fetch wheels with pip.

    Raises:
        BadInput: they are not to be had here.
    """
    argv = [_python_with_pip()[0], "-m", "pip", command, "--quiet", "--disable-pip-version-check", *options]
    done = subprocess.run(argv, capture_output=True, text=True)
    if done.returncode != 0:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or ["pip failed"]
        raise BadInput(f"{problem}: {errors[-1]}", "are internet access and pip there?")


@lru_cache
def _python_with_pip() -> tuple[str, bool]:
    """Return a Python here whose pip can be used, and whether it is of our version: an environment of uv has no pip.

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
    """Whether the wheels of this machine fit there."""
    has_same_version = tuple(target["version"][:2]) == sys.version_info[:2]
    return has_same_version and (target["system"], target["machine"]) == (platform.system(), platform.machine())


def locked_for(lock: str, target: Mapping[str, Any], requirements: Sequence[str] = ()) -> list[str]:
    """Return the pins of a lock file that hold for the Python of another machine.

    pip judges markers by the Python it runs on, so they are judged here.

    Args:
        requirements: only what these need in the end, as far as this machine's packages tell; none: the whole file.
    """
    lines = (line for line in lock.splitlines() if line.strip() and not line.startswith("#"))
    return [pin for line in lines if (pin := _held(line, target, requirements))]


def hashed_for(hashes: str, target: Mapping[str, Any], requirements: Sequence[str]) -> str:
    """Return the part of a file of pins with hashes that some requirements need on another machine.

    What they need there and this machine does not know of is left out, and the build of torch, which is chosen there.
    """
    entries = []
    for entry in re.findall(r"^[\w.-]+==.*(?:\n .*)*", hashes, re.MULTILINE):
        head, *files = entry.splitlines()
        if requirements and (pin := _held(head.rstrip(" \\"), target, requirements)):
            entries.append("\n".join([f"{pin} \\", *files]))
    return "\n".join(entries)


def _held(line: str, target: Mapping[str, Any], requirements: Sequence[str]) -> str:
    """Return a pin without its marker; nothing where it does not hold there, or none of the requirements needs it."""
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    pin, facts = Requirement(line), _facts(target)
    applies = pin.marker is None or pin.marker.evaluate(facts)
    is_needed = not requirements or canonicalize_name(pin.name) in _needed(tuple(requirements), **facts)
    return f"{pin.name}{pin.specifier}" if applies and is_needed else ""


@lru_cache
def _needed(requirements: tuple[str, ...], **facts: str) -> set[str]:
    """Return the names of packages and of everything that they need there."""
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
            lines = _requires(requirement.name)
            dependencies = [Requirement(line) for line in lines]
            pending += [
                one for one in dependencies if one.marker is None or one.marker.evaluate({**facts, "extra": extra})
            ]
    return {canonicalize_name(name) for name, _ in seen}


def _requires(name: str) -> list[str]:
    """Return what a package needs, as this Python says or the one that trains here; nothing for another system's."""
    training_prefix = Path(training_python() or sys.executable).parent.parent
    for paths in (sys.path, list(map(str, training_prefix.glob("lib/python*/site-packages")))):
        for distribution in importlib.metadata.Distribution.discover(name=name, path=paths):
            return distribution.requires or []
    return []


def _facts(target: Mapping[str, Any]) -> dict[str, str]:
    """Return what markers ask for, of another machine."""
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
    """Return the platform tags of wheels that run on a machine, the newest first; pip knows the older ones of a Mac."""
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
        BadInput: there is none for it, or this machine cannot get it.
    """
    local = own_uv()
    if local is not None and (system, machine) == (platform.system(), platform.machine()):
        return local
    tags = [tag.format(machine) for tag in _UV_TAGS.get(system, ())]
    if not tags:
        raise BadInput(f"there is no uv for {system} on {machine}", "install Python 3.10 or newer there")

    def fill(folder: Path) -> None:
        options = ["--no-deps", "--require-hashes", "--only-binary=:all:", "-r", str(PINNED_UV)]
        options += [word for tag in tags for word in ("--platform", tag)]
        _pip("install", [*options, "--target", str(folder)], "uv cannot be downloaded here")

    return _kept(f"uv for {system} {machine}", fill) / "bin" / "uv"


def own_uv() -> Path | None:
    """Return the ``uv`` of this machine."""
    sibling = Path(sys.executable).with_name("uv")
    path = str(sibling) if sibling.is_file() else shutil.which("uv")
    return Path(path) if path else None
