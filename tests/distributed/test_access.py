"""Reports of the way to a machine: where it ended, why, and what to do, each from a real server or its absence."""

from __future__ import annotations

import contextlib
import platform
import socket
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from scripted_connection import garbage, serving, silent

from distributed.ssh.access import AccessReport, check_access, check_all, own_key
from distributed.ssh.connection import SshTarget
from distributed.ssh.errors import SshError, Stage
from tests.lab.light import LightLab
from tests.lab.spec import HostSpec
from tests.lab.ssh_setup import configured
from tests.waiting import PATIENCE

pytestmark = pytest.mark.slow

SOON = (1.0, 8.0, 40.0)
"""Time limits for what does not answer at all."""


@pytest.fixture(scope="module")
def lab() -> Iterator[LightLab]:
    specs = (
        HostSpec("a"),
        HostSpec("b"),
        HostSpec("keyless", key=False),
        HostSpec("off", sshd=False),
        HostSpec("shellless", sshd_options=("ForceCommand /usr/sbin/nologin",)),
        HostSpec("endless", sshd_options=("ForceCommand yes Welcome",)),
        HostSpec("hung", sshd_options=("ForceCommand sleep 60",)),
        HostSpec("slow", sshd_options=('ForceCommand sleep 2; eval "$SSH_ORIGINAL_COMMAND"',)),
        HostSpec("thrown", sshd_options=("ForceCommand kill -9 $PPID",)),
        HostSpec("chosen", sshd_options=("AllowUsers somebody-else",)),
    )
    with LightLab(*specs) as built:
        yield built


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))


def loopback(port: int, tmp_path: Path) -> SshTarget:
    config = tmp_path / "empty_config"
    config.write_text("")
    return SshTarget("box", "127.0.0.1", port, config_file=str(config))


def ended(report: AccessReport) -> tuple[Stage | None, str]:
    assert report.problem and report.fix and report.problem.isprintable()
    return report.failed, report.cause


def checked(target: SshTarget, *timeouts: float, until: str) -> AccessReport:
    """Check the access with one time limit after the other until the cause is this one: a busy machine needs more."""
    for seconds in timeouts:
        report = check_access(target, timeout=seconds)
        if report.cause == until:
            break
    return report


def test_a_machine_that_lets_us_in(lab: LightLab) -> None:
    report = check_access(lab.target("a"))
    assert report.ok and report.authenticated_by == str(lab.key) and report.system
    assert report.host_name == platform.node()
    assert list(report.stages.values()) == [True] * 4
    assert report.where == f"127.0.0.1:{lab['a'].port}" and report.fingerprint.startswith("SHA256:")


@pytest.mark.parametrize(
    ("host", "stage", "cause", "fix"),
    [
        ("off", Stage.REACH, "port_closed", "systemctl enable --now ssh"),
        ("keyless", Stage.LOGIN, "no_key_accepted", "run this on that machine itself, as"),
        ("chosen", Stage.LOGIN, "no_key_accepted", "run this on that machine itself, as"),
        ("thrown", Stage.LOGIN, "user_refused", "Allow access for"),
        ("shellless", Stage.SHELL, "no_shell", "chsh -s /bin/sh"),
        ("endless", Stage.SHELL, "no_shell", "print nothing when the shell is not interactive"),
        ("hung", Stage.SHELL, "command_timeout", "start files"),
    ],
)
def test_each_cause_has_its_stage_and_its_fix(lab: LightLab, host: str, stage: Stage, cause: str, fix: str) -> None:
    report = checked(lab.target(host), *((2.0, 10.0, 40.0) if host == "hung" else (PATIENCE,)), until=cause)
    assert ended(report) == (stage, cause)
    assert fix in report.fix
    if cause == "no_key_accepted":
        assert report.command in report.fix and own_key().line in report.command
    order = list(Stage)
    assert [report.stages[s] for s in order[: order.index(stage) + 1]] == [True] * order.index(stage) + [False]
    assert all(report.stages[s] is None for s in order[order.index(stage) + 1 :])


def test_start_files_that_are_slow_have_the_time_that_the_configuration_gives(lab: LightLab, tmp_path: Path) -> None:
    config = configured(lab.ssh_config, tmp_path, f"Host slow\n  ConnectTimeout {PATIENCE:.0f}")
    assert check_access(lab.target("slow", config_file=config), timeout=1.0).ok


def test_a_name_without_address(lab: LightLab) -> None:
    report = check_access(SshTarget("x", "no-such-machine.invalid", config_file=str(lab.ssh_config)))
    assert ended(report) == (Stage.REACH, "name_unknown")


