"""What is said about hardware, system and ways, from what machines say of themselves."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.wizard.state.assessment import of_finding
from distributed.agent import machine_health as health
from distributed.agent.requests import ReadHealth
from distributed.checks.findings import (
    Health,
    guarded_folder,
    judge_connections,
    judge_facts,
    judge_health,
    judge_host_keys,
    judge_mtu,
)
from distributed.preparation.preflight import Facts
from distributed.preparation.provision import environment_size

SOUND: dict[str, Any] = {
    "system": "Darwin", "machine": "arm64", "hardware": "arm64", "memory": {"total": 2**34, "free": 2**33},
    "power": {"source": "ac", "percent": 80, "saving": False}, "inhibitor": "caffeinate", "mtu": {"en0": 1500},
    "celsius": 50.0, "throttled": False, "nvidia": [],
    "devices": [{"device": "cpu", "problem": "", "gflops": 100.0}],
}  # fmt: skip
GPU = {"name": "RTX", "driver": "570.1", "total": 2**34, "free": 2**34}
CUDA = {"device": "cuda:0", "problem": "", "gflops": 9e4}


LINUX = {"system": "Linux"}
REFUSED = "systemd-inhibit is missing or refused"


def alarms(**change: object) -> list[tuple[str, str]]:
    found = judge_health(Health.model_validate({**SOUND, **change}))
    assert all(finding.fix for finding in found if finding.level != "ok")
    return [(finding.level, finding.seen) for finding in found if finding.level != "ok"]


def test_what_is_not_in_order_is_not_called_so() -> None:
    facts = Facts((3, 11, 7), "2.13.0", (), 0.1, 10**11, True, "/home/a", "Linux", 0, "eth0", "SHA256:a")
    every = {"system", "python", "torch", "disk", "clock"}
    assert {finding.check for finding in judge_facts(facts)} == every
    unfit: dict[str, dict[str, Any]] = {
        "python": {"python": (3, 9, 2)},
        "torch": {"torch": ""},
        "disk": {"free": 10**8},
        "clock": {"clock_ahead": -61.0},
    }
    for check, change in unfit.items():
        assert {finding.check for finding in judge_facts(replace(facts, **change))} == every - {check}


def test_a_sound_machine_raises_no_alarm() -> None:
    assert alarms() == []


@pytest.mark.parametrize(
    ("change", "alarm"),
    [
        ({"machine": "x86_64"}, ("warning", "Python for x86_64 under Rosetta")),
        ({"memory": {"total": 2**34, "free": 2**30}}, ("warning", "1.0 GB of 16 GB free")),
        ({"power": {"source": "battery", "percent": 43}}, ("warning", "runs on battery, 43 %")),
        ({"power": {"source": "ac", "saving": True}}, ("warning", "Low Power Mode is on")),
        ({"inhibitor": "", "lid": "ignore", **LINUX}, ("warning", f"may fall asleep: {REFUSED}")),
        ({"celsius": 97.0}, ("warning", "97 °C")),
        ({"celsius": None, "nvidia": [{**GPU, "celsius": 91}], "devices": [CUDA]}, ("warning", "91 °C")),
        ({"throttled": True, "celsius": None}, ("warning", "unknown, slowed down by heat")),
        ({"devices": [{"device": "mps", "problem": "boom"}]}, ("problem", "mps: boom")),
        ({"nvidia": [GPU]}, ("warning", "RTX (driver 570.1) is not used: torch has no CUDA there")),
    ],
)
def test_one_thing_that_is_wrong_is_one_alarm(change: dict[str, object], alarm: tuple[str, str]) -> None:
    assert alarms(**change) == [alarm]


def test_a_temperature_that_no_sensor_tells_is_no_alarm_and_is_not_called_ok() -> None:
    unheard = Health.model_validate({**SOUND, "celsius": None})
    (heat,) = [finding for finding in judge_health(unheard) if finding.check == "heat"]
    assert heat.level == "ok" and heat.is_unknown
    assert of_finding(heat).label == "unknown"


def test_a_laptop_gets_the_words_and_commands_of_its_system() -> None:
    """All that can be wrong with its power and sleep, on a Mac and on Linux."""

    def words(system: str) -> list[str]:
        laptop = {"power": {"source": "battery", "percent": 41, "saving": True}, "inhibitor": "", "lid": "suspend"}
        found = judge_health(Health.model_validate({**SOUND, **laptop, "system": system}))
        return [
            f"{one.check}: {one.seen}: {one.fix}" for one in found if one.check in ("power", "power saving", "sleep")
        ]

    asleep = "may fall asleep: {}; keep its lid open: closing it puts it to sleep"
    off = "turn sleep off there while you train"
    assert words("Linux") == [
        "power: runs on battery, 41 %: plug it in",
        "power saving: the power-saving profile is on: powerprofilesctl set balanced",
        f"sleep: {asleep.format(REFUSED)}: {off}: sudo systemctl mask --runtime sleep.target",
    ]
    assert words("Darwin") == [
        "power: runs on battery, 41 %: plug it in",
        "power saving: Low Power Mode is on: sudo pmset -a lowpowermode 0",
        f"sleep: {asleep.format('caffeinate is missing')}: {off}: sudo pmset -a sleep 0",
    ]


def test_what_closing_the_lid_does_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On mains it may differ; a machine without a lid, or whose lid is closed while it works, is not put to sleep."""
    asked = {"HandleLidSwitch": 's "suspend"\n', "HandleLidSwitchExternalPower": 's "ignore"\n'}
    monkeypatch.setattr(health, "output", lambda *command: asked.get(command[-1], ""))
    assert health.lid_action("battery", str(tmp_path)) == ""
    (tmp_path / "LID0").mkdir()
    state = tmp_path / "LID0/state"
    state.write_text("state:      open\n")
    assert [health.lid_action(source, str(tmp_path)) for source in ("battery", "ac")] == ["suspend", "ignore"]
    asked["HandleLidSwitchExternalPower"] = 's ""\n'
    assert health.lid_action("ac", str(tmp_path)) == "suspend"
    asked |= {"Docked": "b true\n", "HandleLidSwitchDocked": 's "ignore"\n'}
    assert health.lid_action("battery", str(tmp_path)) == "ignore"
    del asked["Docked"]
    state.write_text("state:      closed\n")
    assert health.lid_action("battery", str(tmp_path)) == ""


