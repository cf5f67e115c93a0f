"""A program in a real terminal (tmux): keys go in, and what a person would see at the moment comes out."""

from __future__ import annotations

import os
import shlex
import subprocess
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing_extensions import Self

PATIENCE = 60.0
_LOOK = 0.1


class Tmux:
    """A command in a terminal of its own; it ends with the block.

    Args:
        command: its words.
        folder: where it is started.
    """

    def __init__(self, command: Sequence[str], folder: Path, width: int = 80, height: int = 24) -> None:
        self._server = f"muster-{uuid.uuid4().hex[:8]}"
        words = f"{shlex.join(command)}; echo exit code $?; exec cat"
        size = ["-x", str(width), "-y", str(height)]
        self._tmux("-f", "/dev/null", "new-session", "-d", *size, "-c", str(folder), words)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._tmux("kill-server")

    @property
    def screen(self) -> str:
        """What is on the screen."""
        return self._tmux("capture-pane", "-p")

    def press(self, *keys: str) -> None:
        """Press keys by tmux's names for them (``Enter``, ``C-c``, ``a``), one after the other."""
        for key in keys:
            self._tmux("send-keys", key)

    def write(self, text: str) -> None:
        """Type a text."""
        self._tmux("send-keys", "-l", text)

    def until(self, *texts: str, patience: float = PATIENCE) -> str:
        """Wait until all texts are on the screen, and return it."""
        end = time.monotonic() + patience
        while not all(text in (screen := self.screen) for text in texts):
            assert time.monotonic() < end, f"no {texts} on:\n{screen}"
            time.sleep(_LOOK)
        return screen

    def until_gone(self, text: str, patience: float = PATIENCE) -> str:
        """Wait until a text is on the screen no more."""
        end = time.monotonic() + patience
        while text in (screen := self.screen):
            assert time.monotonic() < end, f"still {text!r} on:\n{screen}"
            time.sleep(_LOOK)
        return screen

    def _tmux(self, *words: str) -> str:
        environment = {**os.environ, "TERM": "xterm-256color", "LC_ALL": "C.UTF-8"}
        done = subprocess.run(
            ["tmux", "-u", "-L", self._server, *words], env=environment, capture_output=True, text=True, check=False
        )
        return done.stdout
