"""The terms on which this computer is lent: what may run, when, and how much of it."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from typing import Any

from distributed.hosts.lending import CLASSES, LendClass
from profiles.errors import BadInput, counted
from profiles.quantities import memory_text

_DAY = 24 * 60
_TIME = r"(\d{1,2})(?::(\d{2}))?"
_HOURS = re.compile(rf"{_TIME}\s*-\s*{_TIME}")
_MEMORY = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt])i?b?", re.IGNORECASE)
_UNITS = {"k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
LEAST_MEMORY = 1 << 30


@dataclass(frozen=True)
class LendingTerms:
    """What a pool may run here, and when."""

    lend: LendClass = "own"
    while_idle: bool = False
    """Only while nobody uses this computer."""
    hours: tuple[int, int] | None = None
    """Only from one minute of the day to another one, which may be the next day's; local time."""
    on_mains: bool = False
    """Only while this computer is plugged in."""
    memory: int = 0
    """Bytes at most; 0: all."""
    cores: int = 0
    """Cores at most; 0: all."""

    @property
    def limits(self) -> str:
        """The limits in words; empty: there are none."""
        words = [
            "while nobody uses it" if self.while_idle else "",
            f"from {_clock(self.hours[0])} to {_clock(self.hours[1])}" if self.hours else "",
            "on mains power" if self.on_mains else "",
            f"at most {memory_text(self.memory)}" if self.memory else "",
            f"at most {counted(self.cores, 'core')}" if self.cores else "",
        ]
        return ", ".join(filter(None, words))

    def document(self) -> dict[str, Any]:
        """Return the terms as JSON values."""
        return asdict(self)

    @classmethod
    def parse(cls, document: object) -> LendingTerms | None:
        """Return the terms of :meth:`document`; ``None``: it is none of these."""
        if not isinstance(document, dict) or document.keys() != asdict(cls()).keys():
            return None
        hours, numbers = document["hours"], (document["memory"], document["cores"])
        is_known = document["lend"] in CLASSES and all(type(number) is int and number >= 0 for number in numbers)
        flags = (document["while_idle"], document["on_mains"])
        is_known = is_known and all(type(flag) is bool for flag in flags)
        if hours is not None:
            is_known = is_known and isinstance(hours, (list, tuple)) and len(hours) == 2
            is_known = is_known and all(type(minute) is int and 0 <= minute < _DAY for minute in hours)
            document = {**document, "hours": tuple(hours)} if is_known else document
        return cls(**document) if is_known else None


def in_hours(hours: tuple[int, int], minute: int) -> bool:
    """Whether a minute of the day lies in a span, which may go over midnight."""
    begin, end = hours
    return begin <= minute < end if begin < end else minute >= begin or minute < end


def parse_hours(text: str) -> tuple[int, int]:
    """Return the minutes of the day of ``22-7`` or ``22:30-6:15``.

    Raises:
        BadInput: it is no such span.
    """
    match = _HOURS.fullmatch(text.strip())
    if match:
        values = [int(number or 0) for number in match.groups()]
        begin, end = (60 * values[0] + values[1]) % _DAY, (60 * values[2] + values[3]) % _DAY
        if max(values[0], values[2]) <= 24 and max(values[1], values[3]) < 60 and begin != end:
            return begin, end
    raise BadInput(f"--hours {text!r} is no span of the day", "write it as 22-7, or 22:30-6:15")


def parse_memory(text: str) -> int:
    """Return the bytes of ``8GB``.

    Raises:
        BadInput: it is no amount of memory, or too little to train anything.
    """
    match = _MEMORY.fullmatch(text.strip())
    amount = int(float(match[1]) * _UNITS[match[2].lower()]) if match else 0
    if amount < LEAST_MEMORY:
        raise BadInput(f"--memory {text!r} is no amount of memory from 1GB on", "write it as 8GB")
    return amount


def _clock(minute: int) -> str:
    return f"{minute // 60:02}:{minute % 60:02}"
