"""How long nobody has used this machine, as an ordinary user can read it: macOS, GNOME, and terminals everywhere."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil

_PATIENCE = 2.0
_MACOS = ["/usr/sbin/ioreg", "-c", "IOHIDSystem", "-d", "4"]
_GNOME = [
    *("gdbus", "call", "--session", "--timeout", "1", "--dest", "org.gnome.Mutter.IdleMonitor"),
    *("--object-path", "/org/gnome/Mutter/IdleMonitor/Core", "--method", "org.gnome.Mutter.IdleMonitor.GetIdletime"),
]
_FORMS = {"darwin": (_MACOS, r'"HIDIdleTime" = (\d+)', 1e9), "linux": (_GNOME, r"uint64 (\d+)", 1e3)}
"""By system, the command that tells since when keyboard and mouse rest, the number in its answer, and its parts of a
second."""


class IdleTime:
    """Reads since when nobody has typed or moved the mouse.

    Args:
        machine: lists the users that are logged in, as psutil does.
        answer: returns the output of a command; ``None``: it failed.
        system: as ``sys.platform`` has it.
    """

    def __init__(
        self,
        machine: Any = psutil,
        answer: Callable[[Sequence[str]], str | None] | None = None,
        system: str = sys.platform,
    ) -> None:
        self._machine, self._answer = machine, answer or _output
        self._desktop = _FORMS.get(system)

    def seconds(self) -> float | None:
        """Return the seconds since the last sign of anybody; ``None``: nothing here tells."""
        known = [seconds for seconds in (self._of_desktop(), *self._of_terminals()) if seconds is not None]
        return min(known, default=None)

    def _of_desktop(self) -> float | None:
        if self._desktop is None:
            return None
        command, pattern, parts = self._desktop
        counts = re.findall(pattern, self._answer(command) or "")
        if not counts:
            self._desktop = None  # there is none, or it is another one: it is not asked again
            return None
        return min(map(int, counts)) / parts

    def _of_terminals(self) -> list[float]:
        """Return for each terminal with somebody logged in the seconds since its program has read from it, unless the
        clock was set back since."""
        idle = []
        with contextlib.suppress(psutil.Error, OSError, RuntimeError):
            for user in self._machine.users():
                with contextlib.suppress(OSError, ValueError):  # a display's name, or one that has gone
                    if user.terminal:
                        idle.append(time.time() - (Path("/dev") / user.terminal).stat().st_atime)
        return [seconds for seconds in idle if seconds >= 0]


def _output(command: Sequence[str]) -> str | None:
    bus = Path(f"/run/user/{os.getuid()}/bus")
    environment = {"DBUS_SESSION_BUS_ADDRESS": f"unix:path={bus}"} if bus.exists() else {}  # ssh gives a worker none
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_PATIENCE, check=False, env=environment | {**os.environ}
        )
        return done.stdout if done.returncode == 0 else None
    return None
