"""Entries appear whole or not at all."""

from __future__ import annotations

import errno
import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from profiles.errors import BadInput
from training.tasks import cache
from training.tasks.cache import cache_root, get_or_build


def test_failed_build_leaves_nothing(tmp_path: Path) -> None:
    def build(folder: Path) -> None:
        (folder / "half").touch()
        raise RuntimeError("stopped")

    with pytest.raises(RuntimeError, match="stopped"):
        get_or_build(tmp_path, "key", build)
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == []


def test_rest_of_a_killed_process_is_cleared(tmp_path: Path) -> None:
    (tmp_path / "key.partial").mkdir()
    (tmp_path / "key.partial" / "half").touch()
    entry = get_or_build(tmp_path, "key", lambda folder: (folder / "whole").touch())
    assert {path.name for path in entry.iterdir()} == {"whole", "seal.json"}


@pytest.mark.parametrize(("number", "said"), [(errno.ENOSPC, "the disk is full"), (errno.EACCES, "Permission denied")])
def test_disk_faults_name_the_setting(tmp_path: Path, number: int, said: str) -> None:
    def build(folder: Path) -> None:
        raise OSError(number, os.strerror(number))

    with pytest.raises(BadInput, match=f"{said}.*cache_dir"):
        get_or_build(tmp_path, "key", build)


def test_cache_folder_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(BadInput, match="choose a folder you can write with cache_dir"):
        get_or_build(tmp_path / "file", "key", lambda folder: None)


def test_default_is_the_users_cache_folder() -> None:
    assert cache_root("").name == "muster"
    assert cache_root("~/x") == Path.home() / "x"


def _build_in_process(root: str, barrier: Any) -> None:
    barrier.wait()
    get_or_build(Path(root), "key", lambda folder: (folder / str(os.getpid())).touch())


@pytest.mark.slow
def test_one_of_several_processes_builds(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(2)
    started = [context.Process(target=_build_in_process, args=(str(tmp_path), barrier)) for _ in range(2)]
    for process in started:
        process.start()
    for process in started:
        process.join(90)
        assert process.exitcode == 0
    assert len(list((tmp_path / "key").glob("[0-9]*"))) == 1


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def flip_one_bit(file: Path) -> None:
    file.write_bytes(bytes([file.read_bytes()[0] ^ 1]) + file.read_bytes()[1:])


@pytest.mark.parametrize("harm", [cut, flip_one_bit, Path.unlink])
@pytest.mark.parametrize("name", ["data", "seal.json"])
def test_a_damaged_entry_is_built_anew_and_told_once(
    tmp_path: Path, harm: Callable[[Path], None], name: str, caplog: pytest.LogCaptureFixture
) -> None:
    def build(folder: Path) -> None:
        (folder / "data").write_bytes(b"whole")

    entry = get_or_build(tmp_path, "key", build)
    harm(entry / name)
    for _ in range(2):
        assert (get_or_build(tmp_path, "key", build) / "data").read_bytes() == b"whole"
    assert caplog.text.count("computed again") == 1


@pytest.mark.parametrize("place", [0, 39, 159])
def test_of_a_big_file_some_blocks_are_looked_at(tmp_path: Path, place: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "BLOCK", 4)
    built: list[Path] = []

    def build(folder: Path) -> None:
        built.append(folder)
        (folder / "data").write_bytes(bytes(160))

    file = get_or_build(tmp_path, "key", build) / "data"
    file.write_bytes(bytes(place) + b"x" + bytes(159 - place))
    get_or_build(tmp_path, "key", build)
    assert len(built) == (1 if place == 39 else 2)  # as far as it is looked at: the ends always
