from __future__ import annotations

from pathlib import Path

import pytest

from distributed.hosts.schema import Machine, requested_machine
from profiles.errors import BadInput
from training.run.requests.request_book import FOLDER, leave_request, take_requests


def test_requests_are_taken_once_in_their_order(tmp_path: Path) -> None:
    first = leave_request(tmp_path, "pause")
    second = leave_request(tmp_path, "drop", "b")
    pause, drop = take_requests(tmp_path)
    assert (pause.id, pause.action) == (first, "pause")
    assert (drop.id, drop.action, drop.machine) == (second, "drop", "b")
    assert take_requests(tmp_path) == []


def test_a_new_machine_travels_with_its_entry(tmp_path: Path) -> None:
    machine = Machine(name="d", address="10.0.0.4", port=2222, devices=("cpu",))
    leave_request(tmp_path, "add", entry=machine)
    (request,) = take_requests(tmp_path)
    assert (request.machine, requested_machine(request.entry or {})) == ("d", machine)


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"action": "rm"}', '{"action": ["stop"]}', "\udcff", '{"action": "add", "entry": "d"}'],
)
def test_nonsense_is_passed_over(tmp_path: Path, text: str) -> None:
    (tmp_path / FOLDER).mkdir()
    (tmp_path / FOLDER / "0.json").write_bytes(text.encode(errors="surrogateescape"))
    leave_request(tmp_path, "kill")
    assert [request.action for request in take_requests(tmp_path)] == ["kill"]
    assert list((tmp_path / FOLDER).iterdir()) == []


def test_a_request_with_an_impossible_machine_is_refused() -> None:
    with pytest.raises(BadInput, match="names no valid machine"):
        requested_machine({"name": "/"})


def test_a_folder_that_is_gone_is_said(tmp_path: Path) -> None:
    with pytest.raises(BadInput):
        leave_request(tmp_path / "none", "stop")


def test_who_is_to_leave_must_be_said(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="needs the name"):
        leave_request(tmp_path, "drop")
