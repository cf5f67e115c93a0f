"""Finding the computer that shares a code: by what it announces, among strangers that announce the same."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from distributed.discovery.network_interfaces import Endpoint, Interfaces
from distributed.discovery.sightings import Browsed, Problem, Sighting, SightingKey, SightingOrigin
from distributed.joining import nearby
from distributed.joining.dialling import Meeting
from distributed.joining.nearby import MOST_ASKED, SharerSearch, meet_nearby
from distributed.joining.pairing.codes import Code
from distributed.joining.pairing.introductions import introduce
from distributed.joining.pools import helper_identity
from profiles.errors import BadInput, MachinesNotReady
from tests.distributed.joining import RunningDoor, Sharer

WRONG = Code(1, ("aardvark", "abandoned", "abbreviate"))


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nearby, "_HEAD_START", 0.05)
    monkeypatch.setattr(nearby, "_OTHERS_SECONDS", 0.0)


@contextlib.contextmanager
def stranger(serve: Callable[[socket.socket], object]) -> Iterator[str]:
    """Yield the address of a computer of somebody else that takes one connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def take() -> None:
            with contextlib.suppress(OSError), listener.accept()[0] as stream:
                serve(stream)

        thread = threading.Thread(target=take)
        thread.start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        with contextlib.suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)
        thread.join()


def refuse(stream: socket.socket) -> None:
    stream.recv(100)
    stream.sendall(b"B" + bytes(32))


def announced(monkeypatch: pytest.MonkeyPatch, *computers: tuple[str, ...]) -> None:
    """Let a search hear of these computers, in this order."""

    def enter(search: SharerSearch) -> SharerSearch:
        for addresses in computers:
            search._tell(addresses)
        return search

    monkeypatch.setattr(SharerSearch, "__enter__", enter)
    monkeypatch.setattr(SharerSearch, "__exit__", lambda self, *_: None)
    monkeypatch.setattr(nearby, "SEARCH_SECONDS", 0.2)


def meet(code: Code) -> Meeting:
    identity = helper_identity()
    return meet_nearby(code, identity, introduce(identity.public, name="studio"), seconds=nearby.SEARCH_SECONDS)


def test_strangers_with_the_same_number_do_not_keep_it_from_the_one_that_knows_the_code(
    door: RunningDoor, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_over = threading.Event()
    silent = stranger(lambda stream: is_over.wait())
    with (
        contextlib.closing(Sharer()) as sharer,
        stranger(refuse) as refusing,
        silent as quiet,
        ThreadPoolExecutor(1) as one,
    ):
        announced(monkeypatch, (quiet,), (refusing, door.address), (refusing,), ("127.0.0.1:1", door.address))
        meeting = meet(sharer.code)
        admitted = one.submit(sharer.admit)
        assert meeting.door == door.address and meeting.agree(lambda pool: True).known_as == "studio"
        assert admitted.result() == {"joined": "studio"}
        is_over.set()


def test_a_wrong_code_costs_one_try_of_one_computer(door: RunningDoor, monkeypatch: pytest.MonkeyPatch) -> None:
    with contextlib.closing(Sharer()) as sharer:
        announced(monkeypatch, (door.address, door.address))
        with pytest.raises(BadInput, match="not an open code"):
            meet(Code(sharer.code.slot, WRONG.words))
        assert sharer.next()["tries_left"] == 2
        assert not [share for share in door.state.shares.values() if share.issued.closed]


def test_nobody_there_is_one_line_that_names_the_option(door: RunningDoor, monkeypatch: pytest.MonkeyPatch) -> None:
    announced(monkeypatch)
    with pytest.raises(MachinesNotReady, match="no computer on this network shares a code with number 1") as raised:
        meet(WRONG)
    assert "--at ADDRESS" in raised.value.hint


def test_why_nothing_is_heard_is_said(door: RunningDoor, monkeypatch: pytest.MonkeyPatch) -> None:
    def enter(search: SharerSearch) -> SharerSearch:
        search._observe(Browsed((), (Problem("x", "macOS does not let this terminal", "System Settings"),)))
        return search

    announced(monkeypatch)
    monkeypatch.setattr(SharerSearch, "__enter__", enter)
    with pytest.raises(MachinesNotReady, match="macOS does not let") as raised:
        meet(WRONG)
    assert "System Settings" in raised.value.hint and "--at ADDRESS" in raised.value.hint


def test_a_crowd_of_strangers_gets_few_guesses(door: RunningDoor, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def refuse_all(code: Code, address: str, *_: object) -> Meeting:
        asked.append(address)
        raise BadInput("no")

    monkeypatch.setattr(nearby, "Meeting", refuse_all)
    announced(monkeypatch, *((f"192.0.2.{number}:1",) for number in range(100)))
    with pytest.raises(MachinesNotReady, match="16 computers here say"):
        meet(WRONG)
    assert len(asked) == MOST_ASKED


def sighting(source: str, slot: str, *addresses: str) -> Sighting:
    key = SightingKey(SightingOrigin.BONJOUR, "_muster-join._tcp", "x", "eth0", source)
    endpoints = tuple(Endpoint(address, "eth0", 7799) for address in addresses)
    return Sighting(key, "x", "x.local", endpoints, (("slot", slot),))


def test_a_computer_is_told_once_and_one_stranger_few_times() -> None:
    told: list[tuple[str, ...]] = []
    search = SharerSearch(17, told.append, lambda: Interfaces(()))
    search._observe(sighting("10.0.0.9", "17", "10.0.0.9", "10.0.0.1"))  # somebody else's address with its own
    search._observe(sighting("10.0.0.1", "17", "10.0.0.1"))
    search._observe(sighting("fe80::1", "17", "10.0.0.1", "fe80::1"))
    search._observe(sighting("10.0.0.2", "18", "10.0.0.2"))
    for number in range(20, 30):
        search._observe(sighting("10.0.0.9", "17", f"10.0.0.{number}"))
    assert told[:2] == [("10.0.0.9:7799", "10.0.0.1:7799"), ("10.0.0.1:7799",)]
    assert len(told) == 3


def test_what_is_announced_says_the_number_and_nothing_else() -> None:
    announcement = nearby.SlotAnnouncement.__new__(nearby.SlotAnnouncement)
    announcement._slot, announcement._port = 17, 7799
    made = announcement._announcement("0123456789abcdef")
    try:
        info = made._info
        assert dict(info.decoded_properties) == {"slot": "17"} and info.port == 7799
        assert socket.gethostname() not in f"{info.name} {info.server}"
    finally:
        made.close()
