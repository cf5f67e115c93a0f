"""Point-to-point links of a group, in addition to its mesh, and the monitor of all its links."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

from profiles.quantities import span_text
from training.exchange.base import ExchangeError
from training.exchange.links.connection import Connection
from training.exchange.links.link import Ended, Incoming, Outgoing, PeerLost
from training.exchange.links.listener import Address, Listener
from training.exchange.mean.mesh import Mesh

_FAREWELL_SECONDS = 0.2
_MIN_INTERVAL, _MAX_INTERVAL = 0.02, 0.5
"""Minimum and maximum seconds between two checks of the links."""

Link = TypeVar("Link", Incoming, Outgoing)


class PointToPointLinks:
    """Links made when a message first needs them, separate from those of the collectives, which would wait for it.

    A thread monitors these links and the mesh's: if a member stalls for ``seconds``, or is lost, all operations end
    with an error that names it.
    """

    def __init__(
        self,
        mesh: Mesh,
        listener: Listener,
        channel: str,
        addresses: Mapping[int, Sequence[Address]],
        seconds: float,
        relay: Address | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._mesh, self._listener, self._channel = mesh, listener, f"{channel}/pairs"
        self._addresses, self._relay, self.seconds = addresses, relay, seconds
        self._clock = clock
        self._pair_links: dict[tuple[int, type], Incoming | Outgoing] = {}
        self._lock = threading.Lock()
        self._begun: dict[object, tuple[Incoming | Outgoing, Ended]] = {}
        self._broken = False
        self._unmet: set[int] = set()
        """Peers to which links were not connected yet at the last check."""
        self._over = threading.Event()
        threading.Thread(target=self._watch, name="watch", daemon=True).start()

    def submit(self, peer: int, kind: type[Link], job: Callable[[Link], Iterator[int]], done: Ended) -> None:
        """Run ``job`` on the link to or from ``peer``; ``done`` is called at its end.

        Raises:
            ExchangeError: the group has ended, or a member is lost.
        """
        with self._lock:
            if self._over.is_set() or self._mesh.lost is not None:
                raise self._mesh.lost or ExchangeError("the group was ended")
            link = self._pair_links.get((peer, kind))
            if link is None:
                link = kind(lambda: self._connect(peer, kind), peer, self._mesh.names, self.break_off)
                self._pair_links[peer, kind] = link
            self._begun[key := object()] = link, done

        def on_end(error: PeerLost | None) -> None:
            with self._lock:
                entry = self._begun.pop(key, None)
            if entry is not None:
                done(error)

        link.submit(job, on_end)

    def break_off(self, lost: PeerLost) -> None:
        """End all operations of this group because a member is lost."""
        self._mesh.break_off(lost)
        with self._lock:
            links = [] if self._broken else list(self._pair_links.values())
            self._broken = True
        self._end_unmet(lost)
        for link in links:
            if isinstance(link, Outgoing):
                link.say_farewell(self._mesh.lost or lost)
        if links:
            timer = threading.Timer(_FAREWELL_SECONDS, lambda: [link.cut() for link in links])
            timer.daemon = True
            timer.start()

    def close(self, seconds: float) -> None:
        """Let operations in flight end within ``seconds``, and hang up."""
        with self._lock:
            self._over.set()
        deadline = time.monotonic() + seconds
        for link in self._pair_links.values():
            link.close(max(0.0, deadline - time.monotonic()))
        self._end_unmet(None)

    def _end_unmet(self, lost: PeerLost | None) -> None:
        """End jobs that wait for a connection: they would wait until their deadline."""
        with self._lock:
            unmet = {key: (link, done) for key, (link, done) in self._begun.items() if link.socket is None}
            self._begun = {key: one for key, one in self._begun.items() if key not in unmet}
        for link, done in unmet.values():
            done(self._mesh.lost or lost or link.lost("the group was ended"))

    def _connect(self, peer: int, kind: type) -> Connection:
        deadline = time.monotonic() + self.seconds
        addresses = self._addresses[peer]
        return self._listener.meet(self._channel, peer, kind is Outgoing, addresses, deadline, self._relay)

    # -------------------------------------------------------------------------------------------------------- the watch

    def waits_for(self) -> str:
        """Return the names of members whose bytes are awaited; empty if there are none."""
        waiting = {link.peer for link in self._links() if isinstance(link, Incoming) and not link.idle}
        return ", ".join(self._mesh.names[peer] for peer in sorted(waiting))

    def _links(self) -> list[Incoming | Outgoing]:
        with self._lock:
            return [*self._mesh.links(), *self._pair_links.values()]

    def _watch(self) -> None:
        watch, watched, last_look = StallDetector(), 0.0, self._clock()
        while not self._over.wait(pause := min(_MAX_INTERVAL, max(_MIN_INTERVAL, self.seconds / 10))):
            now = self._clock()
            # Time in which this process was stopped does not count: what arrived meanwhile is still to be read.
            watched, last_look = watched + min(now - last_look, 2 * pause), now
            if self._mesh.lost is not None:
                return self.break_off(self._mesh.lost)
            if (lost := self._find_unreachable() or watch.check(self._links(), watched, self.seconds)) is not None:
                return self.break_off(lost)

    def _find_unreachable(self) -> PeerLost | None:
        """Find a member that a link waits to connect to although its other connections have ended."""
        with self._lock:
            unmet = {link.peer for link in self._pair_links.values() if not link.idle and link.socket is None}
        gone = {peer for peer in self._unmet & unmet if _hung_up(self._mesh.incoming(peer))}
        self._unmet = unmet
        return self._mesh.incoming(min(gone)).lost("it closed the connection") if gone else None


def _hung_up(link: Incoming) -> bool:
    if not link.idle or link.socket is None:
        return False
    try:
        return not socket.socket.recv(link.socket, 1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True


class StallDetector:
    """Finds the member that holds up the others: nothing has moved on its link for ``seconds`` although it should.

    Others may stall because of it. So a member that has sent nothing at all is named before one that has begun, and one
    that is to send before one that is to receive.
    """

    def __init__(self) -> None:
        self._seen: dict[Incoming | Outgoing, tuple[int, float]] = {}

    def check(self, links: Sequence[Incoming | Outgoing], now: float, seconds: float) -> PeerLost | None:
        """Check the links after ``now`` seconds of monitoring; return the lost member, if there is one."""
        still: list[tuple[tuple[bool, bool, float], Incoming | Outgoing]] = []
        for link in links:
            moved, since = self._seen.get(link, (-1, now))
            if link.idle or link.bytes != moved:
                moved, since = link.bytes, now
            self._seen[link] = moved, since
            if now - since > seconds:
                still.append(((isinstance(link, Outgoing), link.bytes > link.bytes_before, since), link))
        if not still:
            return None
        (is_outgoing, begun, _), link = min(still, key=lambda priority_and_link: priority_and_link[0])
        verb = "took" if is_outgoing else "sent"
        suffix = " more" if begun else ""
        return link.lost(f"it {verb} nothing{suffix} for {span_text(seconds)}, the timeout of this group")
