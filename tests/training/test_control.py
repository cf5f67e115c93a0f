from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from training.control import Command, Control


def test_a_command_waits_for_its_step() -> None:
    control = Control()
    control.post(Command(command="stop", at_step=3))
    assert control.due(2) == []
    assert [c.command for c in control.due(3)] == ["stop"]
    assert control.due(4) == []


def test_the_end_of_the_channel_means_stop() -> None:
    control = Control()
    control.read_from(iter([b'{"command": "snapshot"}\n']), print).join()
    assert [c.command for c in control.due(0)] == ["snapshot", "stop"]


def test_a_bad_line_is_reported_and_passed_over() -> None:
    control = Control()
    bad: list[str] = []
    control.read_from(iter([b"rubbish\n", b'{"command": "launch"}\n', b'{"command": "pause"}\n']), bad.append).join()
    assert len(bad) == 2
    assert [c.command for c in control.due(0)] == ["pause", "stop"]


def test_waiting_ends_when_the_wanted_command_comes() -> None:
    control = Control()
    found: list[Command] = []
    thread = threading.Thread(target=lambda: found.append(control.wait_for(lambda c: c.command == "resume")))
    thread.start()
    control.post(Command(command="snapshot"))
    control.post(Command(command="resume"))
    thread.join(5)
    assert [c.command for c in found] == ["resume"]
    assert [c.command for c in control.due(0)] == ["snapshot"]


class _Interrupted(int):
    """A number of steps during whose comparisons a signal's handler posts commands."""

    def __new__(cls, steps: int, control: Control, at: int) -> _Interrupted:
        return super().__new__(cls, steps)

    def __init__(self, steps: int, control: Control, at: int) -> None:
        self.control, self.left, self.posted = control, at, 0

    def __ge__(self, other: int) -> bool:
        self.left -= 1
        if self.left == 0:
            self.control.post(Command(command="stop", reason="terminated"))
            self.posted += 1
        return super().__ge__(other)


@pytest.mark.parametrize("at", [1, 2, 3])
def test_what_a_signal_posts_while_commands_are_taken_is_not_lost(at: int) -> None:
    control = Control()
    control.post(Command(command="snapshot"))
    step = _Interrupted(5, control, at)
    taken = [command.command for command in (*control.due(step), *control.due(5))]
    assert taken == ["snapshot"] + ["stop"] * step.posted


def test_a_channel_that_breaks_means_stop_too() -> None:
    def lines() -> Iterator[bytes]:
        yield b'{"command": "pause"}'
        yield b"[" * 100_000
        raise OSError("input/output error")

    control = Control()
    bad: list[str] = []
    control.read_from(lines(), bad.append).join()
    assert [command.command for command in control.due(0)] == ["pause", "stop"]
    assert len(bad) == 2
