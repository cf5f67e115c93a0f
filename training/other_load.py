"""How much of this machine's processors is used by programs that do not belong to a run."""

from __future__ import annotations

import psutil

BUSY = 0.2
"""Share of the processors from which others are worth a word."""
_FULL = 0.9


class OtherLoad:
    """Tells, at every look, what others have used since the look before.

    Workers and hub of a run are its own: what has the run's id in its command line, and what the process that started
    this one has started.

    Args:
        run_id: of the run.
    """

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._parent = psutil.Process().ppid()
        self._known: dict[int, bool] = {}
        self._total, self._busy = _processors()
        self._own = self._own_seconds()

    def share(self) -> float | None:
        """Return a number from 0 to 1; ``None`` where no time has passed by the system's count."""
        total, busy = _processors()
        own = self._own_seconds()
        spent = sum(max(0.0, seconds - self._own.get(pid, 0.0)) for pid, seconds in own.items())
        passed, used = total - self._total, busy - self._busy
        self._total, self._busy, self._own = total, busy, own
        return min(1.0, max(0.0, (used - spent) / passed)) if passed > 0 else None

    def _own_seconds(self) -> dict[int, float]:
        """Return the processor seconds of every process of the run, by its number."""
        found: dict[int, float] = {}
        alive = psutil.pids()
        for pid in alive:
            try:
                process = psutil.Process(pid)
                if pid not in self._known:
                    kin = self._parent in (pid, process.ppid())
                    self._known[pid] = kin or self._run_id in " ".join(process.cmdline())
                if self._known[pid]:
                    times = process.cpu_times()
                    found[pid] = times.user + times.system
            except (psutil.Error, OSError):  # it has just ended, or belongs to somebody else
                continue
        self._known = {pid: own for pid, own in self._known.items() if pid in set(alive)}
        return found


def _processors() -> tuple[float, float]:
    """Return the seconds of all processors so far, and those of them in which they were busy."""
    times = psutil.cpu_times()
    idle = times.idle + getattr(times, "iowait", 0.0)
    guests = getattr(times, "guest", 0.0) + getattr(times, "guest_nice", 0.0)  # counted in user and nice already
    total = sum(times) - guests
    return total, total - idle


def slows(others_percent: float | None, cpu_percent: float | None) -> bool:
    """Whether what others use of the processors is missed: it is much, and no processor is left.

    Args:
        others_percent: used by others, from 0 to 100.
        cpu_percent: used by all together, from 0 to 100.
    """
    return (others_percent or 0.0) >= 100 * BUSY and (cpu_percent or 0.0) >= 100 * _FULL
