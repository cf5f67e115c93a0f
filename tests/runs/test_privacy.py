"""What commands a run, and what lets somebody into it, is its owner's alone, whatever the umask."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_run_folder import make, mode

from training.exchange.links.certificates import issue_run_certificates
from training.records.events import WarningEvent
from training.records.run_files import private_file, private_folder
from training.run.requests.request_book import leave_request, take_requests


@pytest.fixture(params=[0o000, 0o022, 0o077])
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def modes(folder: Path) -> dict[str, int]:
    """Modes of a folder and of all in it that are not as they should be."""
    wanted = {True: 0o700, False: 0o600}
    return {
        str(path.relative_to(folder)): mode(path)
        for path in (folder, *folder.rglob("*"))
        if mode(path) != wanted[path.is_dir()]
    }


def test_requests_secrets_and_records_are_private(umask: int, tmp_path: Path) -> None:
    with make(tmp_path / "output") as folder:
        leave_request(folder.path, "stop")
        issue_run_certificates(folder.secrets, "run", [0, 1], ["127.0.0.1"])
        folder.append(WarningEvent(message="x"))
        assert not modes(folder.path / "requests") and not modes(folder.path / "secrets")
        records = ("metadata.json", "plan.json", "events.jsonl")
        assert {mode(folder.path / name) for name in records} == {0o600}
        assert not mode(folder.path) & (stat.S_IWGRP | stat.S_IWOTH)


def test_a_folder_of_requests_that_others_may_write_to_is_closed(umask: int, tmp_path: Path) -> None:
    with make(tmp_path / "output") as folder:
        (folder.path / "requests").chmod(0o777)
        leave_request(folder.path, "pause")
        assert mode(folder.path / "requests") == 0o700
        assert [request.action for request in take_requests(folder.path)] == ["pause"]


def test_a_link_is_not_taken_for_a_private_folder(tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    (tmp_path / "secrets").symlink_to(tmp_path / "theirs")
    with pytest.raises(OSError):
        private_folder(tmp_path / "secrets")


def test_a_log_is_private_from_its_first_byte(umask: int, tmp_path: Path) -> None:
    with open(tmp_path / "log", "ab", opener=private_file) as log:
        assert mode(tmp_path / "log") == 0o600
        log.write(b"x")


def test_keys_are_private_from_their_first_byte(umask: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen at the moment when what was written is given its name."""
    seen: set[int] = set()
    replace = os.replace

    def spy(source: str, target: str | Path) -> None:
        seen.add(mode(Path(source)))
        replace(source, target)

    monkeypatch.setattr(os, "replace", spy)
    issue_run_certificates(tmp_path / "c", "run", [0], ["127.0.0.1"])
    assert seen == {0o600}
