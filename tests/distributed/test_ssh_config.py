"""Targets are resolved by OpenSSH itself."""

from __future__ import annotations

import getpass
import os
import pwd
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distributed.hosts.file import Machine
from distributed.ssh.config import OWN_KEY, ResolvedHost, SshTarget, parse_jumps, resolve
from distributed.ssh.keys.host_keys import split_paths
from profiles.errors import BadInput

needs_ssh = pytest.mark.skipif(shutil.which("ssh") is None, reason="ssh is not installed")
Resolve = Callable[..., ResolvedHost]


@pytest.fixture
def resolved(tmp_path: Path) -> Resolve:
    """Resolve a target against a configuration text."""

    def run(text: str, host: str = "studio", **fields: Any) -> ResolvedHost:
        config = tmp_path / "config"
        config.write_text(text)
        return resolve(SshTarget(host, host, config_file=str(config), **fields))

    return run


@needs_ssh
def test_include_match_and_aliases_hold(resolved: Resolve, tmp_path: Path) -> None:
    (tmp_path / "more").write_text("Host studio\n  HostName 10.1.2.3\n  Port 2222\n  IdentityFile ~/.ssh/%h_%r\n")
    host = resolved(f"Include {tmp_path / 'more'}\nMatch host 10.1.2.3\n  User ada\n  IdentitiesOnly yes\n")
    assert (host.hostname, host.port, host.user, host.identities_only) == ("10.1.2.3", 2222, "ada", True)
    assert Path("~/.ssh/10.1.2.3_ada").expanduser() in host.key_files
    assert host.host_port == "10.1.2.3:2222"


@needs_ssh
def test_the_hosts_file_wins_over_the_configuration(resolved: Resolve) -> None:
    host = resolved("Host studio\n  User ada\n  Port 2222\n", port=23, user="bob", key="~/k")
    assert (host.port, host.user, host.key_files[0]) == (23, "bob", Path("~/k").expanduser())


@needs_ssh
def test_a_user_nobody_named_is_marked_as_a_guess(resolved: Resolve) -> None:
    assert resolved("").user_is_guess
    assert resolved("").user == getpass.getuser()
    assert not resolved("", user=getpass.getuser()).user_is_guess


@needs_ssh
def test_agent_socket_is_the_configured_one(resolved: Resolve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSH_AUTH_SOCK", "/run/agent")
    monkeypatch.setenv("OTHER", "/run/other")
    assert resolved("").agent_socket == "/run/agent"
    assert resolved("IdentityAgent none").agent_socket == ""
    assert resolved("IdentityAgent $OTHER").agent_socket == "/run/other"
    account = pwd.getpwuid(os.getuid()).pw_dir  # for ssh, not HOME
    assert resolved("IdentityAgent ~/agent").agent_socket == f"{account}/agent"


@needs_ssh
def test_several_known_hosts_files_may_have_spaces_in_their_names(resolved: Resolve) -> None:
    host = resolved('UserKnownHostsFile "/my keys/known  hosts" /b "/c d/e"')
    assert host.user_known_hosts == (Path("/my keys/known  hosts"), Path("/b"), Path("/c d/e"))


@needs_ssh
def test_new_host_keys_are_written_to_the_home_that_has_our_key_and_those_of_the_account_hold(
    resolved: Resolve, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    account = Path(pwd.getpwuid(os.getuid()).pw_dir)  # for ssh, not HOME
    first, *others = resolved("").user_known_hosts
    assert first == Path(OWN_KEY).expanduser().with_name("known_hosts") == tmp_path / ".ssh/known_hosts"
    assert account / ".ssh/known_hosts" in others


@given(st.lists(st.sampled_from(["/", "~", "/a", "~/.ssh/a", "/b c", "%d/my keys/known.hosts", "$HOME/a  b"])))
def test_files_in_one_line_are_told_apart(names: list[str]) -> None:
    assert split_paths(" ".join(names)) == names


@needs_ssh
@pytest.mark.parametrize(
    ("value", "accepts"), [("ask", False), ("yes", False), ("accept-new", True), ("no", True), ("off", True)]
)
def test_who_was_never_met_is_accepted_where_the_configuration_says_so(
    resolved: Resolve, value: str, accepts: bool
) -> None:
    assert resolved(f"StrictHostKeyChecking {value}").accepts_new_keys == accepts


@needs_ssh
def test_the_time_that_the_configuration_gives_a_machine_is_taken_over(resolved: Resolve) -> None:
    assert (resolved("").connect_timeout, resolved("ConnectTimeout 45").connect_timeout) == (0.0, 45.0)


@needs_ssh
def test_jumps_and_proxy_commands_are_taken_over(resolved: Resolve) -> None:
    jumps = resolved("ProxyJump ada@gate:2222,inner").jumps
    assert [(jump.user, jump.host, jump.port) for jump in jumps] == [("ada", "gate", 2222), ("", "inner", None)]
    assert resolved("ProxyJump none").jumps == ()
    assert resolved("ProxyCommand nc %h %p # %%", port=23).proxy_command.startswith("nc studio 23")


@needs_ssh
def test_an_error_in_the_configuration_is_told_in_one_line(resolved: Resolve) -> None:
    with pytest.raises(BadInput, match=r"studio: .*config: line 1: Bad configuration option: nonsense") as caught:
        resolved("Nonsense yes\n")
    assert "\n" not in str(caught.value)


def test_a_configuration_that_nobody_approved_is_named_without_the_machine_where_a_row_names_it() -> None:
    target = SshTarget("c", "192.0.2.1", config_file="/nowhere/theirs", from_hosts_file=True)
    with pytest.raises(BadInput) as caught:
        resolve(target)
    assert caught.value.message_for("c") == "the SSH configuration /nowhere/theirs of its hosts file is not approved"


@pytest.mark.parametrize("host", ["", "-oProxyCommand=touch /tmp/x"])
def test_an_option_is_no_host_name(host: str) -> None:
    with pytest.raises(BadInput, match="is not a host name"):
        resolve(SshTarget("m", host))


def test_without_ssh_the_usual_defaults_are_taken(resolved: Resolve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    host = resolved("Host studio\n  HostName 10.1.2.3\n", port=2222)
    assert (host.hostname, host.port) == ("studio", 2222)
    assert Path("~/.ssh/known_hosts").expanduser() in host.user_known_hosts
    assert "the ssh command is missing" in host.note
    assert "config was not read" in host.note


def test_a_target_is_made_of_a_machine() -> None:
    machine = Machine(name="studio", address="10.0.0.2", port=23, user="ada", key="~/k")
    assert SshTarget.of(machine) == SshTarget("studio", "10.0.0.2", 23, "ada", "~/k")


names = st.text("abcdefghij.-0123456789", min_size=1, max_size=10)


@given(st.none() | names, names, st.none() | st.integers(1, 65535), st.booleans())
def test_jump_lists_are_parsed(user: str | None, host: str, port: int | None, url: bool) -> None:
    text = ("ssh://" if url else "") + (f"{user}@" if user else "") + host + (f":{port}" if port else "")
    first, second = parse_jumps(f"{text},[fe80::1]:23", SshTarget("m", "m"))
    assert (first.user, first.host, first.port) == (user or "", host, port)
    assert (second.host, second.port) == ("fe80::1", 23)