def test_slowdowns_by_heat_are_counted(tmp_path: Path) -> None:
    for core, count in (("cpu0", "3"), ("cpu1", "4"), ("cpufreq", "9")):
        (tmp_path / core / "thermal_throttle").mkdir(parents=True)
        (tmp_path / core / "thermal_throttle/package_throttle_count").write_text(
            f"{count}\n" if core != "cpufreq" else ""
        )
    assert health.heat_slowdowns(str(tmp_path)) == 7


def test_a_gpu_that_others_fill() -> None:
    assert alarms(nvidia=[GPU], devices=[CUDA]) == []
    assert alarms(nvidia=[{**GPU, "free": 2**30}], devices=[CUDA]) == [("warning", "RTX: 1.0 GB of 16 GB free")]


@pytest.mark.parametrize(
    ("root", "folder"),
    [
        ("/Users/ada/Desktop/work", "/Users/ada/Desktop"),
        ("/Users/ada/Documents", "/Users/ada/Documents"),
        ("/users/ada/documents/x", "/users/ada/Documents"),
        ("/Volumes/Disk/muster", "/Volumes"),
        ("/Users/ada/.cache/muster", ""),
        ("/Users/ada/Documents2", ""),
        ("/private/tmp/Documents", ""),
    ],
)
def test_folders_that_a_mac_guards(root: str, folder: str) -> None:
    assert guarded_folder(root, "Darwin") == folder
    assert guarded_folder(root, "Linux") == ""


def test_packets_that_only_one_end_can_send() -> None:
    found = judge_mtu({"a": ("eth0", 9000), "b": ("eth0", 1500), "c": ("en0", 1400)})
    assert {name: finding.level for name, finding in found.items()} == {"a": "warning", "b": "ok", "c": "ok"}
    assert {finding.level for finding in judge_mtu({"a": ("x", 9000), "b": ("y", 9000)}).values()} == {"ok"}


