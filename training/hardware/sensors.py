"""Temperature, power, battery and load of a machine, as an ordinary user can read them; unreadable is ``None``, never
0.

- Processor, Linux: temperature from the kernel's sensors; energy from the RAPL counters of its packages, which most
  systems let only root read.
- NVIDIA GPU: temperature, energy and whether heat slows it down from NVML, the driver's own library, where the
  bindings (``nvidia-ml-py``) are installed.
- Battery: wherever psutil knows it.

macOS tells temperature and power only to an administrator, so there all but battery and load is unknown.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
from filelock import FileLock, Timeout

RAPL = Path("/sys/class/powercap")
_PROCESSORS = ("coretemp", "k10temp", "zenpower", "cpu_thermal", "cpu-thermal", "soc_thermal", "x86_pkg_temp")
"""Sensors in or beside a processor; the others of a machine are drives, network cards and batteries."""
_SLOWED_BY_HEAT = 0x20 | 0x40
"""NVML's reasons for lower clocks: software and hardware thermal slowdown."""
MOST_WATTS = 5000.0
"""No single meter measures more: a counter that seems to has been reset."""
LONGEST_GAP = 60.0
"""Seconds between two readings of power above which the energy between them is unknown."""


def plausible(celsius: float | None) -> float | None:
    """Return a temperature unless it is implausible, like that of a sensor that is off."""
    return celsius if celsius is not None and 5 <= celsius <= 125 else None


def processor_celsius(machine: Any = psutil) -> float | None:
    """Return the temperature of the processor's hottest part; ``machine`` answers like psutil."""
    sensors = _query(machine, "sensors_temperatures") or {}
    readings = (
        plausible(reading.current) for name, group in sensors.items() if name in _PROCESSORS for reading in group
    )
    return max((celsius for celsius in readings if celsius is not None), default=None)


def battery(machine: Any = psutil) -> Any:
    """Return psutil's record of the machine's battery (``percent``, ``power_plugged``); ``None`` where it has none."""
    return _query(machine, "sensors_battery")


def _query(machine: Any, question: str) -> Any:
    """Query psutil, which lacks some functions on some systems and fails on the answers of some kernels."""
    try:
        return getattr(machine, question)()
    except Exception:  # noqa: BLE001 - a sensor that cannot be read is unknown, whatever the reason
        return None


class Packages:
    """The energy counters of all processor packages (RAPL) together.

    Args:
        folder: where the kernel shows them; default: :data:`RAPL`.
    """

    name = "processor"
    """Name of the meter."""

    def __init__(self, folder: Path | None = None) -> None:
        zones = sorted((folder or RAPL).glob("intel-rapl:*"))
        self.zones: dict[Path, Counter] = {}
        for zone in filter(_is_package, zones):
            wraps_at = _microjoules(zone / "max_energy_range_uj")
            self.zones[zone] = Counter(None if wraps_at is None else wraps_at / 1e6)
        self._read = False

    @property
    def joules(self) -> float | None:
        """Energy since the first reading; ``None``: they were never read."""
        return sum(counter.joules for counter in self.zones.values()) if self._read else None

    def watts(self, at: float) -> float | None:
        """Read the counters at a time in seconds, and return the power; an unreadable one makes the sum unknown."""
        counted = {zone: _microjoules(zone / "energy_uj") for zone in self.zones}
        if not counted or None in counted.values():
            return None
        self._read = True
        package_watts = [self.zones[zone].add(value / 1e6, at) for zone, value in counted.items() if value is not None]
        known_watts = [watts for watts in package_watts if watts is not None]
        return sum(known_watts) if len(known_watts) == len(package_watts) else None


def _is_package(zone: Path) -> bool:
    """Whether a zone is a whole processor: its parts are zones too, and so is the platform on some laptops."""
    try:
        return (zone / "name").read_text().startswith("package")
    except OSError:
        return False


