from __future__ import annotations

from pathlib import Path

import pytest

from distributed.requests import FOLDER, leave_request, take_requests
from profiles.errors import BadInput


def test_requests_are_taken_once_in_their_order(tmp_path: Path) -> None:
    leave_request(tmp_path, "pause")
    leave_request(tmp_path, "stop")
    assert take_requests(tmp_path) == ["pause", "stop"]
    assert take_requests(tmp_path) == []


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"action": "rm"}', '{"action": ["stop"]}', "\udcff"])
def test_nonsense_is_passed_over(tmp_path: Path, text: str) -> None:
    (tmp_path / FOLDER).mkdir()
    (tmp_path / FOLDER / "0.json").write_bytes(text.encode(errors="surrogateescape"))
    leave_request(tmp_path, "kill")
    assert take_requests(tmp_path) == ["kill"]
    assert list((tmp_path / FOLDER).iterdir()) == []


def test_a_folder_that_is_gone_is_said(tmp_path: Path) -> None:
    with pytest.raises(BadInput):
        leave_request(tmp_path / "none", "stop")
