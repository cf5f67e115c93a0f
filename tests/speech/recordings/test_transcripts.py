"""Transcripts as people have them."""

from __future__ import annotations

from pathlib import Path

import pytest

from profiles.errors import BadInput
from speech.recordings.segments.transcript import join_words, parse_text, read_transcript

SRT = """1
00:00:01,000 --> 00:00:03,000
<i>Good morning,</i>
[door] all 12 of you.

2
00:01:03,500 --> 00:01:04,500
Ann &amp; Bob
"""
VTT = """WEBVTT - a title

NOTE nobody says this

00:01.000 --> 00:03.000 align:start
Good morning.
"""


def written(folder: Path, name: str, content: str | bytes) -> Path:
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def test_subtitles_have_words_and_times(tmp_path: Path) -> None:
    transcript = read_transcript(written(tmp_path, "a.srt", SRT))
    assert transcript.text == "Good morning, all 12 of you. Ann & Bob"
    assert transcript.times is not None and len(transcript.times) == len(transcript.words) == 9
    assert 1.0 < transcript.times[0] < transcript.times[5] < 3.0 and 63.5 < transcript.times[6] < 64.5
    assert transcript.text_between(2, 5) == "all 12 of"


def test_web_subtitles_too(tmp_path: Path) -> None:
    assert read_transcript(written(tmp_path, "a.vtt", VTT.replace("\n", "\r\n"))).text == "Good morning."


@pytest.mark.parametrize("content", ["\ufeffOne  two.\n\nThree", "One two. Three".encode("utf-16")])
def test_plain_text_of_any_form(tmp_path: Path, content: str | bytes) -> None:
    assert read_transcript(written(tmp_path, "a.txt", content)).text == "One two. Three"


def test_times_before_lines_of_plain_text_are_no_words(tmp_path: Path) -> None:
    content = "[00:00.000 --> 00:02.500]  Hello (12:30) there.\n(01:02) Ann: at 7:20.\n[1:01:02]: [sic] Bye"
    content += "\n[SPEAKER_00]: now"
    words = "Hello (12:30) there. Ann: at 7:20. [sic] Bye now"
    assert read_transcript(written(tmp_path, "a.txt", content)).text == words


OTTER = "Speaker 1  0:05  \nGood day.\nAnd more: all.\n\nAnn Lee  1:02:03\nSee you at 10:30\n"
OTTER += "\nTranscribed by https://otter.ai\n"


@pytest.mark.parametrize(
    ("content", "spoken"),
    [
        (OTTER, "Good day. And more: all. See you at 10:30"),
        ("[Ann Lee] 14:03:22\nHello.\n[Bob] 14:03:25\nBye.\n", "Hello. Bye."),
        ("Ann Lee (00:05):\nHello.\n\nSpeaker 2 (00:09):\nBye.\n", "Hello. Bye."),
        ("Ann Lee: Hello.\nBob: Note: now.\nAnn Lee: Bye.", "Hello. Note: now. Bye."),
        ("00:00:05\tAnn:\tHello.\n00:00:07\tBob:\tYes.\n00:00:09\tAnn:\tBye.", "Hello. Yes. Bye."),
        ("安：你好。\n李：好。\n安：再见。", "你好。 好。 再见。"),
        ("Ann:\nHello.\nBob:\nHi.\nAnn:\nSo\nBob:\nBye.", "Hello. Hi. So Bye."),
    ],
)
def test_names_of_speakers_are_no_words(tmp_path: Path, content: str, spoken: str) -> None:
    assert read_transcript(written(tmp_path, "a.txt", content)).text == spoken


@pytest.mark.parametrize(
    "content",
    [
        "Remember: save. Note: it is late.\nNote: again.",
        "Flour: two cups.\nSugar: one.\nMilk: a little.\nStir: well.",
        "Note: one.\nIt goes on.\nNote: two.\nAnd on.\nNote: three.",
        "He said: go.\nAnd so on.\nSee you at 10:30\nJohn 3:16 is short.",
    ],
)
def test_a_colon_makes_no_speaker(tmp_path: Path, content: str) -> None:
    assert read_transcript(written(tmp_path, "a.txt", content)).text == content.replace("\n", " ")


