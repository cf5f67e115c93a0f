"""How members connect: a listening socket, TLS 1.3 with the run's certificates, a hello.

Every direction of every pair has its own connection. The sender dials; where it cannot (a firewall, a machine behind a
router), the receiver dials and says so (``handshake.py``); where neither can, both meet at a relay (``relay.py``).
One direction is established in ``connection_attempt.py``.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from profiles.errors import BadInput
from training.exchange.base import ExchangeError, ExchangeTimeout
from training.exchange.links.connection import Connection, close_in_child
from training.exchange.links.connection_attempt import Arrivals, ConnectionAttempt
from training.exchange.links.dialling import Address, DialHistory, listen_on
from training.exchange.links.handshake import (
    MAX_CHANNEL,
    POLL_SECONDS,
    RECEIVES,
    SENDS,
    ConnectTimeouts,
    Handshakes,
    Identity,
    Key,
)
from training.exchange.unauthenticated import UnauthenticatedConnections

__all__ = ["Address", "ConnectTimeouts", "Identity", "Listener"]


class PeerMissing(ExchangeTimeout):
    """There is no connection with a member.

    Args:
        rank: of it; ``None``: it has hardly had time to connect.
    """

    def __init__(self, message: str, rank: int | None) -> None:
        super().__init__(message)
        self.rank = rank


class Listener:
    """A member's listening socket; it outlives the groups that are formed with it.

    Args:
        host: literal address to listen on; ``::`` is all there are, of IPv4 too.
        timeouts: of dialling; they may be changed between connections.

    Attributes:
        dial_history: what is remembered about dialling the peers.
        arrivals: incoming connections that have not been asked for yet.
        unauthenticated: connections whose handshake is in progress.

    Raises:
        BadInput: the certificates cannot be read, or there are none and ``host`` is not loopback.
        ExchangeError: the address is not this machine's.
    """

    def __init__(self, host: str, identity: Identity, port: int = 0, timeouts: ConnectTimeouts | None = None) -> None:
        self.identity = identity
        self.timeouts = timeouts or ConnectTimeouts()
        self._handshakes = Handshakes(identity, self.timeouts)
        if identity.certificates is None and not ipaddress.ip_address(host).is_loopback:
            raise BadInput(f"{host}: without certificates only a loopback address is allowed", "issue certificates")
        try:
            self._socket = listen_on(host, port)
        except OSError as error:
            raise ExchangeError(
                f"cannot listen on {host}: {error.strerror}; name an address of this machine"
            ) from error
        close_in_child(self._socket)
        self.address: Address = self._socket.getsockname()[:2]
        self.dial_history = DialHistory()
        self.arrivals = Arrivals()
        self.unauthenticated = UnauthenticatedConnections()
        threading.Thread(target=self._accept, name="listener", daemon=True).start()

    def connect(
        self,
        channel: str,
        peers: Mapping[int, Sequence[Address]],
        deadline: float,
        names: Mapping[int, str],
        relay: Address | None = None,
        is_wanted: Callable[[], bool] = lambda: True,
    ) -> tuple[dict[int, Connection], dict[int, Connection]]:
        """Connect with ``peers`` on ``channel``, a name that is used once; return outgoing and incoming connections by
        rank.

        Args:
            peers: literal addresses where each listens, the fastest route first; empty: it cannot be dialled.
            deadline: of :func:`time.monotonic`.
            relay: address of the relay for pairs that cannot dial one another.
            is_wanted: whether the connections are still needed; checked again after :meth:`wake`.

        Raises:
            PeerMissing: a member is missing; the message names it and what was tried last.
        """
        if len(channel.encode()) > MAX_CHANNEL:
            raise ValueError(f"the channel's name '{channel}' is too long")
        interrupted, begun = threading.Event(), time.monotonic()

        def still() -> bool:
            return is_wanted() and not interrupted.is_set()

        meetings = {
            (peer, direction): self._meeting((channel, peer, direction), peers[peer], relay, deadline, still)
            for peer in peers
            for direction in (SENDS, RECEIVES)
        }
        try:
            results = _connect_all(meetings)
        except BaseException:
            interrupted.set()
            self.wake()
            raise
        met = {key: one for key, one in results.items() if one is not None}
        if len(met) < len(results):
            for connection in met.values():
                connection.socket.close()
            missing = sorted({peer for peer, _ in results.keys() - met.keys()})
            problems = {peer: meetings[peer, SENDS].problem or meetings[peer, RECEIVES].problem for peer in missing}
            details = "; ".join(f"{names[peer]}: {problems[peer] or 'it did not connect'}" for peer in missing)
            is_fair = time.monotonic() > (begun + deadline) / 2  # else others have given it up
            raise PeerMissing(f"no connection with {details}", missing[0] if is_fair else None)
        return {peer: met[peer, SENDS] for peer in peers}, {peer: met[peer, RECEIVES] for peer in peers}

    def meet(
        self,
        channel: str,
        peer: int,
        sends: bool,
        addresses: Sequence[Address],
        deadline: float,
        relay: Address | None = None,
        is_wanted: Callable[[], bool] = lambda: True,
    ) -> Connection:
        """Return one direction to or from one peer, like :meth:`connect` does for all."""
        meeting = self._meeting((channel, peer, SENDS if sends else RECEIVES), addresses, relay, deadline, is_wanted)
        connection = meeting.meet()
        if connection is None:
            raise ExchangeTimeout(f"no connection with rank {peer}: {meeting.problem or 'it did not connect'}")
        return connection

    def answer_questions(self, answer: Callable[[int], bytes]) -> None:
        """Let members that ask be told what ``answer`` returns, a line."""
        self._handshakes.answer_question = answer

    def wake(self) -> None:
        """Wake all waiting threads, so that they check whether their connection is still needed."""
        self.arrivals.wake()

    def close(self) -> None:
        """Stop listening, and close connections that were not taken. Idempotent."""
        self.arrivals.close()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # or accept() would keep waiting
        self._socket.close()

    def _meeting(
        self,
        key: Key,
        addresses: Sequence[Address],
        relay: Address | None,
        deadline: float,
        is_wanted: Callable[[], bool],
    ) -> ConnectionAttempt:
        return ConnectionAttempt(
            self._handshakes,
            self.dial_history,
            self.arrivals,
            key,
            addresses,
            relay,
            deadline,
            is_wanted,
            self.timeouts,
        )

    # ------------------------------------------------------------------------------------------------ being dialled

    def _accept(self) -> None:
        while not self.arrivals.closed:
            try:
                connection, (host, *_) = self._socket.accept()
            except OSError:
                if self.arrivals.closed:
                    return
                time.sleep(POLL_SECONDS)  # out of descriptors until unauthenticated connections end
                continue
            if not self.unauthenticated.enter(host):
                connection.close()
                continue
            try:
                threading.Thread(
                    target=self._do_handshake, args=(connection, host), name="handshake", daemon=True
                ).start()
            except RuntimeError:  # out of threads
                self.unauthenticated.leave(host)
                connection.close()

    def _do_handshake(self, connection: socket.socket, host: str) -> None:
        """Do the handshake of an incoming connection; one that is not of the run is closed."""
        try:
            self.arrivals.add(*self._handshakes.answer(connection, host.removeprefix("::ffff:")))
        except (OSError, EOFError, ExchangeError, ValueError):
            pass
        finally:
            self.unauthenticated.leave(host)


def _connect_all(meetings: Mapping[tuple[int, int], ConnectionAttempt]) -> dict[tuple[int, int], Connection | None]:
    """Establish all connections in parallel. Unlike a pool's threads, these delay neither Ctrl-C nor the process's
    end."""
    connections: dict[tuple[int, int], Connection | None] = {}
    errors: list[Exception] = []

    def meet(key: tuple[int, int]) -> None:
        try:
            connections[key] = meetings[key].meet()
        except Exception as error:  # noqa: BLE001 - raised again in the waiting thread
            errors.append(error)

    threads = [threading.Thread(target=meet, args=(key,), name="meeting", daemon=True) for key in meetings]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return connections
