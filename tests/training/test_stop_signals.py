from __future__ import annotations

import signal
import threading

import pytest

from tests.waiting import until
from training.run.stopping import StopSignals


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
def test_only_a_second_press_is_a_kill(times: list[float], done: str) -> None:
    clock = iter([50.0 + moment for moment in times])
    run, stop = Run(), StopSignals(lambda text: None, lambda: next(clock))
    stop.watch(run)
    for _ in times:
        stop(signal.SIGINT, None)
    assert run.done == done.split()


def test_a_press_while_something_is_printed_is_obeyed_and_said_afterwards() -> None:
    printing, said = threading.Lock(), list[str]()

    def say(text: str) -> None:
        with printing:
            said.append(text)

    run, stop = Run(), StopSignals(say)
    stop.watch(run)
    with printing:
        stop(signal.SIGINT, None)
    assert run.done == ["stop"]
    until(lambda: said)
