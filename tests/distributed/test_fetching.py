"""Files that a far machine sends: what it names is checked, and nothing else is taken."""

from __future__ import annotations

import io
import itertools
import json
import os
from pathlib import Path, PurePosixPath
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted_connection import far_machine

from distributed.agent import files as agent_files
from distributed.hosts.schema import Machine
from distributed.machine.link import HereConnection, MachineLink
from distributed.preparation import transfer
from distributed.preparation.transfer import LONGEST_LIST, MOST_FILES, announced, fetch_folder
from distributed.ssh.errors import SshError

ROOM = 1 << 30


def said(files: object) -> bytes:
    return json.dumps({"files": files}).encode() + b"\n"


def sends(path: Path, data: bytes) -> MachineLink:
    """A machine that answers every question with ``data``."""
    path.write_bytes(data)

    class Stranger(HereConnection):
        def stream(self, argv: Any) -> Any:
            return super().stream(["cat", str(path)])

    return MachineLink(Machine(name="far"), lambda: Stranger("far"))


@pytest.fixture
def target(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir()
    return tmp_path / "run" / "model"


@pytest.mark.slow
def test_a_folder_arrives_as_it_is_there(tmp_path: Path, target: Path) -> None:
    link = far_machine(tmp_path)
    there = tmp_path / "far" / "runs" / "run-1" / "0" / "model"
    (there / "deep").mkdir(parents=True)
    (there / "weights").write_bytes(os.urandom(3 << 20))
    (there / "deep" / "empty").write_bytes(b"")
    (there / "link").symlink_to("/etc/passwd")
    assert fetch_folder(link, "run-1", "0", "model", target)
    assert (target / "weights").read_bytes() == (there / "weights").read_bytes()
    assert sorted(path.name for path in target.rglob("*")) == ["deep", "empty", "weights"]
    assert not fetch_folder(link, "run-1", "1", "model", target.with_name("other"))
    assert os.listdir(target.parent) == ["model"]


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "cannot be read"),
        (b"{}", "names no files"),
        (b"[" * LONGEST_LIST, "cannot be read"),
        (b" " * (LONGEST_LIST + 1), "too long"),
        (said({"model/../../outside": 4}) + b"evil", "outside its folder"),
        (said({"model/weights": 1 << 60}), "room for"),
        (said({"model/weights": 9}) + b"short", "ended too early"),
        (said({"model/weights": 4}) + b"longer", "more than it announced"),
        (said({}) + b"more", "more than it announced"),
    ],
)
def test_nothing_is_kept_of_what_is_not_as_announced(tmp_path: Path, target: Path, data: bytes, words: str) -> None:
    with pytest.raises(SshError, match=words):
        fetch_folder(sends(tmp_path / "answer", data), "run-1", "0", "model", target)
    assert os.listdir(target.parent) == []


def test_a_machine_that_dribbles_is_not_waited_for(target: Path) -> None:
    clock = itertools.count()
    line = said({"model/weights": 1 << 20})
    process = SimpleNamespace(
        write=lambda data: None, read_line=lambda timeout: line, read=lambda timeout: b"x", close=lambda: None
    )
    link = MachineLink(Machine(name="far"), lambda: SimpleNamespace(stream=lambda argv: process))
    with pytest.raises(SshError, match="too slowly"):
        fetch_folder(link, "run-1", "0", "model", target, clock=lambda: next(clock))
    assert next(clock) < 120 and os.listdir(target.parent) == []


PATHS = st.text(st.sampled_from("abM/.\\: \0\n\u202e\ud800") | st.characters(), max_size=20)
SIZES = st.integers(-5, 2 * ROOM) | st.floats() | st.booleans() | st.none() | st.text(max_size=2)


@given(st.dictionaries(PATHS.map("model/".__add__) | PATHS, SIZES, max_size=5) | st.lists(PATHS))
def test_whatever_is_announced_lies_inside_and_fits(files: object) -> None:
    try:
        taken = announced("far", said(files), "model", ROOM)
    except SshError:
        return
    assert taken == files
    assert sum(taken.values()) <= ROOM
    for path in taken:
        parts = PurePosixPath(path).parts
        assert "/".join(parts) == path and parts[0] == "model" and len(parts) > 1 and ".." not in parts


@given(st.binary(max_size=60))
def test_no_line_is_more_than_refused(line: bytes) -> None:
    with pytest.raises(SshError):
        announced("far", line, "model", ROOM)


def test_the_list_is_bounded() -> None:
    assert len(announced("far", said({f"model/{n}": 0 for n in range(MOST_FILES)}), "model", 0)) == MOST_FILES
    with pytest.raises(SshError, match="more than 1000"):
        announced("far", said({f"model/{n}": 0 for n in range(MOST_FILES + 1)}), "model", 0)
    with pytest.raises(SshError, match="a folder too"):
        announced("far", said({"model/a": 0, "model/a/b": 0}), "model", 0)


@pytest.mark.parametrize(("free", "room"), [(0, 0), (2_000_000, 1_800_000), (10 << 30, (10 << 30) - (1 << 28))])
def test_a_small_disk_takes_a_small_model(free: int, room: int) -> None:
    assert transfer.usable_space(free) == room
    with pytest.raises(SshError, match=r"has 12\.9 GB, and there is room for [\d.]+ .?B"):
        announced("far", said({"model/weights": 12 << 30}), "model", room)


def test_a_file_that_becomes_shorter_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    weights = tmp_path / "model" / "weights"
    weights.write_bytes(b"123")

    class Out(io.BytesIO):
        def write(self, data: Any) -> int:
            weights.write_bytes(b"12")
            return super().write(data)

    with pytest.raises(OSError, match="became shorter"):
        agent_files.fetch(tmp_path, "model", Out())
