"""Repeats of a held key, told from presses by their times."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from hypothesis import given
from hypothesis import strategies as st
from textual.events import Key

from app.shell.keys import Press, pressed


def repeats(gaps: Sequence[float], other: str = "") -> list[bool]:
    """Return of every press of Enter, so many seconds after the one before, whether it is taken for a repeat; ``other``
    is pressed before the last one."""
    presses: list[Press] = []
    for at in accumulate(gaps, initial=100.0):
        if other and len(presses) == len(gaps):
            presses.append(presses[-1].followed_by(Key(other, None)))
        event = Key("enter", "\r")
        event.time = at
        presses.append(presses[-1].followed_by(event) if presses else pressed(event))
    return [press.held_since() is not None for press in presses]


@given(st.floats(0.2, 0.75), st.floats(0.015, 0.11), st.lists(st.floats(-0.004, 0.004), min_size=3, max_size=30))
def test_every_repeat_of_a_keyboard_is_one_whatever_its_rate(delay: float, rate: float, jitter: list[float]) -> None:
    assert repeats([delay, *(rate + late for late in jitter)]) == [False] + [True] * (len(jitter) + 1)


@given(st.lists(st.one_of(st.floats(0.0, 0.17), st.floats(0.85, 5.0)), max_size=30))
def test_no_press_without_a_keyboards_delay_is_a_repeat(gaps: list[float]) -> None:
    assert not any(repeats(gaps))


def test_presses_in_a_persons_rhythm_are_none() -> None:
    assert not any(repeats([0.3, 0.25, 0.2, 0.22, 0.19, 0.3]))


def test_another_key_ends_the_repeats() -> None:
    assert repeats([0.5, 0.03, 0.03, 0.03], other="down") == [False, True, True, True, False, False]


def test_presses_that_a_program_wrote_at_once_after_a_while_are_none() -> None:
    assert not any(repeats([0.5, 0.0, 0.0, 0.0]))


def test_whether_a_press_is_a_repeat_is_known_a_moment_later() -> None:
    first = pressed(Key("enter", "\r"))
    first.times[0] = 100.0
    second = Key("enter", "\r")
    second.time = 100.5
    press = first.followed_by(second)
    assert first.undecided_until() == 0 and 100.5 < press.undecided_until() < 100.7
    press.times.extend([100.53, 100.56])
    assert press.held_since() == 100.0 and press.undecided_until() == 0
