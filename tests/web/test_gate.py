"""Tickets, sessions and names."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.web.server import AllowedHosts, Authenticator


def test_a_ticket_works_once_and_its_session_from_then_on() -> None:
    authenticator = Authenticator()
    ticket = authenticator.new_ticket()
    session = authenticator.redeem(ticket)
    assert session is not None and session != ticket
    assert authenticator.redeem(ticket) is None
    assert authenticator.admits(session)
    assert not authenticator.admits(ticket)


def test_a_new_ticket_makes_the_unused_one_before_it_worthless() -> None:
    authenticator = Authenticator()
    first, second = authenticator.new_ticket(), authenticator.new_ticket()
    assert authenticator.redeem(first) is None
    assert authenticator.redeem(second) is not None


@given(st.text())
def test_nothing_guessed_comes_in(text: str) -> None:
    authenticator = Authenticator()
    authenticator.redeem(authenticator.new_ticket())
    authenticator.new_ticket()
    assert authenticator.redeem(text) is None
    assert not authenticator.admits(text)
    assert not Authenticator().admits(text)


@pytest.mark.parametrize("host", ["127.0.0.1:80", "localhost:80", "LOCALHOST:80", "[::1]:80"])
def test_names_of_this_machine(host: str) -> None:
    assert AllowedHosts("127.0.0.1", 80).is_ours(host)


HOSTILE = [
    "",
    "evil.test:80",
    "127.0.0.1",
    "127.0.0.1:81",
    "127.0.0.1.evil.test:80",
    "localhost:80:80",
    "::1:80",
    "[::1]",
    "lab:80",
]


@pytest.mark.parametrize("host", HOSTILE)
def test_a_name_that_somebody_points_here_is_none(host: str) -> None:
    assert not AllowedHosts("127.0.0.1", 80, ("lab",)).is_ours(host)


def test_on_all_addresses_literal_ones_and_own_names_are_ours() -> None:
    names = AllowedHosts("0.0.0.0", 80, ("lab", "lab.local"))
    assert all(names.is_ours(f"{host}:80") for host in ("192.168.1.20", "[fe80::1]", "lab", "lab.local", "localhost"))
    assert not any(names.is_ours(f"{host}:80") for host in ("evil.test", "lab.evil.test", "fe80::1", "1.2.3"))


def test_on_one_address_no_other_is_ours() -> None:
    names = AllowedHosts("192.168.1.20", 80, ("lab",))
    assert names.is_ours("192.168.1.20:80") and names.is_ours("lab:80")
    assert not names.is_ours("192.168.1.21:80")


@given(st.text())
def test_only_the_page_itself_is_of_the_same_origin(origin: str) -> None:
    names = AllowedHosts("127.0.0.1", 80)
    assert names.is_same_origin("http://127.0.0.1:80", "127.0.0.1:80")
    assert not names.is_same_origin(origin, "127.0.0.1:80")
