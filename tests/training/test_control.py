from __future__ import annotations

import io
import threading
from collections.abc import Iterator

import pytest

from training.records.events import AnswerEvent
from training.run.orders import Command, Control
from training.workers.worker import Rendezvous, read_rendezvous


def taken(control: Control, step: int) -> list[str]:
    """What is to be done after a step; the last of it ends the member or holds it."""
    commands = []
    while (command := control.next(step)) is not None:
        commands.append(command.command)
        if command.command in ("stop", "pause"):
            break
    return commands


def test_a_command_waits_for_its_step() -> None:
    control = Control()
    control.post(Command(command="stop", at_step=3))
    control.post(Command(command="admit", rank=2))
    assert control.next(2) is None and control.readmitted == {2}
    control.post(Command(command="ban", rank=2))
    assert (control.readmitted, control.banned) == (set(), {2})
    assert taken(control, 3) == ["stop"]
    assert control.next(4) is None


def test_the_end_of_the_channel_means_stop() -> None:
    control = Control()
    control.read_from(iter([b'{"command": "snapshot"}\n']), print).join()
    assert taken(control, 0) == ["stop"] and taken(control, 0) == ["snapshot"]


def test_a_command_may_come_before_the_addresses() -> None:
    control = Control()
    lines = io.BytesIO(b'{"command": "unattended"}\n{"command": "stop"}\n{"address": "h:1"}\n')
    assert read_rendezvous(lines, control.post) == Rendezvous("h:1")
    assert taken(control, 0) == ["stop"]


def test_a_bad_line_is_reported_and_passed_over() -> None:
    control = Control()
    bad: list[str] = []
    control.read_from(iter([b"rubbish\n", b'{"command": "launch"}\n', b'{"command": "snapshot"}\n']), bad.append).join()
    assert len(bad) == 2
    assert taken(control, 0) == ["stop"] and taken(control, 0) == ["snapshot"]


def test_a_paused_member_writes_a_snapshot_and_goes_on_only_when_it_is_told_to() -> None:
    answers: list[AnswerEvent] = []
    control, done = Control(answer=answers.append), []
    control.post(Command(command="pause", order=1))

    def train() -> None:
        while (command := control.next(5)) is not None:
            done.append(command.command)

    thread = threading.Thread(target=train, daemon=True)
    thread.start()
    control.post(Command(command="meet", order=2))
    control.post(Command(command="snapshot", order=2, at_step=5))
    control.post(Command(command="resume", order=3))
    thread.join(60)
    assert not thread.is_alive() and done == ["pause", "snapshot", "resume"]
    assert {(answer.order, answer.step) for answer in answers if answer.done} == {(1, 5), (2, 5), (3, 5)}


def test_nobody_begins_a_step_while_the_members_agree() -> None:
    answers: list[AnswerEvent] = []
    control = Control(answer=answers.append)
    assert control.next(4) is None
    control.post(Command(command="meet", order=1))
    assert [(answer.step, answer.done) for answer in answers] == [(5, False)]
    began = threading.Event()
    threading.Thread(target=lambda: (control.next(5), began.set()), daemon=True).start()
    assert not began.wait(0.05)
    control.post(Command(command="stop", order=1, at_step=6))
    assert began.wait(60) and taken(control, 6) == ["stop"]


def test_a_stop_ends_a_pause_so_that_all_come_to_its_step() -> None:
    control = Control()
    control.post(Command(command="pause", order=1))
    assert taken(control, 5) == ["pause"]
    control.post(Command(command="stop", order=2, at_step=6))
    assert control.next(5) is None and taken(control, 6) == ["stop"]


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
    found = [*taken(control, step), *taken(control, 5)]
    assert sorted(found) == ["snapshot"] + ["stop"] * step.posted


def test_a_channel_that_breaks_means_stop_too() -> None:
    def lines() -> Iterator[bytes]:
        yield b'{"command": "snapshot"}'
        yield b"[" * 100_000
        raise OSError("input/output error")

    control = Control()
    bad: list[str] = []
    control.read_from(lines(), bad.append).join()
    assert taken(control, 0) == ["stop"] and taken(control, 0) == ["snapshot"]
    assert len(bad) == 2
