"""The memory that this process may use: the machine's, or what its control groups allow."""

from __future__ import annotations

import re
from pathlib import Path

from training.cores import control_groups, text_of


def memory_limit(root: Path = Path("/")) -> int | None:
    """Return the bytes of the tightest limit of this process' control groups and of those around them; ``None``
    without any.

    Args:
        root: where ``proc`` and ``sys`` are.
    """
    files = (folder / ("memory.max" if second else "memory.limit_in_bytes")
             for folder, second in control_groups("memory", root))  # fmt: skip
    found = (text_of(file).strip() for file in files)
    return min((int(text) for text in found if re.fullmatch(r"[0-9]{1,18}", text)), default=None)


def total_memory(root: Path = Path("/")) -> tuple[int, bool]:
    """Return the bytes of memory that there are for this process, and whether a control group is what limits them."""
    import psutil  # 20 ms, not needed by who only looks for a limit

    whole, limit = int(psutil.virtual_memory().total), memory_limit(root)
    return (limit, True) if limit is not None and limit < whole else (whole, False)
