"""The side that has joined: holds a line to the pool's door and answers its calls."""

from __future__ import annotations

import contextlib
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from distributed.hosts.joined import identity_of, parse_line
from distributed.joining.dialling import CONNECT_SECONDS, dial_door
from distributed.joining.door import BEAT, SILENCE
from distributed.joining.guard import ProgramGuard, end_programs, mark_of
from distributed.joining.lending.box import NoBox
from distributed.joining.lending.commands import commands_for, remove_box
from distributed.joining.lending.ledger import LentPrograms
from distributed.joining.lending.resting import LendingWatch
from distributed.joining.lending.terms import LendingTerms
from distributed.joining.pairing.exchange import BadPeer
from distributed.joining.pairing.frames import json_line
from distributed.joining.pairing.keys import JoiningKey, door_message, is_signed, leave_message, line_message
from distributed.joining.pools import JoinedPool, forget_pool, helper_identity, is_forgotten, joined_pools
from distributed.joining.ssh_server import Ports, SshServer
from profiles.errors import BadInput

MOST_SESSIONS = 32
"""Connections that one pool may have at a time."""
_LONGEST_PAUSE = 15.0
"""Seconds between two attempts to reach a door; below the time that a call waits for a machine."""
_LONGEST_LINE = 4096
_LOOK = 0.5
_TOKEN = re.compile(r"[0-9a-f]{32}")
Tell = Callable[[str], None]


class Dismissed(Exception):
    """The pool does not know this computer any more; its door has proved who it is."""


class DoorLine:
    """A line to a pool's door whose both ends have proved who they are.

    Args:
        address: ``host:port`` of the door.

    Raises:
        OSError, EOFError: it cannot be reached, or has ended.
        BadPeer: another computer answers there.
        Dismissed: the pool has removed this computer.
    """

    def __init__(self, pool: JoinedPool, identity: JoiningKey, address: str) -> None:
        self._pool, self._identity = pool, identity
        self._id, self._buffer = identity_of(identity.public), b""
        self._rests, self._sending = "", threading.Lock()
        challenge = secrets.token_hex(32)
        self._stream = dial_door(address)
        with _bad_letters(), contextlib.ExitStack() as unless_proved:
            unless_proved.callback(self._stream.close)
            self._stream.sendall(f"muster 1 line {self._id} {challenge}\n".encode())
            answer = self._read()
            status, self._question = str(answer.get("status")), str(answer.get("challenge"))
            if not is_signed(pool.key, door_message(self._id, challenge, status), answer.get("proof")):
                raise BadPeer
            if status != "welcome":
                raise Dismissed
            message = line_message(pool.key, self._id, self._question)
            said = {"lend": pool.terms.lend, "limits": pool.terms.limits}
            self._stream.sendall(json_line({"proof": identity.sign(message), **said}))
            unless_proved.pop_all()

    def _read(self) -> dict[str, Any]:
        """Return the next document.

        Raises:
            TimeoutError: none arrived in time; OSError, EOFError: the line is lost.
        """
        while b"\n" not in self._buffer:
            piece = self._stream.recv(_LONGEST_LINE)
            self._buffer += piece
            if not piece or len(self._buffer) > _LONGEST_LINE:
                raise EOFError
        line, _, self._buffer = self._buffer.partition(b"\n")
        return parse_line(line)

    def say_rests(self, reason: str) -> None:
        """Tell the pool why nothing of it runs here at present; empty: it may call."""
        with contextlib.suppress(OSError), self._sending:
            self._rests = reason
            self._stream.sendall(self._beat())

    def _beat(self) -> bytes:
        return json_line({"beat": 1, "rests": self._rests})

    def calls(self) -> Any:
        """Yield the tokens of calls, and give signs of life, until the line is lost."""
        heard = sent = time.monotonic()
        self._stream.settimeout(BEAT)
        with contextlib.suppress(OSError, EOFError):
            while time.monotonic() - heard < SILENCE:
                document: dict[str, Any] = {}
                with contextlib.suppress(TimeoutError):
                    document, heard = self._read(), time.monotonic()
                if time.monotonic() - sent >= BEAT:  # also while calls keep coming
                    with self._sending:
                        self._stream.sendall(self._beat())
                    sent = time.monotonic()
                if _TOKEN.fullmatch(token := str(document.get("open"))):
                    yield token

    def leave(self) -> None:
        """Tell the pool that this computer leaves for good."""
        message = leave_message(self._pool.key, self._id, self._question)
        with contextlib.suppress(OSError):
            self._stream.sendall(json_line({"leaving": self._identity.sign(message)}))

    def close(self) -> None:
        """End the line; wakes the thread that reads. Idempotent."""
        with contextlib.suppress(OSError):
            self._stream.shutdown(socket.SHUT_RDWR)
        self._stream.close()


