"""The log of commands: what an entry says, and that those who watch a run see what its process does."""

from __future__ import annotations

from collections import deque
from pathlib import Path

import pytest

from app.dashboard.dialogs.commands import Commands
from distributed.agent.requests import ListAddresses
from distributed.machine.link import link_to, this_machine
from distributed.ssh import command_log
from distributed.ssh.command_log import commands_of, keep_log, note, ssh_command
from distributed.ssh.config import SshTarget, resolve
from distributed.ssh.errors import remote_login


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(command_log, "_ran", deque())
    monkeypatch.setattr(command_log, "_kept_in", None)
    return tmp_path


def test_who_watches_a_run_sees_the_commands_of_its_process_and_how_they_ended(run_dir: Path) -> None:
    keep_log(run_dir)
    note("air", ["sh", "-c", "# stores a file\ncat"]).end("ok")
    shown = Commands(run_dir).records[-1]
    assert (shown.machine, shown.command, shown.outcome) == (
        "air",
        "sh -c <a program of Muster's: stores a file>",
        "ok",
    )


def test_the_process_that_takes_a_run_over_keeps_what_the_one_before_did(run_dir: Path) -> None:
    keep_log(run_dir)
    note("air", ["first"])
    command_log._ran.clear()
    keep_log(run_dir)
    note("air", ["second"])
    assert [record.command for record in commands_of(run_dir)] == ["first", "second"]


def test_a_damaged_log_is_none(tmp_path: Path) -> None:
    (tmp_path / command_log.LOG_FILE).write_text('[{"unknown": 1}]')
    assert commands_of(tmp_path) == []


def test_a_request_says_what_it_does() -> None:
    hosts = this_machine()
    record = note("here", link_to(hosts.machines[0], hosts).command(ListAddresses()))
    assert "<a program of Muster's: list addresses>" in record.command


def test_a_log_in_is_listed_as_one_could_type_it(tmp_path: Path) -> None:
    config, key = tmp_path / "ssh_config", tmp_path / "key"
    config.write_text("Host pc\n  HostName 192.0.2.7\n")
    key.touch()
    target = SshTarget("pc", "pc", 2200, "ada", str(key), str(config))
    line = ssh_command(target, resolve(target))
    assert line == ["ssh", "-F", str(config), "-i", str(key), "-p", "2200", "ada@pc"]


def test_a_hint_about_an_ssh_server_is_of_the_system_that_it_speaks_of() -> None:
    assert "Mac" not in remote_login("127.0.0.1", "linux") and "openssh-server" in remote_login("127.0.0.1", "linux")
    assert "openssh" not in remote_login("::1", "darwin")
    assert "Mac" in remote_login("192.0.2.7", "linux") and "Linux" in remote_login("192.0.2.7", "linux")
