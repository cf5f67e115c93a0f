"""Rendezvous store for a process group of stock torch, whose keys travel over the links of a mesh."""

from __future__ import annotations

import base64
import json
import threading
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import Store

from training.exchange.base import ExchangeError
from training.exchange.links.link import PeerLost
from training.exchange.mean.mesh import Mesh

FORM_SECONDS = 20.0
"""Seconds for one round, and for gloo to connect."""
_SHORT, _LONG = 0.002, 0.05
"""Seconds between two rounds without news, at first and later."""


class MeshStore(Store):
    """The keys that torch's members exchange to connect, passed on over a mesh in rounds.

    A thread takes part in round after round until no member misses a key: NCCL's first rank sets one and asks for none,
    then waits for the others inside the library.

    Raises:
        ExchangeError: by each method: a member is gone, or no member will set the key.
    """

    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        self._mesh = mesh
        self._values: dict[str, bytes] = {}
        self._news: dict[str, str] = {}
        self._changed = threading.Condition()
        self._settled = self._others_settled = self._is_complete = False
        self.problem: Exception | None = None
        """Why the rounds have ended."""
        threading.Thread(target=self._run_rounds, name="torch store", daemon=True).start()

    def set(self, key: str, value: str | bytes) -> None:
        with self._changed:
            self._values[key] = value.encode() if isinstance(value, str) else bytes(value)
            self._news[key] = base64.b64encode(self._values[key]).decode()

    def get(self, key: str, seconds: float | None = None) -> bytes:
        with self._changed:
            self._changed.wait_for(lambda: key in self._values or self._over, seconds)
            if key not in self._values:
                raise self.problem or ExchangeError(f"no member has set torch's key '{key}'")
            return self._values[key]

    def add(self, key: str, value: int) -> int:
        """Count for this member alone: torch does not count across members while it connects."""
        with self._changed:
            total = int(self._values.get(key, b"0")) + value
            self._values[key] = str(total).encode()
            return total

    def check(self, keys: Sequence[str]) -> bool:
        return all(key in self._values for key in keys)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        for key in keys:
            self.get(key, None if timeout is None else timeout.total_seconds())

    def has_extended_api(self) -> bool:
        return False

    def clone(self) -> MeshStore:
        return self

    def settle(self) -> None:
        """Return when no member misses a key; there are no rounds after that."""
        with self._changed:
            self._settled = True
            self._changed.wait_for(lambda: self._is_complete or self.problem is not None)
            if self.problem is not None:
                raise self.problem

    @property
    def _over(self) -> bool:
        return self._is_complete or self._others_settled or self.problem is not None

    def _run_rounds(self) -> None:
        rounds, pause = 0, _SHORT
        try:
            while not self._is_complete:
                rounds += 1
                with self._changed:
                    settled, message, self._news = self._settled, {"done": self._settled, "keys": self._news}, {}
                news, others = self._round(message, rounds)
                with self._changed:
                    self._values = {**news, **self._values}
                    self._others_settled, self._is_complete = others, others and settled
                    self._changed.notify_all()
                pause = _SHORT if news else min(2 * pause, _LONG)
                if not news:
                    time.sleep(pause)
        except Exception as error:  # noqa: BLE001 - raised where a key is asked for
            with self._changed:
                self.problem = error
                self._changed.notify_all()

    def _round(self, message: Mapping[str, Any], number: int) -> tuple[dict[str, bytes], bool]:
        """Exchange news with all members; return theirs, and whether no other member misses anything."""
        mesh, new_values, complete = self._mesh, dict[str, bytes](), True
        buffers = {peer: memoryview(bytearray(4096 + 1024 * len(mesh.members))) for peer in mesh.peers}
        sizes: dict[int, int] = {}
        payload = memoryview(json.dumps(message).encode())
        mesh.gather(payload, buffers, sizes.__setitem__, None, number).submit().wait(FORM_SECONDS)
        for peer, size in sizes.items():
            try:
                news = json.loads(bytes(buffers[peer][:size]))
                for key, value in news["keys"].items():
                    new_values.setdefault(key, base64.b64decode(value, validate=True))
                complete &= news["done"] is True
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
                raise PeerLost(peer, mesh.names[peer], "it sent an invalid message about its process group") from error
        return new_values, complete
