from __future__ import annotations

import signal

import pytest

from training import stopping
from training.stopping import StopSignals


class Run:
    def __init__(self) -> None:
        self.done: list[str] = []

    def request_stop(self, message: str) -> None:
        self.done.append("stop")

    def kill(self) -> None:
        self.done.append("kill")


@pytest.mark.parametrize(
    ("times", "done"), [([0.0], "stop"), ([0.0, 0.1, 0.9], "stop"), ([0.0, 0.1, 1.5], "stop kill")]
)
def test_only_a_second_press_is_a_kill(monkeypatch: pytest.MonkeyPatch, times: list[float], done: str) -> None:
    clock = iter([50.0 + moment for moment in times])
    monkeypatch.setattr(stopping.time, "monotonic", lambda: next(clock))
    run, stop = Run(), StopSignals(lambda text: None)
    stop.watch(run)
    for _ in times:
        stop(signal.SIGINT, None)
    assert run.done == done.split()
