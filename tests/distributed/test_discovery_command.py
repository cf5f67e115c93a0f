"""What ``discover`` and ``announce`` print, and how they end."""

from __future__ import annotations

import io
import ipaddress
import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from rich.cells import cell_len
from rich.console import Console
from zeroconf import EventLoopBlocked, ServiceInfo, Zeroconf

from app.cli.machines import access, discover
from app.console import show
from distributed.discovery.announce import Announcement, describe_this_machine
from distributed.discovery.discovery import Discovery
from distributed.discovery.machine_identity import FoundMachine, FoundPath
from distributed.discovery.mdns_records import parse_txt
from distributed.discovery.network_interfaces import Endpoint, Interface, Interfaces, PathKind
from distributed.discovery.sightings import (
    Identified,
    Problem,
    Reachability,
    Sighting,
    SightingKey,
    SightingOrigin,
    State,
    apply,
)
from distributed.ssh.access import AccessReport
from profiles.errors import ExitCode

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
CLI = [sys.executable, str(ROOT / "cli_typer.py")]


def machine(name: str, status: Reachability = Reachability.ONLINE, problem: Problem | None = None) -> FoundMachine:
    paths = tuple(
        FoundPath(Endpoint(f"192.168.100.{n}", "enp3s0", kind=PathKind.WIRED), status, problem) for n in (101, 102)
    )
    details = {"devices": "cuda NVIDIA GeForce RTX 4090, cpu 32 cores", "memory": "137438953472"}
    return FoundMachine(name, name, (name,), status, (SightingOrigin.BONJOUR,), paths, details=details, problem=problem)


def printed(*found: FoundMachine) -> str:
    stream = io.StringIO()
    Console(file=stream, width=80, markup=False, emoji=False, highlight=False).print(discover.machine_table(found))
    return stream.getvalue()


