"""The rendezvous store's server: a small key-value store on loopback, in the launcher's process (needs no torch).

``torch.distributed.TCPStore`` formats the peer of every connection with ``getnameinfo`` without ``NI_NUMERICHOST``, in
the client and on the server's only event loop, and asks for the IPv4-mapped form ``::ffff:127.0.0.1`` that
``/etc/hosts`` never holds. Where no name server answers, that stalls the whole store for 10 s. It also listens on every
interface. This store never looks a name up and is bound to 127.0.0.1; far members reach it through SSH forwards.

The protocol is one JSON object a line with values in base64, at most :data:`MAX_LINE` bytes.
"""

from __future__ import annotations

import base64
import json
import socketserver
import threading
from collections.abc import Callable, Mapping
from typing import Any

MAX_LINE = 1 << 20

Reply = dict[str, Any]


class StoreServer(socketserver.ThreadingTCPServer):
    """Holds the keys; one thread for each client. Close it with :meth:`close`."""

    daemon_threads = True
    block_on_close = False
    allow_reuse_address = False

    def __init__(self, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self._values: dict[str, str] = {}
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self.serve_forever, args=(0.05,), name="store", daemon=True)
        self._operations: dict[str, Callable[[Mapping[str, Any]], Reply]] = {
            "set": self._set,
            "get": self._get,
            "read": self._read,
            "add": self._add,
            "compare_set": self._compare_set,
            "delete": self._delete,
            "count": self._count,
        }

    @property
    def port(self) -> int:
        return int(self.server_address[1])

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Stop answering. Idempotent."""
        if self._thread.is_alive():
            self.shutdown()
            self._thread.join()
        self.server_close()

    def answer(self, request: Mapping[str, Any]) -> Reply:
        """Carry one request out.

        Raises:
            KeyError, TypeError, ValueError: not a request.
        """
        with self._changed:
            reply = self._operations[request["op"]](request)
            self._changed.notify_all()
            return reply

    def _set(self, request: Mapping[str, Any]) -> Reply:
        self._values[str(request["key"])] = str(request["value"])
        return {}

    def _get(self, request: Mapping[str, Any]) -> Reply:
        keys = [str(key) for key in request["keys"]]
        if not self._changed.wait_for(lambda: all(key in self._values for key in keys), float(request["timeout"])):
            return {"missing": [key for key in keys if key not in self._values]}
        return {"values": [self._values[key] for key in keys]}

    def _read(self, request: Mapping[str, Any]) -> Reply:
        return {"values": [self._values.get(str(key)) for key in request["keys"]]}

    def _add(self, request: Mapping[str, Any]) -> Reply:
        key = str(request["key"])
        total = int(decode(self._values.get(key, "")) or b"0") + int(request["amount"])
        self._values[key] = encode(str(total).encode())
        return {"total": total}

    def _compare_set(self, request: Mapping[str, Any]) -> Reply:
        key, expected, desired = str(request["key"]), str(request["expected"]), str(request["desired"])
        if self._values.get(key, "") == expected:
            self._values[key] = desired
        return {"values": [self._values.get(key, expected)]}

    def _delete(self, request: Mapping[str, Any]) -> Reply:
        return {"deleted": self._values.pop(str(request["key"]), None) is not None}

    def _count(self, request: Mapping[str, Any]) -> Reply:
        return {"total": len(self._values)}


class _Handler(socketserver.StreamRequestHandler):
    disable_nagle_algorithm = True
    server: StoreServer

    def handle(self) -> None:
        try:
            while line := self.rfile.readline(MAX_LINE):
                reply = self.server.answer(json.loads(line))
                self.wfile.write(json.dumps(reply).encode() + b"\n")
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return  # the client is gone, or is none: the connection ends and the store goes on


def serve_store(port: int = 0) -> tuple[StoreServer, int]:
    """Start a store on 127.0.0.1 and return it with its port; call ``close()`` when the run is over.

    It belongs into the launcher's process, so that any worker may die.

    Raises:
        OSError: the port is taken.
    """
    server = StoreServer(port)
    server.start()
    return server, server.port


def encode(value: str | bytes) -> str:
    """Return a value as it stands in a line."""
    return base64.b64encode(value.encode() if isinstance(value, str) else value).decode()


def decode(value: str) -> bytes:
    """Return the value of :func:`encode`."""
    return base64.b64decode(value)
