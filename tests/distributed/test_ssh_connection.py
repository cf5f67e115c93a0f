"""Connections to real sshd servers on loopback."""

from __future__ import annotations

import base64
import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import paramiko
import pytest

from distributed.machine.link import HereConnection
from distributed.ssh.command_log import commands_run
from distributed.ssh.connection import PUT, SshConnection, SshTarget
from distributed.ssh.errors import (
    CommandTimeout,
    Dropped,
    ForwardRefused,
    HostKeyChanged,
    NameUnknown,
    NoKeyAccepted,
    NoShell,
    NotSsh,
    PortClosed,
    RemoteFileError,
    SshError,
    Stage,
    Stalled,
)
from distributed.ssh.keys.host_keys import HostKeyInfo
from distributed.ssh.process import Completed, RemoteProcess, command_line
from tests.lab import ssh_setup
from tests.lab.light import LightLab
from tests.lab.processes import signal_all, until_it_runs
from tests.lab.spec import HostSpec
from tests.lab.ssh_setup import configured
from tests.waiting import PATIENCE, until

pytestmark = pytest.mark.slow

_KIND = "OPENSSH " + "PRIVATE KEY"


@pytest.fixture(scope="module")
def lab() -> Iterator[LightLab]:
    with LightLab(
        "a", "b", HostSpec("locked", key=False), HostSpec("keyless", key=False), HostSpec("off", sshd=False)
    ) as built:
        yield built


@pytest.fixture(scope="module")
def connections() -> Iterator[list[SshConnection]]:
    made: list[SshConnection] = []
    yield made
    for connection in made:
        connection.close()


@pytest.fixture
def a(lab: LightLab, connections: list[SshConnection]) -> SshConnection:
    """One connection for all tests, made again where a test has lost it."""
    if not connections or not connections[-1].alive():
        connections.append(SshConnection.connect(lab.target("a")))
    return connections[-1]


# --- commands ---


def test_a_command_runs_in_the_home_folder(lab: LightLab, a: SshConnection) -> None:
    done = a.run(["pwd"])
    assert done.ok and done.stdout.decode().strip() == str(lab["a"].files)
    assert a.system.split()[0] in ("Linux", "Darwin")


def test_exit_code_output_and_errors_come_back(a: SshConnection) -> None:
    done = a.run(["sh", "-c", "cat; echo bad >&2; exit 7"], input=b"\0\xff\n")
    assert (done.returncode, done.stdout, done.stderr, done.problem) == (7, b"\0\xff\n", b"bad\n", "bad")


def test_a_killed_command_shows_its_signal(a: SshConnection) -> None:
    assert a.run(["sh", "-c", "kill -9 $$"]).returncode == 137


def test_a_missing_program_is_an_exit_code(a: SshConnection) -> None:
    done = a.run(["no-such-program"])
    assert done.returncode == 127 and "no-such-program" in done.problem


def test_megabytes_pass_both_ways_at_once(a: SshConnection) -> None:
    data = os.urandom(3_000_000)
    assert a.run(["cat"], input=data).stdout == data


def test_a_command_that_does_not_end_is_left_in_time(a: SshConnection) -> None:
    chatty = ["sh", "-c", "while echo; do sleep 0.2; done"]  # ends by itself then, and gives its session back
    with a.stream(chatty) as process, pytest.raises(CommandTimeout, match=r"^a: a command did not end within 0.3 s"):
        process.communicate(None, timeout=0.3)


def test_endless_output_is_bounded(a: SshConnection, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distributed.ssh.process.OUTPUT_LIMIT", 1_000_000)
    with pytest.raises(CommandTimeout, match="more than 1000000 bytes"):
        a.run(["yes"])


def test_noise_of_start_files_is_dropped(lab: LightLab, a: SshConnection) -> None:
    rc = lab["b"].files / ".bashrc"
    rc.write_text("echo Welcome to this machine\n")
    try:
        with SshConnection.connect(lab.target("b")) as b:
            noisy = subprocess.run(["ssh", "-F", lab.ssh_config, "b", "echo hi"], capture_output=True).stdout
            assert b.run(["echo", "hi"]).stdout == b"hi\n"
    finally:
        rc.unlink()
    assert noisy.endswith(b"hi\n")
    assert noisy.startswith(b"Welcome") or "bash" not in os.environ.get("SHELL", "bash")


def test_many_threads_share_a_connection(a: SshConnection) -> None:
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda number: a.run(["echo", str(number)]).stdout, range(8)))
    assert results == [f"{number}\n".encode() for number in range(8)]


