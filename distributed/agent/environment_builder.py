"""Builds an environment with the packages on a machine, or finds the existing one.

Standard library only, Python >= 3.9: part of :mod:`distributed.agent.program`, run by the Python that the environment
will use.

An environment is ``ROOT/envs/KEY``; the key is a hash of the recipe, the Python and the platform. It is built under a
hidden name and renamed when it is complete, so that a partial build is never used; only its ``bin/python`` is used
afterwards, which survives the renaming (the shebangs of the scripts beside it do not). Caches and temporary files lie
beside it and are removed at the end. A build writes lines ``{"say": TEXT, "share": 0 TO 1}``, and last
``{"python": PATH}`` or ``{"problem", "fix", "offline"}``.
"""

from __future__ import annotations

import collections
import contextlib
import fcntl
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from distributed.agent.install_failures import explain
from distributed.agent.requests import BuildEnvironment, FindEnvironment
from distributed.system import keep_awake
from profiles.quantities import bytes_text

CPU_INDEX = "https://download.pytorch.org/whl/cpu"
SIZE, SIZE_WITH_CUDA = 1_600_000_000, 5_600_000_000
"""Bytes of an environment that trains, without CUDA and with it."""
PIP_PATIENCE = ("--retries", "2", "--timeout", "20")
"""Options of pip: where an index cannot be reached, that is said within a minute."""
_STEP = re.compile(r"^(Collecting|Processing|Downloading|Building|Installing|Resolved|Prepared|Installed)\b")
_SIZE = re.compile(r"\(([\d.]+) ?([kMG]?)(i?)B\)$")
_MOST_FETCHED = 0.9
"""Share of the work that is done when the last package is downloaded; unpacking is the rest."""
_EMPTY, _EMPTY_SHARE = 23_000_000, 0.03  # bytes of an environment that has pip alone, and its share of the work
_KEPT_LINES = 1000
LOG = "install.log"
"""File in Muster's folder: the output of pip or uv that failed last."""
BEAT, EMPTY_BEAT = 20.0, 3.0
"""Seconds between two signs of life of a step without output, and while an empty environment is made."""


class InstallLog:
    """Progress of an installation, from the output of pip or uv.

    Args:
        packages: number of packages to download.
    """

    def __init__(self, packages: int) -> None:
        self.packages = packages
        self.fetched = 0
        self.bytes = 0.0
        self.latest = "installing"
        """The newest description."""

    def describe(self, line: str) -> str:
        """Process one line of output; return a description for the user, empty where it is no step."""
        text = self._description(line)
        self.latest = text or self.latest
        return text

    def _description(self, line: str) -> str:
        step = _STEP.match(line)
        if step is None:
            return ""
        if step[1] in ("Collecting", "Processing"):
            self.fetched += 1
            self.packages = max(self.packages, self.fetched)
            return ""
        if step[1] == "Downloading":
            return self._downloading(line)
        if step[1] == "Resolved":
            return f"installing {' '.join(line.split()[1:3])}"
        unpacks = line.startswith("Installing collected")
        return "unpacking what was downloaded" if unpacks else re.sub(r" in [\d.]+m?s$", "", line)[:200]

    def _downloading(self, line: str) -> str:
        name = re.split(r"-\d|[ (]", line.split(maxsplit=1)[1].rpartition("/")[2])[0]
        size = _SIZE.search(line)
        if size is not None:
            unit = 1024 if size[3] else 1000
            self.bytes += float(size[1]) * unit ** " kMG".index(size[2] or " ")
        count = f"package {self.fetched} of {self.packages}, " if self.fetched else ""
        return f"downloading {name} ({count}{bytes_text(self.bytes)} in all)"

    @property
    def share(self) -> float:
        """Share of the work that is done, from 0 to 1; 0 where unknown: uv names only large packages."""
        done = self.fetched / self.packages if self.packages else 0.0
        return _EMPTY_SHARE * bool(done) + (_MOST_FETCHED - _EMPTY_SHARE) * done


