"""Somebody in the network who has no business with the coordinator; runs on a host of its own, standard library only.

    python stranger.py ADDRESS PORT hold COUNT           opens connections, says how many, keeps them until killed
    python stranger.py ADDRESS PORT rubbish ROUNDS       speaks rubbish, in many tongues
    python stranger.py ADDRESS PORT replay FILE          sends recorded bytes again
    python stranger.py ADDRESS PORT present FOLDER       shows ca.pem, certificate.pem and key.pem, and says nonsense

The last three print one JSON list: what each connection was answered, in hexadecimal, or the name of the error.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import socket
import ssl
import sys
import time
from pathlib import Path

NONSENSE = b"{}\n{}\n"
RUBBISH = (
    b"GET / HTTP/1.1\r\nHost: coordinator\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00",
    NONSENSE,
    bytes(range(256)) * 256,
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(600),
    b"\x16\x03\x01\xff\xff" + os.urandom(4000),
    b"\x00" * 100_000,
)
PATIENCE = 60.0


def dial(address: str, port: int) -> socket.socket:
    return socket.create_connection((address, port), timeout=PATIENCE)


def answer(stream: socket.socket) -> str:
    """Return all that the coordinator says until it hangs up, which it must."""
    said = b""
    try:
        while part := stream.recv(65536):
            said += part
    except ConnectionError as error:
        return said.hex() or type(error).__name__
    return said.hex()


def say(address: str, port: int, words: bytes) -> str:
    """Send ``words`` and return the answer; the coordinator may hang up in their midst."""
    with dial(address, port) as stream:
        with contextlib.suppress(OSError):
            stream.sendall(words)
        return answer(stream)


def replay(address: str, port: int, recorded: bytes) -> str:
    """Send the recorded greeting, hear the coordinator out, send the rest, and return all it said."""
    greeting = 5 + int.from_bytes(recorded[3:5], "big")
    with dial(address, port) as stream:
        stream.sendall(recorded[:greeting])
        said = stream.recv(65536).hex()
        with contextlib.suppress(OSError):
            stream.sendall(recorded[greeting:])
        return said + answer(stream)


def present(address: str, port: int, folder: Path) -> str:
    """Return how the answer to a client with these certificates begins, or the error that ends the handshake."""
    context = ssl.create_default_context(cafile=str(folder / "ca.pem"))
    context.load_cert_chain(folder / "certificate.pem", folder / "key.pem")
    try:
        with dial(address, port) as plain, context.wrap_socket(plain, server_hostname="muster-coordinator") as stream:
            stream.sendall(NONSENSE)
            return stream.recv(9).decode()
    except OSError as error:
        return type(error).__name__


def hold(address: str, port: int, count: int) -> None:
    """Keep ``count`` connections open; those that the coordinator ends are opened again."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    held = [dial(address, port) for _ in range(count)]
    print(len(held), flush=True)
    while True:
        for number, stream in enumerate(held):
            if ended(stream):
                stream.close()
                try:
                    held[number] = dial(address, port)
                except ConnectionError:  # the coordinator is gone
                    return
        time.sleep(0.2)


def ended(stream: socket.socket) -> bool:
    """Whether the coordinator has hung up; what it said before is thrown away."""
    stream.setblocking(False)
    try:
        return not stream.recv(65536)
    except BlockingIOError:
        return False
    except OSError:
        return True


def main() -> None:
    address, port, what, how = sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4]
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    if what == "hold":
        hold(address, port, int(how))
    elif what == "rubbish":
        print(json.dumps([say(address, port, words) for _ in range(int(how)) for words in RUBBISH]))
    elif what == "replay":
        print(json.dumps([replay(address, port, Path(how).read_bytes())]))
    else:
        print(json.dumps([present(address, port, Path(how))]))


if __name__ == "__main__":
    main()