def test_an_end_of_input_that_comes_after_the_close_does_not_end_the_connection(a: SshConnection) -> None:
    """Another thread may have made it before: OpenSSH hangs up on it."""
    with a.stream(["true"]) as ended:
        channel = ended.channel
        until(lambda: channel.closed)
        late = paramiko.Message()
        late.add_byte(bytes([96]))  # SSH_MSG_CHANNEL_EOF
        late.add_int(channel.remote_chanid)
        channel.transport._send_user_message(late)
    assert a.run(["echo", "hi"]).stdout == b"hi\n"


def test_a_close_while_new_keys_are_agreed_on_does_not_wait_in_the_thread_that_receives_them(
    lab: LightLab, a: SshConnection
) -> None:
    flag, keys = lab["a"].files / "flag", a.transport.clear_to_send
    waits = ["sh", "-c", "until [ -e flag ]; do sleep 0.02; done; echo there"]
    with a.stream(["sh", "-c", "read word; exit 3"]) as ends, a.stream(waits) as goes_on:
        ends.write(b"go\n")
        keys.clear()
        try:
            assert ends.wait(60) == 3
            until(lambda: ends.channel.closed)
            flag.touch()
            assert goes_on.read_line(60) == b"there\n"
        finally:
            keys.set()
    assert a.run(["true"]).ok


def test_a_connection_that_changes_its_keys_all_the_time_loses_nothing(lab: LightLab) -> None:
    with SshConnection.connect(lab.target("a")) as connection, ThreadPoolExecutor(4) as pool:
        connection.transport.packetizer.REKEY_BYTES = 50_000
        words, given = ["head", "-c", "200000"], bytes(200_000)
        results = list(pool.map(lambda _: len(connection.run(words, input=given).stdout), range(16)))
    assert results == [200_000] * 16


# --- streams ---


def test_lines_flow_while_the_command_runs(a: SshConnection) -> None:
    with a.stream(["cat"]) as cat:
        for word in (b"one\n", b"two\n"):
            cat.write(word)
            assert cat.read_line(60) == word
        cat.write(b"end")
        cat.end_input()
        assert list(cat) == [b"end"]
        assert cat.wait(60) == 0


def test_a_wait_for_a_line_ends_in_time_and_loses_nothing(a: SshConnection) -> None:
    with a.stream(["sh", "-c", "printf half; read x; echo $x"]) as process:
        with pytest.raises(TimeoutError):
            process.read_line(0.3)
        process.write(b" line\n")
        assert process.read_line(60) == b"halfline\n"


def test_writing_to_a_command_that_has_ended_says_so(a: SshConnection) -> None:
    with a.stream(["sh", "-c", "echo gone >&2; exit 3"]) as process:
        assert process.wait(60) == 3
        with pytest.raises(Dropped, match=r"exit code 3.*gone"):
            process.write(b"x" * 10_000_000)


def test_a_background_process_outlives_its_stream(lab: LightLab, a: SshConnection) -> None:
    script = "nohup sleep 61.5 >/dev/null 2>&1 & echo $!"
    pid = int(a.run(["sh", "-c", script]).stdout)
    assert until_it_runs(lab["a"].pids, "sleep 61.5") == pid
    assert a.run(["kill", str(pid)]).ok


# --- files ---


