"""Field types with bounds, for everything that another process or machine sends.

A text is made harmless (cut, and always encodable), because the end of a long message is worth less than the message.
A number out of its bounds is refused; a :data:`Measured` figure becomes ``None``, because sensors and diverging runs
report such figures honestly.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, ValidationError
from pydantic_core import from_json

LONGEST_LINE = 1 << 18
"""Bytes of one line."""
LONGEST_TEXT = 4000
LONGEST_NAME = 200
MOST_RANKS = 65_536
_LARGEST = 1 << 63
_DEPTH = 8
_VALUES = 20_000


def _cut(length: int) -> BeforeValidator:
    return BeforeValidator(lambda value: harmless(value, length) if isinstance(value, str) else value)


def harmless(text: str, length: int = LONGEST_TEXT) -> str:
    """Return ``text`` cut to ``length`` characters, with a question mark for what UTF-8 cannot hold."""
    if len(text) > length:
        text = text[: length - 3] + "..."
    return text.encode("utf-8", "replace").decode()


Text = Annotated[str, _cut(LONGEST_TEXT)]
Name = Annotated[str, _cut(LONGEST_NAME)]
Rank = Annotated[int, Field(ge=-1, lt=MOST_RANKS)]
Count = Annotated[int, Field(ge=0, lt=1 << 53)]
"""Bytes, samples, parts of some work."""
Step = Annotated[int, Field(ge=0, le=10**9)]
Number = Annotated[float, Field(ge=-1e39, le=1e39, allow_inf_nan=False)]
"""A diverging loss reaches the end of fp32."""
Seconds = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]
Moment = Annotated[float, Field(ge=-1e11, le=1e11, allow_inf_nan=False)]
"""Seconds since the epoch."""
Measured = Annotated[
    float | None,
    BeforeValidator(lambda value: None if isinstance(value, float) and not math.isfinite(value) else value),
]


def parse_object(line: str | bytes) -> dict[str, Any]:
    """Parse a line that holds one JSON object, of bounded size in every direction and without NaN or infinity.

    Raises:
        ValueError: it is something else.
    """
    if len(line) > LONGEST_LINE:
        raise ValueError(f"longer than {LONGEST_LINE} bytes")
    document = from_json(line.encode() if isinstance(line, str) else line, allow_inf_nan=False)
    if not isinstance(document, dict):
        raise ValueError("not a JSON object")
    for count, value in enumerate(_scalars(document, _DEPTH)):
        if count >= _VALUES or (isinstance(value, (int, float)) and not -_LARGEST < value < _LARGEST):
            raise ValueError("a number beyond all bounds" if count < _VALUES else "too many values")
    return document


def _scalars(value: object, depth: int) -> Iterator[object]:
    """Yield all numbers and texts in ``value``. Raises ValueError where it is nested deeper than ``depth``."""
    if not isinstance(value, (dict, list)):
        yield value
        return
    if depth == 0:
        raise ValueError("nested too deeply")
    for item in value.values() if isinstance(value, dict) else value:
        yield from _scalars(item, depth - 1)


def first_problem(error: ValidationError) -> str:
    """Return where a document is invalid and why, of its first error, without anything of its content."""
    problem = error.errors(include_url=False, include_input=False)[0]
    location = ".".join(str(part) for part in problem["loc"])
    return f"{location}: {problem['msg']}" if location else problem["msg"]
