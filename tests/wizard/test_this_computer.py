"""What the row of this computer says of it, on systems of every kind."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.wizard.services.machines import linux, mac, row_of, this_computer
from distributed.hosts.file import Machine

CPU = "processor\t: 0\nmodel name\t: AMD Ryzen 7 7700X\nmodel\t\t: 97\n"
CARD = "Model: \t\t NVIDIA GeForce RTX 4090\nIRQ:   \t\t 130\nGPU UUID: \t GPU-0\n"
BOARD = "Raspberry Pi 5 Model B Rev 1.0\0"
OS = 'NAME="Debian"\nPRETTY_NAME="Debian GNU/Linux 12 (bookworm)"\n'


@pytest.mark.parametrize(
    ("files", "chip"),
    [
        ({"proc/cpuinfo": CPU}, "AMD Ryzen 7 7700X"),
        ({"proc/cpuinfo": CPU, "proc/driver/nvidia/gpus/0/information": CARD}, "NVIDIA GeForce RTX 4090"),
        ({f"proc/driver/nvidia/gpus/{n}/information": CARD for n in range(2)}, "2 x NVIDIA GeForce RTX 4090"),
        ({"proc/cpuinfo": "processor\t: 0\nBogoMIPS\t: 108\n", "proc/device-tree/model": BOARD}, BOARD[:-1]),
    ],
)
def test_linux_says_its_gpu_or_its_processor(files: dict[str, str], chip: str, tmp_path: Path) -> None:
    for place, text in {**files, "etc/os-release": OS}.items():
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / place).write_text(text)
    assert linux(tmp_path) == (chip, "Debian GNU/Linux 12 (bookworm)")


def test_where_no_file_tells_the_kind_of_machine_is_said(tmp_path: Path) -> None:
    assert all(linux(tmp_path))


def test_a_mac_says_its_chip() -> None:
    answers = {"sysctl": "Apple M2 Max", "sw_vers": "15.4"}
    assert mac(lambda program, *_: answers[program])[0] == "Apple M2 Max"
    assert all(mac(lambda *_: ""))


def test_a_saved_profile_s_row_of_this_computer_says_the_same() -> None:
    row = row_of(Machine(name="desk", address="localhost"), this_computer())
    here = this_computer()
    assert (row.chip, row.memory, row.system) == (here.chip, here.memory, here.system)
    assert all(here) and row.memory.endswith(" GB")