@pytest.mark.parametrize(("play", "cause"), [(silent, "stalled"), (garbage, "not_ssh"), (lambda peer: None, "dropped")])
def test_a_server_that_is_none_of_sshs_is_left_in_time(tmp_path: Path, play: Any, cause: str) -> None:
    with serving(play) as port:
        report = checked(loopback(port, tmp_path), *(SOON if play is silent else (PATIENCE,)), until=cause)
    assert ended(report) == (Stage.REACH, cause)


def test_a_real_server_that_falls_silent_is_left_in_time(lab: LightLab) -> None:
    lab["b"].cut()
    try:
        report = checked(lab.target("b"), *SOON, until="stalled")
    finally:
        lab["b"].mend()
    assert ended(report) == (Stage.REACH, "stalled")


def test_side_by_side_a_silent_machine_holds_nobody_up(lab: LightLab, tmp_path: Path) -> None:
    both = threading.Barrier(2)

    def wait_for_the_other(peer: socket.socket) -> None:
        with contextlib.suppress(threading.BrokenBarrierError):
            both.wait(PATIENCE)
        silent(peer)

    with serving(wait_for_the_other) as one, serving(wait_for_the_other) as other:
        twin = replace(loopback(other, tmp_path), name="other box")
        targets = [loopback(one, tmp_path), lab.target("a"), twin, lab.target("off")]
        for seconds in (2.0, 10.0, 40.0):  # a busy machine may need more for the real one
            reports = check_all(targets, timeout=seconds)
            if not reports["a"].cause:
                break
    assert [report.cause for report in reports.values()] == ["stalled", "", "stalled", "port_closed"]
    assert not both.broken  # both were connected to at the same time


def test_the_first_meeting_shows_the_fingerprint_and_how_to_compare(lab: LightLab, tmp_path: Path) -> None:
    known = tmp_path / "known"
    target = lab.target("a", config_file=configured(lab.ssh_config, tmp_path, f"UserKnownHostsFile {known}"))
    report = check_access(target)
    assert ended(report) == (Stage.HOST_KEY, "unknown_host_key")
    assert report.fingerprint in report.problem
    assert "ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub" in report.fix
    assert report.unknown_key is not None and not known.exists()
    assert check_access(target, trust=lambda key: key == report.unknown_key).ok


def test_a_first_meeting_says_under_which_names_the_machine_is_known(lab: LightLab, tmp_path: Path) -> None:
    (tmp_path / "known").write_text(f"studio,pi {lab['a'].host_key}\n")
    config = configured(lab.ssh_config, tmp_path, f"UserKnownHostsFile {tmp_path / 'known'}")
    report = check_access(lab.target("a", config_file=config))
    assert report.unknown_key is not None and report.unknown_key.known_as == ("studio", "pi")


def test_a_changed_key_names_the_line_and_is_refused_whatever_is_trusted(lab: LightLab, tmp_path: Path) -> None:
    known = tmp_path / "known"
    known.write_text(f"# mine\n[127.0.0.1]:{lab['a'].port} {lab['b'].host_key}\n")
    config = configured(lab.ssh_config, tmp_path, f"UserKnownHostsFile {known}")
    report = check_access(lab.target("a", config_file=config), trust=lambda _: True)
    assert ended(report) == (Stage.HOST_KEY, "host_key_changed")
    assert f"{known}:2" in report.problem and "compare on that machine" in report.fix
    assert f"ssh-keygen -R '[127.0.0.1]:{lab['a'].port}' -f {known}" in report.fix
    assert lab["b"].host_key in known.read_text() and known.read_text().count("\n") == 2


def test_a_jump_host_is_named_as_the_cause(lab: LightLab, tmp_path: Path) -> None:
    config = configured(lab.ssh_config, tmp_path, "Host a\n  ProxyJump keyless")
    report = check_access(lab.target("a", config_file=config))
    assert ended(report) == (Stage.LOGIN, "no_key_accepted")
    assert "through keyless" in report.problem and not report.password_possible


def test_an_error_of_the_configuration_is_a_report(lab: LightLab, tmp_path: Path) -> None:
    bad = tmp_path / "bad"
    bad.write_text("NoSuchOption yes\n")
    report = check_access(lab.target("a", config_file=str(bad)))
    assert report.cause == "ssh_config" and "nosuchoption" in report.problem.lower()


def test_a_locked_key_says_how_to_unlock_it(lab: LightLab, tmp_path: Path) -> None:
    key = tmp_path / "key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "secret", "-f", str(key)], check=True)
    report = check_access(lab.target("keyless", key=str(key)))
    assert report.fix == f"unlock the key first: ssh-add {key}" and "locked by a passphrase" in report.problem


def test_the_page_names_every_cause_and_every_error_a_stage() -> None:
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "access.md").read_text()
    kinds: list[type[SshError]] = [SshError, *SshError.__subclasses__()]
    for kind in kinds:
        assert f"| `{kind.cause}` |" in page
        assert Stage(kind.stage)
