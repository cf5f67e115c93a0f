"""Reads the transcript of a recording: plain text, or subtitles with times (SubRip, WebVTT)."""

from __future__ import annotations

import logging
import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import regex

from profiles.errors import BadInput
from speech.recordings.segments.rolling import Cue, unroll_captions
from speech.recordings.segments.speakers import without_headings, without_names
from speech.scoring.text_normalisation import WITHOUT_SPACES
from training.tasks.data_files.plain_text import plain_text
from training.tasks.data_files.tables import check_size, read_text

logger = logging.getLogger("muster.data")

ENDINGS = (".txt", ".srt", ".vtt")
_LARGEST = 20_000_000  # bytes: a thousand hours of speech
_TIME = r"(?:(\d{1,4}):)?(\d{1,2}):(\d{1,2})(?:\s?[.,]\s?(\d{1,3}))?(?![\d:.,])"
_CUE = re.compile(rf"^[^\S\n]*{_TIME}\s*-{{1,2}}>\s*{_TIME}", re.MULTILINE)
_ARROW = re.compile(r"^[^\S\n]*-?\d[\d:.,; \t]*-->", re.MULTILINE)
_CUE_NUMBER = re.compile(r"(?:^|\n)[^\S\n]*\d+[^\S\n]*\n$")
"""Number of the next cue, with or without a blank line before it."""
_RUBY = re.compile(r"<(rt|rp)\b[^<>]*>.*?</\1>", re.DOTALL)
"""Ruby text: the pronunciation of the characters below it."""
_BREAK = re.compile(r"\\[Nnh]|<br\s*/?>", re.IGNORECASE)
_TAG = re.compile(r"</?\w[^<>]*>")
_STAMP = re.compile(rf"^[^\S\n]*(?:[\[(]{_TIME}(?:\s*-->\s*{_TIME})?[\])]:?|\[[^\[\]\n]*\]:)", re.MULTILINE)
"""A time, or who speaks (``[SPEAKER_00]:``), before a line of plain text, as Whisper and meeting programs write it."""
_LABEL = re.compile(r"(\d+\.\d+)\t(\d+\.\d+)\t(.*)")
"""A line of a label track, as Audacity exports it: begin and end in seconds, and text."""
_NOT_SPOKEN = re.compile(r"\{[^{}]*\}|\[[^\[\]]*\]:?|[♪♫]")
_SPEAKER_CHANGE = re.compile(r"^(?:>{2,}|[-–—]+(?!\s*\d))\s*")


@dataclass(frozen=True)
class Transcript:
    """A text and the positions of its words."""

    text: str
    words: tuple[tuple[int, int], ...]
    """Start and end of each word in ``text``, in characters."""
    times: npt.NDArray[np.float64] | None = None
    """[words] the second at which each word is spoken, according to the subtitles."""

    def word(self, number: int) -> str:
        start, end = self.words[number]
        return self.text[start:end]

    def text_between(self, start: int, end: int) -> str:
        """Return the text from word ``start`` up to, not including, word ``end``, as it was written."""
        return self.text[self.words[start][0] : self.words[end - 1][1]] if start < end else ""


def read_transcript(path: Path, language: str = "") -> Transcript:
    """Read a transcript; the file's ending decides its format.

    Args:
        language: code of the language; decides how words are divided.

    Raises:
        BadInput: the file is missing, too large, of an unknown format or encoding, or holds no words.
    """
    if path.suffix.lower() not in ENDINGS:
        raise BadInput(f"transcript {path}: not a known kind", f"give {', '.join(ENDINGS)}")
    text = _read_text(path)
    if path.suffix.lower() == ".txt":
        labels = _labels(text)
        transcript = _join_cues(labels, language) if labels else parse_text(_spoken_text(path, text), language)
    else:
        cues = _without_names(path, sorted(_cues(path, text), key=lambda cue: cue.begin))
        transcript = _join_cues(unroll_captions(cues), language)
    if not transcript.words:
        raise BadInput(f"transcript {path}: holds no words", "write what is said in the recording")
    return transcript


def parse_text(text: str, language: str = "") -> Transcript:
    """Return a plain text with the positions of its words; white space of any kind becomes one space."""
    text = plain_text(unicodedata.normalize("NFC", text))
    return Transcript(text, tuple(word_spans(text, language)))


