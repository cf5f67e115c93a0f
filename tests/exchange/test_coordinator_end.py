"""What a coordinator leaves behind when it ends: nothing."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable

import pytest

from tests.waiting import until
from training.exchange.group.coordinator_server import Coordinator
from training.exchange.group.coordinator_state import CoordinatorConfig


def test_no_connection_is_still_served_at_the_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nor is one that had to be cancelled told with a traceback, as asyncio does."""
    coordinator = Coordinator(CoordinatorConfig(run_id="r", names=("a",)))
    port, loop = coordinator.start(), coordinator._loop
    close, left = loop.close, list[set[asyncio.Task[object]]]()
    monkeypatch.setattr(loop, "close", lambda: (left.append(asyncio.all_tasks(loop)), close()))

    def never(*_: object) -> Awaitable[object]:
        return asyncio.Event().wait()

    monkeypatch.setattr(coordinator, "_identify", never)
    with socket.create_connection(("127.0.0.1", port)):
        until(lambda: len(coordinator._connections) == 1)
        coordinator.stop()
    assert left == [set()]
    assert not caplog.records
