"""The rendezvous store's server: a small key-value store on loopback, in the launcher's process (needs no torch).

``torch.distributed.TCPStore`` formats the peer of every connection with ``getnameinfo`` without ``NI_NUMERICHOST``, in
the client and on the server's only event loop, and asks for the IPv4-mapped form ``::ffff:127.0.0.1`` that
``/etc/hosts`` never holds. Where no name server answers, that stalls the whole store for 10 s. It also listens on every
interface. This store never looks a name up and is bound to 127.0.0.1; far members reach it through SSH forwards.

Every user of the machine reaches a port on loopback, so a client first shows the run's token, which stands beside the
members' keys (:meth:`StoreServer.admit`). Who does not is not answered.

The protocol is one JSON object a line with values in base64, at most :data:`MAX_LINE` bytes. What a member may store,
ask for and wait for is bounded.
"""

from __future__ import annotations

import base64
import contextlib
import hmac
import json
import secrets
import socket
import socketserver
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from profiles.errors import BadInput
from training.records.run_files import write_atomically

MAX_LINE = 1 << 20
MAX_CLIENTS = 512
"""Connections of members; each has two or three."""
MAX_KEYS = 1 << 16
MAX_KEY = 1024
MAX_BYTES = 16 << 20
"""Limit of keys and values together."""
MAX_WAIT = 2 * 3600.0
"""Seconds."""
MAX_UNAUTHENTICATED = 32
"""Connections that have not shown the token; one more ends the oldest of them."""
_HELLO = 10.0
"""Seconds within which the token must arrive."""
_TOKEN_FILE = "rendezvous"

Reply = dict[str, Any]


