"""Collects the wheels of packages for a machine that cannot download them itself.

PyTorch's own index is asked for PyTorch alone: pip asks every index for every package, and repeats that for seconds
where one cannot be reached.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distributed.agent.environment_builder import CPU_INDEX, InstallLog
from distributed.preparation.downloads import (
    fetched_once,
    hashed_for,
    is_like_here,
    knows_dependencies,
    locked_for,
    python_with_pip,
    run_pip,
    target_options,
)
from profiles.errors import BadInput
from profiles.installation import setup_line, training_python
from profiles.quantities import bytes_text

Say = Callable[[str], None]
_listeners: dict[str, list[Say]] = {}
"""Who is told the progress of a collection, by its key: machines of the same kind share one."""
_PACKAGE = re.compile(r"(?:Collecting |Processing \S*/)([\w.-]+?)(?=-\d|[^\w.-]|$)")


class InstallProgress(str):
    """A line about an installation, with its progress."""

    machine: str
    share: float
    """Share of the work that is done, from 0 to 1; 0: unknown."""
    words: str
    """The line without the machine's name."""

    def __new__(cls, words: str, share: float = 0.0, machine: str = "") -> InstallProgress:
        progress = super().__new__(cls, f"{machine}: {words}" if machine else words)
        progress.words, progress.share, progress.machine = words, share, machine
        return progress


def collect_wheels(
    requirements: Sequence[str], lock: str, target: Mapping[str, Any], say: Say, hashes: str = ""
) -> Path:
    """Return a folder with wheels of all requirements for a machine; it is removed when this process ends.

    Args:
        requirements: requirement specifiers of the packages.
        lock: constraints for the full closure of the requirements.
        target: ``version``, ``system``, ``machine``, ``libc``, ``macos``, ``cuda`` of the Python there.
        say: told the progress, also where the packages are collected for another machine of the same kind.
        hashes: pins with the hashes of their files, which are checked where these packages are to be taken.

    Raises:
        BadInput: a package cannot be downloaded here.
    """
    platform_facts = [target.get(fact) for fact in ("version", "system", "machine", "libc", "macos", "cuda")]
    cache_key = json.dumps([list(requirements), lock, hashes, platform_facts])
    listeners = _listeners.setdefault(cache_key, [])
    listeners.append(say)

    def say_to_all(line: str) -> None:
        for listener in tuple(listeners):
            listener(line)

    def fill(folder: Path) -> None:
        _Collection(folder, requirements, lock, hashes, target, say_to_all).download()

    try:
        return fetched_once(cache_key, fill) / "wheels"
    finally:
        listeners.remove(say)


@dataclass(frozen=True)
class _Collection:
    """The download of wheels for one kind of machine into ``folder/wheels``; fields as of :func:`collect_wheels`."""

    folder: Path
    requirements: Sequence[str]
    lock: str
    hashes: str
    target: Mapping[str, Any]
    say: Say

    def download(self) -> None:
        """Download all wheels.

        Raises:
            BadInput: a package cannot be downloaded here.
        """
        self.say("collecting packages here")
        target, has_gpu = self.target, bool(self.target.get("cuda"))
        is_same_platform = is_like_here(target) and python_with_pip()[1]
        if not is_same_platform and not training_python():  # their dependencies are not known here
            hint = f"first install them here: {setup_line()}"
            raise BadInput("the packages cannot be collected on this computer yet", hint)
        if has_gpu and not is_same_platform:
            self.say("its NVIDIA card stays unused: PyTorch with CUDA can only be sent from a machine of the same kind")
        torch = [line for line in self.requirements if re.match(r"torch\b(?![-_])", line)]
        has_small_torch = bool(torch) and target["system"] == "Linux" and not (has_gpu and is_same_platform)
        pins = locked_for(self.lock, target, self.requirements)
        torch_pins = [pin for pin in pins if pin.startswith("torch==")] or torch
        platform = [] if is_same_platform else target_options(target)
        log = InstallLog(len(pins))
        if has_small_torch:
            self._pip(log, torch_pins, "--no-deps", "--index-url", CPU_INDEX, *platform)
        if is_same_platform and (has_gpu or not knows_dependencies(self.requirements, target)):
            self._pip(log, self.requirements, "-c", self._written("lock.txt", self.lock))  # pip knows what they need
            return
        hashed = hashed_for(self.hashes, target, self.requirements)
        if hashed:
            self._pip(log, [hashed], "--no-deps", "--require-hashes", *platform)
        done = {*re.findall(r"^(\S+) \\$", hashed, re.MULTILINE), *(torch_pins if has_small_torch else ())}
        unchecked = [pin for pin in pins if pin not in done]
        if unchecked:
            self._pip(log, unchecked, "--no-deps", *platform)

    def _pip(self, log: InstallLog, packages: Sequence[str], *options: str) -> None:
        """Download some packages; those that are there already are found there."""

        def see(line: str) -> None:
            log.describe(line)
            if package := _PACKAGE.match(line):
                size = f", {bytes_text(log.bytes)} so far" if log.bytes else ""
                words = f"collecting packages: {log.fetched} of {log.packages} ({package[1]}{size})"
                self.say(InstallProgress(words, log.share))

        wheels = str(self.folder / "wheels")
        sources = ["-r", self._written("requirements.txt", "\n".join(packages)), "--find-links", wheels]
        settings = ["--only-binary=:all:", "--dest", wheels]
        run_pip("download", [*sources, *options, *settings], "the packages cannot be collected on this computer", see)

    def _written(self, name: str, text: str) -> str:
        (self.folder / "wheels").mkdir(exist_ok=True)
        (self.folder / name).write_text(text)
        return str(self.folder / name)