class DiskGrowth:
    """Text about what has arrived in some folders since the last call; empty where nothing has."""

    def __init__(self, log: InstallLog, folders: Sequence[Path]) -> None:
        self._log, self._folders, self._bytes = log, folders, 0

    def __call__(self) -> str:
        before, self._bytes = self._bytes, sum(map(_bytes_in, self._folders))
        return f"{self._log.latest}; {bytes_text(self._bytes)} are on the disk" if self._bytes > before else ""


class EmptyEnvironment:
    """Progress of an environment that gets pip, which takes minutes on a busy machine and says nothing."""

    def __init__(self, stage: str, folder: Path) -> None:
        self._stage, self._folder, self._bytes = stage, folder, 0

    def __call__(self) -> str:
        self._bytes = _bytes_in(self._folder)
        return f"{self._stage}: {bytes_text(self._bytes)} of about {bytes_text(_EMPTY)}"

    def share(self) -> float:
        """Return the share of the whole installation that is done."""
        return _EMPTY_SHARE * min(1.0, self._bytes / _EMPTY)


def _bytes_in(folder: Path) -> int:
    size = 0
    for parent, _, files in os.walk(folder):
        for name in files:
            with contextlib.suppress(OSError):  # removed meanwhile
                size += os.lstat(os.path.join(parent, name)).st_size
    return size


@contextlib.contextmanager
def heartbeat(
    text_of: Callable[[], str], share_of: Callable[[], float] = lambda: 0.0, every: float = BEAT
) -> Iterator[None]:
    """Report a text every so many seconds: pip and uv are silent while a package of gigabytes arrives.

    Args:
        text_of: returns the text; empty: there is nothing to report.
    """
    over = threading.Event()

    def beat() -> None:
        while not over.wait(every):
            if text := text_of():
                say(text, share_of())

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


class Unbuildable(Exception):
    """``args`` are the problem, the fix, and whether packages sent by the requesting machine would help."""

    output: Sequence[str] = ()
    """Lines of the program that failed."""


def key(recipe: str) -> str:
    """Return the name of the environment for this recipe, Python and platform."""
    fields = [recipe, *map(str, sys.version_info[:2]), sys.implementation.name, platform.system(), platform.machine()]
    return hashlib.sha256(json.dumps([*fields, has_cuda()]).encode()).hexdigest()[:16]


def has_cuda() -> bool:
    return shutil.which("nvidia-smi") is not None


def ready(root: Path, recipe: str) -> str:
    """Return the Python of a complete, working environment; empty where there is none."""
    python = root / "envs" / key(recipe) / "bin" / "python"
    try:
        works = subprocess.run([str(python), "-c", ""], capture_output=True, timeout=20).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return str(python) if works else ""


def find(root: Path, request: FindEnvironment) -> dict[str, Any]:
    """Report where the environment is, and which wheels fit this machine."""
    return {
        "python": ready(root, request.recipe),
        "version": list(sys.version_info[:3]),
        "system": platform.system(),
        "machine": platform.machine(),
        "libc": list(platform.libc_ver()),
        "macos": platform.mac_ver()[0],
        "cuda": has_cuda(),
    }


def build(root: Path, request: BuildEnvironment) -> dict[str, Any]:
    """Build the environment unless it exists."""
    try:
        return {"python": environment(root, request)}
    except Unbuildable as error:
        problem, fix, offline = (*error.args, False)[:3]
        return {
            "problem": problem,
            "fix": fix,
            "offline": offline,
            "log": error.output and write_log(root, error.output),
        }
    except OSError as error:
        return {"problem": str(error), "fix": "are the folder and the disk there writable?"}


