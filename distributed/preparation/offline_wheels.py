"""The packages for a machine without internet, as wheel files collected on this one."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from distributed.preparation.environment_builder import CPU_INDEX
from profiles.errors import BadInput

_OLDEST_GLIBC, _OLDEST_MACOS = 17, 11


_collected: dict[str, tempfile.TemporaryDirectory[str]] = {}
"""Folders of this process, by what is in them: the second machine of a kind gets what the first one got."""
_collecting = threading.Lock()


def collect_wheels(
    requirements: Sequence[str], lock: str, there: Mapping[str, Any], say: Callable[[str], None]
) -> Path:
    """Return a folder with wheels of all requirements for a machine; it is removed when this process ends.

    Args:
        requirements: packages, as pip takes them.
        lock: constraints; the whole closure of the requirements.
        there: ``version``, ``system``, ``machine``, ``libc``, ``macos``, ``cuda`` of the Python there.
        say: is told what happens.

    Raises:
        BadInput: a package is not to be had here.
    """
    decisive = [there.get(fact) for fact in ("version", "system", "machine", "libc", "macos", "cuda")]
    kind = json.dumps([list(requirements), lock, decisive])
    with _collecting:
        if kind not in _collected:
            say("collecting the packages on this machine")
            files = tempfile.TemporaryDirectory(prefix="muster-wheels-")
            try:
                _download(Path(files.name), requirements, lock, there)
            except BaseException:
                files.cleanup()
                raise
            _collected[kind] = files
        return Path(_collected[kind].name) / "wheels"


def _download(files: Path, requirements: Sequence[str], lock: str, there: Mapping[str, Any]) -> None:
    folder = files / "wheels"
    folder.mkdir()
    (files / "lock.txt").write_text(lock)
    (files / "requirements.txt").write_text("\n".join(requirements))
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    command += ["--only-binary=:all:", "--dest", str(folder)]
    torch = any(line.startswith("torch") for line in requirements)
    if torch and there["system"] == "Linux" and not there.get("cuda"):
        command += ["--extra-index-url", CPU_INDEX]  # the small build of torch
    if is_like_here(there):
        command += ["-c", str(files / "lock.txt"), "-r", str(files / "requirements.txt")]
    else:
        (files / "requirements.txt").write_text("\n".join(locked_for(lock, there, requirements)))
        command += ["--no-deps", "-r", str(files / "requirements.txt"), *target_options(there)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        told = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or ["pip failed"]
        raise BadInput(f"the packages cannot be collected: {told[-1]}", "are internet access and pip there?")


def is_like_here(there: Mapping[str, Any]) -> bool:
    """Whether the wheels of this machine fit there."""
    same = tuple(there["version"][:2]) == sys.version_info[:2]
    return same and (there["system"], there["machine"]) == (platform.system(), platform.machine())


def locked_for(lock: str, there: Mapping[str, Any], requirements: Sequence[str] = ()) -> list[str]:
    """Return the pins of a lock file that hold for the Python of another machine.

    pip judges markers by the Python it runs on, so they are judged here.

    Args:
        requirements: only what these need in the end, as far as this machine's packages tell; none: the whole file.
    """
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    facts = _facts(there)
    pins = [Requirement(line) for line in lock.splitlines() if line.strip() and not line.startswith("#")]
    held = [pin for pin in pins if pin.marker is None or pin.marker.evaluate(facts)]
    needed = _needed(requirements, facts)
    return [f"{pin.name}{pin.specifier}" for pin in held if not requirements or canonicalize_name(pin.name) in needed]


def hashed_for(hashes: str, there: Mapping[str, Any], requirements: Sequence[str]) -> str:
    """Return the part of a file of pins with hashes that some requirements need on another machine.

    What they need there and this machine does not know of is left out, and the build of torch, which is chosen there.
    """
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    facts = _facts(there)
    needed = _needed(requirements, facts)
    found = []
    for entry in re.findall(r"^[\w.-]+==.*(?:\n .*)*", hashes, re.MULTILINE):
        head, *files = entry.splitlines()
        pin = Requirement(head.rstrip(" \\"))
        if canonicalize_name(pin.name) in needed and (pin.marker is None or pin.marker.evaluate(facts)):
            found.append("\n".join([f"{pin.name}{pin.specifier} \\", *files]))
    return "\n".join(found)


def _needed(requirements: Sequence[str], facts: dict[str, str]) -> set[str]:
    """Return the names of packages and of everything that they need there."""
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    seen: set[tuple[str, str]] = set()
    waiting = [Requirement(line) for line in requirements]
    while waiting:
        wanted = waiting.pop()
        for extra in {"", *wanted.extras}:
            if (wanted.name, extra) in seen:
                continue
            seen.add((wanted.name, extra))
            try:
                lines = importlib.metadata.requires(wanted.name) or []
            except importlib.metadata.PackageNotFoundError:  # of another system: what it needs is not known here
                continue
            further = [Requirement(line) for line in lines]
            waiting += [one for one in further if one.marker is None or one.marker.evaluate({**facts, "extra": extra})]
    return {canonicalize_name(name) for name, _ in seen}


def _facts(there: Mapping[str, Any]) -> dict[str, str]:
    """Return what markers ask for, of another machine."""
    major, minor, micro = there["version"]
    return {
        "python_version": f"{major}.{minor}",
        "python_full_version": f"{major}.{minor}.{micro}",
        "platform_system": str(there["system"]),
        "sys_platform": str(there["system"]).lower(),
        "platform_machine": str(there["machine"]),
    }


def target_options(there: Mapping[str, Any]) -> list[str]:
    """Return pip's options for the wheels of a Python on another machine."""
    major, minor, _ = there["version"]
    options = ["--implementation", "cp", "--python-version", f"{major}.{minor}", "--abi", f"cp{major}{minor}"]
    options += ["--abi", "abi3", "--abi", "none"]
    return [*options, *(word for name in platforms(there) for word in ("--platform", name))]


def platforms(there: Mapping[str, Any]) -> list[str]:
    """Return the platform tags of wheels that run on a machine, the newest first."""
    machine = str(there["machine"])
    if there["system"] == "Darwin":
        match = re.match(r"[1-9][0-9](?!\d)", str(there["macos"]))
        newest = max(int(match[0]) if match else 0, _OLDEST_MACOS)
        return [
            f"macosx_{version}_0_{kind}"
            for version in range(newest, _OLDEST_MACOS - 1, -1)
            for kind in (machine, "universal2")
        ]
    match = re.fullmatch(r"glibc 2\.([0-9]{1,3})[\d.]*", " ".join(map(str, there["libc"])))
    newest = int(match[1]) if match else _OLDEST_GLIBC
    tags = [f"manylinux_2_{minor}_{machine}" for minor in range(newest, _OLDEST_GLIBC - 1, -1)]
    return [*tags, f"manylinux2014_{machine}", f"linux_{machine}"]
