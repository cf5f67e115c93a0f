"""Lines and frames of a stranger's connection: bounded, and read without taking a byte too many."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

from distributed.joining.pairing.exchange import LONGEST_FRAME, BadPeer

LONGEST_LINE = 200
"""Bytes of the first line of a connection."""
REFUSED = b"\0\0"
"""A frame without content: the code was wrong."""
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def first_line(stream: socket.socket, limit: int = LONGEST_LINE) -> str:
    """Return the first line of a non-blocking socket, without its end; what follows stays in the socket.

    Raises:
        BadPeer: there is none.
    """
    loop, line = asyncio.get_running_loop(), b""
    while not line.endswith(b"\n"):
        byte = await loop.sock_recv(stream, 1)
        line += byte
        if not byte or len(line) > limit:
            raise BadPeer
    try:
        return line[:-1].decode("ascii")
    except UnicodeDecodeError as error:
        raise BadPeer from error


async def read_frame(reader: asyncio.StreamReader) -> bytes:
    """Return the next frame: two bytes with its length, then its content.

    Raises:
        BadPeer: it is too long, or a refusal.
        EOFError: the connection ended.
    """
    length = int.from_bytes(await reader.readexactly(2), "big")
    if not 0 < length <= LONGEST_FRAME:
        raise BadPeer
    return await reader.readexactly(length)


def frame(content: bytes) -> bytes:
    return len(content).to_bytes(2, "big") + content


def json_line(document: dict[str, Any]) -> bytes:
    return json.dumps(document).encode() + b"\n"
