from __future__ import annotations

import threading

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
