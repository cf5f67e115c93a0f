"""Signs of life through the rendezvous store.

A gloo collective notices a killed peer at once, a cut cable or a frozen machine only at the group's time-out, and
never says who it was. So every member counts up a key of its own and watches those of the others.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Sequence

from training.exchange.base import ExchangeError
from training.exchange.store_client import StoreClient

BEAT = 0.5
"""Seconds between two signs of life."""
LEASE = 15.0
"""Seconds of silence after which a member counts as lost."""
LOCAL_LEASE = 60.0
"""Of a member on the same machine: the end of its process is seen at once, and where others take the processors its
signs of life may be late."""
_SUSPICIOUS = 3
"""Beats of silence that name the culprit once an exchange has failed."""


class Liveness:
    """Counts this member's beats, watches the others', and spreads the first failure to all members.

    Args:
        store: a connection of its own; closed by whoever made it.
        names: how to call each rank in messages.
        on_failure: called from the watching thread with one line about what the group failed of.
        beside: ranks on this member's machine.
    """

    def __init__(
        self,
        store: StoreClient,
        names: Sequence[str],
        rank: int,
        on_failure: Callable[[str], None],
        beside: Collection[int] = (),
    ) -> None:
        self._beside = frozenset(beside)
        self._store = store
        self._names = names
        self._rank = rank
        self._on_failure = on_failure
        self._others = [other for other in range(len(names)) if other != rank]
        self._beats: dict[int, bytes | None] = {}
        # Beats of this member during which the other's count stood still. Not seconds: after a sleep of the machine
        # with the store, nobody has beaten for long and everybody is alive.
        self._silence = dict.fromkeys(self._others, 0)
        self._left: set[int] = set()
        self._failure = ""
        self._beaten = threading.Condition()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="liveness", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def report(self, text: str) -> str:
        """Tell everybody what the group failed of; return what was told first."""
        try:
            return self._store.compare_set("failed", "", text).decode()
        except ExchangeError:
            return text

    def verdict(self, seconds: float) -> str:
        """Return who is to blame for a failed exchange; empty if that is not known within ``seconds``."""
        deadline = time.monotonic() + seconds
        with self._beaten:
            self._beaten.wait_for(
                lambda: self._failure or self._suspects(_SUSPICIOUS) or not self._thread.is_alive(),
                timeout=deadline - time.monotonic(),
            )
            return self._failure or self._describe(self._suspects(_SUSPICIOUS))

    def leave(self) -> None:
        """Say good-bye and stop."""
        self._stop.set()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join()
        try:
            self._store.set(f"left/{self._rank}", "1")
        except ExchangeError:
            return  # the store went first

    def _run(self) -> None:
        while not self._stop.wait(BEAT):
            try:
                self._beat()
            except ExchangeError:
                return  # without a store nobody can be judged; the exchanges themselves still notice a lost peer

    def _beat(self) -> None:
        self._store.add(f"beat/{self._rank}", 1)
        keys = ["failed", *(f"{kind}/{other}" for kind in ("beat", "left") for other in self._others)]
        failed, *rest = self._store.read(keys)
        beats, left = rest[: len(self._others)], rest[len(self._others) :]
        with self._beaten:
            for other, beat, gone in zip(self._others, beats, left):
                self._silence[other] = self._silence[other] + 1 if beat == self._beats.get(other) else 0
                self._beats[other] = beat
                if gone is not None:
                    self._left.add(other)
            lost = [other for other in self._others if other not in self._left and self._is_silent(other)]
            if failed is None and lost:
                failed = self.report(self._describe(lost)).encode()
            self._failure = failed.decode() if failed else ""
            self._beaten.notify_all()
        if self._failure:
            self._on_failure(self._failure)

    def _is_silent(self, other: int) -> bool:
        lease = LOCAL_LEASE if other in self._beside else LEASE
        return self._silence[other] >= int(lease / BEAT)

    def _suspects(self, beats: int) -> list[int]:
        return [other for other in self._others if other in self._left or self._silence[other] >= beats]

    def _describe(self, ranks: Sequence[int]) -> str:
        if not ranks:
            return ""
        who = " and ".join(
            f"{self._names[r]} has left the group" if r in self._left else f"{self._names[r]} does not respond"
            for r in ranks
        )
        return f"{who}; engine nccl cannot go on without a member: resume the run, or use engine = mesh"
