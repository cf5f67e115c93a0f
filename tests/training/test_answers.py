"""What members say that their model wrote."""

from __future__ import annotations

import json

from training.answers import from_payloads, to_payload
from training.tasks.base import Answer

SHARES = {0: range(3), 1: range(3, 5)}


def test_answers_of_all_members_come_in_the_order_of_the_split() -> None:
    own, other = [Answer(0, "yes", False), Answer(2, "né", True)], [Answer(3, "no", False)]
    assert from_payloads({1: to_payload(other), 0: to_payload(own)}, SHARES) == [*own, *other]


def test_what_a_member_says_of_others_or_of_nothing_is_left_out() -> None:
    rows: list[object] = [[0, "not mine", 0], [4, "mine", 0], [4, "twice", 0], [True, "", 0], ["3", "", 0], [3, 7, 0]]
    rows += [[3, "x" * 5000, 0], "nothing", [3]]
    lies = {0: b"\xff", 1: json.dumps({"answers": rows}).encode(), 7: to_payload([Answer(1, "stranger", False)])}
    assert from_payloads(lies, SHARES) == [Answer(4, "mine", False)]


def test_no_more_is_sent_than_there_is_room_for() -> None:
    payload = to_payload([Answer(sample, "ü" * 2000, False) for sample in range(2000)])
    assert 3_900_000 < len(payload) < 4 << 20
    assert from_payloads({0: payload}, {0: range(2000)})[-1].sample < 400