def test_the_way_to_the_coordinator_is_needed_and_the_others_are_not() -> None:
    found = judge_connections({"this machine": "timed out", "b": "timed out", "c": ""}, ["this machine"])
    assert [finding.level for finding in found] == ["problem", "warning", "ok"]
    assert "firewall of this machine" in found[0].fix


def test_where_ssh_carries_the_way_to_the_coordinator_nothing_is_in_the_way() -> None:
    (found,) = judge_connections({"this machine": "timed out"}, ["this machine"], through_ssh=True)
    assert found.level == "warning" and found.seen.endswith("; a run reaches it through SSH")


def test_a_way_that_loses_large_packets_is_a_warning_on_its_own() -> None:
    (found,) = judge_connections({"b": health.LOSES_LARGE}, ["b"])
    assert (found.level, found.seen) == (
        "warning",
        "to b small packets pass, and large ones are lost: a run sends small ones there",
    )
    assert "MTU" in found.fix


# ------------------------------------------------------------------------------------------------------------- parsers


BATTERY = {"type": "Battery", "online": "", "status": "Discharging", "capacity": "43", "scope": ""}
MAINS = {"type": "Mains", "online": "0", "status": "", "capacity": "", "scope": ""}


def test_power_of_linux() -> None:
    assert health.linux_power([])["source"] == ""
    assert health.linux_power([{**BATTERY, "scope": "Device"}])["source"] == ""  # a mouse
    assert health.linux_power([MAINS, BATTERY]) | {"saving": False} == {
        "source": "battery",
        "percent": 43,
        "saving": False,
    }
    assert health.linux_power([{**MAINS, "online": "1"}, BATTERY])["source"] == "ac"


def test_power_of_a_mac() -> None:
    batt = "Now drawing from 'Battery Power'\n -InternalBattery-0 (id=1)\t67%; discharging; 3:10 remaining\n"
    said = {"source": "battery", "percent": 67, "saving": True}
    assert health.mac_power(batt, " standby  1\n lowpowermode         1\n") == said
    assert health.mac_power("Now drawing from 'AC Power'\n", " powermode  0\n")["source"] == "ac"
    assert health.mac_throttled("CPU_Speed_Limit \t= 60\n") and not health.mac_throttled("CPU_Speed_Limit = 100")


def test_nvidia_smi_says_numbers_or_not() -> None:
    (gpu,) = health.nvidia("NVIDIA H200, 570.86.15, 143771, 143000, [N/A]\n")
    assert gpu["driver"] == "570.86.15" and gpu["free"] == 143000 * 2**20 and gpu["celsius"] is None


@given(st.text(max_size=200), st.text(max_size=200))
def test_no_text_breaks_a_parser(one: str, two: str) -> None:
    said = {**SOUND, "power": health.mac_power(one, two), "throttled": health.mac_throttled(one)}
    judge_health(Health.model_validate_json(json.dumps({**said, "nvidia": health.nvidia(one)})))
    health.linux_power([{"type": one, "capacity": two, "status": one, "online": two, "scope": ""}])


def test_this_machine_tells_its_memory_and_its_interfaces() -> None:
    said = Health.model_validate_json(json.dumps({**SOUND, **health.facts(Path(), ReadHealth())}))
    assert 0 < said.memory.free <= said.memory.total
    assert "lo" not in said.mtu and all(size > 0 for size in said.mtu.values())


@pytest.mark.slow
def test_this_machine_multiplies_rightly() -> None:
    torch = pytest.importorskip("torch")
    found = health.smoke(torch, "cpu")
    assert found["problem"] == "" and found["gflops"] > 0.1 and found["bf16"] is False
    assert health.smoke(torch, "cuda:99")["problem"]


def test_machines_that_share_a_host_key_are_warned_of() -> None:
    found = judge_host_keys({"a": "k", "b": "k", "c": "other"})
    assert set(found) == {"a", "b"} and {one.level for one in found.values()} == {"warning"}
    assert "same host key as b" in found["a"].seen and "ssh-keygen -A" in found["a"].fix


def test_the_size_of_an_environment_follows_the_card() -> None:
    assert environment_size(0) == "about 1.6 GB"  # Macs, ARM, cards of other makers
    assert environment_size(2) == "about 5.6 GB, with CUDA"
    assert "or 5.6 GB" in environment_size(None)
