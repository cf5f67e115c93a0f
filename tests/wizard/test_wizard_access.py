"""The set-up's way to machines over real SSH servers: each failure with its cause and its command, and mended ones."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from app.wizard import actions as do
from app.wizard import machine_looks
from app.wizard.engine import Wizard
from app.wizard.machine_entries import SSH_CONFIG
from app.wizard.machine_looks import access_row
from app.wizard.real_services import RealServices
from app.wizard.services import Sight
from app.wizard.state import MachineRow, Machines, Need, Status
from distributed.ssh.access import check_access
from tests.lab.fixtures import MakeLab
from tests.lab.light import LightLab
from tests.lab.spec import HostSpec, LabUnavailable
from tests.wizard.fake_services import FakeWatch

pytestmark = pytest.mark.slow

SECRET = "tr0ub4dor-and-3"


@pytest.fixture(scope="module")
def lab() -> Iterator[LightLab]:
    specs = (
        HostSpec("fine"),
        HostSpec("keyless", key=False),
        HostSpec("off", sshd=False),
        HostSpec("shellless", sshd_options=("ForceCommand /usr/sbin/nologin",)),
        HostSpec("thrown", sshd_options=("ForceCommand kill -9 $PPID",)),
        HostSpec("renewed"),
    )
    try:
        with LightLab(*specs) as built:
            built["renewed"].new_host_key()
            yield built
    except LabUnavailable as error:
        pytest.skip(str(error))


def row(name: str, config: Path, address: str = "", port: int | None = None) -> MachineRow:
    settings = ((SSH_CONFIG, str(config)),)
    return MachineRow(name, name, Status.OK, address=address or name, port=port, settings=settings)


@contextlib.contextmanager
def silent_server() -> Iterator[int]:
    """A port that takes connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.mark.parametrize(
    ("host", "code", "command"),
    [
        ("no-such-machine.invalid", "name_unknown", ""),
        ("off", "port_closed", "systemctl enable --now ssh"),
        ("keyless", "no_key_accepted", "~/.ssh/authorized_keys"),
        ("thrown", "user_refused", "Allow access for"),
        ("shellless", "no_shell", "chsh -s /bin/sh"),
        ("renewed", "host_key_changed", "ssh-keygen -R"),
    ],
)
def test_every_failure_shows_its_cause_and_what_to_do(lab: LightLab, host: str, code: str, command: str) -> None:
    found = access_row(row(host, lab.ssh_config), ())
    assert (found.status, found.code) == (Status.FAILED, code)
    assert found.cause and found.cause.isprintable()
    assert found.fix and command in found.fix
    assert [status for _, status in found.stages].count(Status.FAILED) == 1


def test_a_server_that_stalls_is_said_to_stall(lab: LightLab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_looks, "check_access", partial(check_access, timeout=1.0))
    with silent_server() as port:
        found = access_row(row("mute", lab.ssh_config, "127.0.0.1", port), ())
    assert (found.code, found.words) == ("stalled", "stalled")


def test_a_first_meeting_is_accepted_by_its_fingerprint_only(lab: LightLab, tmp_path: Path) -> None:
    config = tmp_path / "ssh_config"
    config.write_text(f"UserKnownHostsFile {tmp_path / 'known_hosts'}\nMatch all\nInclude {lab.ssh_config}\n")
    stranger = row("fine", config)
    found = access_row(stranger, ("SHA256:of-another",))
    assert (found.need, found.code, found.status) == (Need.TRUST, "unknown_host_key", Status.WARNING)
    assert found.compare in found.fix and found.compare.startswith("ssh-keygen -lf")
    assert not (tmp_path / "known_hosts").exists()
    assert access_row(stranger, (found.fingerprint,)).status is Status.OK


class OneMachine(RealServices):
    """The real world with one machine in sight."""

    def __init__(self, machine: MachineRow) -> None:
        super().__init__()
        self._machine = machine

    def watch(self, see: object) -> FakeWatch:
        assert callable(see)
        see(Sight(Machines((self._machine,))))
        return FakeWatch(None)  # type: ignore[arg-type]  # nothing is typed


def at_access(machine: MachineRow) -> Wizard:
    wizard = Wizard(OneMachine(machine))
    assert wizard.wait(lambda state: bool(state.machines.rows), 10)
    for action in (do.NewSetup(), do.Pick(machine.key, True), do.Next()):
        wizard.do(action)
    return wizard


def test_a_mended_server_turns_green_by_itself(lab: LightLab) -> None:
    wizard = at_access(row("off", lab.ssh_config))
    try:
        assert wizard.wait(lambda state: state.access[0].status is Status.FAILED, 20)
        lab["off"].start_sshd()
        begin = time.monotonic()
        assert wizard.wait(lambda state: state.access[0].status is Status.OK, 30)
        print(f"green after {time.monotonic() - begin:.1f} s")
        wizard.do(do.Next())
        assert wizard.state.step.value == "checks"
    finally:
        wizard.close()
        lab["off"].stop_sshd()


@pytest.mark.lab
def test_a_password_is_asked_once_and_kept_nowhere(
    make_lab: MakeLab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab = make_lab(HostSpec("box", password=SECRET, key=False))
    monkeypatch.setenv("HOME", str(tmp_path))
    machine = replace(row("box", lab.ssh_config), key="box")
    wizard = at_access(machine)
    seen: list[str] = []
    wizard.subscribe(lambda: seen.append(repr(wizard.state)))
    try:
        assert wizard.wait(lambda state: state.access[0].need is Need.PASSWORD, 30), wizard.state.access
        wizard.do(do.GivePassword("box", "not-the-right-one"))
        assert wizard.wait(lambda state: state.access[0].code == "password_refused", 30), wizard.state.access
        assert wizard.state.access[0].need is Need.PASSWORD
        wizard.do(do.GivePassword("box", SECRET))
        assert wizard.wait(lambda state: state.access[0].status is Status.OK, 60), wizard.state.access
    finally:
        wizard.close()
    assert access_row(machine, ()).status is Status.OK
    assert not any(SECRET in text for text in seen)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert files and not any(SECRET.encode() in path.read_bytes() for path in files)
