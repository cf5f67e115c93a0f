"""Happenings as lines."""

from __future__ import annotations

import math
import time

from textual.content import Content

from app.dashboard.picture import Picture
from app.history import Happening
from app.shell.symbols import Mark
from app.shell.text import literal

MARKS = {
    "run": Mark.RUNNING,
    "machine": Mark.WAITING,
    "lost": Mark.LOST,
    "back": Mark.ONLINE,
    "error": Mark.PROBLEM,
    "warning": Mark.WARNING,
    "evaluation": Mark.DONE,
    "snapshot": Mark.DONE,
    "request": Mark.CHOSEN,
}


def clock_text(moment: float) -> str:
    """``14:03:21``, local; dashes for what is no time."""
    if not math.isfinite(moment) or not 0 <= moment < 1e11:
        return "--:--:--"
    return time.strftime("%H:%M:%S", time.localtime(moment))


def happening_line(one: Happening, picture: Picture, ascii_only: bool) -> Content:
    """Return time, symbol and words in one line."""
    words = what(one, picture)
    bad = one.kind in ("lost", "error")
    return Content.assemble(
        (clock_text(one.time), "$text-muted"),
        "  ",
        MARKS[one.kind].show("", ascii_only=ascii_only),
        " ",
        literal(words, "$text-error" if bad else ""),
    )


def what(one: Happening, picture: Picture) -> str:
    """Return the words, with machine and step where they are not said."""
    name = picture.name(one.member) if one.member >= 0 else ""
    who = f"{name}: " if name and name not in one.text and one.kind not in ("evaluation",) else ""
    at = f" (step {one.step})" if one.step >= 0 and one.kind in ("evaluation", "warning", "error") else ""
    return f"{who}{one.text}{at}"
