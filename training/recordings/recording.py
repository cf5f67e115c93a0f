"""One recording of a source, as every reader gives it, and why one can be left out."""

from __future__ import annotations

import unicodedata
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import TypeAlias

    from training.tasks.speech_clips import AudioSource

    Source: TypeAlias = "AudioSource | UrlSource | NoSource"


class Reason(str, Enum):
    """Why a recording is left out; the values are the words of ``left_out.csv``."""

    NO_TEXT = "no text"
    BAD_CELL = "bad cell"
    TRANSLATION = "translation"
    NOT_THERE = "not there"
    OUTSIDE = "outside"
    NOT_HTTPS = "not https"
    DOWNLOAD = "download"
    UNREADABLE = "unreadable"
    EMPTY = "empty"
    SILENT = "silent"
    CLIPPED = "clipped"
    TOO_SHORT = "too short"
    TOO_LONG = "too long"
    CHARACTERS = "characters per second"
    DUPLICATE = "duplicate"
    CONTRADICTION = "contradiction"
    LANGUAGE = "language"


@dataclass(frozen=True)
class Fault:
    """Why one recording is left out."""

    reason: Reason
    detail: str
    may_pass: bool = False
    """The same command may get it the next time: a server did not answer."""


class Unusable(Exception):
    """One recording cannot be used."""

    def __init__(self, reason: Reason, detail: str, may_pass: bool = False) -> None:
        super().__init__(detail)
        self.fault = Fault(reason, detail, may_pass)


@dataclass(frozen=True)
class UrlSource:
    """A recording behind an ``https`` address."""

    url: str

    def stamp(self) -> str:
        return self.url

    @property
    def shown(self) -> str:
        """The address without its query, which may hold a key."""
        return self.url.partition("?")[0]


@dataclass(frozen=True)
class NoSource:
    """What a cell holds that leads to no recording."""

    text: str

    def stamp(self) -> str:
        return self.text


@dataclass(frozen=True)
class Recording:
    """One row of a source."""

    id: str
    audio: Source
    text: str
    where: str
    """Where it came from, for messages: table and line."""
    speaker: str = ""
    language: str = ""
    split: str = ""
    """``train``, ``validation`` or ``test``; empty if the source does not say."""
    offset: float = 0.0
    """Seconds into the sound file at which it begins."""
    duration: float | None = None
    """Seconds from there on; ``None``: to the end of the file."""
    fault: Fault | None = None
    """Why it cannot be used, if the reader knows already."""

    @property
    def shown_source(self) -> str:
        """File or address, for a report."""
        match self.audio:
            case UrlSource():
                return self.audio.shown
            case NoSource(text):
                return text.partition("?")[0]
            case _:
                return str(getattr(self.audio, "path", self.where))


@dataclass(frozen=True)
class Columns:
    """Names of columns that a person gave; an empty one is found by the usual names."""

    audio: str = ""
    text: str = ""
    speaker: str = ""


@dataclass(frozen=True)
class Request:
    """What a reader is asked for."""

    source: str
    columns: Columns = field(default_factory=Columns)
    roots: tuple[Path, ...] = ()
    """Folders besides the table's own in which recordings may be."""


def one_line(text: str) -> str:
    """Return a transcript in one line, without control characters."""
    return " ".join("".join(c if unicodedata.category(c) != "Cc" else " " for c in text).split())