@contextlib.contextmanager
def _bad_letters() -> Iterator[None]:
    """Take letters that cannot be signed for those of another program."""
    try:
        yield
    except ValueError as error:
        raise BadPeer from error


class PoolConnection:
    """Keeps a line to one pool, redialled when it is lost, and serves the pool's sessions, each in a thread.

    Args:
        tell: called with a line for people on each change.
        token: of the guard that ends the pool's programs once this process is gone.
    """

    def __init__(self, pool: JoinedPool, identity: JoiningKey, tell: Tell, token: str = "") -> None:
        self.pool, self._identity, self._tell = pool, identity, tell
        self.commands = commands_for(pool.terms, pool.identity, mark_of(pool.identity, token))
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._line: DoorLine | None = None
        self._servers: set[SshServer] = set()
        self._answers = threading.BoundedSemaphore(2 * MOST_SESSIONS)
        """Calls arrive in clear, so somebody between the two can send many: no more are answered at a time."""
        self._ports = Ports(self.commands.box.listen)
        self._rests = ""
        programs = LentPrograms(pool.name, pool.terms.lend)
        self._watch = LendingWatch(pool.terms, self.commands.box, self, tell, programs)
        self._thread = threading.Thread(target=self._run, name=f"pool-{pool.name}", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        pause, problem = 1.0, ""
        while not self._closed.is_set():
            try:
                address, line = self._dial()
            except Dismissed:
                self._tell(f"{self.pool.name} has removed this computer; nothing of it runs here any more")
                return forget_pool(self.pool)
            except (OSError, EOFError, BadPeer) as error:
                reason = _reason(error)
                if reason != problem:
                    self._tell(f"{self.pool.name} cannot be reached ({reason}); dialling again")
                problem = reason
                self._closed.wait(pause * (0.75 + secrets.randbelow(50) / 100))
                pause = min(2 * pause, _LONGEST_PAUSE)
                continue
            pause, problem = 1.0, ""
            self._tell(f"connected to {self.pool.name}")
            self._serve(address, line)

    def _dial(self) -> tuple[str, DoorLine]:
        """Return the first address that leads to the pool, and the line."""
        worst: Exception = EOFError()
        for address in self.pool.addresses:
            try:
                line = DoorLine(self.pool, self._identity, address)
            except (OSError, EOFError, BadPeer) as error:
                worst = error
                continue
            if address != self.pool.addresses[0]:
                others = (other for other in self.pool.addresses if other != address)
                self.pool = replace(self.pool, addresses=(address, *others))
            return address, line
        raise worst

    def rest(self, reason: str) -> None:
        """Serve nothing while there is a reason; empty: serve again. Ends what runs here for the pool."""
        with self._lock:
            self._rests, line, servers = reason, self._line, list(self._servers)
        if line is not None:
            line.say_rests(reason)
        if reason:
            for server in servers:
                server.close()
            self.commands.box.close()

    def _serve(self, address: str, line: DoorLine) -> None:
        with self._lock:
            self._line, rests = line, self._rests
        if rests:
            line.say_rests(rests)
        if not self._closed.is_set():
            for token in line.calls():
                if self._answers.acquire(blocking=False):
                    answering = threading.Thread(target=self._answer, args=(address, token), name="pool-session")
                    answering.daemon = True
                    answering.start()
        with self._lock:
            self._line = None
        line.close()
        if not self._closed.is_set():
            self._tell(f"the connection to {self.pool.name} was lost; dialling again")
            self._closed.wait(secrets.randbelow(100) / 100)

    def _answer(self, address: str, token: str) -> None:
        """Open the connection that a call asks for, and be an SSH server on it."""
        try:
            self._serve_session(address, token)
        finally:
            self._answers.release()

    def _serve_session(self, address: str, token: str) -> None:
        with contextlib.suppress(OSError), dial_door(address) as stream:
            stream.sendall(f"muster 1 back {token}\n".encode())
            stream.settimeout(None)
            server = SshServer(stream, self._identity.path, self.pool.key, self.commands.execute, self._ports)
            with self._lock:
                is_welcome = len(self._servers) < MOST_SESSIONS and not (self._closed.is_set() or self._rests)
                if is_welcome:
                    self._servers.add(server)
            try:
                if is_welcome:
                    server.serve()
            finally:
                server.close()
                with self._lock:
                    self._servers.discard(server)

    def close(self, leaves: bool = False) -> None:
        """End the line, all sessions, and what runs here for the pool.

        Args:
            leaves: whether this computer leaves for good.
        """
        self._closed.set()
        self._watch.close()
        with self._lock:
            line, servers = self._line, list(self._servers)
        if line is not None:
            if leaves:
                line.leave()
            line.close()
        for server in servers:
            server.close()
        self.commands.box.close()
        end_programs(self.pool.identity)
        self._thread.join(CONNECT_SECONDS)
        if leaves:
            remove_box(self.pool.identity)


def _reason(error: Exception) -> str:
    if isinstance(error, BadPeer):
        return "another computer answers at its address"
    if isinstance(error, TimeoutError):
        return "no answer"
    return getattr(error, "strerror", None) or "it closed the connection"


def serve_pools(stopped: Callable[[float], bool], tell: Tell) -> None:
    """Be driven by all pools that this computer has joined, also by those that it joins meanwhile, until stopped.

    Args:
        stopped: waits for so many seconds, and returns whether to stop.

    Raises:
        BadInput: this computer's key cannot be used, or the box of no pool holds.
    """
    identity, connections, guard = helper_identity(), dict[str, PoolConnection](), ProgramGuard()
    unboxed: dict[str, LendingTerms] = {}
    """Terms of the pools whose box does not hold."""

    def terms_of(key: str) -> LendingTerms:
        return connections[key].pool.terms

    try:
        while not stopped(_LOOK):
            pools = {pool.identity: pool for pool in joined_pools()}
            for gone in [known for known, connection in connections.items() if is_forgotten(connection.pool)]:
                connections.pop(gone).close(leaves=True)
            for other in [key for key, pool in pools.items() if key in connections and pool.terms != terms_of(key)]:
                connections.pop(other).close()
            for new in pools.keys() - connections.keys():
                if unboxed.get(new) != pools[new].terms:
                    try:
                        connections[new] = PoolConnection(pools[new], identity, tell, guard.token)
                    except NoBox as error:  # it worked when the pool was joined
                        unboxed[new] = pools[new].terms
                        tell(f"{pools[new].name} runs nothing here: {error.message}; {error.hint}")
            if not connections:
                if unboxed.keys() & pools.keys():
                    raise BadInput("nothing that this computer has joined may run here", "see the lines above")
                return tell("this computer has left all that it had joined")
    finally:
        for connection in connections.values():
            connection.close()
        guard.close()


def leave(pool: JoinedPool) -> bool:
    """Forget a pool, end what it runs here, and tell it so; return whether it could be told.

    Where a process serves the pool, it does the rest.
    """
    forget_pool(pool)
    is_told = False
    for address in pool.addresses:
        with contextlib.suppress(OSError, EOFError, BadPeer, Dismissed):
            line = DoorLine(pool, helper_identity(), address)
            line.leave()
            line.close()
            is_told = True
            break
    end_programs(pool.identity)
    remove_box(pool.identity)
    return is_told