class StoreServer(socketserver.ThreadingTCPServer):
    """Holds the keys on 127.0.0.1; one thread for each client. Close it with :meth:`close` when the run is over.

    It belongs in the launcher's process, so that any worker may die.

    Args:
        max_keys, max_bytes: limits of its contents.

    Raises:
        OSError: the port is taken.
    """

    daemon_threads = True
    block_on_close = False
    allow_reuse_address = False
    request_queue_size = 128

    def __init__(self, port: int = 0, max_keys: int = MAX_KEYS, max_bytes: int = MAX_BYTES) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.token = secrets.token_hex(32)
        self._unauthenticated: dict[socket.socket, None] = {}
        self._clients = 0
        self._clients_lock = threading.Lock()
        self._max_keys, self._max_bytes = max_keys, max_bytes
        self._values: dict[str, str] = {}
        self._held = 0
        self._added: dict[str, tuple[int, Reply]] = {}
        """The last addition of each client, by its number: a repeated request is answered as before."""
        self._changed = threading.Condition()
        self._operations: dict[str, Callable[[Mapping[str, Any]], Reply]] = {
            "set": lambda request: self._put(str(request["key"]), str(request["value"])),
            "get": self._get,
            "add": self._add,
            "compare_set": self._compare_set,
            "delete": self._delete,
            "count": lambda request: {"total": len(self._values)},
        }
        self._thread = threading.Thread(target=self.serve_forever, args=(0.05,), name="store", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        return int(self.server_address[1])

    def admit(self, folder: Path) -> None:
        """Write the token where :func:`read_token` finds it: into the folder (0700) with a member's keys."""
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_atomically(folder / _TOKEN_FILE, self.token.encode())

    def close(self) -> None:
        """Stop answering. Idempotent."""
        if self._thread.is_alive():
            self.shutdown()
            self._thread.join()
        self.server_close()

    def __exit__(self, *error: object) -> None:
        self.close()

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._clients_lock:
            if len(self._unauthenticated) >= MAX_UNAUTHENTICATED:
                oldest = next(iter(self._unauthenticated))
                del self._unauthenticated[oldest]
                with contextlib.suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)
            self._unauthenticated[request] = None
        super().process_request(request, client_address)

    def authenticate(self, connection: socket.socket, hello: bytes) -> bool:
        """Return whether ``hello`` shows the token and one more client fits; if so, count it."""
        is_authentic = hmac.compare_digest(hello, self.token.encode() + b"\n")
        with self._clients_lock:
            self._unauthenticated.pop(connection, None)
            if not is_authentic or self._clients >= MAX_CLIENTS:
                return False
            self._clients += 1
            return True

    def release(self) -> None:
        """Count one client less."""
        with self._clients_lock:
            self._clients -= 1

    def answer(self, request: Mapping[str, Any]) -> Reply:
        """Answer one request.

        Raises:
            KeyError, TypeError, ValueError: the request is invalid, or exceeds a limit.
        """
        with self._changed:
            reply = self._operations[request["op"]](request)
            self._changed.notify_all()
            return reply

    def _get(self, request: Mapping[str, Any]) -> Reply:
        keys = [str(key) for key in request["keys"]]
        seconds = float(request["timeout"])
        if not 0 <= seconds <= MAX_WAIT:
            raise ValueError("the wait is too long")
        if not self._changed.wait_for(lambda: all(key in self._values for key in keys), seconds):
            return {"missing": [key for key in keys if key not in self._values]}
        values = [self._values[key] for key in keys]
        if sum(len(value) + len('"", ') for value in values) > MAX_LINE - len('{"values": []}\n'):
            raise ValueError("more than a line holds")
        return {"values": values}

    def _add(self, request: Mapping[str, Any]) -> Reply:
        key, client = str(request["key"]), str(request.get("client", ""))[:MAX_KEY]
        number = int(request.get("number", 0))
        if client in self._added and self._added[client][0] == number:
            return self._added[client][1]
        total = int(decode(self._values.get(key, "")) or b"0") + int(request["amount"])
        self._put(key, encode(str(total).encode()))
        if client:
            self._added.pop(client, None)
            self._added[client] = number, {"total": total}
        if len(self._added) > MAX_CLIENTS:
            del self._added[next(iter(self._added))]
        return {"total": total}

    def _compare_set(self, request: Mapping[str, Any]) -> Reply:
        key, expected, desired = str(request["key"]), str(request["expected"]), str(request["desired"])
        if self._values.get(key, "") == expected:
            self._put(key, desired)
        return {"values": [self._values.get(key, expected)]}

    def _delete(self, request: Mapping[str, Any]) -> Reply:
        key = str(request["key"])
        gone = self._values.pop(key, None)
        self._held -= 0 if gone is None else len(key) + len(gone)
        return {"deleted": gone is not None}

    def _put(self, key: str, value: str) -> Reply:
        decode(value)
        is_new = key not in self._values
        held = self._held + len(value) + (len(key) if is_new else -len(self._values[key]))
        if len(key) > MAX_KEY or held > self._max_bytes or (is_new and len(self._values) >= self._max_keys):
            raise ValueError("more than the store holds")
        self._values[key], self._held = value, held
        return {}


class _Handler(socketserver.StreamRequestHandler):
    disable_nagle_algorithm = True
    server: StoreServer

    def handle(self) -> None:
        if not self.server.authenticate(self.connection, self._hello()):
            return
        try:
            self.connection.settimeout(None)
            self.wfile.write(b"{}\n")
            while line := self.rfile.readline(MAX_LINE):
                reply = self.server.answer(json.loads(line))
                self.wfile.write(json.dumps(reply).encode() + b"\n")
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return  # the client is gone or invalid: only its connection ends
        finally:
            self.server.release()

    def _hello(self) -> bytes:
        self.connection.settimeout(_HELLO)
        try:
            return self.rfile.readline(2 * len(self.server.token))
        except OSError:
            return b""


def read_token(folder: Path) -> str:
    """Return what :meth:`StoreServer.admit` wrote.

    Raises:
        BadInput: it is not there.
    """
    try:
        return (folder / _TOKEN_FILE).read_text()
    except OSError as error:
        raise BadInput(f"{error.filename}: {error.strerror}", "the run's keys are gone: start the run again") from error


def encode(value: str | bytes) -> str:
    """Encode a value for the protocol."""
    return base64.b64encode(value.encode() if isinstance(value, str) else value).decode()


def decode(value: str) -> bytes:
    """Decode a value encoded by :func:`encode`."""
    return base64.b64decode(value, validate=True)
