"""``python -m distributed.joining.door``: the process through which machines that dial this computer are reached.

It listens on one TCP port for them, and on a Unix socket, which only this user can open, for this user's commands and
runs. The first line of a TCP connection says what it is for:

======================================  ===============================================================================
``muster 1 pair SLOT``                  a machine that joins with the code of this slot: SPAKE2, sealed introductions
``muster 1 line ID CHALLENGE``          a machine that has joined; both sides prove their key, then it waits for calls
``muster 1 back TOKEN``                 its answer to a call: this very socket is handed to the caller
======================================  ===============================================================================

So no byte of a session goes through this process: if it is killed, sessions go on, and the next call starts another.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import secrets
import socket
import sys
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from distributed.hosts.joined import (
    DEFAULT_PORT,
    JoinedMachine,
    door_socket,
    forget_joined,
    joined_machine,
    joined_machines,
    joining_folder,
    on_terms,
    one_line,
    parse_line,
    pool_key,
    read_document,
    write_known_hosts,
)
from distributed.joining.dialling import end_when_cut
from distributed.joining.handshakes import PendingHandshakes
from distributed.joining.nearby import SlotAnnouncement
from distributed.joining.pairing.codes import CodeDesk, new_code
from distributed.joining.pairing.exchange import BadPeer, Pairing
from distributed.joining.pairing.frames import Streams, first_line, json_line
from distributed.joining.pairing.introductions import own_addresses
from distributed.joining.pairing.keys import JoiningKey, door_message, is_signed, leave_message, line_message
from distributed.joining.sharing import Share, admit
from profiles.errors import BadInput
from profiles.quantities import span_text
from training.exchange.unauthenticated import HANDSHAKE_SECONDS

JOIN = "muster machines join"
"""What a person starts on a machine that has joined."""
BEAT = 5.0
"""Seconds between signs of life of a helper; the door answers each."""
SILENCE = 15.0
"""Seconds without one after which a helper counts as gone."""
REDIAL = 20.0
"""Seconds within which a helper that lost its line, or the door, dials again: so long a call waits for it."""
_BACK = 10.0
"""Seconds within which a helper answers a call."""
_IDLE = 60.0
"""Seconds without machines and codes after which a door ends."""
_LONGEST_SLOT = 3
_REQUEST_BYTES = 4096
_LINE_LIMIT = 4096
_LOST = (OSError, EOFError, ValueError, BadPeer, asyncio.TimeoutError, asyncio.IncompleteReadError)
"""Errors of a peer that is gone, silent, or does not speak this protocol."""


class HelperLine:
    """The connection by which a machine that has joined waits for calls."""

    def __init__(self, machine: JoinedMachine, streams: Streams, address: str, leaves: bytes) -> None:
        self.machine, self.address = machine, address
        self._leaves = leaves
        """What the machine signs where it leaves for good."""
        self._reader, self._writer = streams
        self.since = time.time()
        self.rests = ""
        """Why the machine runs nothing for others at present."""

    def send(self, document: dict[str, Any]) -> None:
        self._writer.write(json_line(document))

    async def serve(self) -> bool:
        """Answer signs of life until the line is lost; return whether the machine has left for good."""
        try:
            while line := await asyncio.wait_for(self._reader.readline(), SILENCE):
                document = parse_line(line)
                if is_signed(self.machine.key, self._leaves, document.get("leaving")):
                    return True
                self.rests = one_line(document.get("rests"))
                self.send({"beat": 1})
                await asyncio.wait_for(self._writer.drain(), SILENCE)  # one that reads nothing is no use
        except _LOST:
            pass
        return False

    def close(self) -> None:
        self._writer.close()


class Door:
    """The state of the process; everything runs in one event loop."""

    def __init__(self) -> None:
        self.identity = JoiningKey(pool_key())
        write_known_hosts()
        self.desk = CodeDesk()
        self.shares: dict[int, Share] = {}
        """By the slot of their code."""
        self.port = 0
        self._lines: dict[str, HelperLine] = {}
        self._awaited: dict[str, float] = {}
        """When a machine has joined or lost its line: it dials soon."""
        self._calls: dict[str, asyncio.Future[socket.socket]] = {}
        self._changed = asyncio.Condition()
        self._handshakes = PendingHandshakes()
        self._began = self._busy = time.monotonic()
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self, network: socket.socket, user: socket.socket) -> None:
        """Serve until there is nothing to serve."""
        self.port = network.getsockname()[1]
        self._spawn(self._accept(network, self._receive))
        self._spawn(self._accept(user, self._obey))
        while time.monotonic() - self._busy < _IDLE:
            if self.shares or self._lines or joined_machines():
                self._busy = time.monotonic()
            await asyncio.sleep(1.0)
            self.tell_closed()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _accept(self, listener: socket.socket, serve: Any) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                stream, address = await loop.sock_accept(listener)
            except OSError:  # no more descriptors: some are closed soon
                await asyncio.sleep(0.2)
                continue
            stream.setblocking(False)
            self._spawn(serve(stream, str(address[0]).removeprefix("::ffff:") if address else ""))

    # ------------------------------------------------------------------------------------------------- from the network

    async def _receive(self, stream: socket.socket, host: str) -> None:
        """Serve a connection of a stranger, who has ten seconds to show who it is."""
        self._handshakes.enter(stream, host)
        session = None
        with contextlib.suppress(*_LOST), contextlib.ExitStack() as unless_known:
            unless_known.callback(stream.close)
            try:
                end_when_cut(stream)
                session = await asyncio.wait_for(self._authenticate(stream, host), HANDSHAKE_SECONDS)
            finally:
                self._handshakes.leave(stream)
            unless_known.pop_all()
        if session is not None:
            with contextlib.suppress(*_LOST):
                await session

    async def _authenticate(self, stream: socket.socket, host: str) -> Coroutine[Any, Any, None] | None:
        """Return what is to be done with a connection whose peer has shown who it is."""
        words = (await first_line(stream)).split(" ")
        if words[:2] != ["muster", "1"] or len(words) < 4:
            raise BadPeer
        kind, arguments = words[2], words[3:]
        if kind == "back" and (call := self._calls.pop(arguments[0], None)) is not None and not call.done():
            call.set_result(stream)
            return None
        if kind == "pair" and arguments[0].isdecimal() and len(arguments[0]) <= _LONGEST_SLOT:
            return await admit(self, stream, host, int(arguments[0]))
        if kind == "line" and len(arguments) == 2:
            return await self._prove(stream, host, *arguments)
        raise BadPeer

    async def _prove(
        self, stream: socket.socket, host: str, identity: str, challenge: str
    ) -> Coroutine[Any, Any, None]:
        """Prove to a helper that this is its pool, and let it prove who it is."""
        reader, writer = await asyncio.open_connection(sock=stream, limit=_LINE_LIMIT)
        with contextlib.ExitStack() as unless_proved:
            unless_proved.callback(writer.close)
            machine = joined_machine(identity)
            status, question = "unknown" if machine is None else "welcome", secrets.token_hex(32)
            proof = self.identity.sign(door_message(identity, challenge, status))
            writer.write(json_line({"status": status, "proof": proof, "challenge": question}))
            answer = parse_line(await reader.readline())
            message = line_message(self.identity.public, identity, question)
            if machine is None or not is_signed(machine.key, message, answer.get("proof")):
                raise BadPeer
            machine = await asyncio.to_thread(on_terms, machine, answer)
            unless_proved.pop_all()
        leaves = leave_message(self.identity.public, identity, question)
        return self._hold(HelperLine(machine, (reader, writer), host, leaves))

    async def _hold(self, line: HelperLine) -> None:
        """Keep a helper's line until it is lost, or the helper has another one."""
        name = line.machine.name
        if (earlier := self._lines.get(name)) is not None:
            earlier.close()
        self._lines[name] = line
        await self._notify()
        try:
            if await line.serve():
                await asyncio.to_thread(forget_joined, name)
        finally:
            line.close()
            if self._lines.get(name) is line:
                del self._lines[name]
                self._awaited[name] = time.monotonic()

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    # ---------------------------------------------------------------------------------------------------- for this user

    async def _obey(self, stream: socket.socket, _: str) -> None:
        """Serve a command or a run of this user."""
        request: dict[str, Any] = {}
        with contextlib.suppress(*_LOST):
            request = parse_line((await first_line(stream, _REQUEST_BYTES)).encode())
            if "share" in request:
                return await self._share(stream, request.get("port"))
        with contextlib.suppress(*_LOST), stream:
            if "call" in request:
                await self._call(stream, str(request["call"]), float(request.get("seconds", _BACK)))
            elif "forget" in request:
                await self._forget(str(request["forget"]))
                await self._answer(stream, {"forgotten": request["forget"]})
            else:
                await self._answer(stream, self._status())

    async def _answer(self, stream: socket.socket, document: dict[str, Any]) -> None:
        await asyncio.get_running_loop().sock_sendall(stream, json_line(document))

    def _status(self) -> dict[str, Any]:
        """Return of each machine that is connected its address, since when (seconds since 1970), and why it rests."""
        lines = self._lines.items()
        return {name: {"address": line.address, "since": line.since, "rests": line.rests} for name, line in lines}

    async def _call(self, caller: socket.socket, name: str, seconds: float) -> None:
        """Have a helper open a connection, and hand it to the caller."""
        line = await self._line_of(name, seconds)
        if line is None:
            problem = f"{name} has joined, but is not connected to this computer"
            await self._answer(caller, {"problem": problem, "hint": f"is it on? Start there: {JOIN}"})
            return
        if line.rests:
            problem = f"{name} rests: {line.rests}"
            await self._answer(caller, {"problem": problem, "hint": "it is lent, and comes back by itself"})
            return
        token = secrets.token_hex(16)
        call = self._calls[token] = asyncio.get_running_loop().create_future()
        line.send({"open": token})
        try:
            session = await asyncio.wait_for(call, _BACK)
        except asyncio.TimeoutError:
            line.close()  # if it is there at all, it dials again
            problem = f"{name} is connected, but did not answer within {span_text(_BACK)}"
            await self._answer(caller, {"problem": problem, "hint": "is it asleep, or its cable out?"})
            return
        finally:
            self._calls.pop(token, None)
        with session:
            socket.send_fds(caller, [json_line({"ok": True})], [session.fileno()])

    async def _line_of(self, name: str, seconds: float) -> HelperLine | None:
        """Return a machine's line; waited for where it has just joined, or it or this door was there a moment ago."""
        since = max(self._began, self._awaited.get(name, 0.0))
        end = min(since + REDIAL, time.monotonic() + seconds)
        async with self._changed:
            while name not in self._lines and (left := end - time.monotonic()) > 0:
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self._changed.wait(), left)
        return self._lines.get(name)

    async def _share(self, stream: socket.socket, port: object) -> None:
        addresses = await asyncio.to_thread(own_addresses)  # before a code is open: it is the first thing told
        try:
            if port not in (None, self.port):
                hint = "share without --port; it ends a minute after the last machine was removed"
                raise BadInput(f"machines that join dial TCP port {self.port} of this computer already", hint)
            Pairing(new_code(), is_helper=False)  # else nobody could join with the code: the library is missing
            issued = self.desk.issue(frozenset(self.shares))
        except BadInput as error:
            with stream:
                return await self._answer(stream, {"problem": error.message, "hint": error.hint})
        share = Share(issued, await asyncio.open_unix_connection(sock=stream, limit=_LINE_LIMIT))
        self.shares[issued.code.slot] = share
        announcement = SlotAnnouncement(issued.code.slot, self.port)
        try:
            await share.run({"code": str(issued.code), "port": self.port, "addresses": addresses})
        finally:
            announcement.close()
            self.desk.close(issued, "it was withdrawn")
            del self.shares[issued.code.slot]

    def expect(self, name: str) -> None:
        """Let calls of a machine that has just joined wait until it dials."""
        self._awaited[name] = time.monotonic()

    def tell_closed(self) -> None:
        """Tell the sharers of codes that were closed."""
        self.desk.close_expired()
        for share in list(self.shares.values()):
            if share.issued.closed and not share.is_pairing:
                share.finish({"closed": share.issued.closed})

    async def _forget(self, name: str) -> None:
        await asyncio.to_thread(forget_joined, name)
        if (line := self._lines.get(name)) is not None:
            line.close()  # it dials again, and is answered that it is unknown