def test_names_in_subtitles_are_no_words(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    texts = ["Ann Lee: Good", "Ann Lee: day: all", "<v Bob Ray>Bob: yes</v>", "Bob: so\nAnn Lee: bye"]
    cues = "\n\n".join(f"00:0{n}.000 --> 00:0{n}.900\n{text}" for n, text in enumerate(texts))
    assert read_transcript(written(tmp_path, "a.vtt", f"WEBVTT\n\n{cues}\n")).text == "Good day: all yes so bye"
    assert "taken for names of speakers, which nobody says: Ann Lee, Bob" in caplog.text


def test_a_label_track_has_words_and_times(tmp_path: Path) -> None:
    content = "2.100000\t3.500000\tgood day\r\n0.500000\t2.100000\thello there\r\n\\\t100.000000\t900.000000\r\n"
    transcript = read_transcript(written(tmp_path, "a.txt", content))
    assert transcript.text == "hello there good day" and transcript.times is not None
    assert 0.5 < transcript.times[0] < transcript.times[1] < 2.1 < transcript.times[2] < transcript.times[3] < 3.5


def test_a_language_without_spaces_has_a_word_a_character() -> None:
    transcript = parse_text("今天 好。", "zh")
    assert [transcript.word(number) for number in range(4)] == ["今", "天", "好", "。"]
    assert transcript.text_between(1, 4) == "天 好。" and join_words(["今", "天"], "zh") == "今天"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", "", "holds no words"),
        ("a.txt", b"\xff\xfe\x00", "not UTF-8"),
        ("a.txt", b"ok\n\xe9t\xe9", "line 2: not UTF-8"),
        ("a.txt", b"a\0b", "zero bytes"),
        ("a.docx", "text", "not a known kind"),
        ("a.srt", "no times", "no line with times"),
        ("a.srt", "00:00:02,000 --> 00:00:01,000\nx", "line 1: ends before it begins"),
        ("a.srt", "00:00:01,000 --> 00:00:02,000\n[music]", "holds no words"),
    ],
)
def test_what_is_no_transcript_is_told_in_a_line(tmp_path: Path, name: str, content: str | bytes, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        read_transcript(written(tmp_path, name, content))


def test_a_missing_one_is_told(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="No such file"):
        read_transcript(tmp_path / "a.txt")


def subtitles(folder: Path, *lines: str, name: str = "a.srt") -> str:
    """The text of subtitles, each with its number and times."""
    cues = (f"{n}\n00:00:{n:02},000 --> 00:00:{n + 1:02},000\n{line}\n" for n, line in enumerate(lines, start=1))
    return read_transcript(written(folder, name, "\n".join(cues))).text


def test_numbers_of_subtitles_without_blank_lines_are_no_words(tmp_path: Path) -> None:
    cue = "{n}\n00:00:0{n},000 --> 00:00:0{n},900\n{text}\n"
    content = "".join(cue.format(n=n, text=text) for n, text in enumerate(("one", "7", "3", "42"), start=1))
    assert read_transcript(written(tmp_path, "a.srt", content)).text == "one 7 3 42"


@pytest.mark.parametrize(
    ("lines", "text"),
    [
        (["- Where to?\n- Home.", "– Now?", "— Ja.", "-Nein.", "-5 degrees - cold"],
         "Where to? Home. Now? Ja. Nein. -5 degrees - cold"),
        ([">> Hello.", "&gt;&gt;&gt; News", "[SPEAKER_01]: Thanks"], "Hello. News Thanks"),
        (["{\\an8}one\\Ntwo\\hthree"], "one two three"),
        (["<c.yellow>hel</c><00:00:01.200>lo<br/>you"], "hello you"),
        (["if x < y and y > z"], "if x < y and y > z"),
        (["<ruby>漢<rt>kan</rt>字<rp>(</rp><rt>ji</rt><rp>)</rp></ruby>"], "漢字"),
    ],
)  # fmt: skip
def test_what_only_readers_need_is_no_text(tmp_path: Path, lines: list[str], text: str) -> None:
    assert subtitles(tmp_path, *lines) == text


def test_subtitles_are_in_the_order_of_their_times(tmp_path: Path) -> None:
    content = "1\n00:00:03,000 --> 00:00:04,000\nlast\n\n2\n00:00:01,000 --> 00:00:02,000\nfirst\n"
    transcript = read_transcript(written(tmp_path, "a.srt", content))
    assert transcript.text == "first last" and transcript.times is not None
    assert transcript.times.tolist() == sorted(transcript.times)


def test_times_as_people_type_them(tmp_path: Path) -> None:
    content = "1\n00:00:01 -> 00:00:02\none\n\n2\n00:00:02, 500 --> 0:0:03 . 5\ntwo\n\n3\n00:00:04-->00:00:05\nthree\n"
    transcript = read_transcript(written(tmp_path, "a.srt", content))
    assert transcript.text == "one two three" and transcript.times is not None
    assert transcript.times.tolist() == [1.5, 3.0, 4.5]


def test_times_that_cannot_be_read_are_named_by_line(tmp_path: Path) -> None:
    content = "1\n00:00:01,000 --> 00:00:02,000\none\n\n2\n00:00:02:12 --> 00:00:03:00\ntwo\n"
    with pytest.raises(BadInput, match="line 6: no times"):
        read_transcript(written(tmp_path, "a.srt", content))
