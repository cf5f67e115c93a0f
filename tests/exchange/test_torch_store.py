"""The rendezvous store: what torch asks of it, and what strangers may send."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from waiting import PATIENCE

from profiles.errors import BadInput
from training.exchange.base import ExchangeError
from training.exchange.torch_backend.store_client import StoreClient
from training.exchange.torch_backend.store_server import (
    MAX_CLIENTS,
    MAX_KEY,
    MAX_LINE,
    MAX_UNAUTHENTICATED,
    MAX_WAIT,
    StoreServer,
    encode,
    read_token,
)


@pytest.fixture(scope="module")
def server() -> Iterator[StoreServer]:
    server = StoreServer()
    yield server
    server.close()


@pytest.fixture
def client(server: StoreServer, request: pytest.FixtureRequest) -> Iterator[StoreClient]:
    client = StoreClient(f"127.0.0.1:{server.port}", server.token, PATIENCE, prefix=f"{request.node.name}/")
    yield client
    client.close()


def test_it_listens_on_loopback_only(server: StoreServer) -> None:
    assert server.socket.getsockname()[0] == "127.0.0.1"


def test_a_taken_port_is_an_os_error(server: StoreServer) -> None:
    with pytest.raises(OSError, match="in use"):
        StoreServer(server.port)


def test_values_of_any_bytes_come_back(client: StoreClient) -> None:
    client.set("key", bytes(range(256)))
    assert client.get("key") == bytes(range(256))
    assert client.check(["key"])
    assert not client.check(["key", "none"])


def test_add_counts_and_starts_at_zero(client: StoreClient) -> None:
    assert [client.add("n", 2), client.add("n", -5)] == [2, -3]
    assert client.get("n") == b"-3"


def test_compare_set_lets_the_first_one_win(client: StoreClient) -> None:
    assert client.compare_set("who", "", "first") == b"first"
    assert client.compare_set("who", "", "second") == b"first"
    assert client.compare_set("who", "first", "third") == b"third"


def test_delete_and_count(client: StoreClient) -> None:
    before = client.num_keys()
    client.set("gone", "1")
    assert client.num_keys() == before + 1
    assert [client.delete_key("gone"), client.delete_key("gone")] == [True, False]


def test_torch_asks_through_its_prefixes(client: StoreClient) -> None:
    prefixed = dist.PrefixStore("p", dist.PrefixStore("q", client))
    before = prefixed.num_keys()
    prefixed.set("key", "1")
    assert prefixed.num_keys() == before + 1
    assert [prefixed.delete_key("key"), prefixed.delete_key("key")] == [True, False]
    prefixed.set_timeout(timedelta(seconds=0.05))
    with pytest.raises(dist.DistStoreError, match="had no .*none within 0.05 s"):
        prefixed.get("none")


def test_a_get_waits_for_another_client(client: StoreClient) -> None:
    other = client.clone()
    timer = threading.Timer(0.05, other.set, ("late", "x"))
    timer.start()
    assert client.get("late") == b"x"
    timer.join()


def test_a_missing_key_is_named(client: StoreClient) -> None:
    client.set("here", "1")
    with pytest.raises(ExchangeError, match="had no there within"):
        client.wait(["here", "there"], timedelta(seconds=0.05))


def test_clients_of_different_prefixes_do_not_meet(server: StoreServer) -> None:
    one, other = (StoreClient(f"127.0.0.1:{server.port}", server.token, PATIENCE, prefix) for prefix in ("a/", "b/"))
    one.set("key", "1")
    assert not other.check(["key"])
    one.close()
    other.close()


@contextlib.contextmanager
def stranger_at(server: StoreServer, *, knows: bool = False) -> Iterator[socket.socket]:
    """A bare connection; one that ``knows`` the token has shown it and was let in."""
    with socket.create_connection(("127.0.0.1", server.port)) as stranger:
        stranger.settimeout(60)
        if knows:
            stranger.sendall(server.token.encode() + b"\n")
            assert stranger.recv(3) == b"{}\n"
        yield stranger


def say(stranger: socket.socket, data: bytes) -> None:
    """Send it and nothing more; the store may hang up in the midst of it."""
    with contextlib.suppress(OSError):
        stranger.sendall(data)
        stranger.shutdown(socket.SHUT_WR)


def last_words(stranger: socket.socket) -> bytes:
    """What comes until the store hangs up."""
    said = b""
    with contextlib.suppress(ConnectionError):
        while piece := stranger.recv(4096):
            said += piece
    return said


def asked(stranger: socket.socket, request: dict[str, object]) -> bytes:
    stranger.sendall(json.dumps(request).encode() + b"\n")
    return stranger.makefile("rb").readline()


@pytest.mark.parametrize("token", ["", "0" * 64, "x" * 5000, '{"op": "set", "key": "stolen", "value": ""}'])
def test_who_does_not_know_the_token_stores_nothing_and_hears_nothing(
    server: StoreServer, client: StoreClient, token: str
) -> None:
    before = client.num_keys()
    with stranger_at(server) as stranger:
        say(stranger, token.encode() + b'\n{"op": "set", "key": "stolen", "value": ""}\n{"op": "count"}\n')
        assert last_words(stranger) == b""
    assert client.num_keys() == before
    with pytest.raises(ExchangeError, match="token is not the store's"):
        StoreClient(client.address, "another", PATIENCE)


def test_the_token_is_for_the_members_alone(server: StoreServer, tmp_path: Path) -> None:
    server.admit(tmp_path / "member-0")
    modes = [path.stat().st_mode & 0o777 for path in (tmp_path / "member-0", *(tmp_path / "member-0").iterdir())]
    assert modes == [0o700, 0o600]
    assert read_token(tmp_path / "member-0") == server.token
    with pytest.raises(BadInput, match="start the run again"):
        read_token(tmp_path)


def test_silent_strangers_keep_no_member_out(server: StoreServer) -> None:
    with contextlib.ExitStack() as stack:
        crowd = [stack.enter_context(stranger_at(server)) for _ in range(2 * MAX_UNAUTHENTICATED)]
        client = StoreClient(f"127.0.0.1:{server.port}", server.token, PATIENCE)
        assert client.add("alive", 1) > 0
        client.close()
        assert [last_words(stranger) for stranger in crowd[:MAX_UNAUTHENTICATED]] == [b""] * MAX_UNAUTHENTICATED


@given(
    st.binary(max_size=200)
    | st.sampled_from([b"[]", b"{}", b'{"op": "get"}', b'{"op": "add", "key": "k"}', b"null", b"[" * 10_000]),
    st.booleans(),
)
def test_no_bytes_harm_the_store(server: StoreServer, data: bytes, knows: bool) -> None:
    with stranger_at(server, knows=knows) as stranger:
        say(stranger, data + b"\n")
        last_words(stranger)
    client = StoreClient(f"127.0.0.1:{server.port}", server.token, PATIENCE)
    assert client.add("alive", 1) > 0
    client.close()


@pytest.mark.parametrize(
    "request_",
    [
        {"op": "set", "key": "k" * (MAX_KEY + 1), "value": ""},
        {"op": "set", "key": "k", "value": "not base64!"},
        {"op": "get", "keys": ["none"], "timeout": MAX_WAIT + 1},
        {"op": "get", "keys": ["none"], "timeout": -1},
        {"op": "get", "keys": ["none"], "timeout": float("nan")},
        {"op": "add", "key": "n", "amount": float("inf")},
    ],
)
def test_a_member_that_asks_for_too_much_is_cut_off(server: StoreServer, request_: dict[str, object]) -> None:
    with stranger_at(server, knows=True) as member:
        assert asked(member, request_) == b""


def test_an_answer_fits_its_line(server: StoreServer) -> None:
    with stranger_at(server, knows=True) as member:
        assert asked(member, {"op": "set", "key": "large", "value": encode(b"x" * 1000)}) == b"{}\n"
        assert len(asked(member, {"op": "get", "keys": ["large"] * 700, "timeout": 0})) < MAX_LINE
        assert asked(member, {"op": "get", "keys": ["large"] * 800, "timeout": 0}) == b""


def test_what_is_held_is_counted() -> None:
    keys, values = st.sampled_from(["a", "bb", "", "k" * 50]), st.binary(max_size=40).map(encode)

    @given(st.data())
    def check(data: st.DataObject) -> None:
        for _ in range(data.draw(st.integers(0, 12))):
            key, value = data.draw(keys), data.draw(values)
            operation = data.draw(st.sampled_from(["set", "delete", "compare_set"]))
            server.answer({"op": operation, "key": key, "value": value, "expected": value, "desired": value})
        assert server._held == sum(len(key) + len(value) for key, value in server._values.items())

    with StoreServer() as server:
        check()
    assert not server._thread.is_alive()


def test_a_full_store_refuses_more_and_keeps_what_it_has() -> None:
    with StoreServer(max_keys=3, max_bytes=40) as server:
        for key in "abc":
            server.answer({"op": "set", "key": key, "value": encode(b"x")})
        for request in ({"key": "d", "value": ""}, {"key": "a", "value": encode(b"x" * 30)}):
            with pytest.raises(ValueError, match="more than the store holds"):
                server.answer({"op": "set", **request})
        assert server.answer({"op": "get", "keys": ["a", "d"], "timeout": 0}) == {"missing": ["d"]}


def test_a_line_without_end_is_cut_off(server: StoreServer) -> None:
    for knows in (False, True):
        with (
            stranger_at(server, knows=knows) as stranger,
            pytest.raises((BrokenPipeError, ConnectionResetError)),
        ):
            stranger.sendall(b"x" * (64 * MAX_LINE))


def test_a_store_that_goes_away_is_one_line() -> None:
    server = StoreServer()
    port = server.port
    client = StoreClient(f"127.0.0.1:{port}", server.token, 0.1)
    server.close()
    client._socket.shutdown(socket.SHUT_RDWR)
    with pytest.raises(ExchangeError, match="cannot be reached"):
        client.get("key")
    client.close()


@contextlib.contextmanager
def losing_an_answer(server: StoreServer) -> Iterator[str]:
    """An address of the store whose first connection ends when it has asked, and before it is answered."""
    with socket.create_server(("127.0.0.1", 0)) as door:

        def serve() -> None:
            for number in range(2):
                near, far = door.accept()[0], socket.create_connection(("127.0.0.1", server.port))
                with near, far, near.makefile("rb") as asked_for, far.makefile("rb") as answers:
                    for line in asked_for:
                        far.sendall(line)
                        answer = answers.readline()
                        if not number and answer != b"{}\n":
                            break
                        near.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"127.0.0.1:{door.getsockname()[1]}"
        thread.join()


def test_a_connection_that_ends_is_made_anew_and_nothing_is_added_twice(server: StoreServer) -> None:
    with losing_an_answer(server) as address:
        client = StoreClient(address, server.token, PATIENCE, prefix="lossy/")
        assert [client.add("n", 1), client.add("n", 2), client.add("n", 3)] == [1, 3, 6]
        assert client.get("n") == b"6"
        client.close()


def test_of_additions_only_the_last_of_each_client_is_held() -> None:
    with StoreServer() as server:
        for number in range(2 * MAX_CLIENTS):
            server.answer({"op": "add", "key": "n", "amount": 1, "client": f"c{number}", "number": 0})
        assert len(server._added) == MAX_CLIENTS
