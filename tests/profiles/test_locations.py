from __future__ import annotations

from pathlib import Path

import pytest

from profiles.locations import absolute_location, is_location


@pytest.mark.parametrize(
    ("value", "found"),
    [
        ("here", "FOLDER/here"),
        ("here/file.py:build", "FOLDER/here/file.py:build"),
        ("./none", "FOLDER/none"),
        ("../none", "PARENT/none"),
        ("a/b/c", "FOLDER/a/b/c"),
        ("/x", "/x"),
        ("~/x", "HOME/x"),
        ("owner/name", "owner/name"),
        ("name", "name"),
        ("package.module:factory", "package.module:factory"),
        ("", ""),
    ],
)
def test_what_becomes_a_path(value: str, found: str, tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "file.py").touch()
    places = {"FOLDER": tmp_path, "PARENT": tmp_path.parent, "HOME": Path.home()}
    for word, place in places.items():
        found = found.replace(word, str(place))
    assert absolute_location(value, tmp_path) == found


@pytest.mark.parametrize(
    ("value", "expected"),
    [("word", False), ("there", True), ("o/n", True), ("~x", True), (".", True), ("m:f", True), ("", False)],
)
def test_what_is_more_than_a_word(value: str, expected: bool, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    assert is_location(value, tmp_path) is expected
