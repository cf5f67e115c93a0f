"""What a machine tells an ordinary user of its heat, power and battery. What cannot be read is ``None``, never 0.

- Processor, Linux: temperature from the kernel's sensors; energy from the RAPL counters of its packages, which most
  systems let only root read.
- NVIDIA GPU: temperature, energy and whether heat slows it down from NVML, the driver's own library, where the
  bindings (``nvidia-ml-py``) are installed.
- Battery: wherever psutil knows it.

macOS tells temperature and power only to an administrator, so there all but the battery is unknown.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import psutil

from training.meters import Counter, Integral

RAPL = Path("/sys/class/powercap")
_PROCESSORS = ("coretemp", "k10temp", "zenpower", "cpu_thermal", "cpu-thermal", "soc_thermal", "x86_pkg_temp")
"""Sensors in or beside a processor; the others of a machine are drives, network cards and batteries."""
_SLOWED_BY_HEAT = 0x20 | 0x40
"""NVML's reasons for lower clocks: software and hardware thermal slowdown."""


class Meter(Protocol):
    """Something that measures energy."""

    name: str
    """What it measures: ``gpu`` or ``processor``."""

    @property
    def joules(self) -> float | None:
        """Energy since the first reading; ``None``: it was never read."""
        ...

    def watts(self, at: float) -> float | None:
        """Read it at a time in seconds, and return the power, if it tells that."""
        ...


def plausible(celsius: float | None) -> float | None:
    """Return a temperature unless it is nonsense, as that of a sensor that is off."""
    return celsius if celsius is not None and 5 <= celsius <= 125 else None


def processor_celsius() -> float | None:
    """Return the temperature of the processor's hottest part."""
    every = _told("sensors_temperatures") or {}
    found = (plausible(one.current) for name, group in every.items() if name in _PROCESSORS for one in group)
    return max((celsius for celsius in found if celsius is not None), default=None)


class Battery(NamedTuple):
    """The battery of a machine that has one."""

    percent: float
    plugged: bool | None
    """Whether it is on mains."""


def battery() -> Battery | None:
    """Return the state of the machine's battery."""
    found = _told("sensors_battery")
    return None if found is None else Battery(float(found.percent), found.power_plugged)


def _told(question: str) -> Any:
    """Ask psutil, which has not every question on every system and trips over what some kernels answer."""
    try:
        return getattr(psutil, question)()
    except Exception:  # noqa: BLE001 - a sensor that cannot be read is unknown, whatever the reason
        return None


class Packages:
    """The energy counters of all processor packages (RAPL) together.

    Args:
        folder: where the kernel shows them; default: :data:`RAPL`.
    """

    name = "processor"

    def __init__(self, folder: Path | None = None) -> None:
        zones = sorted((folder or RAPL).glob("intel-rapl:*"))
        self.zones = {zone: _counter(zone) for zone in zones if _is_package(zone)}
        self._read = False

    @property
    def joules(self) -> float | None:
        return sum(counter.joules for counter in self.zones.values()) if self._read else None

    def watts(self, at: float) -> float | None:
        """One package that cannot be read makes the sum unknown."""
        counted = {zone: _microjoules(zone / "energy_uj") for zone in self.zones}
        if not counted or None in counted.values():
            return None
        self._read = True
        every = [self.zones[zone].add(value / 1e6, at) for zone, value in counted.items() if value is not None]
        known = [watts for watts in every if watts is not None]
        return sum(known) if len(known) == len(every) else None


def _is_package(zone: Path) -> bool:
    """Whether a zone is a whole processor: its parts are zones too, and so is the platform on some laptops."""
    try:
        return (zone / "name").read_text().startswith("package")
    except OSError:
        return False


def _counter(zone: Path) -> Counter:
    wraps_at = _microjoules(zone / "max_energy_range_uj")
    return Counter(None if wraps_at is None else wraps_at / 1e6)


def _microjoules(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def nvidia_library() -> Any | None:
    """Return NVML, ready to be asked; ``None`` where bindings or driver are missing."""
    try:
        import pynvml  # only machines with such a GPU need it

        pynvml.nvmlInit()
    except Exception:  # noqa: BLE001 - no bindings, no driver, or one that is broken: nothing to read either way
        return None
    return pynvml


class Gpu:
    """One NVIDIA GPU.

    Args:
        uuid: as CUDA says it, without the kind in front.
        library: NVML.
    """

    name = "gpu"

    def __init__(self, uuid: str, library: Any) -> None:
        self._library = library
        whole = self._asked("nvmlDeviceGetHandleByUUID", f"GPU-{uuid}")
        self._handle = whole if whole is not None else self._asked("nvmlDeviceGetHandleByUUID", f"MIG-{uuid}")
        self._meter: Counter | Integral = Counter() if self._millijoules() is not None else Integral()
        self._read = False

    @property
    def joules(self) -> float | None:
        return self._meter.joules if self._read else None

    def watts(self, at: float) -> float | None:
        """GPUs before Volta do not count energy: their power is read and summed up."""
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

    def _of_gpu(self, question: str, *more: Any) -> Any:
        return None if self._handle is None else self._asked(question, self._handle, *more)

    def _asked(self, question: str, *arguments: Any) -> Any:
        """Ask NVML; what this GPU or its driver does not know is ``None``."""
        try:
            return getattr(self._library, question)(*arguments)
        except self._library.NVMLError:
            return None


class Claim:
    """Makes one member of a run the only one to count a meter that several could read: two would count it twice.

    The claim ends with its process, and another member's then takes its place.

    Args:
        folder: the run's private folder on this machine; where there is none, no other member is here either.
        name: of the meter.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self._path = folder / f"meter-{name}"
        self._descriptor: int | None = None

    def mine(self) -> bool:
        """Whether this process counts the meter; it takes it if nobody does."""
        if self._descriptor is not None:
            return True
        try:
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except FileNotFoundError:
            return True
        except OSError:
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # another has it, or the file system knows no locks
            os.close(descriptor)
            return False
        self._descriptor = descriptor
        return True

    def release(self) -> None:
        """Let another member count it. Idempotent."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
