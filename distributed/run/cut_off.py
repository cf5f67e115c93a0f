"""A supervisor that cannot reach those members of its run that may go on by themselves."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from profiles.quantities import span_text

CUT_OFF = 900.0
"""Seconds for which a supervisor that cannot reach most members waits for them."""
SEPARATED = 60.0
"""Seconds after which members that were cut off from the others have noticed that, and wait if they may not go on."""


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
        self._is_elsewhere = True
        """Whether those that are away may be the ones that go on, as far as the others have shown."""

    def note_sync(self, connected: float) -> None:
        """Note that a member that can be reached has synchronised. If it was connected ever since the others must have
        noticed that some were cut off, those that can be reached are the ones that go on.

        Args:
            connected: when its connection was made, by the clock.
        """
        with self._lock:
            begun = self._clock() - SEPARATED
            if self._since is not None and max(self._since, connected) < begun:
                self._is_elsewhere = False

    def judge(self, away: int, members: int, has_coordinator: bool) -> bool:
        """Return whether those members that are ``away`` may be the ones that go on, by the rule of
        :mod:`training.exchange.group.quorum`, and the others have not shown that they do.

        Args:
            members: number of those that count: of the last mesh that is known to count, else of all that train.
            has_coordinator: the coordinator is away as well: it breaks a tie.
        """
        with self._lock:
            if not away or 2 * away + has_coordinator <= members:
                self._since, self._is_elsewhere = None, True
                return False
            if not self._is_elsewhere:
                return False
            if self._since is None:
                self._since = self._clock()
                self._warn(
                    f"{away} of {members} members cannot be reached, and may train on without this "
                    f"computer; it looks for them for {span_text(CUT_OFF)}"
                )
            if self._clock() - self._since >= CUT_OFF:
                self._leave()
        return True