def _microjoules(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def nvidia_library() -> Any | None:
    """Return NVML, initialised; ``None`` if bindings or driver are missing."""
    try:
        import pynvml  # only machines with such a GPU need it

        pynvml.nvmlInit()
    except Exception:  # noqa: BLE001 - no bindings, no driver, or one that is broken: nothing to read either way
        return None
    return pynvml


class Gpu:
    """One NVIDIA GPU.

    Args:
        uuid: as CUDA reports it, without the prefix.
    """

    name = "gpu"

    def __init__(self, uuid: str, library: Any) -> None:
        self._library = library
        handle = self._call("nvmlDeviceGetHandleByUUID", f"GPU-{uuid}")
        self._handle = handle if handle is not None else self._call("nvmlDeviceGetHandleByUUID", f"MIG-{uuid}")
        self._meter: Counter | Integral = Counter() if self._millijoules() is not None else Integral()
        self._read = False

    @property
    def joules(self) -> float | None:
        return self._meter.joules if self._read else None

    def watts(self, at: float) -> float | None:
        """Read it; GPUs before Volta do not count energy: their power is read and summed up."""
        counts = isinstance(self._meter, Counter)
        value = self._millijoules() if counts else self._of_gpu("nvmlDeviceGetPowerUsage")
        if value is None:
            return None
        self._read = True
        return self._meter.add(value / 1000, at)

    def celsius(self) -> float | None:
        return plausible(self._of_gpu("nvmlDeviceGetTemperature", 0))

    def throttled(self) -> bool | None:
        """Whether heat slows it down."""
        reasons = self._of_gpu("nvmlDeviceGetCurrentClocksThrottleReasons")
        return None if reasons is None else bool(reasons & _SLOWED_BY_HEAT)

    def _millijoules(self) -> Any:
        return self._of_gpu("nvmlDeviceGetTotalEnergyConsumption")

    def _of_gpu(self, question: str, *arguments: Any) -> Any:
        return None if self._handle is None else self._call(question, self._handle, *arguments)

    def _call(self, question: str, *arguments: Any) -> Any:
        """Call NVML; ``None`` if this GPU or its driver does not support it."""
        try:
            return getattr(self._library, question)(*arguments)
        except self._library.NVMLError:
            return None


class Claim:
    """Lets only one member of a run count a meter that several could read.

    The claim ends with its process, and another member's then takes its place.

    Args:
        folder: the run's private folder on this machine; if it does not exist, no other member is here either.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self._folder = folder
        self._lock = FileLock(folder / f"meter-{name}", mode=0o600, thread_local=False)

    def mine(self) -> bool:
        """Whether this process counts the meter; it takes a free one."""
        if not self._lock.is_locked and self._folder.is_dir():
            with contextlib.suppress(Timeout, OSError):  # another has it, or the file system knows no locks
                self._lock.acquire(timeout=0)
        return self._lock.is_locked or not self._folder.is_dir()

    def release(self) -> None:
        """Let another member count it. Idempotent."""
        self._lock.release()


class Counter:
    """Energy of a meter that counts joules.

    Args:
        wraps_at: joules after which the meter begins again at 0; ``None``: it never does.
    """

    def __init__(self, wraps_at: float | None = None) -> None:
        self.joules = 0.0
        """Since the first reading."""
        self._wraps_at = wraps_at
        self._previous: tuple[float, float] | None = None

    def add(self, counted: float, at: float) -> float | None:
        """Take a reading at a time in seconds; return the mean watts since the one before, if it tells them.

        It may wrap once between two readings. A counter that was reset, as by reloading a driver, tells nothing
        about the time before.
        """
        before = self._previous
        if before is not None and at <= before[1]:
            return None
        self._previous = (counted, at)
        if before is None:
            return None
        spent, seconds = counted - before[0], at - before[1]
        if spent < 0 and self._wraps_at is not None:
            spent += self._wraps_at
        if not 0 <= spent <= MOST_WATTS * seconds:
            return None
        self.joules += spent
        return spent / seconds


class Integral:
    """Energy of a meter that only reports power, by the trapezoidal rule."""

    def __init__(self) -> None:
        self.joules = 0.0
        """Since the first reading."""
        self._previous: tuple[float, float] | None = None

    def add(self, watts: float, at: float) -> float | None:
        """Take a reading at a time in seconds; return its watts if they are plausible."""
        if not 0 <= watts <= MOST_WATTS:
            return None
        before, self._previous = self._previous, (watts, at)
        if before is not None and 0 < at - before[1] <= LONGEST_GAP:
            self.joules += (watts + before[0]) / 2 * (at - before[1])
        return watts


class OtherLoad:
    """Measures the processor load of other programs between two calls.

    Args:
        run_seconds: returns the processor seconds of the run's own processes, by process id.
    """

    def __init__(self, run_seconds: Callable[[], dict[int, float]]) -> None:
        self._run_seconds = run_seconds
        self._total, self._busy = _processors()
        self._previous_seconds = run_seconds()

    def share(self) -> float | None:
        """Return the share of others since the last call, 0 to 1; ``None`` if no time has passed by the system's
        count."""
        total, busy = _processors()
        run_seconds = self._run_seconds()
        spent = sum(max(0.0, seconds - self._previous_seconds.get(pid, 0.0)) for pid, seconds in run_seconds.items())
        passed, used = total - self._total, busy - self._busy
        self._total, self._busy, self._previous_seconds = total, busy, run_seconds
        return min(1.0, max(0.0, (used - spent) / passed)) if passed > 0 else None


class RunProcesses:
    """The processes of a run on this machine.

    These are its workers, its coordinator and the program that shows it: processes with its id in their command line,
    siblings of this process, the descendants of all these, and the ancestors of this process.

    Args:
        inside: whether this process is one of them; else only processes with the run's id and their descendants count.
    """

    def __init__(self, run_id: str, inside: bool = True) -> None:
        self._run_id = run_id
        self._parent = psutil.Process().ppid() if inside else -1
        self._above = {process.pid for process in psutil.Process().parents()} if inside else set[int]()
        self._is_of_run: dict[int, bool] = {}

    def seconds(self) -> dict[int, float]:
        """Return the processor seconds of every process of the run, by process id."""
        seconds_by_pid: dict[int, float] = {}
        alive = set(psutil.pids())
        for pid in alive:
            with contextlib.suppress(psutil.Error, OSError):  # it has just ended, or belongs to another user
                process = psutil.Process(pid)
                if self._belongs(process):
                    times = process.cpu_times()
                    seconds_by_pid[pid] = times.user + times.system
        self._is_of_run = {pid: is_of_run for pid, is_of_run in self._is_of_run.items() if pid in alive}
        return seconds_by_pid

    def _belongs(self, process: psutil.Process) -> bool:
        """Whether a process is one of the run; its parent is looked at first, whatever their numbers are."""
        if process.pid not in self._is_of_run:
            parent = process.ppid()
            is_kin = process.pid in self._above or parent == self._parent
            is_kin = is_kin or (parent not in self._above and self._is_parent_of_run(parent))
            self._is_of_run[process.pid] = is_kin or self._run_id in " ".join(process.cmdline())
        return self._is_of_run[process.pid]

    def _is_parent_of_run(self, pid: int) -> bool:
        with contextlib.suppress(psutil.Error, OSError):
            return pid > 0 and self._belongs(psutil.Process(pid))
        return False


def _processors() -> tuple[float, float]:
    """Return the seconds of all processors so far, and those of them in which they were busy."""
    times = psutil.cpu_times()
    idle = times.idle + getattr(times, "iowait", 0.0)
    guests = getattr(times, "guest", 0.0) + getattr(times, "guest_nice", 0.0)  # counted in user and nice already
    total = sum(times) - guests
    return total, total - idle