def listen(port: int) -> socket.socket:
    """Listen on a TCP port of all addresses.

    Raises:
        OSError: it is in use.
    """
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):
            return socket.create_server(("::", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=64)
    return socket.create_server(("0.0.0.0", port), backlog=64)


def _listen_for_user() -> tuple[Path, socket.socket]:
    path = door_socket()
    path.unlink(missing_ok=True)
    user = socket.socket(socket.AF_UNIX)
    user.bind(str(path))
    user.listen(64)
    return path, user


def main() -> int:
    os.umask(0o077)
    lock = os.open(joining_folder() / "door.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return 0  # another one runs
    os.ftruncate(lock, 0)
    os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)  # for people
    port = read_document(joining_folder() / "door.json").get("port", DEFAULT_PORT)
    try:
        network = listen(port)
    except (OSError, OverflowError, TypeError) as error:
        print(f"cannot listen on TCP port {port}: {getattr(error, 'strerror', None) or error}", file=sys.stderr)
        return 2
    try:
        path, user = _listen_for_user()
    except OSError as error:
        print(f"cannot listen on a Unix socket: {error}", file=sys.stderr)
        return 2
    for listener in (network, user):
        listener.setblocking(False)
    asyncio.run(_run(network, user))
    path.unlink(missing_ok=True)
    return 0


async def _run(network: socket.socket, user: socket.socket) -> None:
    await Door().run(network, user)


if __name__ == "__main__":
    sys.exit(main())
