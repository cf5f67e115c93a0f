"""``serve``: command lines that another program sends, answered by one process that keeps their models loaded."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import sys
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, NoReturn, TypeVar

from app.console import show_line
from profiles.errors import BadInput

T = TypeVar("T")
_KEPT = 2
"""Models that stay loaded: one before and one after training."""
_serving = threading.Event()


def loaded(load: Callable[..., T], *arguments: Any) -> T:
    """Return ``load(*arguments)``, a model; within :func:`serve`, the newest two stay loaded."""
    return _kept(load, *arguments) if _serving.is_set() else load(*arguments)


@functools.lru_cache(maxsize=_KEPT)
def _kept(load: Callable[..., Any], *arguments: Any) -> Any:
    return load(*arguments)


def serve() -> NoReturn:
    """Run each line of stdin, the words of a command as a JSON list, and write its JSON document in one line.

    The end of stdin ends the process at once, whatever it is doing, so that it never outlives the program it serves.

    Raises:
        BadInput: a line is not a JSON list of words.
    """
    from app.cli.main import main  # which lists this command

    _serving.set()
    requests: SimpleQueue[list[str] | BadInput] = SimpleQueue()
    threading.Thread(target=_read, args=(requests,), name="requests", daemon=True).start()
    while True:
        words = requests.get()
        if isinstance(words, BadInput):
            raise words
        with contextlib.redirect_stdout(io.StringIO()) as written:
            main([*words, "--json"])
        show_line(json.dumps(json.loads(written.getvalue())))


def _read(requests: SimpleQueue[list[str] | BadInput]) -> None:
    for line in sys.stdin:
        try:
            requests.put(_words(line))
        except BadInput as error:  # ends the process where it is raised
            return requests.put(error)
    os._exit(0)


def _words(line: str) -> list[str]:
    try:
        words = json.loads(line)
    except ValueError:
        words = None
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise BadInput(f"not a command line: {line.strip()[:80]!r}", 'write a JSON list, as in ["transcribe", "RUN"]')
    return words
