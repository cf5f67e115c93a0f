"""A command line that every login shell hands on unchanged.

SSH gives the server one string, which the user's login shell parses: sh, bash, zsh, fish, csh, each with rules of its
own. So the words travel encoded: letters, digits and a few marks as they are, every other byte as ``\\0ooo``. The
login shell sees three quoted words without quotes or dollars inside the last; a POSIX ``sh`` on the far side decodes
them.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence

from profiles.errors import BadInput

LIMIT = 100_000
"""Bytes of an encoded command; Linux refuses one argument of 128 KiB. Longer input belongs on stdin."""

_PLAIN = re.compile(rb"[^A-Za-z0-9_@%+=:,./-]")


def encode(argv: Sequence[str]) -> str:
    """Encode a command's words; ``printf %b`` decodes them to a line for ``sh``."""
    line = " ".join(shlex.quote(word) for word in argv).encode("utf-8", "surrogateescape")
    return _PLAIN.sub(lambda match: b"\\0%03o" % match[0][0], line).decode("ascii")


def command_line(argv: Sequence[str], marker: str) -> str:
    """Return the string to send. It prints ``marker`` on a line of stdout and then runs ``argv``.

    Whatever stands before the marker was written by the login shell's start files. ``marker`` is letters and digits.

    Raises:
        BadInput: no words, a NUL byte, or too long.
    """
    if not argv or not argv[0]:
        raise BadInput("an empty command cannot be run on another machine")
    if any("\0" in word for word in argv):
        raise BadInput(f"the command {argv[0]!r} has a NUL byte in an argument")
    encoded = encode(argv)
    if len(encoded) > LIMIT:
        raise BadInput(f"the command {argv[0]!r} is too long ({len(encoded)} bytes)", "send the data on stdin")
    # "exit $?" keeps sh as the parent: a signal that ends the command then shows as the exit code 128 + signal.
    return f"""sh -c 'echo {marker}; eval "$(printf %b "$1")"; exit $?' sh '{encoded}'"""
