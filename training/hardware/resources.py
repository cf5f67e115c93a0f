"""The resources of the machine that this process may use: processor cores, memory and GPUs, found without torch."""

from __future__ import annotations

import math
import os
import re
import resource
import subprocess
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

_PATIENCE = 10.0


class Quota(NamedTuple):
    """A limit on processor time: a process that has used its share of a period stands still until the next one."""

    cores: float
    """Processor seconds a second."""
    period: float
    """Seconds over which it is counted."""


def quota(root: Path = Path("/")) -> Quota | None:
    """Return the tightest quota of this process' control groups and their parents; ``None`` without any.

    Args:
        root: where ``proc`` and ``sys`` are.
    """
    quotas = []
    for folder, is_second in control_groups("cpu", root):
        cfs_texts = (text_of(folder / f"cpu.cfs_{name}_us") for name in ("quota", "period"))
        limit, period = text_of(folder / "cpu.max").partition(" ")[::2] if is_second else cfs_texts
        quotas.append(_parse_quota(limit, period))
    return min((quota for quota in quotas if quota is not None), key=lambda quota: quota.cores, default=None)


def control_groups(controller: str, root: Path = Path("/")) -> Iterator[tuple[Path, bool]]:
    """Yield the folders of this process' control groups and their parents that may set limits, and whether each is of
    version 2.

    The last one of a line of ``/proc/self/cgroup`` is the root, which is a container's own group if the container does
    not see its path.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    mounted = root / "sys/fs/cgroup"
    for line in lines:
        _, controllers, group_path = [*line.split(":", 2), "", ""][:3]
        if controllers and controller not in controllers.split(","):
            continue
        inside = PurePosixPath(group_path.lstrip("/"))
        for group in dict.fromkeys((inside, *inside.parents)):
            yield (mounted / controller / group, False) if controllers else (mounted / group, True)


def text_of(path: Path) -> str:
    """Return the content of a system file; empty if it does not exist."""
    try:
        return path.read_text()
    except (OSError, ValueError):
        return ""


def _parse_quota(limit: str, period: str) -> Quota | None:
    """Parse microseconds; "max", -1 and invalid numbers are no limit."""
    try:
        quota_us, period_us = float(limit), float(period)
    except ValueError:
        return None
    if not (math.isfinite(quota_us) and math.isfinite(period_us)) or quota_us <= 0 or period_us <= 0:
        return None
    return Quota(quota_us / period_us, period_us / 1e6)


def granted_cores() -> int:
    """Return the number of cores that the system lets this process run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def free_cores() -> float:
    """Return the number of cores that this process may use, which may be fractional."""
    limit = quota()
    return min(float(granted_cores()), limit.cores) if limit is not None else float(granted_cores())


def whole_cores(free: float | None = None) -> int:
    """Return the number of threads that these cores keep busy: more would slow each other down."""
    return max(1, math.ceil(free_cores() if free is None else free))


def threads(chosen: int, usual: int, free: float | None = None) -> int:
    """Return the threads of a worker.

    Args:
        chosen: by the user; 0: not set.
        usual: the library's own default, which ignores quotas.
        free: cores available to it; default: :func:`free_cores`.
    """
    return chosen or min(usual, whole_cores(free))


def memory_limit(root: Path = Path("/")) -> int | None:
    """Return the bytes of the tightest limit of this process, its control groups and their parents; ``None`` without
    any.

    Args:
        root: where ``proc`` and ``sys`` are.
    """
    files = (folder / ("memory.max" if second else "memory.limit_in_bytes")
             for folder, second in control_groups("memory", root))  # fmt: skip
    texts = (text_of(file).strip() for file in files)
    limits = [int(text) for text in texts if re.fullmatch(r"[0-9]{1,18}", text)]
    return min([*limits, *filter(None, [data_limit()])], default=None)


def data_limit() -> int | None:
    """Return the bytes of data that this process may have, as on a machine that is lent in part; ``None``: all."""
    limit, _ = resource.getrlimit(resource.RLIMIT_DATA)
    return None if limit == resource.RLIM_INFINITY else limit


def total_memory(root: Path = Path("/")) -> tuple[int, bool]:
    """Return the bytes of memory available to this process, and whether a control group limits them."""
    import psutil  # 20 ms, not needed to find a limit

    machine_total, limit = int(psutil.virtual_memory().total), memory_limit(root)
    return (limit, True) if limit is not None and limit < machine_total else (machine_total, False)


def free_memory(root: Path = Path("/")) -> int:
    """Return the bytes that this process can still allocate: of the machine, or of the control group with the least
    left. Cached files count as free.

    Args:
        root: where ``proc`` and ``sys`` are.
    """
    import psutil

    left = [int(psutil.virtual_memory().available)]
    for folder, second in control_groups("memory", root):
        names = ("memory.max", "memory.current") if second else ("memory.limit_in_bytes", "memory.usage_in_bytes")
        limit, used = (text_of(folder / name).strip() for name in names)
        files = re.findall(r"^(?:total_)?inactive_file (\d+)$", text_of(folder / "memory.stat"), re.MULTILINE)
        if re.fullmatch(r"[0-9]{1,18}", limit) and used.isdecimal():
            left.append(int(limit) - int(used) + max(map(int, files), default=0))
    if (data := data_limit()) is not None:
        memory = psutil.Process().memory_info()
        left.append(data - getattr(memory, "data", memory.rss))
    return max(0, min(left))


def count_gpus() -> int:
    """Return the number of NVIDIA GPUs that a worker started here can use; ``CUDA_VISIBLE_DEVICES`` is obeyed."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:  # CUDA takes the entries before the first that is no GPU
        named = [entry.strip() for entry in visible.split(",")]
        count = next((index for index, entry in enumerate(named) if entry in ("", "-1")), len(named))
        return min(count, 1) if named[0].startswith("MIG-") else count  # a process sees one slice of a GPU
    return sum(line.startswith("GPU ") for line in _nvidia("-L"))


def gpu_memory() -> int:
    """Return the bytes of the smallest NVIDIA GPU of this machine; 0 if there is none, or it is unknown."""
    listed = _nvidia("--query-gpu=memory.total", "--format=csv,noheader,nounits")
    return min((int(line) for line in listed if line.strip().isdecimal()), default=0) * 2**20


def gpus_are_alike() -> bool:
    """Return whether this machine has NVIDIA GPUs, all of one kind with the same memory, and none cut into slices, of
    which a process sees one; ``False``: an old driver does not tell."""
    listed = _nvidia("--query-gpu=name,memory.total,compute_cap,mig.mode.current", "--format=csv,noheader")
    kinds = {line.strip() for line in listed if line.count(",") == 3}
    return len(kinds) == 1 and not any(kind.endswith("Enabled") for kind in kinds)


def gpus_have_bf16() -> bool:
    """Return whether every NVIDIA GPU of this machine multiplies bf16 in hardware (compute capability 8.0 or newer);
    ``False`` if an old driver does not tell."""
    listed = _nvidia("--query-gpu=compute_cap", "--format=csv,noheader")
    majors = [re.fullmatch(r"([0-9]{1,3})\.[0-9]+", line.strip()) for line in listed]
    return bool(majors) and all(major is not None and int(major[1]) >= 8 for major in majors)


def _nvidia(*question: str) -> list[str]:
    """Return the output lines of the driver's tool; none if it is missing or hangs."""
    try:
        return subprocess.run(
            ["nvidia-smi", *question], capture_output=True, text=True, timeout=_PATIENCE
        ).stdout.splitlines()
    except (OSError, subprocess.TimeoutExpired):
        return []
