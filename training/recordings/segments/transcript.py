"""What a person wrote down of a recording: plain text, or subtitles with times (SubRip, WebVTT)."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import regex

from profiles.errors import BadInput
from training.recordings.segments.rolling import Cue, told_once
from training.tasks.normalising import WITHOUT_SPACES
from training.tasks.tables import check_size, read_text
from training.tasks.transcript_text import plain_text

ENDINGS = (".txt", ".srt", ".vtt")
_LARGEST = 20_000_000  # bytes: a thousand hours of speech
_TIME = r"(?:(\d{1,4}):)?(\d{1,2}):(\d{1,2})(?:\s?[.,]\s?(\d{1,3}))?(?![\d:.,])"
_CUE = re.compile(rf"^[^\S\n]*{_TIME}\s*-{{1,2}}>\s*{_TIME}", re.MULTILINE)
_ARROW = re.compile(r"^[^\S\n]*-?\d[\d:.,; \t]*-->", re.MULTILINE)
_CUE_NUMBER = re.compile(r"(?:^|\n)[^\S\n]*\d+[^\S\n]*\n$")
"""Of the next cue, also without a blank line before it."""
_READING = re.compile(r"<(rt|rp)\b[^<>]*>.*?</\1>", re.DOTALL)
"""How the letters below are read (ruby)."""
_BREAK = re.compile(r"\\[Nnh]|<br\s*/?>", re.IGNORECASE)
_TAG = re.compile(r"</?\w[^<>]*>")
_STAMP = re.compile(rf"^[^\S\n]*[\[(]{_TIME}(?:\s*-->\s*{_TIME})?[\])]:?", re.MULTILINE)
"""A time before a line of plain text, as Whisper's own command and meeting programs write it."""
_NOT_SAID = re.compile(r"\{[^{}]*\}|\[[^\[\]]*\]:?|[♪♫]")
_SPEAKER_CHANGE = re.compile(r"^(?:>{2,}|[-–—]+(?!\s*\d))\s*")


@dataclass(frozen=True)
class Transcript:
    """A text and where its words lie in it."""

    text: str
    words: tuple[tuple[int, int], ...]
    """First character and end of each word in ``text``."""
    times: npt.NDArray[np.float64] | None = None
    """[words] the second at which each is said, as subtitles have it."""

    def word(self, number: int) -> str:
        first, end = self.words[number]
        return self.text[first:end]

    def between(self, first: int, end: int) -> str:
        """Return the text from word ``first`` up to word ``end``, as it was written."""
        return self.text[self.words[first][0] : self.words[end - 1][1]] if first < end else ""


def read_transcript(path: Path, language: str = "") -> Transcript:
    """Read a transcript; its ending says what it is.

    Args:
        language: code of the language; decides what a word is.

    Raises:
        BadInput: missing, too large, of another kind or encoding, or without a word.
    """
    if path.suffix.lower() not in ENDINGS:
        raise BadInput(f"transcript {path}: not a known kind", f"give {', '.join(ENDINGS)}")
    text = _read_text(path)
    if path.suffix.lower() == ".txt":
        transcript = of_text(_STAMP.sub("", text), language)
    else:
        transcript = _of_cues(told_once(sorted(_cues(path, text), key=lambda cue: cue.begin)), language)
    if not transcript.words:
        raise BadInput(f"transcript {path}: holds no words", "write what is said in the recording")
    return transcript


def of_text(text: str, language: str = "") -> Transcript:
    """Return the words of a plain text; white space of any kind is one space."""
    text = plain_text(unicodedata.normalize("NFC", text))
    return Transcript(text, tuple(word_places(text, language)))


def word_places(text: str, language: str = "") -> Iterator[tuple[int, int]]:
    """Yield first character and end of each word."""
    word = r"(?!\s)\X" if language in WITHOUT_SPACES else r"\S+"  # a character with its marks
    return (found.span() for found in regex.finditer(word, text))


def joined(words: Iterable[str], language: str = "") -> str:
    """Return words as one text."""
    return ("" if language in WITHOUT_SPACES else " ").join(words)


def _read_text(path: Path) -> str:
    check_size(path, _LARGEST, "name the text of one recording")
    text = read_text(path, "save it as UTF-8")
    if "\0" in text:
        raise BadInput(f"transcript {path}: holds zero bytes, so it is no text", "save it as UTF-8")
    return text


def _cues(path: Path, text: str) -> Iterator[Cue]:
    """Yield the cues; numbers, settings and comments are left out."""
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    times = list(_CUE.finditer(text))
    if not times:
        raise BadInput(f"transcript {path}: no line with times (00:00:01,000 --> 00:00:02,500)", "or name it .txt")
    starts = {found.start() for found in times}
    for arrow in _ARROW.finditer(text):
        if arrow.start() not in starts:
            line = text.count("\n", 0, arrow.start()) + 1
            raise BadInput(f"transcript {path}, line {line}: no times", "write them like 00:00:01,000 --> 00:00:02,500")
    for number, found in enumerate(times):
        begin, end = _seconds(found.groups()[:4]), _seconds(found.groups()[4:])
        if end < begin:
            line = text.count("\n", 0, found.start()) + 1
            raise BadInput(f"transcript {path}, line {line}: ends before it begins", "correct the times")
        body = text[found.end() :]
        if number + 1 < len(times):
            body = _CUE_NUMBER.sub("\n", text[found.end() : times[number + 1].start()])
        yield Cue(begin, end, _said(body.partition("\n")[2]))


def _said(body: str) -> tuple[str, ...]:
    """The lines of a cue up to the blank one, without markup and without what is not said."""
    shown = _TAG.sub("", _BREAK.sub(" ", _READING.sub("", body.split("\n\n", 1)[0])))
    shown = _NOT_SAID.sub(lambda markup: "\n" * markup[0].count("\n") or " ", shown)
    lines = (_SPEAKER_CHANGE.sub("", plain_text(line)) for line in shown.split("\n"))
    return tuple(line for line in lines if line)


def _seconds(parts: Sequence[str | None]) -> float:
    hours, minutes, seconds, fraction = parts
    return int(hours or 0) * 3600 + int(minutes or 0) * 60 + int(seconds or 0) + float(f"0.{fraction or 0}")


def _of_cues(cues: Sequence[tuple[float, float, str]], language: str) -> Transcript:
    """Join cues to one text; a word is said where it lies in its cue, by its letters."""
    texts, words, times, place = [], [], [], 0
    for begin, end, said in cues:
        cue = of_text(said, language)
        if cue.words:
            texts.append(cue.text)
            words += [(place + first, place + last) for first, last in cue.words]
            times += [begin + (end - begin) * (first + last) / 2 / len(cue.text) for first, last in cue.words]
            place += len(cue.text) + 1
    return Transcript(" ".join(texts), tuple(words), np.array(times))
