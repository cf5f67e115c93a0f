"""The door's side of a code: the person who shares it is told what happens, and asked who may join."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Coroutine
from typing import Any, Protocol

from distributed.discovery.known_machines import config_names
from distributed.hosts.joined import JoinedMachine, joined_machines, joined_name, parse_line, save_joined
from distributed.joining.pairing.codes import CodeDesk, OpenCode, new_code
from distributed.joining.pairing.exchange import DECISION, LONGEST_FRAME, MESSAGE_BYTES, BadPeer, Introduction, Pairing
from distributed.joining.pairing.frames import REFUSED, Streams, frame, json_line, read_frame
from distributed.joining.pairing.introductions import introduce
from distributed.joining.pairing.keys import JoiningKey
from distributed.ssh.config import USER_CONFIG

_naming = threading.Lock()


class Share:
    """A command that shares a code, and waits.

    Args:
        streams: to the command: it is told of events, and answers ``{"admit": true}`` where it is asked.
    """

    def __init__(self, issued: OpenCode, streams: Streams) -> None:
        self.issued, self.is_pairing = issued, False
        self._reader, self._writer = streams
        self._answers: asyncio.Queue[bool] = asyncio.Queue()
        self._finished = asyncio.get_running_loop().create_future()

    async def run(self, opening: dict[str, Any]) -> None:
        """Serve the command until a machine has joined, or the code is closed, or the command ends."""
        self.tell(opening)
        reading = asyncio.ensure_future(self._read())
        try:
            await asyncio.wait((reading, self._finished), return_when=asyncio.FIRST_COMPLETED)
            if self._finished.done():
                self.tell(self._finished.result())
                with contextlib.suppress(OSError):
                    await self._writer.drain()
            else:
                self.finish({"closed": "it was withdrawn"})
        finally:
            reading.cancel()
            self._writer.close()

    async def _read(self) -> None:
        with contextlib.suppress(ValueError, OSError):
            while line := await self._reader.readline():
                self._answers.put_nowait(parse_line(line).get("admit") is True)

    def tell(self, event: dict[str, Any]) -> None:
        self._writer.write(json_line(event))

    def finish(self, event: dict[str, Any]) -> None:
        """Tell the last event. Idempotent."""
        if not self._finished.done():
            self._finished.set_result(event)

    async def decide(self, introduction: Introduction, address: str) -> bool:
        """Ask the person whether a machine may join; ``False`` where the command ends. Earlier answers do not count."""
        while not self._answers.empty():
            self._answers.get_nowait()
        self.tell({"asks": introduction.model_dump(), "address": address})
        answer = asyncio.ensure_future(self._answers.get())
        await asyncio.wait((answer, self._finished), return_when=asyncio.FIRST_COMPLETED)
        if answer.done():
            return answer.result()
        answer.cancel()
        return False


class PairingDoor(Protocol):
    """What pairing needs of the door."""

    desk: CodeDesk
    identity: JoiningKey
    shares: dict[int, Share]
    """By the slot of their code."""
    port: int

    def expect(self, name: str) -> None:
        """Let calls of a machine that has just joined wait until it dials."""

    def tell_closed(self) -> None:
        """Tell the sharers of codes that were closed."""


async def admit(door: PairingDoor, stream: socket.socket, host: str, slot: int) -> Coroutine[Any, Any, None] | None:
    """Check whether a stranger knows the code of a slot; return what is to be done with one that does.

    A slot without a code is answered as one with another code, so a stranger does not learn which are open. A try is
    used up as soon as the exchange begins: more than three never take place.
    """
    reader, writer = await asyncio.open_connection(sock=stream, limit=2 * LONGEST_FRAME)
    try:
        message = await reader.readexactly(MESSAGE_BYTES)
        issued = door.desk.take_try(slot)
        share = door.shares.get(slot)
        door.tell_closed()
        if door.desk.is_flooded():
            raise BadPeer  # an exchange takes 15 ms of a core, and nobody can be admitted
        try:
            pairing = Pairing(new_code() if issued is None else issued.code, is_helper=False)
            pairing.finish(message)
            writer.write(pairing.message)
            introduction = pairing.open_introduction(await read_frame(reader))
            if issued is not None and share is not None and door.desk.accept(issued):
                share.is_pairing = True
                return _agree(door, share, pairing, (reader, writer), introduction, host)
            writer.write(REFUSED)  # another machine was quicker
        except BadPeer:
            writer.write(REFUSED)
        finally:
            if issued is not None and share is not None and not share.is_pairing:
                door.desk.refuse(issued)
                share.tell({"wrong": host, "tries_left": issued.tries_left})
                door.tell_closed()
    except BaseException:
        writer.close()
        raise
    writer.close()
    return None


async def _agree(
    door: PairingDoor, share: Share, pairing: Pairing, streams: Streams, introduction: Introduction, host: str
) -> None:
    """Introduce this computer, wait until both people have agreed, and remember the machine."""
    reader, writer = streams
    outcome: dict[str, Any] = {"closed": f"{introduction.name} has gone before it had joined"}
    try:
        introduced = await asyncio.to_thread(introduce, door.identity.public, door.port)  # takes seconds at worst
        writer.write(frame(pairing.seal_introduction(introduced, door.identity)))
        theirs = asyncio.ensure_future(_has_agreed(pairing, reader))
        ours = asyncio.ensure_future(share.decide(introduction, host))
        try:
            refusal = await _refusal({theirs: "has not agreed to join", ours: "was not admitted"})
        finally:
            theirs.cancel()
            ours.cancel()
        if refusal:
            outcome = {"closed": f"{introduction.name} {refusal}"}
            writer.write(frame(pairing.seal({"admitted": False})))
        else:
            machine = await asyncio.to_thread(_remember, introduction)
            door.expect(machine.name)
            writer.write(frame(pairing.seal({"admitted": True, "as": machine.name})))
            outcome = {"joined": machine.name}
        await writer.drain()
    finally:
        writer.close()
        share.finish(outcome)


async def _has_agreed(pairing: Pairing, reader: asyncio.StreamReader) -> bool:
    """Return whether the person at the machine that joins has agreed."""
    return pairing.open(await read_frame(reader)).get("yes") is True


async def _refusal(decisions: dict[asyncio.Future[bool], str]) -> str:
    """Wait for decisions; return the reason of the first that is no, or that is not made in time; empty: all are yes.

    Raises:
        OSError, EOFError, BadPeer: the other machine is gone.
    """
    pending, end = set(decisions), asyncio.get_running_loop().time() + DECISION
    while pending:
        left = end - asyncio.get_running_loop().time()
        decided, pending = await asyncio.wait(pending, timeout=left, return_when=asyncio.FIRST_COMPLETED)
        late = pending if not decided else set()
        if reasons := [decisions[one] for one in (*decided, *late) if one in late or not one.result()]:
            return reasons[0]
    return ""


def _remember(introduction: Introduction) -> JoinedMachine:
    """Save a machine under its own name, or with a number if another one, or a host of ~/.ssh/config, has that."""
    with _naming:
        return _remember_named(introduction)


def _remember_named(introduction: Introduction) -> JoinedMachine:
    machines = joined_machines()
    again = next((machine.name for machine in machines if machine.key == introduction.key), "")
    names = {*(machine.name for machine in machines), *map(joined_name, config_names(USER_CONFIG.expanduser()))}
    numbered = (f"{introduction.name[:36]}-{number}" for number in range(2, len(names) + 3))
    name = again or next(name for name in (introduction.name, *numbered) if name not in names)
    details = introduction.model_dump(include={"key", "user", "system", "devices", "memory", "lend", "limits"})
    machine = JoinedMachine(name=name, **details)
    save_joined(machine)
    return machine
