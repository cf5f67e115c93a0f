from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distributed.preparation.code_sync import HashCache, Tree, folder_tree


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A folder with one large file that nobody has touched for a while."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "big").write_bytes(b"a" * 1_500_000)
    os.utime(tmp_path / "data" / "big", (1_700_000_000, 1_700_000_000))
    return tmp_path / "data"


def tree_of(data: Path) -> Tree:
    """Each time as another process; the cache is beside the folder."""
    return folder_tree(data, HashCache(data.parent / "hashes.json"))


def test_a_file_that_has_not_changed_is_not_read_again(data: Path, tmp_path: Path) -> None:
    tree = tree_of(data)
    kept = (tmp_path / "hashes.json").read_text()
    (tmp_path / "hashes.json").write_text(kept.replace(tree.files["big"], "f" * 64))
    assert tree_of(data).files == {"big": "f" * 64}  # it was looked up


def test_a_change_is_seen(data: Path) -> None:
    before = tree_of(data)
    (data / "big").write_bytes(b"b" * 1_500_000)
    assert tree_of(data).files != before.files
    os.utime(data / "big", (1_600_000_000, 1_600_000_000))
    changed = tree_of(data)
    assert changed.files != before.files


def test_a_file_of_this_very_moment_is_not_kept(data: Path, tmp_path: Path) -> None:
    os.utime(data / "big")
    tree_of(data)
    assert not (tmp_path / "hashes.json").exists()


@given(st.one_of(st.binary(max_size=50), st.just(b'{"big": [1, 2, 3, 4]}'), st.just(b"[" * 5000)))
def test_a_damaged_cache_is_none(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    folder = tmp_path_factory.mktemp("cache")
    (folder / "hashes.json").write_bytes(content)
    cache, stat = HashCache(folder / "hashes.json"), os.stat(folder)
    assert cache.get(Path("big"), stat) == ""
    cache.save()


def test_where_it_cannot_be_written_everything_goes_on(data: Path, tmp_path: Path) -> None:
    (tmp_path / "hashes.json").mkdir()
    assert tree_of(data).files == tree_of(data).files
