"""Codes: what a person types leads to the code that was read out, or is refused before a try is spent."""

from __future__ import annotations

import contextlib
import string
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distributed.joining.pairing.codes import LIFETIME, MOST_OPEN, TRIES, Code, CodeDesk, new_code, parse_code
from distributed.joining.pairing.words import WORDS
from profiles.errors import BadInput

codes = st.builds(Code, st.integers(1, 999), st.tuples(*[st.sampled_from(WORDS)] * 3))
DASHES = (" ", "-", "_", ".", "\u2013", "  ")
"""What people and programs put between the parts."""


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def desk(clock: Clock) -> CodeDesk:
    return CodeDesk(clock)


def test_no_two_words_can_be_taken_for_one_another() -> None:
    assert len(WORDS) == len(set(WORDS)) == len({word[:3] for word in WORDS}) == 1295
    assert all(set(word) <= set(string.ascii_lowercase) for word in WORDS)
    shortened = {}
    for word in WORDS:  # two words that differ in one letter share a text with one letter left out, or are one
        for text in {word, *(word[:n] + word[n + 1 :] for n in range(len(word)))}:
            assert shortened.setdefault(text, word) == word


@given(codes, st.sampled_from(DASHES), st.booleans())
def test_case_and_marks_do_not_matter(code: Code, mark: str, loud: bool) -> None:
    text = str(code).replace("-", mark)
    assert parse_code(f" {text.upper() if loud else text}\n") == code


@given(codes, st.integers(0, 2), st.data())
def test_three_letters_are_enough(code: Code, number: int, data: st.DataObject) -> None:
    words = list(code.words)
    words[number] = words[number][: data.draw(st.integers(3, len(words[number])))]
    assert parse_code("-".join([str(code.slot), *words])) == code


@given(codes, st.integers(0, 2), st.data())
def test_one_slip_leads_to_the_same_word(code: Code, number: int, data: st.DataObject) -> None:
    word = code.words[number]
    at, letter = data.draw(st.integers(0, len(word) - 1)), data.draw(st.sampled_from(string.ascii_lowercase))
    slips = word[:at] + word[at + 1 :], word[:at] + letter + word[at + 1 :], word[:at] + letter + word[at:]
    words = [*code.words]
    words[number] = data.draw(st.sampled_from(slips))
    assert parse_code("-".join([str(code.slot), *words])) == code


@given(st.text(max_size=60))
def test_anything_else_is_refused_in_one_line_that_does_not_repeat_it(text: str) -> None:
    with contextlib.suppress(ValueError):
        assert set(parse_or_fail(text).words) <= set(WORDS)


def parse_or_fail(text: str) -> Code:
    """Parse a code; a refusal becomes a ValueError once its message is checked."""
    try:
        return parse_code(text)
    except BadInput as error:
        if not error.hint or "\n" in error.message or len(error.message) > 100:
            raise
        raise ValueError from error


@pytest.mark.parametrize(
    "text",
    ["17", "17-", "17-amber-comet", "amber-comet-lizard", "0-amber-comet-lizard", "1000-amber-comet-lizard",
     "17-amber-comet-lizard-amber", "17-xxxxx-comet-lizard", ""],
)  # fmt: skip
def test_no_code(text: str) -> None:
    with pytest.raises(BadInput):
        parse_code(text)


def test_the_words_are_in_no_traceback() -> None:
    code = new_code()
    assert not any(word in repr(code) for word in code.words)


def test_a_code_has_three_tries_whatever_comes_of_them(desk: CodeDesk) -> None:
    issued = desk.issue()
    assert all(desk.take_try(issued.code.slot) is issued for _ in range(TRIES))
    assert desk.take_try(issued.code.slot) is None
    desk.refuse(issued)
    assert "3 wrong codes" in issued.closed


def test_a_code_is_good_once(desk: CodeDesk) -> None:
    issued = desk.issue()
    assert desk.accept(issued) and not desk.accept(issued)
    assert desk.take_try(issued.code.slot) is None


def test_a_code_ends_after_ten_minutes(desk: CodeDesk, clock: Clock) -> None:
    issued = desk.issue()
    clock.now = LIFETIME - 0.1
    assert desk.take_try(issued.code.slot) is issued
    clock.now = LIFETIME
    assert desk.take_try(issued.code.slot) is None and "ten minutes" in issued.closed


def test_a_night_asleep_ends_a_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "CLOCK_BOOTTIME", 7, raising=False)
    monkeypatch.setattr(time, "clock_gettime", {7: 0.0}.__getitem__)
    desk = CodeDesk()
    issued = desk.issue()
    monkeypatch.setattr(time, "clock_gettime", {7: 3e4}.__getitem__)
    assert desk.take_try(issued.code.slot) is None and "ten minutes" in issued.closed


def test_codes_are_few_and_have_slots_of_their_own(desk: CodeDesk) -> None:
    assert len({desk.issue().code.slot for _ in range(MOST_OPEN)}) == MOST_OPEN
    with pytest.raises(BadInput, match="8 codes are open"):
        desk.issue()


def test_a_code_gets_no_slot_whose_machine_is_still_being_agreed_on(desk: CodeDesk) -> None:
    assert desk.issue(frozenset(range(1, 999))).code.slot == 999


def test_thirty_tries_a_minute_close_all_codes(desk: CodeDesk, clock: Clock) -> None:
    issued = desk.issue()
    guesses = [slot for slot in range(1, 999) if slot != issued.code.slot][:29]
    assert all(desk.take_try(slot) is None for slot in guesses) and not issued.closed
    assert desk.take_try(issued.code.slot) is None and "guessing" in issued.closed
    with pytest.raises(BadInput, match="too many"):
        desk.issue()
    clock.now = 61.0
    assert desk.issue()


def test_two_hundred_tries_an_hour_close_all_codes(desk: CodeDesk, clock: Clock) -> None:
    for _ in range(200):
        clock.now += 3.0  # 20 a minute
        desk.take_try(1)
    with pytest.raises(BadInput, match="in an hour"):
        desk.issue()
