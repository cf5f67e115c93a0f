"""``machines share``, ``join`` and ``leave``: what is refused, in one line that says what to do."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest

from app.cli.main import main
from distributed.hosts.joined import JoinedMachine, is_door_open, joined_machines, save_joined
from distributed.joining.door import Door
from tests.distributed.joining import RunningDoor, SharedCode

Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def _own_folder(joining_config: Path) -> None:
    """All that is joined here lies in a folder of its own."""


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["share"], "no terminal is here"),
        (["join"], "has joined nothing yet"),
        (["join", "--at", "192.168.1.5"], "does not begin with its number"),
        (["join", "192.168.1.5"], "word 1 of the code is none"),
        (["join", "17-xx"], "the code has 1 words"),
        (["leave"], "has joined nothing"),
        (["leave", "studio"], "nothing joined is called 'studio'"),
    ],
)
def test_wrong_use_is_one_line(
    words: list[str], problem: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    assert main(["machines", *words]) == 2
    error, hint = capsys.readouterr().err.splitlines()[-2:]
    assert problem in error and error.startswith("error: ") and hint.startswith("hint: ")


def test_an_address_in_place_of_a_code_is_told_where_it_stands(capsys: Capture) -> None:
    assert main(["machines", "join", "17-aardvark-abandoned-abbreviate@192.168.1.5"]) == 2
    assert "after --at" in capsys.readouterr().err


def test_another_port_than_that_of_the_door_is_refused(capsys: Capture) -> None:
    door = RunningDoor()
    try:
        other = door.port % 60_000 + 1
        assert main(["machines", "share", "--yes", "--port", str(other)]) == 3
        assert f"dial TCP port {door.port} of this computer already" in capsys.readouterr().err
    finally:
        door.close()


def test_a_machine_is_removed_also_where_no_door_runs(capsys: Capture) -> None:
    save_joined(JoinedMachine("studio", "AAAAC3NzaC1lZDI1NTE5AAAAI" + "A" * 43))
    assert main(["machines", "leave", "Studio.joined"]) == 0
    assert joined_machines() == [] and not is_door_open()


def test_the_state_of_a_door_shows_no_code() -> None:
    door = RunningDoor()
    try:
        shared = SharedCode()
        (share,) = door.state.shares.values()
        assert isinstance(door.state, Door) and shared.code not in repr((share.issued, door.state.desk))
        shared.process.terminate()
        shared.process.communicate()
    finally:
        door.close()
