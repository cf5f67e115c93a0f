"""What a worker tells of its machine: with fakes of the kernel's files, of NVML, of CUDA and of psutil."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from toy_task import ToyTask, toy_plan

from tests.waiting import PATIENCE
from training.hardware import machine_load, sensors
from training.hardware.machine_load import MachineLoad, machine_events
from training.hardware.sensors import Claim, Gpu, Packages
from training.records.events import MachineEvent, MemberEvent, from_line, to_line
from training.run.orders import Control
from training.workers.worker import Rendezvous, run_worker

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
UUID = "7b2a7a1e-0000-4a6c-9f6e-9d7e0c5a1b11"
Chip = namedtuple("Chip", "label current high critical")


class FakeNvml:
    """NVML with one GPU; what ``answers`` does not hold is not supported."""

    class NVMLError(Exception):
        pass

    def __init__(self, answers: dict[str, Any], uuid: str = f"GPU-{UUID}") -> None:
        self.answers = {f"nvmlDeviceGet{name}": value for name, value in answers.items()}
        self._uuid = uuid

    def __getattr__(self, question: str) -> Any:
        def ask(*arguments: Any) -> Any:
            if question == "nvmlDeviceGetHandleByUUID":
                if arguments == (self._uuid,):
                    return "handle"
                raise self.NVMLError("not found")
            if question not in self.answers or arguments[0] != "handle":
                raise self.NVMLError("not supported")
            return self.answers[question]

        return ask


def load_of(
    private: Path, device: torch.device = CPU, rapl: Path | None = None, library: Any = None, **told: Any
) -> MachineLoad:
    """A machine of this test alone, with a sensor for each of ``told``: what the real one tells must not matter."""
    own = Packages(rapl or private / "none")
    return MachineLoad(device, private, own, machine=SimpleNamespace(**told), library=lambda: library)


@pytest.fixture
def rapl(tmp_path: Path) -> Path:
    """Two packages of a server, a part of one of them, and the whole platform."""
    folder = tmp_path / "powercap"
    names = {"intel-rapl:0": "package-0", "intel-rapl:0:0": "core", "intel-rapl:1": "package-1", "intel-rapl:2": "psys"}
    for zone, name in names.items():
        (folder / zone).mkdir(parents=True)
        (folder / zone / "name").write_text(f"{name}\n")
        (folder / zone / "max_energy_range_uj").write_text("262143328850\n")
        count(folder / zone, 262_143.0)
    return folder


def count(zone: Path, joules: float) -> None:
    (zone / "energy_uj").write_text(f"{int(joules * 1e6)}\n")


def cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=UUID))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 7)


def test_a_machine_that_tells_nothing_has_no_such_figures(tmp_path: Path) -> None:
    event = load_of(tmp_path).event(1.0)
    told = json.loads(to_line(event))
    assert set(told) == {"v", "time", "kind", "cpu_percent", "memory_used", "memory_total"}
    assert not any(tmp_path.glob("meter-*"))


def test_events_of_earlier_runs_are_read_and_mean_unknown() -> None:
    event = from_line('{"v": 1, "kind": "machine", "cpu_percent": 1, "memory_used": 2, "memory_total": 3}')
    assert isinstance(event, MachineEvent)
    assert (event.celsius, event.watts, event.joules, event.meters) == (None, None, None, None)


def test_packages_are_counted_over_their_wrap_and_their_parts_are_not(rapl: Path, tmp_path: Path) -> None:
    load = load_of(tmp_path, rapl=rapl)
    assert load.event(0.0).watts is None
    for zone in rapl.iterdir():  # 0.329 J to the end of the range, and on
        count(zone, 499.671150)
    event = load.event(5.0)
    assert event.watts == pytest.approx(200.0)
    assert event.joules == pytest.approx(1000.0)
    assert event.meters == ("processor",)


def test_counters_for_root_only_are_unknown_and_not_nothing(rapl: Path, tmp_path: Path) -> None:
    (rapl / "intel-rapl:1" / "energy_uj").unlink()  # root in the tests could read whatever its mode is
    load = load_of(tmp_path, rapl=rapl)
    events = [load.event(float(at)) for at in range(3)]
    assert {(event.watts, event.joules, event.meters) for event in events} == {(None, None, None)}


def test_one_member_of_a_machine_counts_its_processor_and_another_takes_over(rapl: Path, tmp_path: Path) -> None:
    first, second = (load_of(tmp_path, rapl=rapl) for _ in range(2))
    assert [load.event(0.0).joules for load in (first, second)] == [0.0, None]
    first.close()
    for zone in rapl.iterdir():
        count(zone, 50.0)
    assert second.event(5.0).joules == 0.0
    for zone in rapl.iterdir():
        count(zone, 60.0)
    assert second.event(10.0).joules == pytest.approx(20.0)
    second.close()


def test_a_claim_where_nobody_else_can_be_is_granted_and_one_that_cannot_be_made_is_not(tmp_path: Path) -> None:
    assert Claim(tmp_path / "no folder", "processor").mine()
    (tmp_path / "meter-gpu").symlink_to(tmp_path / "elsewhere")
    assert not Claim(tmp_path, "gpu").mine()
    assert not (tmp_path / "elsewhere").exists()


def test_a_gpu_that_counts_energy(monkeypatch: pytest.MonkeyPatch, rapl: Path, tmp_path: Path) -> None:
    library = FakeNvml({"Temperature": 71, "TotalEnergyConsumption": 9_000_000, "CurrentClocksThrottleReasons": 0x44})
    cuda(monkeypatch)
    load = load_of(tmp_path, CUDA, rapl, library)
    load.event(0.0)
    library.answers["nvmlDeviceGetTotalEnergyConsumption"] += 1_500_000
    for zone in rapl.iterdir():
        count(zone, 99.671150)
    event = load.event(5.0)
    assert (event.celsius, event.throttled, event.device_memory_used) == (71, True, 7)
    assert event.watts == pytest.approx(300.0 + 40.0)
    assert event.joules == pytest.approx(1700.0)
    assert event.meters == ("processor", "gpu")


def test_a_gpu_that_only_tells_its_power_and_does_not_know_its_heat() -> None:
    gpu = Gpu(UUID, FakeNvml({"PowerUsage": 120_000}, f"MIG-{UUID}"))
    assert [gpu.watts(at) for at in (0.0, 5.0)] == [120.0, 120.0]
    assert (gpu.joules, gpu.celsius(), gpu.throttled()) == (600.0, None, None)


def test_a_gpu_that_nobody_knows_tells_nothing() -> None:
    gpu = Gpu("another", FakeNvml({"Temperature": 71, "PowerUsage": 120_000}))
    assert (gpu.watts(0.0), gpu.joules, gpu.celsius(), gpu.throttled()) == (None, None, None, None)


def test_a_gpu_shared_by_two_members_is_counted_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cuda(monkeypatch)
    library = FakeNvml({"TotalEnergyConsumption": 5, "Temperature": 60})
    events = [load.event(0.0) for load in [load_of(tmp_path, CUDA, library=library) for _ in range(2)]]
    assert [event.meters for event in events] == [("gpu",), None]
    assert [event.celsius for event in events] == [60, 60]


def test_cuda_is_not_started_for_a_figure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def started(*_: Any) -> Any:
        raise AssertionError("CUDA was started by the sampler")

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_device_properties", started)
    assert load_of(tmp_path, CUDA).event(0.0).celsius is None


def test_bindings_that_are_missing_or_find_no_driver_are_no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert sensors.nvidia_library() is None
    monkeypatch.setitem(sys.modules, "pynvml", SimpleNamespace(nvmlInit=lambda: 1 / 0))
    assert sensors.nvidia_library() is None
    loaded = SimpleNamespace(nvmlInit=lambda: None)
    monkeypatch.setitem(sys.modules, "pynvml", loaded)
    assert sensors.nvidia_library() is loaded


def test_the_hottest_sensor_of_the_processor_counts_and_nonsense_does_not() -> None:
    chips = {
        "coretemp": [Chip("a", 55.0, None, None), Chip("b", 61.0, None, None), Chip("off", 255.5, None, None)],
        "nvme": [Chip("disk", 80.0, None, None)],
    }
    assert sensors.processor_celsius(SimpleNamespace(sensors_temperatures=lambda: chips)) == 61.0


def test_sensors_that_fail_are_unknown(tmp_path: Path) -> None:
    def broken() -> Any:
        raise ValueError("invalid literal for int()")

    event = load_of(tmp_path, sensors_temperatures=broken, sensors_battery=broken).event(0.0)
    assert (event.celsius, event.battery_percent, event.on_mains) == (None, None, None)


def test_a_battery_is_told(tmp_path: Path) -> None:
    state = SimpleNamespace(percent=43, secsleft=-1, power_plugged=False)
    event = load_of(tmp_path, sensors_battery=lambda: state).event(0.0)
    assert (event.battery_percent, event.on_mains) == (43.0, False)


def samplers() -> set[threading.Thread]:
    """Threads that sample, those of earlier tests on a busy machine included."""
    return {thread for thread in threading.enumerate() if thread.name == "machine-load"}


def test_a_reader_that_is_gone_ends_the_sampler_and_not_the_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def gone(event: MachineEvent) -> None:
        raise BrokenPipeError("nobody reads")

    before = samplers()
    with machine_events(gone, CPU, tmp_path, patience=PATIENCE):
        pass
    assert "nobody reads" in capsys.readouterr().err
    assert samplers() <= before


def test_a_sensor_that_hangs_does_not_keep_the_worker(tmp_path: Path) -> None:
    release, before = threading.Event(), samplers()
    hangs = SimpleNamespace(sensors_battery=release.wait)
    with machine_events(lambda event: None, CPU, tmp_path, machine=hangs, patience=0.05):
        pass
    (own,) = samplers() - before
    release.set()
    own.join(60)


def test_a_worker_tells_its_load_before_its_end_and_leaves_no_thread(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(machine_load, "PATIENCE", PATIENCE)  # on a busy machine too its thread has ended after that
    events, before = list[Any](), samplers()
    plan = toy_plan(training={"max_steps": 2})
    code = run_worker(
        plan, 0, ToyTask(), lambda: Rendezvous(""), tmp_path, tmp_path / "secrets", events.append, Control()
    )
    assert code == 0
    loads = [event for event in events if isinstance(event, MachineEvent)]
    assert loads and loads[-1].memory_used > 0
    assert isinstance(events[-1], MemberEvent)
    assert samplers() <= before


REAL = """
import sys, torch
from pathlib import Path
from training.records.event_log import EventSink
from training.hardware.machine_load import machine_events
# A busy machine takes its time, and who does not wait for the thread breaks it off.
with machine_events(EventSink(sys.stdout, 3), torch.device("cpu"), Path(sys.argv[1]), patience=60.0):
    pass
"""


@pytest.mark.slow
def test_the_sensors_of_this_very_machine_do_no_harm(tmp_path: Path) -> None:
    repository = Path(__file__).resolve().parents[2]
    script = tmp_path / "script" / "sensors.py"
    script.parent.mkdir()
    script.write_text(REAL)
    run = subprocess.run(
        [sys.executable, str(script), str(tmp_path)], capture_output=True, text=True, timeout=100, cwd=repository,
        env={**os.environ, "PYTHONPATH": str(repository)},
    )  # fmt: skip
    assert (run.returncode, run.stderr) == (0, "")
    event = from_line(run.stdout)
    assert isinstance(event, MachineEvent)
    assert event.celsius is None or 5 <= event.celsius <= 125
    assert event.joules is None or (event.joules >= 0 and event.meters)
