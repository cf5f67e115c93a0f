"""A second holder of each part of a member's snapshots: it is copied to another machine, so that a run can go on when
any one machine is gone. Where the parts are small, as those of adapters are, all machines get all of them.

Copies are sent in the background of the training, over connections of their own, for a quarter of the time: however
slow a link is, three quarters of it are left to the training. So that no snapshot waits for copies, the next one that
is copied is the first after they have arrived everywhere. Every device keeps its part of the last snapshot that is
copied completely, until another one is.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future

from profiles.errors import RunFailed
from training.exchange.base import ExchangeError
from training.snapshots.member_snapshots import MemberSnapshots
from training.snapshots.part_transfer import (
    DeviceLinks,
    SendingPace,
    Transfer,
    UnreadSnapshot,
    carry_out,
    receive_part,
    send_part,
)

SHARE, PIECE = 0.25, 256 << 10
"""Share of the time for which a link is used, and bytes after which the training has its turn."""
SMALL = 64 << 20
"""Bytes up to which a part is copied to all machines."""
_LOOKS, _PAUSE = 50, 0.2
"""How often to look whether copies have arrived before a run stops, and seconds between two looks."""


class SnapshotCopies:
    """Copies this device's snapshots to other machines, and receives theirs. All devices call the same methods.

    Args:
        links: to the member's other devices, used for nothing else.
        gather: asks all devices, see :meth:`training.layouts.base.Layout.gather`.
        warn: takes a line about copies that cannot be made.
    """

    def __init__(
        self,
        snapshots: MemberSnapshots,
        links: DeviceLinks,
        gather: Callable[[bytes], list[bytes]],
        warn: Callable[[str], None],
    ) -> None:
        self._snapshots, self._links, self._gather, self._warn = snapshots, links, gather, warn
        self._pace = SendingPace(PIECE, SHARE)
        self._thread: threading.Thread | None = None
        self._newest: int | None = None
        """The last snapshot whose copying was begun."""
        self._is_arrived = False
        """Whether this device has sent and received all that it was to of that."""
        self._complete: int | None = None
        """The last snapshot that was copied everywhere."""
        self._passed_over: tuple[int, int, Future[None] | None] | None = None
        """The last snapshot, if it was not copied."""

    def begin(self, step: int, size: int, written: Future[None] | None) -> None:
        """Copy a snapshot, unless one before is still on its way anywhere.

        Args:
            size: bytes of this device's part.
            written: its end shows that the part is on the disk; ``None``: it is.
        """
        sizes = self._sizes(size)
        self._passed_over = (step, size, written) if sizes is None else None
        if sizes is None:
            return
        # or the run went on from the other one
        secured = self._snapshots.loaded if self._complete is None else self._complete
        self._snapshots.own.held = {step if secured is None else secured, step}
        self._newest, self._is_arrived = step, False
        transfers = list(self._transfers(max(sizes)))
        self._thread = threading.Thread(target=self._copy, args=(step, transfers, written), daemon=True, name="copies")
        self._thread.start()

    def wait(self) -> None:
        """Let copies of the last snapshot arrive, if that takes seconds only; nothing else needs the links any more."""
        self._pace.share = 1.0
        for _ in range(_LOOKS):
            if self._sizes(0) is not None:
                if self._passed_over is None:
                    return
                self.begin(*self._passed_over)
            time.sleep(_PAUSE)

    def _sizes(self, size: int) -> list[int] | None:
        """Return the sizes that the devices give; ``None``: one of them is busy, or lost."""
        is_busy = self._thread is not None and self._thread.is_alive()
        try:
            mine = json.dumps([is_busy, self._is_arrived, size]).encode()
            answers = [json.loads(answer) for answer in self._gather(mine)]
        except ExchangeError:  # the training says so
            return None
        if any(busy for busy, *_ in answers):
            return None
        if all(is_arrived for _, is_arrived, _ in answers):
            self._complete = self._newest
        return [int(part) for *_, part in answers]

    def _transfers(self, largest: int) -> Iterator[Transfer]:
        """Yield who sends its part to whom: to the next machine in the order of the stages, or to all."""
        count = len(self._snapshots.machines)
        for device in range(count):
            later = ((device + distance) % count for distance in range(1, count))
            receivers = dict.fromkeys(map(self._snapshots.receiver, later))
            others = [other for other in receivers if other != self._snapshots.receiver(device)]
            yield from (Transfer(device, device, other) for other in others[: None if largest <= SMALL else 1])

    def _copy(self, step: int, transfers: list[Transfer], written: Future[None] | None) -> None:
        try:
            if written is not None:
                written.result()
            failed = carry_out(
                transfers,
                self._links,
                lambda transfer: send_part(self._links, transfer.target, self._snapshots.own, step, self._pace),
                lambda transfer: receive_part(
                    self._links, transfer.source, self._snapshots.store_of(transfer.part), step, self._pace
                ),
            )
            self._is_arrived = not failed
            errors = [error for _, error in failed if not isinstance(error, UnreadSnapshot)]  # it says so itself
        except ExchangeError:
            return  # the training has lost the same machine, or has ended
        except RunFailed as error:
            errors = [error]
        for message in dict.fromkeys(error.message for error in errors):
            self._warn(f"{message}: a machine that is lost would take its part of the snapshot along")


def copies_of(
    snapshots: MemberSnapshots,
    links: DeviceLinks | None,
    gather: Callable[[bytes], list[bytes]],
    warn: Callable[[str], None],
) -> SnapshotCopies | None:
    """Return what copies snapshots over ``links``; ``None`` where there are none, as the devices are on one machine."""
    return SnapshotCopies(snapshots, links, gather, warn) if links is not None else None