def write_log(root: Path, output: Sequence[str]) -> str:
    """Keep the output of a failed installation; return the file's path, empty where it cannot be written."""
    log = root / LOG
    try:
        root.mkdir(parents=True, exist_ok=True)
        log.write_text("\n".join(output) + "\n", encoding="utf-8", errors="replace")
    except OSError:  # such as a full disk
        return ""
    return str(log)


def environment(root: Path, recipe: BuildEnvironment) -> str:
    """Build the environment unless it exists, and return its Python.

    Raises:
        Unbuildable: the build failed.
    """
    envs = root / "envs"
    envs.mkdir(parents=True, exist_ok=True)
    with open(envs / ".lock", "w") as lock, _kept_awake():
        with heartbeat(lambda: "waiting for another installation on this machine"):
            fcntl.flock(lock, fcntl.LOCK_EX)
        existing = ready(root, recipe.recipe)
        if existing:
            return existing
        for leftover in envs.glob(".*.part"):
            shutil.rmtree(leftover, ignore_errors=True)
        _check_room(envs, recipe)
        partial, scratch = envs / f".{key(recipe.recipe)}.part", envs / ".scratch.part"
        try:
            scratch.mkdir()
            _fill(partial, scratch, recipe)
            folder = envs / key(recipe.recipe)
            shutil.rmtree(folder, ignore_errors=True)  # left over from a Python that was removed
            partial.rename(folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
            shutil.rmtree(scratch, ignore_errors=True)
    return str(folder / "bin" / "python")


@contextlib.contextmanager
def _kept_awake() -> Iterator[None]:
    """Keep this machine from falling asleep over gigabytes of downloads, where the system supports it."""
    awake = keep_awake()
    try:
        yield
    finally:
        if awake is not None:
            awake.kill()
            awake.communicate()


def _fill(folder: Path, scratch: Path, recipe: BuildEnvironment) -> None:
    uv = recipe.uv
    (scratch / "lock.txt").write_text(recipe.lock)
    (scratch / "requirements.txt").write_text("\n".join(recipe.requirements))
    environment = _environment(scratch)
    stage = f"making an environment for Python {platform.python_version()} with {'uv' if uv else 'venv and pip'}"
    say(stage)
    python = str(folder / "bin" / "python")
    if uv:
        _run([uv, "venv", "--python", sys.executable, str(folder)], environment)
        install = [uv, "pip", "install", "--python", python]
    else:
        growth = EmptyEnvironment(stage, folder)
        with heartbeat(growth, growth.share, EMPTY_BEAT):
            pip = _venv(folder, python, environment)
        install = [*pip, "install", "--no-input", *PIP_PATIENCE, "--no-compile"]
        install += ["--progress-bar", "off", "--disable-pip-version-check"]
    sent = ["--no-index", "--find-links", recipe.wheels] if recipe.wheels else []
    log = InstallLog(len(re.findall(r"^[\w.-]+==", recipe.hashed, re.MULTILINE)) + 1)  # and torch
    with heartbeat(DiskGrowth(log, (scratch, folder)), lambda: log.share):
        if recipe.hashed:
            hashed = ["--no-deps", "--require-hashes", "-r", str(scratch / "hashed.txt")]
            (scratch / "hashed.txt").write_text(recipe.hashed)
            _run([*install, *hashed, *sent], environment, log)
        pins = ["-c", str(scratch / "lock.txt")]
        if not sent and _takes_small_torch(recipe):
            _install_small_torch(
                [*install, "--no-deps", *pins], recipe, lambda command: _run(command, environment, log)
            )
        # torch, and packages without hashes
        _run([*install, *pins, "-r", str(scratch / "requirements.txt"), *sent], environment, log)


def _environment(scratch: Path) -> dict[str, str]:
    """Return environment variables that keep all temporary files and caches in our folder."""
    redirected = {name: str(scratch / name.lower()) for name in ("TMPDIR", "PIP_CACHE_DIR", "UV_CACHE_DIR")}
    for folder in redirected.values():
        Path(folder).mkdir()
    inherited = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    return {**inherited, **redirected}


def _trains(recipe: BuildEnvironment) -> bool:
    return any(re.match(r"torch\b", line) for line in recipe.requirements)


def _check_room(folder: Path, recipe: BuildEnvironment) -> None:
    """Raises Unbuildable where the packages do not fit on the disk."""
    needed = SIZE_WITH_CUDA if has_cuda() and not recipe.wheels else SIZE
    if _trains(recipe) and (free := shutil.disk_usage(folder).free) < needed:
        problem = f"its packages take {bytes_text(needed)}, and {bytes_text(free)} are free at {folder}"
        raise Unbuildable(problem, "free some space there, or set 'project_path' to another disk")


def _takes_small_torch(recipe: BuildEnvironment) -> bool:
    """Whether this machine takes the build of torch without CUDA, which on Linux PyTorch's own index alone has."""
    return _trains(recipe) and platform.system() == "Linux" and not has_cuda()


def _install_small_torch(install: list[str], recipe: BuildEnvironment, run: Callable[[list[str]], None]) -> None:
    """Install the build of torch without CUDA, from PyTorch's index or another one that has it, or nothing.

    An index beside PyPI would not do: where it cannot be reached, pip takes PyPI's build, which is for NVIDIA cards.

    Raises:
        Unbuildable: no index that can be reached has it.
    """
    named = [line for line in recipe.requirements if re.match(r"torch\b(?![-_])", line)]
    pinned = [f"{pin}+cpu" for pin in re.findall(r"^torch==[\w.]+$", recipe.lock, re.MULTILINE)]
    try:
        run([*install, *named, "--index-url", CPU_INDEX])
    except Unbuildable as error:
        if error.args[2:] != (True,):  # the index is not at fault
            raise
        try:
            if not pinned:
                raise
            run([*install, *pinned])  # a mirror of both indexes
        except Unbuildable:
            problem = f"{CPU_INDEX} cannot be reached, and PyPI's build of torch is for NVIDIA cards (4 GB more)"
            raise Unbuildable(problem, "", True) from None


def _venv(folder: Path, python: str, environment: dict[str, str]) -> list[str]:
    """Create an empty environment, and return the command line of a pip for it."""
    try:
        _run([sys.executable, "-m", "venv", str(folder)], environment)
        return [python, "-m", "pip"]
    except Unbuildable:
        shutil.rmtree(folder, ignore_errors=True)
    try:
        _run([sys.executable, "-m", "venv", "--without-pip", str(folder)], environment)
        _run([sys.executable, "-m", "pip", "--python", python, "--version"], environment)
    except Unbuildable:
        fix = "install uv there (https://docs.astral.sh/uv), or on Debian and Ubuntu: sudo apt install python3-venv"
        raise Unbuildable(f"{sys.executable} has neither a working venv nor pip", fix) from None
    return [sys.executable, "-m", "pip", "--python", python]


def _run(command: list[str], environment: dict[str, str], log: InstallLog | None = None) -> None:
    """Run a command, and report its progress.

    Raises:
        Unbuildable: it failed.
    """
    lines: collections.deque[str] = collections.deque(maxlen=_KEPT_LINES)
    try:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            env=environment, text=True, errors="replace",
        )  # fmt: skip
    except OSError as error:
        raise Unbuildable(f"{command[0]}: {error.strerror}", "install uv or pip there") from None
    with process:
        assert process.stdout is not None
        for line in map(str.strip, process.stdout):
            lines.append(line)
            if log is not None and (text := log.describe(line)):
                say(text, log.share)
    if process.returncode != 0:
        failure = Unbuildable(*explain(list(lines)))
        failure.output = list(lines)
        raise failure


def say(text: str, share: float = 0.0) -> None:
    sys.stdout.write(json.dumps({"say": text, "share": round(share, 3)}) + "\n")  # at once: threads report, too
    sys.stdout.flush()
