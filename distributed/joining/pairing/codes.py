"""Codes that a person reads out: a number and three words, such as ``17-amber-comet-lizard``.

The number (1 to 999) only says which of the open codes is meant. The words are the secret: 1,295^3 = 2^31.0 codes. A
code is good for one machine, for ten minutes, and for three tries, so a stranger's chance is 3 / 2^31 = 1.4e-9.

A misspelt word never costs a try: any two words differ in three letters or more, so one slip leads to one word, and
what leads to none is refused before anything is sent.
"""

from __future__ import annotations

import re
import secrets
import time
import unicodedata
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from distributed.joining.pairing.words import WORDS
from profiles.errors import BadInput

LIFETIME = 600.0
"""Seconds for which a code is open."""
TRIES = 3
MOST_OPEN = 8
_MOST_SLOT = 999
_WORDS_IN_CODE = 3
_PREFIX = 3
"""Letters that identify a word."""
_LONGEST = 200
_EXAMPLE = "it looks like 17-amber-comet-lizard"
_BY_PREFIX = {word[:_PREFIX]: word for word in WORDS}
_MINUTE, _HOUR = (60.0, 30), (3600.0, 200)
"""Windows in seconds, and the tries that a door takes in one before it withdraws all codes."""


@dataclass(frozen=True)
class Code:
    """A code as two people know it."""

    slot: int
    words: tuple[str, ...]

    @property
    def password(self) -> bytes:
        """What both sides of the key exchange know."""
        return str(self).encode()

    def __str__(self) -> str:
        return "-".join([str(self.slot), *self.words])

    def __repr__(self) -> str:
        return f"Code(slot={self.slot})"  # the words are in no log and no traceback


def new_code(taken: frozenset[int] = frozenset()) -> Code:
    """Return a random code whose slot is not among ``taken``."""
    free = [slot for slot in range(1, _MOST_SLOT + 1) if slot not in taken]
    return Code(secrets.choice(free), tuple(secrets.choice(WORDS) for _ in range(_WORDS_IN_CODE)))


def parse_code(text: str) -> Code:
    """Return the code that a person has typed: in any case, with spaces or hyphens, with words cut to three letters or
    more, with one wrong, missing or extra letter a word.

    Raises:
        BadInput: it is no code; the message does not repeat it.
    """
    normal = unicodedata.normalize("NFKC", text[:_LONGEST]).casefold()
    parts = [part for part in re.split(r"[\W_]+", normal) if part]
    if not parts or not re.fullmatch(r"[0-9]{1,3}", parts[0]) or int(parts[0]) == 0:
        raise BadInput("the code does not begin with its number", _EXAMPLE)
    if len(parts) - 1 != _WORDS_IN_CODE or len(text) > _LONGEST:
        raise BadInput(f"the code has {len(parts) - 1} words, not {_WORDS_IN_CODE}", _EXAMPLE)
    return Code(int(parts[0]), tuple(_word(part, number) for number, part in enumerate(parts[1:], start=1)))


def _word(text: str, number: int) -> str:
    if text in WORDS:
        return text
    if len(text) >= _PREFIX and _BY_PREFIX.get(text[:_PREFIX], "").startswith(text):
        return _BY_PREFIX[text[:_PREFIX]]
    near = [word for word in WORDS if _differ_in_one(word, text)]
    if len(near) == 1:
        return near[0]
    raise BadInput(f"word {number} of the code is none of the words that codes are made of", "read it once more")


def _differ_in_one(word: str, text: str) -> bool:
    """Whether one letter is wrong, missing or too many."""
    if abs(len(word) - len(text)) > 1:
        return False
    start = next((n for n, pair in enumerate(zip(word, text)) if pair[0] != pair[1]), min(len(word), len(text)))
    rest, other = word[start:], text[start:]
    return other in (rest[1:], *(() if not other else (other[:1] + rest[1:], other[:1] + rest)))


def _seconds() -> float:
    """Return seconds that go on while the computer sleeps, and that nobody sets."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))  # macOS: the latter


@dataclass
class OpenCode:
    """A code that is open at a door."""

    code: Code
    expires: float
    """On the desk's clock."""
    tries_left: int = TRIES
    closed: str = ""
    """Why it is closed; empty: it is open."""


@dataclass
class CodeDesk:
    """The open codes of a door, with their limits. Not thread-safe."""

    clock: Callable[[], float] = _seconds
    _open: dict[int, OpenCode] = field(default_factory=dict)
    _tried: deque[float] = field(default_factory=lambda: deque(maxlen=_HOUR[1]))

    def issue(self, taken: frozenset[int] = frozenset()) -> OpenCode:
        """Open a new code, with a slot that is not among ``taken``.

        Raises:
            BadInput: too many are open, or too many were tried.
        """
        self.close_expired()
        if len(self._open) >= MOST_OPEN:
            raise BadInput(f"{MOST_OPEN} codes are open already", "end one of the other shares with Ctrl-C")
        if self.is_flooded():
            raise BadInput("too many wrong codes were tried here", "somebody may be guessing: share again in an hour")
        issued = OpenCode(new_code(taken.union(self._open)), self.clock() + LIFETIME)
        self._open[issued.code.slot] = issued
        return issued

    def take_try(self, slot: int) -> OpenCode | None:
        """Return the code of a slot for one try, which is used up; ``None`` if no code is open there.

        A door that gets too many tries closes all its codes.
        """
        self.close_expired()
        self._tried.append(self.clock())
        if self.is_flooded():
            for issued in list(self._open.values()):
                self.close(issued, "too many codes were tried at this computer: somebody may be guessing")
        issued_code = self._open.get(slot)
        if issued_code is None or issued_code.tries_left == 0:
            return None
        issued_code.tries_left -= 1
        return issued_code

    def accept(self, issued: OpenCode) -> bool:
        """Use up a code whose words were right; ``False`` if it is closed already."""
        is_open = not issued.closed
        self.close(issued, "used")
        return is_open

    def refuse(self, issued: OpenCode) -> None:
        """Close a code whose tries are used up by wrong words."""
        if issued.tries_left == 0:
            self.close(issued, f"{TRIES} wrong codes were tried, so it is closed")

    def close(self, issued: OpenCode, reason: str) -> None:
        """Close a code. Idempotent."""
        issued.closed = issued.closed or reason
        if self._open.get(issued.code.slot) is issued:
            del self._open[issued.code.slot]

    def close_expired(self) -> None:
        """Close the codes whose time is over."""
        now = self.clock()
        for issued in [issued for issued in self._open.values() if issued.expires <= now]:
            self.close(issued, "nobody joined within ten minutes")

    def is_flooded(self) -> bool:
        """Whether so many tries were taken that no code is open, and none can be opened."""
        now = self.clock()
        return any(sum(now - tried < window for tried in self._tried) >= most for window, most in (_MINUTE, _HOUR))
