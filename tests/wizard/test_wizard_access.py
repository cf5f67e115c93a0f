"""The set-up's way to machines over real SSH servers: each failure with its cause and its command, and mended ones."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from app.wizard.engine import Wizard
from app.wizard.services.outside import Outside
from app.wizard.services.services import Services
from app.wizard.state import actions as do
from app.wizard.state.assessment import of_report
from app.wizard.state.dependencies import blockers
from app.wizard.state.records import Access, AccessNeed, ItemStatus, MachineRow
from distributed.ssh.access import AccessReport
from distributed.ssh.config import accept
from tests.lab.fixtures import MakeLab
from tests.lab.light import LightLab
from tests.lab.spec import HostSpec
from tests.waiting import until_state
from tests.wizard.ssh_failures import FAILURES, Impatient, InSight, failing_lab, row, silent_server

pytestmark = pytest.mark.slow

SECRET = "tr0ub4dor-and-3"


@pytest.fixture(scope="module")
def lab() -> Iterator[LightLab]:
    with failing_lab() as built:
        yield built


def asked(machine: MachineRow, trusted: Sequence[str] = (), outside: Outside | None = None) -> AccessReport:
    with closing(Services(outside=outside)) as services:
        return services.check_access(machine, trusted)


@pytest.mark.parametrize(("host", "code", "command"), FAILURES)
def test_every_failure_shows_its_cause_and_what_to_do(lab: LightLab, host: str, code: str, command: str) -> None:
    report = asked(row(host, lab.ssh_config))
    found = of_report(report)
    assert (found.status, report.cause) == (ItemStatus.FAILED, code)
    assert found.cause and found.cause.isprintable()
    assert found.fix and command in found.fix
    assert list(report.stages.values()).count(False) == 1


def test_a_server_that_stalls_is_said_to_stall(lab: LightLab) -> None:
    with silent_server() as port:
        report = asked(row("mute", lab.ssh_config, "127.0.0.1", port), (), Impatient(port))
    assert (report.cause, of_report(report).words) == ("stalled", "stalled")


def test_a_first_meeting_is_accepted_by_its_fingerprint_only(lab: LightLab, tmp_path: Path) -> None:
    config = tmp_path / "ssh_config"
    config.write_text(f"UserKnownHostsFile {tmp_path / 'known_hosts'}\nMatch all\nInclude {lab.ssh_config}\n")
    accept(str(config))
    stranger = row("fine", config)
    report = asked(stranger, ("SHA256:of-another",))
    found, access = of_report(report), Access("", report=report)
    assert (access.need, report.cause, found.status) == (AccessNeed.TRUST, "unknown_host_key", ItemStatus.WARNING)
    assert access.compare in found.fix and access.compare.startswith("ssh-keygen -lf")
    assert not (tmp_path / "known_hosts").exists()
    assert asked(stranger, (report.fingerprint,)).ok


def at_access(machine: MachineRow) -> Wizard:
    wizard = Wizard(InSight(machine))
    until_state(wizard, lambda state: bool(state.machines.rows))
    for action in (do.new_setup(), do.pick(machine.key, True), do.go_on()):
        wizard.do(action)
    return wizard


def test_a_mended_server_turns_green_by_itself(lab: LightLab) -> None:
    wizard = at_access(row("off", lab.ssh_config))
    try:
        until_state(wizard, lambda state: state.access[0].status is ItemStatus.FAILED)
        lab["off"].start_sshd()
        begin = time.monotonic()
        until_state(wizard, lambda state: state.access[0].status is ItemStatus.OK)
        print(f"green after {time.monotonic() - begin:.1f} s")
        wizard.do(do.go_on())
        assert wizard.state.step.value == "checks"
    finally:
        wizard.close()
        lab["off"].stop_sshd()


def test_an_ssh_configuration_of_a_hosts_file_is_approved_at_the_machine(lab: LightLab, tmp_path: Path) -> None:
    config = tmp_path / "ssh_config"
    config.write_text(f'Match exec "touch {tmp_path}/ran"\nMatch all\nInclude {lab.ssh_config}\n')
    wizard = at_access(replace(row("fine", config), key="box"))
    try:
        until_state(wizard, lambda state: state.access[0].need is AccessNeed.APPROVAL)
        report = wizard.state.access[0].report
        assert report is not None and any(f"touch {tmp_path}/ran" in line for line in report.demands)
        assert blockers(wizard.state) == ("fine: approve what its hosts file names, or skip it",)
        assert not (tmp_path / "ran").exists()
        wizard.do(do.approve("box"))
        until_state(wizard, lambda state: state.access[0].status is ItemStatus.OK)
        assert (tmp_path / "ran").exists()
    finally:
        wizard.close()


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
        until_state(wizard, lambda state: state.access[0].need is AccessNeed.PASSWORD)
        wizard.give_password("box", "not-the-right-one")
        until_state(wizard, lambda state: state.access[0].words == "wrong password")
        assert wizard.state.access[0].place.startswith("root@")
        assert wizard.state.access[0].need is AccessNeed.PASSWORD
        wizard.give_password("box", SECRET)
        until_state(wizard, lambda state: state.access[0].status is ItemStatus.OK)
    finally:
        wizard.close()
    assert asked(machine).ok
    assert not any(SECRET in text for text in seen)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert files and not any(SECRET.encode() in path.read_bytes() for path in files)
