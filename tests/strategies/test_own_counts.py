"""A strategy that counts its rounds itself is told what it has to hand to newcomers."""

from __future__ import annotations

from tests.training.memory_exchange import RoomExchange, together


def test_members_with_different_counts_hear_what_each_does_instead_of_waiting() -> None:
    def body(exchange: RoomExchange) -> object:
        return exchange.gather(f"mine/{7 * exchange.rank}", b"")

    found, _ = together(2, body)
    one, other = (str(error) for error in found.values())
    assert one == other and "'mine/0'" in one and "'mine/7'" in one and "docs/how-to/extending.md" in one
