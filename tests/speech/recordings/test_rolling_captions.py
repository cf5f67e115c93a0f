"""Captions that scroll are told once; people who repeat themselves are not cut."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from speech.recordings.segments.rolling import Cue, unroll_captions
from speech.recordings.segments.transcript import read_transcript

LINES = ["welcome to the garden show", "today we plant tomatoes and beans", "first loosen the soil", "then water"]
word = st.sampled_from(["no", "yes", "la", "so"])
lines = st.lists(st.lists(word, min_size=1, max_size=4).map(" ".join), min_size=3, max_size=8)


def scrolling(lines: list[str]) -> list[Cue]:
    """Two lines on the screen: a new one below the last, then the new one alone for a moment."""
    cues = []
    for number, line in enumerate(lines):
        begin, end = 3.0 * number, 3.0 * number + 3
        cues += [Cue(begin, end - 0.01, tuple(lines[max(0, number - 1) : number + 1])), Cue(end - 0.01, end, (line,))]
    return cues


def text_of(cues: list[Cue]) -> str:
    return " ".join(text for _, _, text in unroll_captions(cues))


def test_lines_that_scroll_and_are_held_are_told_once_where_they_come() -> None:
    captions = unroll_captions(scrolling(LINES))
    assert [text for *_, text in captions] == LINES
    assert [begin for begin, *_ in captions] == [0.0, 3.0, 6.0, 9.0]


@given(lines)
def test_whatever_is_said_each_line_that_scrolls_is_told_once(spoken: list[str]) -> None:
    assert text_of(scrolling(spoken)) == " ".join(spoken)


def test_a_line_that_grows_is_told_once() -> None:
    words = "one two three four five".split()
    assert text_of([Cue(n, n + 1, (" ".join(words[: n + 1]),)) for n in range(5)]) == "one two three four five"


def test_two_lines_that_move_up() -> None:
    assert text_of([Cue(n, n + 1, tuple(LINES[n : n + 2])) for n in range(4)]) == " ".join(LINES)


@pytest.mark.parametrize(
    "spoken",
    [
        ["la la la"] * 6,
        ["no", "no", "no no", "yes"],
        ["I think", "think so", "so what", "what now"],
        ["thank you", "thank you very much", "good bye", "good bye then", "and so on", "and so forth", "the end"],
    ],
)
def test_what_people_repeat_stays(spoken: list[str]) -> None:
    assert text_of([Cue(2.0 * n, 2.0 * n + 1.5, (line,)) for n, line in enumerate(spoken)]) == " ".join(spoken)


def test_captions_of_a_video_site(tmp_path: Path) -> None:
    cues = "WEBVTT\nKind: captions\nLanguage: en\n\nSTYLE\n::cue { color: lime }\n\n"
    before = " "
    for number, line in enumerate(LINES):
        first_word, *words = line.split()
        begin, end = 3 * number, 3 * number + 2
        tagged = first_word + "".join(f"<00:00:{begin:02}.500><c> {word}</c>" for word in words)
        cues += f"00:00:{begin:02}.000 --> 00:00:{end:02}.990 align:start position:0%\n{before}\n{tagged}\n\n"
        cues += f"00:00:{end:02}.990 --> 00:00:{end + 1:02}.000 align:start position:0%\n{line}\n \n\n"
        before = line
    (tmp_path / "a.vtt").write_text(cues)
    transcript = read_transcript(tmp_path / "a.vtt")
    assert transcript.text == " ".join(LINES)


def test_markup_and_what_is_not_said(tmp_path: Path) -> None:
    markup = "{\\an8}<font color=red>♪ Good</font>\u00a0morning ♪\n<v Ann>Tom &amp; I\u200b.</v>\n(laughs)"
    (tmp_path / "a.srt").write_text(f"1\n0:00:01,5 --> 0:00:03,000 X1:1 Y1:2\n{markup}\n")
    assert read_transcript(tmp_path / "a.srt").text == "Good morning Tom & I. (laughs)"