@pytest.mark.parametrize("columns", ["80", "200"])
def test_the_table_fits_eighty_columns_and_says_states_in_words(columns: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    text = printed(machine("studio-of-the-whole-family-upstairs"), machine("box", Reachability.OFFLINE))
    assert all(len(line) <= 80 for line in text.splitlines())
    assert columns == "200" or "192.168.100.101 " in text
    assert "● online" in text and "○ offline" in text


def test_a_pipe_gets_no_blanks_up_to_its_width(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    show(discover.machine_table((machine("box"), machine("attic"))))
    assert all(len(line) < 160 for line in capsys.readouterr().out.splitlines())


def test_a_hostile_name_is_shown_and_not_obeyed() -> None:
    hostile = machine("\x1b[31m[red]x\u202ey\n")
    for text in (printed(hostile), discover.machine_line(hostile)):
        assert "\x1b" not in text and "\u202e" not in text
        assert "[red]" in "".join(text.split())


def test_a_watched_table_has_the_signs_of_its_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setattr(discover, "interactive", lambda: True)
    place = Endpoint("192.168.100.1", "enp3s0", kind=PathKind.WIRED)
    seen = Sighting(SightingKey(SightingOrigin.BONJOUR, "", "studio"), "studio", "studio.local", (place,))
    state = apply(apply(State(), seen), Identified(place, "SHA256:studio", (), (("ssh-ed25519", "SHA256:studio"),)))
    with discover.until_signal() as stop:
        discover.show_changes(cast("Discovery", SimpleNamespace(state=state)), 0.1, stop, as_json=False)
    assert "● online" in terminal.buffer.getvalue().decode()  # type: ignore[attr-defined]  # of BytesIO


def test_every_cause_is_explained_in_the_docs() -> None:
    page = (ROOT / "docs" / "reference" / "discovery.md").read_text()
    sources = [
        (ROOT / "distributed" / "discovery" / f"{name}.py").read_text() for name in ("reachability", "known_machines")
    ]
    causes = set(re.findall(r'Problem\(\s*"(\w+)"', "".join(sources)))
    assert len(causes) > 5 and causes <= set(re.findall(r"`(\w+)`", page))
    assert all(f"`{kind.value}`" in page for kind in PathKind if kind is not PathKind.HERE)


def test_one_document_with_this_computer_and_what_was_typed(tmp_path: Path) -> None:
    environment = {"HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}
    for seconds in ("1", "10", "40"):  # a busy machine may need more
        command = [*CLI, "discover", "--json", "--timeout", seconds, "127.0.0.1:9"]
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=100)
        document = json.loads(done.stdout)
        found = [one for one in document["machines"] if one["name"] == "127.0.0.1"]
        if any(one["problem"] for one in found):
            break
    assert done.returncode == ExitCode.DONE == document["exit_code"]
    assert any(one["here"] and one["status"] == "online" for one in document["machines"])
    (typed,) = found
    assert (typed["status"], typed["problem"]["cause"]) == ("offline", "port_closed")


@pytest.mark.parametrize("words", [["--hosts", "missing.json"], ["--timeout", "0"], ["@"]])
def test_bad_input_is_one_error(tmp_path: Path, words: list[str]) -> None:
    done = subprocess.run([*CLI, "discover", *words], capture_output=True, text=True, cwd=tmp_path, timeout=100)
    assert done.returncode == ExitCode.BAD_INPUT
    assert done.stderr.startswith("error: ") and "Traceback" not in done.stderr


def test_an_announcement_ends_cleanly_when_it_is_killed(tmp_path: Path) -> None:
    with subprocess.Popen([*CLI, "announce"], stderr=subprocess.PIPE, text=True, cwd=tmp_path) as process:
        assert process.stderr is not None
        assert process.stderr.readline().startswith("announced as '")
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == ExitCode.DONE
        assert process.stderr.read() == ""


def test_ctrl_c_ends_the_watch_with_its_exit_code(tmp_path: Path) -> None:
    environment = {"HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}
    command = [*CLI, "discover", "--watch", "--json"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, text=True, cwd=tmp_path, env=environment, **pipes) as process:
        assert process.stdout is not None and process.stderr is not None
        assert json.loads(process.stdout.readline())["event"] == "found"
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == ExitCode.STOPPED
        assert "Traceback" not in process.stderr.read()


@pytest.mark.parametrize("name", ["fe80::1234:5678:9abc:def0%enx001122334455", "日本語の機械の名前", "box"])
def test_a_row_of_access_names_the_whole_machine_and_stays_in_line(name: str) -> None:
    lines = access.report_lines(AccessReport(name, system="Linux x86_64"), None)
    assert lines[0].startswith(name)
    assert cell_len(lines[-1].partition("ok")[0]) == 22 and cell_len(lines[-1]) <= 80


@pytest.mark.parametrize("seconds", [0.0, float("nan"), -1.0])
def test_no_time_to_look_is_no_wait(seconds: float) -> None:
    with discover.until_signal() as stop:
        assert not stop.wait(seconds)


def test_what_is_announced_comes_back_from_its_record() -> None:
    described = describe_this_machine()
    entries = [f"{key}={value}".encode() for key, value in described.items()]
    assert parse_txt(b"".join(bytes([len(entry)]) + entry for entry in entries)) == described
    assert int(described["memory"]) > 0


def test_many_devices_with_long_names_fit_into_the_announcement() -> None:
    gpus = [f"NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition, slot {n}" for n in range(4)]
    described = describe_this_machine(lambda program, *_: "\n".join(gpus) if program == "nvidia-smi" else "")
    assert described["devices"].startswith("cuda NVIDIA RTX PRO 6000")
    assert max(len(f"{key}={value}".encode()) for key, value in described.items()) <= 255
    eight = describe_this_machine(lambda program, *_: "NVIDIA H200\n" * 8 if program == "nvidia-smi" else "")
    assert eight["devices"].startswith("8x cuda NVIDIA H200, ")


class Responder:
    """Speaks no DNS: keeps what it is told, and is too busy for the first call of each kind where ``busy``."""

    def __init__(self, busy: bool) -> None:
        self.told: list[list[str]] = []
        self.announced: list[list[str]] = []
        self.busy = {"interfaces", "service"} if busy else set()

    def __call__(self, interfaces: list[str]) -> Zeroconf:
        self.told.append(interfaces)
        return cast(Zeroconf, self)

    def update_interfaces(self, interfaces: list[str]) -> None:
        self._refuse("interfaces")
        self.told.append(interfaces)

    def update_service(self, info: ServiceInfo) -> None:
        self._refuse("service")
        self.announced.append(info.parsed_addresses())

    def _refuse(self, kind: str) -> None:
        if kind in self.busy:
            self.busy.remove(kind)
            raise EventLoopBlocked


def having(*addresses: str, first: int = 1) -> Interfaces:
    """Interfaces with one address each, numbered by the system from ``first`` on."""
    attached = (ipaddress.ip_interface(address) for address in addresses)
    return Interfaces(tuple(
        Interface(f"eth{number}", first + number, (one,), PathKind.WIRED, True) for number, one in enumerate(attached)
    ))  # fmt: skip


def test_a_new_network_is_announced_on_although_the_machine_is_busy() -> None:
    now, responder = having("10.0.0.1/24"), Responder(busy=True)
    announcement = Announcement(interfaces=lambda: now, responder=responder)
    now = having("10.0.0.1/24", "169.254.1.1/16")
    assert [announcement.follow_interfaces() for _ in range(4)] == [False, False, True, False]
    assert announcement.interfaces == ("eth0", "eth1")
    assert responder.announced == [["10.0.0.1", "169.254.1.1"]] == responder.told[-1:]


def test_an_interface_that_goes_between_listing_and_announcing_is_left_out() -> None:
    lists = iter([having("10.0.0.1/24", "169.254.1.1/16"), having("10.0.0.1/24")])
    responder = Responder(busy=False)

    def refuse_gone(interfaces: list[str]) -> Zeroconf:
        if len(interfaces) > 1:
            raise RuntimeError(f"No adapter found for IP address {interfaces[1]}")
        return responder(interfaces)

    assert Announcement(interfaces=lambda: next(lists), responder=refuse_gone).interfaces == ("eth0",)
    assert responder.told == [["10.0.0.1"]]


@pytest.mark.parametrize("seen_gone", [True, False])
def test_an_interface_that_is_plugged_in_anew_is_not_taken_for_the_old(seen_gone: bool) -> None:
    now, responder = having("10.0.0.1/24"), Responder(busy=False)
    announcement = Announcement(interfaces=lambda: now, responder=responder)
    if seen_gone:
        now = having()
        assert not announcement.follow_interfaces()
        assert responder.told[-1] == ["127.0.0.1"]
    now = having("10.0.0.1/24", first=7)
    assert announcement.follow_interfaces()
    assert responder.told[-2:] == [["127.0.0.1"], ["10.0.0.1"]]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_strange_name_becomes_one_label() -> None:
    """zeroconf leaves a socket open where an interface goes away meanwhile, as those of labs do beside it."""
    announcement = Announcement(name="Ada's  Büro.example " + "x" * 80)
    try:
        assert re.fullmatch(r"[A-Za-z0-9-]{1,40}", announcement.name)
    finally:
        announcement.close()