def word_spans(text: str, language: str = "") -> Iterator[tuple[int, int]]:
    """Yield start and end of each word, in characters."""
    word = r"(?!\s)\X" if language in WITHOUT_SPACES else r"\S+"  # a character with its marks
    return (match.span() for match in regex.finditer(word, text))


def join_words(words: Iterable[str], language: str = "") -> str:
    """Join words to a text, without spaces where the language writes none."""
    return ("" if language in WITHOUT_SPACES else " ").join(words)


def _read_text(path: Path) -> str:
    check_size(path, _LARGEST, "name the text of one recording")
    text = read_text(path, "save it as UTF-8")
    if "\0" in text:
        raise BadInput(f"transcript {path}: holds zero bytes, so it is no text", "save it as UTF-8")
    return text


def _spoken_text(path: Path, text: str) -> str:
    """Return a plain text without times and names of speakers."""
    lines = [line for line in _STAMP.sub("", without_headings(text)).splitlines() if line.strip()]
    spoken, speakers = without_names(lines, len(lines))
    _report(path, speakers)
    return "\n".join(spoken)


def _without_names(path: Path, cues: Sequence[Cue]) -> list[Cue]:
    lines, speakers = without_names([line for cue in cues for line in cue.lines], len(cues))
    _report(path, speakers)
    spoken = iter(lines)
    return [cue._replace(lines=tuple(line for _ in cue.lines if (line := next(spoken)))) for cue in cues]


def _report(path: Path, speakers: Sequence[str]) -> None:
    if speakers:
        logger.warning("%s: taken for names of speakers, which nobody says: %s", path, ", ".join(speakers))


def _labels(text: str) -> list[tuple[float, float, str]]:
    """Return begin, end and text of the labels of a label track; empty if the text is none."""
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("\\")]  # a label's frequencies
    labels = [label for label in map(_LABEL.fullmatch, lines) if label]
    return sorted((float(label[1]), float(label[2]), label[3]) for label in labels) if len(labels) == len(lines) else []


def _cues(path: Path, text: str) -> Iterator[Cue]:
    """Yield the cues, without numbers, settings and comments."""
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    times = list(_CUE.finditer(text))
    if not times:
        raise BadInput(f"transcript {path}: no line with times (00:00:01,000 --> 00:00:02,500)", "or name it .txt")
    starts = {match.start() for match in times}
    for arrow in _ARROW.finditer(text):
        if arrow.start() not in starts:
            line = text.count("\n", 0, arrow.start()) + 1
            raise BadInput(f"transcript {path}, line {line}: no times", "write them like 00:00:01,000 --> 00:00:02,500")
    for number, match in enumerate(times):
        begin, end = _seconds(match.groups()[:4]), _seconds(match.groups()[4:])
        if end < begin:
            line = text.count("\n", 0, match.start()) + 1
            raise BadInput(f"transcript {path}, line {line}: ends before it begins", "correct the times")
        body = text[match.end() :]
        if number + 1 < len(times):
            body = _CUE_NUMBER.sub("\n", text[match.end() : times[number + 1].start()])
        yield Cue(begin, end, _spoken_lines(body.partition("\n")[2]))


def _spoken_lines(body: str) -> tuple[str, ...]:
    """Return the lines of a cue up to a blank one, without markup and descriptions of sounds."""
    shown = _TAG.sub("", _BREAK.sub(" ", _RUBY.sub("", body.split("\n\n", 1)[0])))
    shown = _NOT_SPOKEN.sub(lambda markup: "\n" * markup[0].count("\n") or " ", shown)
    lines = (_SPEAKER_CHANGE.sub("", plain_text(line)) for line in shown.split("\n"))
    return tuple(line for line in lines if line)


def _seconds(groups: Sequence[str | None]) -> float:
    hours, minutes, seconds, fraction = groups
    return int(hours or 0) * 3600 + int(minutes or 0) * 60 + int(seconds or 0) + float(f"0.{fraction or 0}")


def _join_cues(cues: Sequence[tuple[float, float, str]], language: str) -> Transcript:
    """Join cues to one text; the time of a word is interpolated by its characters within its cue."""
    texts, words, times, offset = [], [], [], 0
    for begin, end, caption in cues:
        cue = parse_text(caption, language)
        if cue.words:
            texts.append(cue.text)
            words += [(offset + left, offset + right) for left, right in cue.words]
            times += [begin + (end - begin) * (left + right) / 2 / len(cue.text) for left, right in cue.words]
            offset += len(cue.text) + 1
    return Transcript(" ".join(texts), tuple(words), np.array(times))
