"""Members that take turns, a thread each."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from profiles.errors import RunFailed
from training.exchange.base import ExchangeError
from training.simulated.baton import Baton
from training.simulated.exchange import SimulatedGroup


def in_turns(room: SimulatedGroup, baton: Baton, size: int, body: Callable[[int], Any]) -> list[Any]:
    """Let every rank do something; return what came of it, or what it raised."""
    found = dict[int, Any]()

    def one(rank: int) -> None:
        baton.acquire()
        try:
            found[rank] = body(rank)
        except (ExchangeError, RunFailed) as error:
            found[rank] = error
        finally:
            room.leave(rank, failed=isinstance(found.get(rank), RunFailed))
            baton.release()

    threads = [threading.Thread(target=one, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "a member hangs"
    return [found.get(rank) for rank in range(size)]
