"""A supervisor that cannot reach those members of its run that may go on by themselves."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

CUT_OFF = 900.0
"""Seconds for which a supervisor that cannot reach most members waits for them."""


class CutOff:
    """Whether the members that cannot be reached may go on by themselves, and so are not given up.

    Args:
        warn: tells the user something.
        leave: called when that has lasted for :data:`CUT_OFF`; it does not return.
        clock: in seconds.
    """

    def __init__(
        self, warn: Callable[[str], object], leave: Callable[[], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._warn, self._leave, self._clock = warn, leave, clock
        self._lock = threading.Lock()
        self._since: float | None = None

    def judge(self, away: int, members: int, has_coordinator: bool) -> bool:
        """Return whether those members that are ``away`` may be the ones that go on, by the rule of
        :mod:`training.exchange.group.quorum`.

        Args:
            members: number of those that count: of the last mesh that is known to count, else of all that train.
            has_coordinator: the coordinator is away as well: it breaks a tie.
        """
        with self._lock:
            if not away or 2 * away + has_coordinator <= members:
                self._since = None
                return False
            if self._since is None:
                self._since = self._clock()
                self._warn(
                    f"{away} of {members} members cannot be reached, and may train on without this "
                    f"computer; it looks for them for {CUT_OFF / 60:.0f} minutes"
                )
            if self._clock() - self._since >= CUT_OFF:
                self._leave()
        return True
