"""The processor cores that this process may use: what the system grants, and the quotas of its control groups."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath


@dataclass(frozen=True)
class Quota:
    """A limit on processor time: who has used his part of a period stands still until the next one begins."""

    cores: float
    """Processor seconds a second."""
    period: float
    """Seconds over which it is counted."""


def quota(root: Path = Path("/")) -> Quota | None:
    """Return the tightest quota of this process' control groups and of those around them; ``None`` without any.

    Args:
        root: where ``proc`` and ``sys`` are.
    """
    groups = control_groups("cpu", root)
    quotas = (_second_version(folder) if is_second else _first_version(folder) for folder, is_second in groups)
    return min((found for found in quotas if found is not None), key=lambda one: one.cores, default=None)


def control_groups(controller: str, root: Path = Path("/")) -> Iterator[tuple[Path, bool]]:
    """Yield the folders of this process' control groups and of those around them that may limit something, and whether
    each is of the second version.

    The last one of a line of ``/proc/self/cgroup`` is the root, which is a container's own group where the container
    does not see its place.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    mounted = root / "sys/fs/cgroup"
    for line in lines:
        _, controllers, place = [*line.split(":", 2), "", ""][:3]
        if controllers and controller not in controllers.split(","):
            continue
        inside = PurePosixPath(place.lstrip("/"))
        for group in dict.fromkeys((inside, *inside.parents)):
            yield (mounted / controller / group, False) if controllers else (mounted / group, True)


def _first_version(folder: Path) -> Quota | None:
    return _read(*(text_of(folder / f"cpu.cfs_{name}_us") for name in ("quota", "period")))


def _second_version(folder: Path) -> Quota | None:
    limit, _, period = text_of(folder / "cpu.max").partition(" ")
    return _read(limit, period)


def text_of(path: Path) -> str:
    """Return what a file of the system says; nothing where it is not there."""
    try:
        return path.read_text()
    except (OSError, ValueError):
        return ""


def _read(limit: str, period: str) -> Quota | None:
    """Parse microseconds; "max", -1 and what is no number are no limit."""
    try:
        used, whole = float(limit), float(period)
    except ValueError:
        return None
    if not (math.isfinite(used) and math.isfinite(whole)) or used <= 0 or whole <= 0:
        return None
    return Quota(used / whole, whole / 1e6)


def granted_cores() -> int:
    """Return the cores that the system lets this process run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def free_cores() -> float:
    """Return the cores that this process may use, a part of one too."""
    limit = quota()
    return min(float(granted_cores()), limit.cores) if limit is not None else float(granted_cores())


def whole_cores() -> int:
    """Return how many threads these cores keep busy: more of them would stand in each other's way."""
    return max(1, math.ceil(free_cores()))


def threads(chosen: int, usual: int) -> int:
    """Return the threads of a worker.

    Args:
        chosen: by a person; 0: nobody has.
        usual: what its library takes by itself; it knows of no quota.
    """
    return chosen or min(usual, whole_cores())
