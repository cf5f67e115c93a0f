"""A door and a machine that joins, over real sockets; and strangers who guess, replay, flood, or say nothing."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import paramiko
import pytest

from distributed.hosts.joined import (
    NotConnected,
    ask_door,
    call_joined,
    door_socket,
    door_status,
    forget_joined,
    joined_machines,
    known_hosts_file,
    save_joined,
)
from distributed.joining import door as door_module
from distributed.joining import helper as helper_module
from distributed.joining.dialling import Meeting, split_door
from distributed.joining.helper import Dismissed, DoorLine, PoolConnection, leave, serve_pools
from distributed.joining.pairing.codes import Code
from distributed.joining.pairing.exchange import BadPeer, Introduction, Pairing
from distributed.joining.pairing.frames import frame, json_line
from distributed.joining.pairing.introductions import introduce, label_of
from distributed.joining.pairing.keys import JoiningKey, line_message
from distributed.joining.pools import JoinedPool, helper_identity, joined_pools, save_pool
from distributed.joining.sharing import _remember
from distributed.ssh.config import SshTarget, resolve
from distributed.ssh.connection import SshConnection
from distributed.ssh.errors import HostKeyChanged, NoRoute
from profiles.errors import BadInput, MachinesNotReady
from tests.distributed.joining import RunningDoor, Sharer
from tests.waiting import until
from training.exchange.unauthenticated import MAX_CONNECTIONS

WRONG = Code(1, ("aardvark", "abandoned", "abbreviate"))


@pytest.fixture
def sharer(door: RunningDoor) -> Iterator[Sharer]:
    with contextlib.closing(Sharer()) as sharing:
        yield sharing


@pytest.fixture
def pool(door: RunningDoor) -> JoinedPool:
    """Of a machine that has joined, as ``studio``."""
    save_joined(machine_of(helper_identity()))
    return JoinedPool("vm", JoiningKey(door_module.pool_key()).public, (door.address,), "studio")


def machine_of(identity: JoiningKey) -> door_module.JoinedMachine:
    return door_module.JoinedMachine("studio", identity.public, user="ada")


@contextlib.contextmanager
def connected(pool: JoinedPool) -> Iterator[PoolConnection]:
    connection = PoolConnection(pool, helper_identity(), lambda line: None)
    try:
        until(lambda: pool.known_as in door_status())
        yield connection
    finally:
        connection.close()


def about() -> Introduction:
    return introduce(helper_identity().public, name="studio")


def join(door: RunningDoor, code: Code, agrees: bool = True) -> JoinedPool:
    return pair(code, door.address, lambda pool: agrees)


def pair(code: Code, address: str, decide: Callable[[Introduction], bool]) -> JoinedPool:
    with contextlib.closing(Meeting(code, address, helper_identity(), about())) as meeting:
        return meeting.agree(decide)


def guess(door: RunningDoor, code: Code) -> None:
    with pytest.raises(BadInput, match="not an open code"):
        join(door, code)


def is_hung_up(stream: socket.socket) -> bool:
    """Whether the door ends a connection, without a word of its own."""
    with stream:
        try:
            return stream.recv(1) == b""
        except ConnectionResetError:
            return True


# -------------------------------------------------------------------------------------------------------------- joining


def test_both_remember_the_other_ones_key_once_both_agree(door: RunningDoor, sharer: Sharer) -> None:
    with ThreadPoolExecutor(1) as one:
        joining = one.submit(join, door, sharer.code)
        assert sharer.admit() == {"joined": "studio"}
        pool = joining.result()
    (machine,) = joined_machines()
    assert (machine.name, machine.key, machine.address) == ("studio", helper_identity().public, "studio.joined")
    assert joined_pools() == [pool] and pool.addresses[0] == door.address
    assert pool.key == JoiningKey(door_module.pool_key()).public and pool.known_as == "studio"
    guess(door, sharer.code)  # it is used


def test_nothing_is_remembered_if_one_of_them_says_no(door: RunningDoor, sharer: Sharer) -> None:
    with ThreadPoolExecutor(1) as one:
        joining = one.submit(join, door, sharer.code)
        assert "was not admitted" in sharer.admit(False)["closed"]
        with pytest.raises(MachinesNotReady, match="has not admitted"):
            joining.result()
    with contextlib.closing(Sharer()) as second:
        with pytest.raises(MachinesNotReady, match="you did not agree"):
            join(door, second.code, agrees=False)
        assert "asks" in second.next() and "has not agreed" in second.next()["closed"]
    assert joined_machines() == [] and joined_pools() == []


def test_a_share_that_ends_withdraws_its_code(door: RunningDoor, sharer: Sharer) -> None:
    sharer.close()
    until(lambda: not door.state.shares)
    guess(door, sharer.code)


def test_a_machine_that_joins_again_keeps_its_name_and_another_one_gets_a_number(
    door: RunningDoor, pool: JoinedPool
) -> None:
    names = []
    for _ in range(2):
        with contextlib.closing(Sharer()) as sharing, ThreadPoolExecutor(1) as one:
            joining = one.submit(join, door, sharing.code)
            names.append(sharing.admit()["joined"])
            joining.result()
        helper_identity().path.unlink()
    assert names == ["studio", "studio-2"]


def test_two_machines_with_one_code_are_one_question(door: RunningDoor, sharer: Sharer) -> None:
    with ThreadPoolExecutor(2) as both:
        joining = [both.submit(join, door, sharer.code) for _ in range(2)]
        assert sharer.admit() == {"joined": "studio"}
        refused = [attempt.exception() for attempt in joining]
    assert sorted(type(error).__name__ for error in refused) == ["BadInput", "NoneType"]


def test_a_yes_before_the_question_admits_nobody(door: RunningDoor, sharer: Sharer) -> None:
    sharer.send(True)
    sharer.send(True)
    until(lambda: door.state.shares[sharer.code.slot]._answers.qsize() == 2)
    with ThreadPoolExecutor(1) as one:
        joining = one.submit(join, door, sharer.code)
        assert "was not admitted" in sharer.admit(False)["closed"]
        assert isinstance(joining.exception(), MachinesNotReady)


def test_a_host_of_the_ssh_configuration_keeps_its_name(
    door: RunningDoor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    config = tmp_path / ".ssh" / "config"
    config.parent.mkdir()
    config.write_text("Host studio.joined\n  HostName 192.0.2.7\n")
    target = SshTarget("x", "studio.joined", config_file=str(config))
    assert _remember(about()).name == "studio-2"
    assert (resolve(target).hostname, resolve(target).joined) == ("192.0.2.7", "")
    assert resolve(replace(target, host="studio-2.joined")).joined == "studio-2"


def test_a_long_configuration_folder_has_a_socket_all_the_same(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = tmp_path / ("x" * 120)
    folder.mkdir()
    monkeypatch.setenv("XDG_CONFIG_HOME", str(folder))
    running = RunningDoor()
    short = door_socket().parent
    try:
        assert door_status() == {} and len(str(door_socket())) < 104 and short.stat().st_mode & 0o777 == 0o700
    finally:
        running.close()
    door_socket().unlink()
    if os.getuid() == 0:
        os.chown(short, 65534, -1)
        with pytest.raises(PermissionError, match="belongs to another user"):
            door_socket()
    short.rmdir()


# -------------------------------------------------------------------------------------------------------- being driven


def test_it_is_a_machine_like_the_others(door: RunningDoor, pool: JoinedPool) -> None:
    with connected(pool), SshConnection.connect(SshTarget("s", "studio.joined")) as studio:
        assert studio.run(["sh", "-c", "cat; exit 7"], input=b"x" * 3_000_000).returncode == 7
        done = studio.run(["sh", "-c", "head -c 3000000 /dev/zero; echo oh >&2; kill -9 $$"])
        assert (len(done.stdout), done.stderr[:3], done.returncode) == (3_000_000, b"oh\n", 137)
        assert studio.run(["sh", "-c", 'echo "$MUSTER_JOINED"']).stdout.decode().partition("/")[0] == pool.identity
        with socket.create_server(("127.0.0.1", 0)) as server:
            forward = studio.forward_remote(server.getsockname())
            with socket.create_connection(("127.0.0.1", forward.port)) as near:
                far, _ = server.accept()
                with far:
                    near.sendall(b"ping")
                    assert far.recv(4) == b"ping"
                    far.close()
                    assert near.recv(1) == b""


def test_secrets_in_its_environment_stay_there(
    door: RunningDoor, pool: JoinedPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hidden")
    with connected(pool), SshConnection.connect(SshTarget("s", "studio.joined")) as studio:
        assert b"hidden" not in studio.run(["env"]).stdout


def test_its_owner_dials_again_until_the_door_is_back(door: RunningDoor, pool: JoinedPool) -> None:
    told: list[str] = []
    connection = PoolConnection(pool, helper_identity(), told.append)
    try:
        until(lambda: "studio" in door_status())
        assert connection._line is not None
        connection._line._stream.shutdown(socket.SHUT_RDWR)
        until(lambda: told.count("connected to vm") == 2)
        with SshConnection.connect(SshTarget("s", "studio.joined")) as studio:
            assert studio.run(["true"]).ok
    finally:
        connection.close()


def test_a_machine_that_is_away_is_named_with_what_to_do(door: RunningDoor, pool: JoinedPool,
                                                         monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    monkeypatch.setattr(door_module, "REDIAL", 0.0)
    with pytest.raises(NoRoute, match="not connected to this computer") as raised:
        SshConnection.connect(SshTarget("s", "studio.joined"))
    assert "muster machines join" in raised.value.hint


def test_a_machine_that_has_just_joined_is_waited_for(door: RunningDoor, sharer: Sharer) -> None:
    door.state._began -= door_module.REDIAL  # its door runs for long
    with ThreadPoolExecutor(2) as two:
        joining = two.submit(join, door, sharer.code)
        sharer.admit()
        calling = two.submit(call_joined, "studio", 30.0)
        with connected(joining.result()):
            calling.result().close()


def test_a_machine_that_does_not_answer_a_call(door: RunningDoor, pool: JoinedPool,
                                               monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    monkeypatch.setattr(door_module, "_BACK", 0.2)
    line = DoorLine(pool, helper_identity(), door.address)
    try:
        until(lambda: "studio" in door_status())
        with pytest.raises(NotConnected, match="did not answer"):
            call_joined("studio", 5.0)
    finally:
        line.close()


def test_an_unknown_name_that_ends_like_one_is_refused(door: RunningDoor, pool: JoinedPool) -> None:
    assert not resolve(SshTarget("x", "studio.local")).joined
    with pytest.raises(NoRoute, match=r"no machine 'nobody.joined' has joined") as raised:
        SshConnection.connect(SshTarget("x", "nobody.joined"))
    assert "studio.joined" in raised.value.hint


def test_who_leaves_is_forgotten_on_both_sides(door: RunningDoor, pool: JoinedPool) -> None:
    assert leave(pool)
    until(lambda: joined_machines() == [])


def test_a_removed_machine_is_told_so_when_it_dials(door: RunningDoor, pool: JoinedPool) -> None:
    told: list[str] = []
    connection = PoolConnection(pool, helper_identity(), told.append)
    until(lambda: "studio" in door_status())
    with ask_door({"forget": "studio"}, start=False) as asked:
        assert asked.recv(100)
    until(lambda: any("has removed this computer" in line for line in told))
    connection.close()
    with pytest.raises(Dismissed):
        DoorLine(pool, helper_identity(), door.address)


def test_another_host_key_is_refused(door: RunningDoor, pool: JoinedPool) -> None:
    with connected(pool) as connection:
        connection._identity.path.unlink()
        JoiningKey(connection._identity.path)  # another key in its file
        with pytest.raises(HostKeyChanged):
            SshConnection.connect(SshTarget("s", "studio.joined"))


def test_programs_end_with_the_connection(door: RunningDoor, pool: JoinedPool) -> None:
    with connected(pool) as connection, SshConnection.connect(SshTarget("s", "studio.joined")) as studio:
        process = studio.stream(["sh", "-c", "echo here; exec sleep 600"])
        assert process.read_line() == b"here\n"
        connection.close()
        until(lambda: not studio.alive())


# ------------------------------------------------------------------------------------------------------------ strangers


def test_three_guesses_close_a_code_and_the_sharer_sees_each(door: RunningDoor, sharer: Sharer) -> None:
    wrong = Code(sharer.code.slot, WRONG.words)
    for left in (2, 1, 0):
        guess(door, wrong)
        assert sharer.next() == {"wrong": "127.0.0.1", "tries_left": left}
    assert "3 wrong codes" in sharer.next()["closed"]
    guess(door, sharer.code)


def test_a_slot_without_a_code_is_answered_like_one_with_another_code(door: RunningDoor, sharer: Sharer) -> None:
    answers = []
    for slot in (sharer.code.slot, sharer.code.slot % 999 + 1):
        stranger = Pairing(WRONG, is_helper=True)
        with (
            door.dial(f"muster 1 pair {slot}\n".encode() + stranger.message) as stream,
            stream.makefile("rb") as answer,
        ):
            stranger.finish(answer.read(33))
            stream.sendall(frame(stranger.seal_introduction(about(), helper_identity())))
            answers.append(answer.read())
    assert answers == [b"\0\0", b"\0\0"]


def test_a_guess_that_is_not_finished_is_spent(door: RunningDoor, sharer: Sharer) -> None:
    for _ in range(3):
        stranger = Pairing(sharer.code, is_helper=True)
        door.dial(f"muster 1 pair {sharer.code.slot}\n".encode() + stranger.message).close()
        assert "wrong" in sharer.next()
    assert "closed" in sharer.next()


def test_an_overheard_join_cannot_be_repeated(door: RunningDoor, sharer: Sharer) -> None:
    helper = Pairing(sharer.code, is_helper=True)
    with door.dial(f"muster 1 pair {sharer.code.slot}\n".encode() + helper.message) as stream:
        helper.finish(stream.recv(33, socket.MSG_WAITALL))
        overheard = frame(helper.seal_introduction(about(), helper_identity()))
    assert "wrong" in sharer.next()
    with door.dial(f"muster 1 pair {sharer.code.slot}\n".encode() + helper.message) as stream:
        assert len(stream.recv(33, socket.MSG_WAITALL)) == 33
        stream.sendall(overheard)
        assert stream.recv(10) == b"\0\0"
    assert sharer.next()["tries_left"] == 1


@pytest.mark.parametrize(
    "line",
    [b"\n", b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\n", b"x" * 300, b"muster 2 pair 1\n", b"muster 1\n",
     b"muster 1 pair -1\n", b"muster 1 pair x\n", b"muster 1 line\n", b"muster 1 line a\n", b"muster 1 back 00\n",
     "muster 1 pair ²\n".encode(), b"muster 1 pair 9999\n" + b"\0" * 33, b"\xff\xfe\n"],
)  # fmt: skip
def test_garbage_is_hung_up_on(door: RunningDoor, line: bytes) -> None:
    stream = door.dial(line)
    with contextlib.suppress(OSError):  # it may have hung up already
        stream.shutdown(socket.SHUT_WR)
    assert is_hung_up(stream)
    assert door_status() == {}


def test_who_says_nothing_is_hung_up_on(door: RunningDoor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door_module, "HANDSHAKE_SECONDS", 0.2)
    assert is_hung_up(door.dial())
    assert is_hung_up(door.dial(b"muster 1 pair 1\n"))
    assert is_hung_up(door.dial(b"muster 1 pa"))


def test_many_connections_of_one_stranger_keep_nobody_else_out(door: RunningDoor, pool: JoinedPool) -> None:
    honest = door.dial()
    until(lambda: len(door.state._handshakes) == 1)
    crowd = [door.dial(host="127.0.0.2") for _ in range(80)]
    try:
        until(lambda: sum(map(_is_ended, crowd)) >= 80 - MAX_CONNECTIONS)
        assert not _is_ended(honest)
        with connected(pool):
            assert "studio" in door_status()
    finally:
        for stream in (honest, *crowd):
            stream.close()


def _is_ended(stream: socket.socket) -> bool:
    stream.setblocking(False)
    try:
        return stream.recv(1) == b""
    except BlockingIOError:
        return False
    except ConnectionResetError:
        return True


def test_who_knows_a_machines_name_but_not_its_key_gets_no_line(door: RunningDoor, pool: JoinedPool) -> None:
    identity = machine_of(helper_identity()).identity
    overheard = ""
    for proof in ("", secrets.token_hex(32), None):
        stream = door.dial(f"muster 1 line {identity} {secrets.token_hex(32)}\n".encode())
        with stream, stream.makefile("rb") as lines:
            question = door_module.parse_line(lines.readline())["challenge"]
            honest = helper_identity().sign(line_message(pool.key, identity, question))
            stream.sendall(json_line({"proof": overheard if proof is None else proof}))
            assert lines.readline() == b""
            overheard = honest  # good for that challenge alone
    assert door_status() == {}


def test_a_door_with_another_key_is_no_pool(door: RunningDoor, pool: JoinedPool) -> None:
    other = JoinedPool("vm", helper_identity().public, pool.addresses, "studio")
    with pytest.raises(BadPeer):
        DoorLine(other, helper_identity(), door.address)
    forget_joined("studio")  # whose word that it is unknown is not taken, either
    with pytest.raises(BadPeer):
        DoorLine(other, helper_identity(), door.address)


def test_only_the_pools_key_logs_in(door: RunningDoor, pool: JoinedPool) -> None:
    with connected(pool):
        door_module.pool_key().unlink()
        JoiningKey(door_module.pool_key())
        with pytest.raises(MachinesNotReady, match="no key was accepted"):
            SshConnection.connect(SshTarget("s", "studio.joined"))


def test_it_opens_no_connections_for_others_and_listens_on_loopback_alone(door: RunningDoor, pool: JoinedPool) -> None:
    with connected(pool), SshConnection.connect(SshTarget("s", "studio.joined")) as studio:
        for kind in ("direct-tcpip", "x11", "auth-agent@openssh.com"):
            with pytest.raises(Exception, match=r"prohibited|Administratively"):
                studio.transport.open_channel(kind, ("127.0.0.1", door.port), ("127.0.0.1", 0))
        with pytest.raises(Exception, match="denied"):
            studio.transport.request_port_forward("0.0.0.0", 0)
        for ask in ("get_pty", "invoke_shell", "request_x11"):
            with pytest.raises(paramiko.SSHException):
                getattr(studio.transport.open_session(), ask)()
        with pytest.raises(paramiko.SSHException):
            studio.transport.open_session().invoke_subsystem("sftp")


def test_the_socket_for_calls_is_for_this_user_alone(door: RunningDoor, pool: JoinedPool) -> None:
    folder = door_module.joining_folder()
    assert folder.stat().st_mode & 0o777 == 0o700
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert files and all(path.stat().st_mode & 0o077 == 0 for path in files)


def test_names_and_addresses() -> None:
    assert label_of("Ada's Mac Studio.local") == "ada-s-mac-studio" and label_of("...") == "machine"
    assert split_door("10.0.0.2") == ("10.0.0.2", 7799) and split_door("[fd00::2]:1") == ("fd00::2", 1)


def test_a_user_without_a_name_can_join(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr("os.getuid", lambda: 2**31 - 7)
    assert introduce("AAAAC3NzaC1lZDI1NTE5AAAAI" + "A" * 43, name="studio").user == ""


def test_a_wrong_address_is_said_in_one_line(door: RunningDoor) -> None:
    with pytest.raises(MachinesNotReady, match="cannot reach a door"):
        pair(WRONG, "127.0.0.1:1", lambda pool: True)
    with socket.create_server(("127.0.0.1", 0)) as stranger:

        def answer() -> None:
            stream, _ = stranger.accept()
            stream.sendall(b"SSH-2.0-OpenSSH_9.2p1 Debian-2+deb12u3\r\n")
            stream.close()

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(MachinesNotReady):
            pair(WRONG, f"127.0.0.1:{stranger.getsockname()[1]}", lambda pool: True)
        thread.join()


# ------------------------------------------------------------------------------- a pool, a helper or a wire that lies


def test_what_a_stranger_answers_at_one_address_keeps_no_machine_from_the_next(
    door: RunningDoor, pool: JoinedPool
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as stranger:

        def answer() -> None:
            stream, _ = stranger.accept()
            with stream:
                stream.sendall(b'{"status": "\\ud800", "challenge": "\\ud800"}\n')

        thread = threading.Thread(target=answer)
        thread.start()
        addresses = ("a..b", f"127.0.0.1:{stranger.getsockname()[1]}", door.address)
        with connected(replace(pool, addresses=addresses)):
            thread.join()


def test_a_machine_without_a_pinned_key_is_not_met_for_the_first_time(door: RunningDoor, pool: JoinedPool) -> None:
    with connected(pool):
        known_hosts_file().write_text("")
        with pytest.raises(HostKeyChanged, match="has not joined with the key"):
            SshConnection.connect(SshTarget("s", "studio.joined"), trust=lambda key: True)
        door_module.Door()  # one that starts mends what the end of an earlier one has left
        with SshConnection.connect(SshTarget("s", "studio.joined")) as studio:
            assert studio.run(["true"]).ok


def test_machines_that_join_at_a_time_have_names_of_their_own(door: RunningDoor) -> None:
    key = "AAAAC3NzaC1lZDI1NTE5AAAAI" + "A" * 42
    introductions = [Introduction(name="studio", key=key + letter) for letter in "ABCDEFGH"]
    with ThreadPoolExecutor(8) as many:
        names = {machine.name for machine in many.map(_remember, introductions)}
    assert len(names) == 8 == len(joined_machines()) == len(known_hosts_file().read_text().splitlines())


def test_a_flood_of_calls_starts_few_threads(door: RunningDoor, monkeypatch: pytest.MonkeyPatch) -> None:
    is_over = threading.Event()

    def dial(address: str) -> socket.socket:
        is_over.wait()
        raise OSError

    monkeypatch.setattr(helper_module, "dial_door", dial)
    monkeypatch.setattr(helper_module, "MOST_SESSIONS", 2)
    calls = [secrets.token_hex(16) for _ in range(50)]
    line: Any = SimpleNamespace(calls=lambda: calls, close=lambda: None)
    connection = PoolConnection(JoinedPool("vm", "", ()), helper_identity(), lambda text: None)
    try:
        connection._serve("", line)
        assert sum(thread.name == "pool-session" for thread in threading.enumerate()) == 4
    finally:
        is_over.set()
        connection._closed.set()


def test_signs_of_life_go_on_while_calls_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(helper_module, "BEAT", 0.05)
    near, far = socket.socketpair()
    line = DoorLine.__new__(DoorLine)
    line._stream, line._buffer, line._rests, line._sending = near, b"", "", threading.Lock()
    calls = line.calls()

    def beat() -> bytes:
        far.sendall(json_line({"open": "0" * 32}))
        assert next(calls) == "0" * 32
        with contextlib.suppress(BlockingIOError):
            return far.recv(100)
        return b""

    with near, far:
        far.setblocking(False)
        assert b"beat" in until(beat)


def test_a_call_that_is_no_token_is_not_answered() -> None:
    near, far = socket.socketpair()
    line = DoorLine.__new__(DoorLine)
    line._stream, line._buffer, line._rests, line._sending = near, b"", "", threading.Lock()
    with near:
        for token in ("0\nGET /", "\ud800", 5, None, ["0" * 32], "0" * 32):
            far.sendall(json_line({"open": token}))
        far.close()
        assert list(line.calls()) == ["0" * 32]


def test_a_machine_that_reads_nothing_is_hung_up_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door_module, "SILENCE", 0.01)
    written: list[bytes] = []

    async def serve() -> bool:
        reader = asyncio.StreamReader()
        reader.feed_data(b"{}\n" * 10)
        writer: Any = SimpleNamespace(write=written.append, drain=asyncio.Event().wait)
        machine = door_module.JoinedMachine("studio", "")
        return await door_module.HelperLine(machine, (reader, writer), "", b"").serve()

    assert asyncio.run(serve()) is False and len(written) == 1


def test_a_door_that_cannot_read_its_machines_sends_none_away(door: RunningDoor, pool: JoinedPool) -> None:
    folder = door_module.joining_folder() / "machines"
    folder.rename(folder.with_name("away"))
    with pytest.raises(EOFError):
        DoorLine(pool, helper_identity(), door.address)
    folder.with_name("away").rename(folder)
    DoorLine(pool, helper_identity(), door.address).close()


def test_a_pool_that_cannot_be_read_is_not_left(door: RunningDoor, pool: JoinedPool) -> None:
    save_pool(pool)
    (file,) = (door_module.joining_folder() / "pools").glob("*.json")
    told: list[str] = []

    def spoil() -> None:
        until(lambda: "studio" in door_status())
        file.write_text("{")

    steps = iter([lambda: None, spoil, lambda: None])

    def stopped(seconds: float) -> bool:
        step = next(steps, None)
        if step is not None:
            step()
        return step is None

    serve_pools(stopped, told.append)
    assert next(steps, None) is None and [machine.name for machine in joined_machines()] == ["studio"]
    assert not any("has left" in line for line in told)


def test_guesses_that_come_too_often_cost_no_exchange(door: RunningDoor, sharer: Sharer) -> None:
    desk = door.state.desk
    desk._tried.extend([desk.clock()] * 30)
    assert is_hung_up(door.dial(f"muster 1 pair {sharer.code.slot}\n".encode() + Pairing(WRONG, True).message))
    assert "guessing" in sharer.next()["closed"]
