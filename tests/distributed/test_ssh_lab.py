"""Causes that need a real network: no route, cut cables, passwords, shells, full disks, slow links."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from distributed.ssh.connection import SshConnection
from distributed.ssh.errors import (
    ConnectTimeout,
    Dropped,
    HostKeyChanged,
    NoRoute,
    NoShell,
    PasswordOnly,
    RemoteFileError,
    SshError,
)
from tests.lab.lab import Lab
from tests.lab.processes import until_it_runs
from tests.lab.spec import HostSpec
from tests.waiting import PATIENCE, until

pytestmark = pytest.mark.lab


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    specs = (
        HostSpec("plain"),
        HostSpec("password", password="s3cret", sshd_options=("PubkeyAuthentication no",)),
        HostSpec("expired", password="s3cret", shadow_ages="0:0:99999:7::", sshd_options=("UsePAM yes",)),
        HostSpec("closed", password="s3cret", shadow_ages="19000:0:99999:7::5", sshd_options=("UsePAM yes",)),
        HostSpec("shellless", shell="/usr/sbin/nologin"),
        HostSpec("small", home_mb=2),
        HostSpec("full", sshd_options=("MaxSessions 0",)),
    )
    with Lab(*specs) as built:
        yield built


def refused(lab: Lab, name: str, timeout: float = PATIENCE, **given: Any) -> SshError:
    with pytest.raises(SshError) as caught:
        SshConnection.connect(lab.target(name), timeout=timeout, **given)
    assert caught.value.machine == name and caught.value.message.startswith(f"{name}: ")
    assert caught.value.hint
    return caught.value


def test_a_pulled_cable_is_a_timeout(lab: Lab) -> None:
    lab["plain"].run(["true"])
    lab["plain"].cut()
    try:
        for seconds in (0.5, 4.0, 32.0):  # a busy machine may not even have looked the address up
            if type(error := refused(lab, "plain", timeout=seconds)) in (ConnectTimeout, NoRoute):
                break
    finally:
        lab["plain"].mend()
    assert type(error) in (ConnectTimeout, NoRoute)


def test_a_server_that_takes_only_passwords_says_so_and_takes_one(lab: Lab) -> None:
    assert type(refused(lab, "password")) is PasswordOnly
    with SshConnection.connect(lab.target("password"), password="s3cret") as connection:
        assert connection.authenticated_by == "password"


def test_an_expired_password_is_told_with_what_to_type(lab: Lab) -> None:
    error = refused(lab, "expired")
    assert type(error) is NoShell and "the password of root there has expired" in error.message
    assert "log in once with: ssh root@" in error.hint and "then a new one twice" in error.hint


def test_an_expired_account_is_told(lab: Lab) -> None:
    error = refused(lab, "closed")
    assert "Your account has expired" in error.message and "sudo chage -E -1 root" in error.hint


def test_an_account_without_shell_is_told(lab: Lab) -> None:
    error = refused(lab, "shellless")
    assert type(error) is NoShell
    assert "not available" in error.message and error.hint.endswith("chsh -s /bin/sh root")


def test_a_server_without_sessions_is_told(lab: Lab) -> None:
    assert "opens no more sessions" in refused(lab, "full").message


def test_a_full_disk_is_told_and_leaves_nothing(lab: Lab) -> None:
    with SshConnection.connect(lab.target("small")) as small:
        with pytest.raises(RemoteFileError, match=r"small: cannot write data/big: .*No space left") as caught:
            small.put(b"x" * 4_000_000, "data/big")
        assert caught.value.hint.startswith("free some space there")
        assert small.run(["ls", "-A", "data"]).stdout == b""


def test_a_machine_that_was_set_up_anew_is_refused(lab: Lab) -> None:
    old = (lab["plain"].folder / "host_key").read_bytes(), (lab["plain"].folder / "host_key.pub").read_bytes()
    lab["plain"].new_host_key()
    try:
        with pytest.raises(HostKeyChanged):
            SshConnection.connect(lab.target("plain"), trust=lambda _: True)
    finally:
        for name, content in zip(("host_key", "host_key.pub"), old):
            (lab["plain"].folder / name).write_bytes(content)
        lab["plain"].stop_sshd()
        lab["plain"].start_sshd()


def test_a_cable_pulled_in_the_middle_is_noticed_and_the_command_goes_on(lab: Lab) -> None:
    host = lab["plain"]
    with SshConnection.connect(lab.target("plain"), heartbeat=0.25) as connection:
        process = connection.stream(["sleep", "71.5"])
        until_it_runs(host.pids, "sleep 71.5")
        begin = time.monotonic()
        host.cut()
        try:
            with pytest.raises(Dropped, match="plain: the connection was lost"):
                process.read(PATIENCE)
            assert time.monotonic() - begin > 0.5
            assert not connection.alive()
            assert host.pids("sleep 71.5")
        finally:
            host.mend()
    for pid in host.pids("sleep 71.5"):
        host.run(["pkill", "-f", "sleep 71.5"])
        until(lambda p=pid: p not in host.pids("sleep 71.5"))  # type: ignore[misc]  # mypy: lambda default


def test_a_short_break_is_survived(lab: Lab) -> None:
    with SshConnection.connect(lab.target("plain"), heartbeat=1.0) as connection:
        lab["plain"].cut()
        thread = threading.Timer(0.5, lab["plain"].mend)
        thread.start()
        assert connection.run(["echo", "still"]).stdout == b"still\n"
        thread.join()
        assert connection.alive()


def test_a_slow_busy_link_is_not_taken_for_a_dead_one(lab: Lab) -> None:
    lab["plain"].set_rate(8)
    try:
        with SshConnection.connect(lab.target("plain"), heartbeat=0.5) as connection:
            done = connection.run(["wc", "-c"], input=b"\0" * 4_000_000)
            assert done.stdout.strip() == b"4000000"
            assert connection.alive()
    finally:
        lab["plain"].set_rate(None)


def test_a_switched_off_machine_drops_the_connection(make_lab: Callable[..., Lab]) -> None:
    own = make_lab("gone")
    with SshConnection.connect(own.target("gone"), heartbeat=0.25) as connection:
        process = connection.stream(["sleep", "30"])
        own["gone"].kill()
        with pytest.raises(Dropped):
            process.read(PATIENCE)
