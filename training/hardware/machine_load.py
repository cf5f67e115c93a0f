"""The load of a worker's machine as events, from a thread that never raises and never delays training."""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from training.hardware.sensors import (
    Claim,
    Gpu,
    OtherLoad,
    Packages,
    RunProcesses,
    battery,
    nvidia_library,
    processor_celsius,
)
from training.lazy import torch
from training.records.events import MachineEvent

INTERVAL = 5.0
PATIENCE = 2.0
"""Seconds to wait for the last event: a driver that hangs must not keep a worker from ending."""


@contextmanager
def machine_events(
    emit: Callable[[MachineEvent], None],
    device: torch.device | None,
    private: Path,
    run_id: str = "",
    process: int | None = None,
    *,
    machine: Any = psutil,
    patience: float | None = None,
) -> Iterator[None]:
    """Report the load of this machine every few seconds, and once at the end.

    Args:
        device: what this worker computes on; ``None``: unknown.
        process: id of the process whose memory is reported; default: this one.
        private: the run's private folder on this machine, where its members agree on which of them counts a meter.
        run_id: of the run; without it the load of other programs is not reported.
        machine: see :class:`MachineLoad`.
        patience: seconds to wait for the last event; default: :data:`PATIENCE`.
    """
    stop = threading.Event()

    def report() -> None:
        try:
            others = OtherLoad(RunProcesses(run_id).seconds) if run_id else None
            load = MachineLoad(device, private, others=others, process=process, machine=machine)
            try:
                load.event(time.monotonic())  # meters and the processor's load are counted from here
                while not stop.wait(INTERVAL):
                    emit(load.event(time.monotonic()))
                emit(load.event(time.monotonic()))
            finally:
                load.close()
        except psutil.NoSuchProcess:  # it has ended, and what it used with it
            return
        except Exception:  # noqa: BLE001 - figures for a person must never end a training; the log tells why they end
            traceback.print_exc()

    thread = threading.Thread(target=report, name="machine-load", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(PATIENCE if patience is None else patience)


class MachineLoad:
    """Reads the load of this machine.

    Args:
        device: what this worker computes on; its GPU is read as soon as training has begun to use it.
        private: see :func:`machine_events`.
        packages: the processor's energy counters; default: this machine's.
        others: measures the load of programs that do not belong to the run.
        process: see :func:`machine_events`.
        machine: reports temperatures and the battery, as psutil does.
        library: returns NVML, once CUDA is in use; default: this machine's.
    """

    def __init__(
        self,
        device: torch.device | None,
        private: Path,
        packages: Packages | None = None,
        others: OtherLoad | None = None,
        process: int | None = None,
        machine: Any = psutil,
        library: Callable[[], Any | None] = nvidia_library,
    ) -> None:
        self._machine, self._library = machine, library
        self._others = others
        self._device = device
        self._private = private
        self._process = psutil.Process(process)
        self._gpu: Gpu | None = None
        self._on_gpu = self._gpu_wanted = device is not None and device.type == "cuda"
        self._on_processor = device is None or device.type == "cpu"
        self._meters: list[tuple[Packages | Gpu, Claim]] = []
        packages = packages or Packages()
        if packages.zones:
            self._take(packages, "processor")

    def event(self, at: float) -> MachineEvent:
        """Read everything at a time in seconds of the monotonic clock."""
        gpu, power = self._found_gpu(), battery(self._machine)
        share = self._others.share() if self._others is not None else None
        watts = {meter: meter.watts(at) for meter, claim in self._meters if claim.mine()}
        joules_by_meter = {meter: joules for meter in watts if (joules := meter.joules) is not None}
        drawn = [value for meter in joules_by_meter if (value := watts[meter]) is not None]
        peak = int(torch.cuda.max_memory_allocated(self._device)) if self._on_gpu else None
        return MachineEvent(
            cpu_percent=psutil.cpu_percent(),
            others_percent=None if share is None else 100 * share,
            memory_used=self._process.memory_info().rss,
            memory_total=psutil.virtual_memory().total,
            device_memory_used=peak,
            celsius=processor_celsius(self._machine) if self._on_processor else gpu.celsius() if gpu else None,
            throttled=gpu.throttled() if gpu else None,
            watts=sum(drawn) if joules_by_meter and len(drawn) == len(joules_by_meter) else None,
            joules=sum(joules_by_meter.values()) if joules_by_meter else None,
            meters=tuple(meter.name for meter in joules_by_meter) or None,
            battery_percent=power.percent if power else None,
            on_mains=power.power_plugged if power else None,
        )

    def close(self) -> None:
        """Let other members count the meters."""
        for _, claim in self._meters:
            claim.release()

    def _take(self, meter: Packages | Gpu, name: str) -> None:
        self._meters.append((meter, Claim(self._private, name)))

    def _found_gpu(self) -> Gpu | None:
        """Look the GPU up once CUDA is in use: asking CUDA for its number before would start it from this thread."""
        if self._gpu_wanted and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch does not type it
            self._gpu_wanted = False
            library = self._library()
            uuid = str(getattr(torch.cuda.get_device_properties(self._device), "uuid", ""))
            if library is not None and uuid:
                self._gpu = Gpu(uuid, library)
                self._take(self._gpu, f"gpu-{uuid}")
        return self._gpu