def test_files_travel_whole_and_with_their_mode(lab: LightLab, a: SshConnection, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(os.urandom(500_000))
    sent: list[tuple[int, int]] = []
    a.put(source, "~/new folder/it's", mode=0o640, see=lambda *amount: sent.append(amount))
    assert sent == sorted(sent) and len(sent) > 2 and sent[-1] == (500_000, 500_000)
    there = lab["a"].files / "new folder" / "it's"
    assert there.read_bytes() == source.read_bytes() and there.stat().st_mode & 0o777 == 0o640
    assert [path.name for path in there.parent.iterdir()] == ["it's"]


def test_an_empty_file_and_a_dash_are_no_trouble(lab: LightLab, a: SshConnection) -> None:
    a.put(b"", "-n")
    assert (lab["a"].files / "-n").read_bytes() == b""


def test_a_failed_put_leaves_the_old_file_and_no_part(lab: LightLab, a: SshConnection) -> None:
    a.put(b"old", "kept/file")
    with pytest.raises(RemoteFileError, match=r"a: cannot write kept: .*is a folder"):
        a.put(b"new", "kept")
    assert [path.name for path in (lab["a"].files / "kept").iterdir()] == ["file"]


def test_a_cut_off_put_does_not_take_the_files_name(lab: LightLab) -> None:
    whole, part = lab["a"].files / "whole", lab["a"].files / "whole.part"
    with SshConnection.connect(lab.target("a")) as connection:
        process = connection.stream(["sh", "-c", PUT, "sh", "whole", "whole.part", "8", "600"])
        process.write(b"half")
        until(lambda: part.exists() and part.stat().st_size == 4)
    until(lambda: not part.exists())
    assert not whole.exists()


# --- ports ---


def echo_server() -> tuple[socket.socket, int]:
    """Answer every connection with what it sends until its end, then with ``bye``."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve(peer: socket.socket) -> None:
        with peer:
            while data := peer.recv(65536):
                peer.sendall(data)
            peer.sendall(b"bye")

    def accept() -> None:
        while True:
            try:
                peer, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=serve, args=(peer,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    return listener, listener.getsockname()[1]


@pytest.fixture
def echo() -> Iterator[int]:
    listener, port = echo_server()
    yield port
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()


def exchange(port: int, data: bytes) -> bytes:
    """Send while receiving, and return what came back."""
    with socket.create_connection(("127.0.0.1", port), timeout=60) as stream:
        sender = threading.Thread(target=_send_all, args=(stream, data))
        sender.start()
        received = b""
        while chunk := stream.recv(65536):
            received += chunk
        sender.join()
        return received


def _send_all(stream: socket.socket, data: bytes) -> None:
    with contextlib.suppress(OSError):  # the other side may have gone
        stream.sendall(data)
        stream.shutdown(socket.SHUT_WR)


def test_what_a_carried_port_takes_and_gives(a: SshConnection, echo: int) -> None:
    data = os.urandom(1_000_000)
    with contextlib.closing(a.forward_remote(("127.0.0.1", echo))) as forward:
        assert exchange(forward.port, data) == data + b"bye"
        assert exchange(forward.port, b"again") == b"againbye"


def test_two_remote_ports_lead_to_their_own_places_and_close_alone(a: SshConnection, echo: int) -> None:
    first = a.forward_remote(("127.0.0.1", echo))
    with (
        contextlib.closing(a.forward_remote(("127.0.0.1", 9))) as second,
        contextlib.suppress(ConnectionResetError),  # its server may hang up before it has read anything
    ):
        assert exchange(second.port, b"x") == b""
    assert exchange(first.port, b"x") == b"xbye"
    first.close()
    with pytest.raises(OSError):
        exchange(first.port, b"x")


def test_a_used_remote_port_is_refused(a: SshConnection, echo: int) -> None:
    with pytest.raises(ForwardRefused, match=f"a: its SSH server does not forward port {echo}"):
        a.forward_remote(("127.0.0.1", 9), echo)
    assert a.run(["true"]).ok


# --- identity ---


def test_a_trusted_stranger_is_known_from_then_on(lab: LightLab, tmp_path: Path) -> None:
    config = configured(lab.ssh_config, tmp_path, f"UserKnownHostsFile {tmp_path / 'known'}\nHashKnownHosts yes")
    asked: list[HostKeyInfo] = []
    for _ in range(2):
        SshConnection.connect(lab.target("a", config_file=config), trust=lambda key: not asked.append(key)).close()
    assert [key.machine for key in asked] == ["a"]
    assert subprocess.run(["ssh", "-F", config, "a", "true"]).returncode == 0


def test_another_known_type_is_no_stranger(lab: LightLab, tmp_path: Path) -> None:
    """A host known by a key it does not have any more is changed, though the new key has another type."""
    ssh_setup.make_key(tmp_path / "rsa", "rsa")
    known = tmp_path / "known"
    known.write_text(f"[127.0.0.1]:{lab['a'].port} {ssh_setup.public_key(tmp_path / 'rsa')}\n")
    with pytest.raises(HostKeyChanged):
        SshConnection.connect(
            lab.target("a", config_file=configured(lab.ssh_config, tmp_path, f"UserKnownHostsFile {known}"))
        )


def strange(lab: LightLab, folder: Path, text: str) -> SshTarget:
    """Return ``a`` as a target of whom known_hosts says nothing, with more lines in the configuration."""
    nobody = f"UserKnownHostsFile {folder / 'nobody'}\n{text}"
    return lab.target("a", config_file=configured(lab.ssh_config, folder, nobody))


@pytest.mark.parametrize("value", ["accept-new", "no"])
def test_a_configuration_may_accept_who_was_never_met_but_no_other_key(
    lab: LightLab, tmp_path: Path, value: str
) -> None:
    target = strange(lab, tmp_path, f"StrictHostKeyChecking {value}")
    SshConnection.connect(target).close()
    ssh_setup.make_key(tmp_path / "other")
    place = f"[127.0.0.1]:{lab['a'].port}"
    assert (tmp_path / "nobody").read_text() == f"{place} {lab['a'].host_key}\n"
    (tmp_path / "nobody").write_text(f"{place} {ssh_setup.public_key(tmp_path / 'other')}\n")
    with pytest.raises(HostKeyChanged):
        SshConnection.connect(target)


def test_the_keys_that_a_command_prints_are_known(lab: LightLab, tmp_path: Path) -> None:
    program = tmp_path / "my known hosts"
    program.write_text(f'#!/bin/sh\necho "$@" >> "$0.asked"; echo "$1 {lab["a"].host_key}"')
    program.chmod(0o755)
    SshConnection.connect(strange(lab, tmp_path, f'KnownHostsCommand "{program}" %H %I %t %K %u%%')).close()
    asked = [line.split() for line in (tmp_path / "my known hosts.asked").read_text().splitlines()]
    name, user = f"[127.0.0.1]:{lab['a'].port}", f"{lab['a'].user}%"
    assert asked[0] == [name, "ORDER", "NONE", "NONE", user]
    assert asked[-1] == [name, "HOSTNAME", *lab["a"].host_key.split(), user]


def test_no_key_is_taken_where_the_command_for_known_keys_fails(lab: LightLab, tmp_path: Path) -> None:
    with pytest.raises(SshError, match="a: KnownHostsCommand of ~/.ssh/config failed: it ended with 1") as caught:
        SshConnection.connect(strange(lab, tmp_path, "KnownHostsCommand /bin/false"), trust=lambda key: True)
    assert caught.value.stage is Stage.HOST_KEY


def test_a_known_key_that_is_revoked_is_refused(lab: LightLab, tmp_path: Path) -> None:
    (tmp_path / "revoked").write_text(lab["a"].host_key)
    config = configured(lab.ssh_config, tmp_path, f"RevokedHostKeys {tmp_path / 'revoked'}")
    with pytest.raises(HostKeyChanged, match="is revoked"):
        SshConnection.connect(lab.target("a", config_file=config))


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have one loopback address")
def test_a_machine_is_dialled_from_the_address_that_the_configuration_names(lab: LightLab, tmp_path: Path) -> None:
    config = configured(lab.ssh_config, tmp_path, "BindAddress 127.0.0.9\nAddressFamily inet")
    with SshConnection.connect(lab.target("a", config_file=config)) as connection:
        assert connection.run(["sh", "-c", "echo $SSH_CONNECTION"]).stdout.split()[0] == b"127.0.0.9"


def test_a_family_without_an_address_is_an_unknown_name(lab: LightLab, tmp_path: Path) -> None:
    config = configured(lab.ssh_config, tmp_path, "AddressFamily inet6")
    with pytest.raises(NameUnknown):
        SshConnection.connect(lab.target("a", config_file=config))


def test_any_key_is_taken_on_loopback_where_the_configuration_says_so(lab: LightLab, tmp_path: Path) -> None:
    SshConnection.connect(strange(lab, tmp_path, "NoHostAuthenticationForLocalhost yes")).close()


def test_log_ins_are_in_the_log_of_commands_and_a_repeated_failure_is_there_once(lab: LightLab) -> None:
    started_at = time.time()
    for _ in range(2):
        with pytest.raises(PortClosed) as caught:
            SshConnection.connect(lab.target("off"))
    SshConnection.connect(lab.target("b")).close()
    since = [one for one in commands_run() if one.at >= started_at and one.machine in ("off", "b")]
    records = {(one.machine, one.command, one.outcome) for one in since}
    off, b = (f"ssh -F {lab.ssh_config} {lab[name].user}@{name}" for name in ("off", "b"))
    assert records == {("off", off, caught.value.problem), ("b", b, "ok"), ("b", "uname -snm", "ok")}
    assert [one.machine for one in since].count("off") == 1


@pytest.mark.parametrize("is_here", [True, False])
def test_a_command_that_was_read_line_by_line_is_not_said_to_run_after_its_end(a: SshConnection, is_here: bool) -> None:
    connection = HereConnection("here") if is_here else a
    processes = [connection.stream(argv) for argv in (["true"], ["sh", "-c", "exit 3"], ["sleep", "60"])]
    assert [process.ran.outcome for process in processes if process.ran] == ["", "", ""]
    for process in processes[:2]:
        process.wait(PATIENCE)
    for process in processes:
        process.close()
    assert [process.ran.outcome for process in processes if process.ran] == ["ok", "exit code 3", "ended"]


@pytest.mark.parametrize("kind", ["ed25519", "rsa", "ecdsa"])
def test_a_host_certificate_of_a_known_authority_is_enough(tmp_path: Path, kind: str) -> None:
    authority, certificate = tmp_path / "ca", tmp_path / "host_key-cert.pub"
    ssh_setup.make_key(authority)
    ssh_setup.make_key(tmp_path / "host_key", kind)
    words = ["ssh-keygen", "-q", "-s", authority, "-I", "a", "-h", "-n", "127.0.0.1", tmp_path / "host_key.pub"]
    subprocess.run(words, check=True)
    spec = HostSpec("a", sshd_options=(f"HostKey {tmp_path / 'host_key'}", f"HostCertificate {certificate}"))
    with LightLab(spec) as certified:
        (tmp_path / "nobody").write_text(f"@cert-authority * {ssh_setup.public_key(authority)}\n")
        SshConnection.connect(strange(certified, tmp_path, "")).close()
        assert (tmp_path / "nobody").read_text().count("\n") == 1


@pytest.mark.parametrize(
    ("line", "fix"),
    [
        ("Ciphers chacha20-poly1305@openssh.com", "add aes256-gcm@openssh.com to the line 'Ciphers'"),
        ("KexAlgorithms sntrup761x25519-sha512@openssh.com", "add curve25519-sha256 to the line 'KexAlgorithms'"),
        ("MACs umac-128-etm@openssh.com", "add hmac-sha2-256-etm@openssh.com to the line 'MACs'"),
        ("HostKeyAlgorithms ssh-rsa", "update its SSH server"),
    ],
)
def test_a_server_whose_algorithms_we_lack_is_told_by_their_names(tmp_path: Path, line: str, fix: str) -> None:
    ssh_setup.make_key(tmp_path / "rsa", "rsa")
    options = (f"HostKey {tmp_path / 'rsa'}", line)
    with LightLab(HostSpec("m", sshd_options=options)) as lab, pytest.raises(NotSsh) as caught:
        SshConnection.connect(lab.target("m"), trust=lambda key: True)
    word, name = line.split()
    assert f"of {word} it offers only {name}" in caught.value.message and fix in caught.value.hint


def test_the_newer_name_of_a_usual_key_exchange_is_known() -> None:
    with LightLab(HostSpec("m", sshd_options=("KexAlgorithms curve25519-sha256",))) as lab:
        SshConnection.connect(lab.target("m")).close()


# --- log-in ---


def allow(lab: LightLab, host: str, key: Path) -> None:
    with open(lab[host].folder / "authorized_keys", "a") as file:
        file.write(ssh_setup.public_key(key) + "\n")


@pytest.mark.parametrize("kind", ["rsa", "ecdsa"])
def test_other_kinds_of_keys_log_in(lab: LightLab, tmp_path: Path, kind: str) -> None:
    key = tmp_path / "key"
    ssh_setup.make_key(key, kind)
    allow(lab, "a", key)
    with SshConnection.connect(lab.target("a", key=str(key))) as connection:
        assert connection.authenticated_by == str(key)


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[str]:
    path = str(tmp_path / "agent")
    with subprocess.Popen(["ssh-agent", "-D", "-a", path], stdout=subprocess.DEVNULL) as process:
        until(lambda: os.path.exists(path))
        yield path
        process.terminate()


def test_the_agents_keys_log_in(lab: LightLab, tmp_path: Path, agent: str) -> None:
    key = tmp_path / "key"
    ssh_setup.make_key(key)
    allow(lab, "keyless", key)
    subprocess.run(["ssh-add", "-q", str(key)], env={**os.environ, "SSH_AUTH_SOCK": agent}, check=True)
    key.unlink()
    config = configured(lab.ssh_config, tmp_path, f"IdentityAgent {agent}\nIdentitiesOnly no")
    with SshConnection.connect(lab.target("keyless", config_file=config)) as connection:
        assert connection.authenticated_by == "agent key lab"


def add_to(agent: str, *keys: Path) -> None:
    subprocess.run(["ssh-add", "-q", *keys], env={**os.environ, "SSH_AUTH_SOCK": agent}, check=True)


def test_of_the_agents_keys_the_one_whose_public_half_is_named_logs_in(
    lab: LightLab, tmp_path: Path, agent: str
) -> None:
    for name in ("key", "other"):
        ssh_setup.make_key(tmp_path / name)
    allow(lab, "keyless", tmp_path / "key")
    add_to(agent, tmp_path / "other", tmp_path / "key")
    (tmp_path / "key").unlink()
    for named in ("key.pub", "key"):  # as ssh: the half that is there tells which of the agent's is meant
        settings = f"IdentityAgent {agent}\nIdentitiesOnly yes\nIdentityFile {tmp_path / named}"
        config = configured(lab.ssh_config, tmp_path, settings)
        with SshConnection.connect(lab.target("keyless", config_file=config)) as connection:
            assert connection.authenticated_by == "agent key lab"


def test_the_key_that_the_hosts_file_names_is_tried_before_all_of_the_agents(tmp_path: Path, agent: str) -> None:
    agents = [tmp_path / f"k{number}" for number in range(6)]
    for key in agents:
        ssh_setup.make_key(key)
    add_to(agent, *agents)
    with LightLab(HostSpec("m", sshd_options=("MaxAuthTries 1",))) as lab:
        settings = f"IdentityAgent {agent}\nIdentitiesOnly no\n" + "\n".join(f"IdentityFile {key}" for key in agents)
        config = configured(lab.ssh_config, tmp_path, settings)
        SshConnection.connect(lab.target("m", key=str(lab.key), config_file=config)).close()


@pytest.mark.parametrize("kind", ["ed25519", "rsa", "ecdsa"])
@pytest.mark.parametrize("held", [False, True], ids=["file", "agent"])
def test_a_users_certificate_logs_in_and_where_it_has_expired_the_key_does(
    lab: LightLab, tmp_path: Path, agent: str, kind: str, held: bool
) -> None:
    authority, key, certificate = tmp_path / "ca", tmp_path / "key", tmp_path / "id of ada.pub"
    ssh_setup.make_key(authority)
    ssh_setup.make_key(key, kind)
    user = lab["keyless"].user
    accepted = lab["keyless"].folder / "authorized_keys"
    settings = f'IdentityFile {key}\nCertificateFile "{certificate}"'
    if held:
        add_to(agent, key)
        key.unlink()
        settings += f"\nIdentityAgent {agent}"
    target = lab.target("keyless", config_file=configured(lab.ssh_config, tmp_path, settings))
    for validity, line in (("+1d", f"cert-authority {ssh_setup.public_key(authority)}"), ("20200101:20210101", "")):
        words = ["ssh-keygen", "-q", "-s", authority, "-I", "ada", "-n", user, "-V", validity, f"{key}.pub"]
        subprocess.run(words, check=True)
        certificate.unlink(missing_ok=True)
        Path(f"{key}-cert.pub").rename(certificate)
        accepted.write_text(f"{line or ssh_setup.public_key(key)}\n")
        with SshConnection.connect(target) as connection:
            assert connection.authenticated_by.endswith("with a certificate") == bool(line)


def test_a_named_key_that_is_not_there_is_told_with_the_one_that_is_meant(lab: LightLab, tmp_path: Path) -> None:
    ssh_setup.make_key(tmp_path / "gpu_key")
    with pytest.raises(NoKeyAccepted, match="gpu-key .there is no such file") as caught:
        SshConnection.connect(lab.target("locked", key=str(tmp_path / "gpu-key")))
    assert "gpu_key" in caught.value.hint and caught.value.mendable


def test_a_dead_agent_is_no_obstacle(lab: LightLab, tmp_path: Path) -> None:
    config = configured(lab.ssh_config, tmp_path, f"IdentityAgent {tmp_path / 'none'}")
    SshConnection.connect(lab.target("a", config_file=config)).close()


def test_no_accepted_key_lists_what_was_tried(lab: LightLab) -> None:
    with pytest.raises(NoKeyAccepted, match=f"locked: no key was accepted for user .*tried: {lab.key}") as caught:
        SshConnection.connect(lab.target("locked"))
    assert "ssh-copy-id -p" in caught.value.hint
    assert not caught.value.password_possible


def test_the_file_of_a_security_key_is_no_obstacle(lab: LightLab, tmp_path: Path) -> None:
    """OpenSSH looks for id_ed25519_sk by itself; what is in it is a handle that cannot sign."""

    def text(data: bytes) -> bytes:
        return len(data).to_bytes(4, "big") + data

    kind = text(b"sk-ssh-ed25519@openssh.com") + text(bytes(32)) + text(b"ssh:")
    inner = bytes(8) + kind + b"\1" + text(b"handle") + text(b"") + text(b"comment")
    inner += bytes(range(1, 1 + -len(inner) % 8))
    whole = b"openssh-key-v1\0" + text(b"none") * 2 + text(b"") + b"\0\0\0\1" + text(kind) + text(inner)
    key = tmp_path / "id_ed25519_sk"
    key.write_text(f"-----BEGIN {_KIND}-----\n{base64.b64encode(whole).decode()}\n-----END {_KIND}-----\n")
    with pytest.raises(NoKeyAccepted, match="on a security key"):
        SshConnection.connect(lab.target("locked", key=str(key)))


def test_a_wrong_user_is_named(lab: LightLab) -> None:
    with pytest.raises(NoKeyAccepted, match="a: no key was accepted for user 'ghost'") as caught:
        SshConnection.connect(lab.target("a", user="ghost"))
    assert "does the user 'ghost' exist there" in caught.value.hint


def test_a_server_that_has_seen_too_many_keys_is_understood(lab: LightLab, tmp_path: Path) -> None:
    files = []
    for number in range(8):
        ssh_setup.make_key(tmp_path / f"k{number}")
        files.append(f"IdentityFile {tmp_path / f'k{number}'}")
    config = configured(lab.ssh_config, tmp_path, "\n".join(files))
    with pytest.raises(NoKeyAccepted, match=r"gave up after \d keys") as caught:
        SshConnection.connect(lab.target("locked", config_file=config))
    assert "'key' in the hosts file" in caught.value.hint


def test_a_server_that_stops_during_the_log_in_is_left_in_time(lab: LightLab, tmp_path: Path) -> None:
    config = configured(lab.ssh_config, tmp_path, f"UserKnownHostsFile {tmp_path / 'known'}")

    def freeze(_: HostKeyInfo) -> bool:
        lab["b"].cut()
        return True

    for seconds in (2.0, 10.0, 40.0):  # a busy machine may need more for the keys
        try:
            with pytest.raises(Stalled) as caught:
                SshConnection.connect(lab.target("b", config_file=config), trust=freeze, timeout=seconds)
        finally:
            lab["b"].mend()
        if "did not answer during login" in caught.value.message:
            break
    assert "did not answer during login" in caught.value.message


# --- ways ---


def test_a_jump_goes_through_several_machines(lab: LightLab, tmp_path: Path) -> None:
    config = configured(lab.ssh_config, tmp_path, "Host far\n  ProxyJump a,b\n" + _entry(lab, "b"))
    with SshConnection.connect(SshTarget("far", "far", config_file=config)) as far:
        assert far.run(["pwd"]).stdout.decode().strip() == str(lab["b"].files)
        assert far.gateway is not None and far.gateway.gateway is not None


def _entry(lab: LightLab, name: str) -> str:
    """Return the settings of a host under another name."""
    block = lab.ssh_config.read_text().split(f"Host {name}\n")[1].split("Host ")[0]
    return "  HostName 127.0.0.1\n" + block


def test_a_jump_that_cannot_reach_on_is_named(lab: LightLab, tmp_path: Path) -> None:
    config = configured(lab.ssh_config, tmp_path, "Host off\n  ProxyJump a")
    with pytest.raises(
        ForwardRefused, match=f"off: 127.0.0.1:{lab['a'].port} cannot reach 127.0.0.1:{lab['off'].port}"
    ):
        SshConnection.connect(lab.target("off", config_file=config))


def test_a_proxy_command_of_the_users_is_used(lab: LightLab, tmp_path: Path) -> None:
    command = f"ProxyCommand ssh -F {lab.ssh_config} -W %h:%p a"
    config = configured(lab.ssh_config, tmp_path, f"Host b\n  {command}")
    with SshConnection.connect(lab.target("b", config_file=config)) as b:
        assert b.run(["pwd"]).stdout.decode().strip() == str(lab["b"].files)


PASS_STREAM = """import socket, sys
stream = socket.create_connection((sys.argv[1], int(sys.argv[2])))
socket.send_fds(socket.socket(fileno=1), [b"\\0"], [stream.fileno()])
"""


def test_a_proxy_command_may_pass_the_connection_itself(lab: LightLab, tmp_path: Path) -> None:
    (tmp_path / "pass.py").write_text(PASS_STREAM)
    command = f"ProxyCommand {sys.executable} {tmp_path}/pass.py %h %p\n  ProxyUseFdpass yes"
    config = configured(lab.ssh_config, tmp_path, f"Host b\n  {command}")
    with SshConnection.connect(lab.target("b", config_file=config)) as b:
        assert b.run(["pwd"]).stdout.decode().strip() == str(lab["b"].files)


def test_a_proxy_command_that_passes_no_connection_is_named(lab: LightLab, tmp_path: Path) -> None:
    config = configured(lab.ssh_config, tmp_path, "Host b\n  ProxyCommand true\n  ProxyUseFdpass yes")
    with pytest.raises(Dropped, match="ProxyCommand passed no connection to") as caught:
        SshConnection.connect(lab.target("b", config_file=config))
    assert caught.value.hint == "try it yourself: true"


def test_no_session_is_left_on_the_far_side(lab: LightLab) -> None:
    before = len(lab["b"].pids())  # the sessions of an earlier test may be about to end
    for _ in range(2):
        with SshConnection.connect(lab.target("b")) as b:
            b.run(["true"])
    until(lambda: len(lab["b"].pids()) <= before)


# --- life ---


def test_a_silent_machine_is_noticed_and_wakes_who_waits(lab: LightLab) -> None:
    with SshConnection.connect(lab.target("b"), heartbeat=0.25) as b, b.stream(["sleep", "600"]) as process:
        assert b.alive()
        lab["b"].cut()
        try:
            with pytest.raises(Dropped, match=r"^b: the connection was lost"):
                process.read(PATIENCE)
        finally:
            lab["b"].mend()
        assert not b.alive()
        with pytest.raises(Dropped):
            b.run(["true"])


def test_a_cut_in_the_middle_of_much_writing_is_noticed_too(lab: LightLab) -> None:
    """What is written fills all windows and buffers, so that the heartbeat's own question cannot be sent either."""
    with SshConnection.connect(lab.target("b"), heartbeat=0.25) as b:
        readers = [b.stream(["sh", "-c", "cat > /dev/null"]) for _ in range(8)]
        lab["b"].cut()
        lost: list[Dropped] = []

        def write(reader: RemoteProcess) -> None:
            try:
                reader.write(bytes(3_000_000))  # the window takes 2 MiB of it
            except Dropped as error:
                lost.append(error)

        writers = [threading.Thread(target=write, args=(reader,), daemon=True) for reader in readers]
        try:
            for thread in writers:
                thread.start()
            for thread in writers:
                thread.join(PATIENCE)
        finally:
            lab["b"].mend()
        assert len(lost) == len(writers) and not b.alive()


def test_a_quiet_connection_stays_alive(lab: LightLab) -> None:
    for heartbeat in (0.5, 4.0):  # a busy machine may leave four of the short ones without an answer
        with SshConnection.connect(lab.target("b"), heartbeat=heartbeat) as b:
            time.sleep(6 * heartbeat)  # the silence would be too long after four: the wait is what is tested
            if answers := b.alive() and b.run(["true"]).ok:
                break
    assert answers


def test_a_killed_server_process_drops_the_command(lab: LightLab) -> None:
    with SshConnection.connect(lab.target("b")) as b, b.stream(["sh", "-c", "echo $PPID; sleep 30"]) as process:
        process.read_line(60)
        server = lab["b"]._process.pid  # type: ignore[union-attr]  # it runs
        signal_all([pid for pid in lab["b"].pids("sshd") if pid != server], signal.SIGKILL)
        with pytest.raises(Dropped, match="b: the connection was lost"):
            process.read(PATIENCE)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("answer", "problem", "hint"),
    [
        ("This account is closed", "commands do not run there .This account is closed", "chsh"),
        ("WARNING: Your password has expired.", "has expired, and no command runs", "log in once with: ssh -p "),
        (f"{'news ' * 40} Password change required", "has expired, and no command runs", "then a new one twice"),
    ],
)
def test_a_user_whose_commands_do_not_run_is_told(answer: str, problem: str, hint: str) -> None:
    spec = HostSpec("m", sshd_options=(f"ForceCommand echo '{answer}'; exit 1",))
    with LightLab(spec) as lab, pytest.raises(NoShell, match=problem) as caught:
        SshConnection.connect(lab.target("m"))
    assert hint in caught.value.hint and ("chsh" in caught.value.hint) is (hint == "chsh")


def test_start_files_that_point_python_elsewhere_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONHOME", "/nowhere")
    line, _ = command_line(["sh", "-c", "echo ${PYTHONHOME:-unset}"], "marker")
    assert subprocess.run(["sh", "-c", line], capture_output=True, check=True).stdout == b"marker\nunset\n"


def test_the_problem_of_a_python_that_does_not_start_is_its_first_line() -> None:
    stderr = b"Fatal Python error: no codec\nPython runtime state: core initialized\n\n  <no Python frame>\n"
    assert Completed(1, b"", stderr).problem == "Fatal Python error: no codec"
