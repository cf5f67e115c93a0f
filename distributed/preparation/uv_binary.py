"""The program ``uv`` for a machine that has no Python to get it with: this machine's own, or the pinned one."""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
import tempfile
import threading
import zipfile
from pathlib import Path

from profiles.errors import BadInput

_TAGS = {
    "Linux": ("manylinux_2_17_{0}", "manylinux2014_{0}", "musllinux_1_1_{0}"),
    "Darwin": ("macosx_11_0_{0}", "macosx_10_12_{0}"),
}
PINNED = Path(__file__).with_name("uv.txt")
"""The one version of uv that is fetched, with the hashes of its wheels, as pip reads it."""
_fetched: dict[tuple[str, str], tempfile.TemporaryDirectory[str]] = {}
"""Folders of this process, by system and processor."""
_fetching = threading.Lock()


def uv_for(system: str, machine: str) -> Path:
    """Return a ``uv`` that runs on a system and processor, as ``uname -sm`` names them.

    Raises:
        BadInput: there is none for it, or this machine cannot get it.
    """
    own = own_uv()
    if own is not None and (system, machine) == (platform.system(), platform.machine()):
        return own
    with _fetching:
        if (system, machine) not in _fetched:
            folder = tempfile.TemporaryDirectory(prefix="muster-uv-")
            try:
                _fetch(system, machine, Path(folder.name))
            except BaseException:
                folder.cleanup()
                raise
            _fetched[system, machine] = folder
        return Path(_fetched[system, machine].name) / "uv"


def own_uv() -> Path | None:
    """Return the ``uv`` of this machine."""
    beside = Path(sys.executable).with_name("uv")
    found = str(beside) if beside.is_file() else shutil.which("uv")
    return Path(found) if found else None


def _fetch(system: str, machine: str, folder: Path) -> None:
    tags = [tag.format(machine) for tag in _TAGS.get(system, ())]
    if not tags:
        raise BadInput(f"there is no uv for {system} on {machine}", "install Python 3.10 or newer there")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary=:all:", "--dest", str(folder), "--require-hashes", "-r", str(PINNED)]
    command += [word for tag in tags for word in ("--platform", tag)]
    done = subprocess.run(command, capture_output=True, text=True)
    wheels = list(folder.glob("uv-*.whl"))
    if done.returncode != 0 or not wheels:
        told = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or ["pip failed"]
        raise BadInput(f"uv cannot be downloaded here: {told[-1]}", "are internet access and pip there?")
    unpack(wheels[0], folder / "uv")


def unpack(wheel: Path, target: Path) -> None:
    """Take the program out of a wheel.

    Raises:
        BadInput: it is not in it.
    """
    try:
        with zipfile.ZipFile(wheel) as archive:
            name = next(name for name in archive.namelist() if name.endswith(".data/scripts/uv"))
            with archive.open(name) as source, target.open("wb") as out:
                shutil.copyfileobj(source, out, 1 << 20)
    except (OSError, StopIteration, zipfile.BadZipFile) as error:
        raise BadInput(f"{wheel.name}: no program uv in it ({error})", "try again") from None
    target.chmod(0o755)
