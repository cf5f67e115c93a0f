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
_TIME = r"(?:(\d{1,4}):)?(\d{1,2}):(\d{1,2})[.,](\d{1,3})"
_CUE = re.compile(rf"^\s*{_TIME}\s*-->\s*{_TIME}", re.MULTILINE)
_NOT_SAID = re.compile(r"<[^<>]*>|\{[^{}]*\}|\[[^\[\]]*\]|[♪♫]")


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
        transcript = of_text(text, language)
    else:
        transcript = _of_cues(told_once(list(_cues(path, text))), language)
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
    for number, found in enumerate(times):
        begin, end = _seconds(found.groups()[:4]), _seconds(found.groups()[4:])
        if end < begin:
            line = text.count("\n", 0, found.start()) + 1
            raise BadInput(f"transcript {path}, line {line}: ends before it begins", "correct the times")
        body = text[found.end() : times[number + 1].start() if number + 1 < len(times) else len(text)]
        yield Cue(begin, end, _said(body.partition("\n")[2]))


def _said(body: str) -> tuple[str, ...]:
    """The lines of a cue up to the blank one, without markup and without what is not said."""
    shown = _NOT_SAID.sub(lambda markup: "\n" * markup[0].count("\n") or " ", body.split("\n\n", 1)[0])
    lines = (plain_text(line) for line in shown.split("\n"))
    return tuple(line for line in lines if line)


def _seconds(parts: Sequence[str | None]) -> float:
    hours, minutes, seconds, fraction = parts
    return int(hours or 0) * 3600 + int(minutes or 0) * 60 + int(seconds or 0) + float(f"0.{fraction}")


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
