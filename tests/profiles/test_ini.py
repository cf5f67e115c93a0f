from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from profiles.errors import BadInput
from profiles.files.ini import parse_ini, read_ini, split_lines, with_section, write_atomically

FILE = Path("some.ini")
words = st.from_regex(r"[a-z_]{1,8}", fullmatch=True)
values = st.text(
    st.characters(min_codepoint=33, max_codepoint=0x2FFF, exclude_categories=("Z", "C")), max_size=12
).filter(lambda text: "#" not in text)
entries = st.dictionaries(words, values, max_size=5)
comments = st.sampled_from(["", "# a note\n", "; another\n", "\n", "   \n", "#key = off\n"])


@st.composite
def files(draw: st.DrawFn) -> str:
    text = draw(comments)
    for name in draw(st.lists(words, unique=True, max_size=4)):
        text += f"[profile:{name}]\n"
        for key, value in draw(entries).items():
            text += draw(comments) + draw(st.sampled_from([f"{key} = {value}\n", f"  {key}: {value}  # why\n"]))
        text += draw(comments)
    return text


def test_values_know_their_line() -> None:
    section = parse_ini("# first\n[a:b]\n\nkey = 1\nother: two words\n", FILE).sections["a:b"]
    assert {key: (entry.value, entry.line) for key, entry in section.entries.items()} == {
        "key": ("1", 4),
        "other": ("two words", 5),
    }


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("x  # why", "x"),
        ("a#b", "a#b"),
        ("# nothing", ""),
        ("module:factory", "module:factory"),
        ("a = b", "a = b"),
        ("100%", "100%"),
    ],
)
def test_what_a_value_is(written: str, read: str) -> None:
    assert parse_ini(f"[s]\nkey = {written}\n", FILE).sections["s"].entries["key"].value == read


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("key = 1\n", "line 1: 'key' stands before any"),
        ("[s]\nno value\n", "line 2: 'no value' is not 'key = value'"),
        ("[s]\n[s]\n", "line 2: [s] is there already, on line 1"),
        ("[s]\na = 1\na = 2\n", "line 3 [s]: 'a' is set already, on line 2"),
        ("[s\n", "line 1: '[s' is not a section"),
        ("[]\n", "line 1: '[]' is not a section"),
    ],
)
def test_a_broken_line_is_named(text: str, message: str) -> None:
    with pytest.raises(BadInput, match=re.escape(message)):
        parse_ini(text, FILE)


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_all_line_ends_and_a_byte_order_mark(end: str, tmp_path: Path) -> None:
    path = tmp_path / "a.ini"
    path.write_bytes(("\ufeff[s]" + end + "key = 1" + end).encode())
    assert read_ini(path).sections["s"].entries["key"].value == "1"


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="No such file"):
        read_ini(tmp_path / "none.ini")


def test_a_binary_file(tmp_path: Path) -> None:
    path = tmp_path / "a.ini"
    path.write_bytes(b"\xff\xfe[\x00")
    with pytest.raises(BadInput, match="not UTF-8"):
        read_ini(path)


@given(st.text(max_size=80))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        file = parse_ini(text, FILE)
    except BadInput:
        return
    assert all(section.line <= len(split_lines(text)) for section in file.sections.values())


@given(st.text(st.sampled_from("ab \r\n\x0b\u2028"), max_size=40))
def test_lines_join_to_the_text(text: str) -> None:
    assert "".join(split_lines(text)) == text


@settings(max_examples=50)
@given(files(), words, entries)
def test_writing_a_section_leaves_every_other_byte(text: str, name: str, new: dict[str, str]) -> None:
    before = parse_ini(text, FILE)
    written = with_section(text, f"profile:{name}", new)
    after = parse_ini(written, FILE)
    assert {key: entry.value for key, entry in after.sections[f"profile:{name}"].entries.items()} == new
    assert _outside(written, name).startswith(_outside(text, name))
    assert list(after.sections)[: len(before.sections)] == list(before.sections)


@settings(max_examples=50)
@given(files(), words, entries)
def test_writing_twice_changes_nothing_more(text: str, name: str, new: dict[str, str]) -> None:
    once = with_section(text, f"profile:{name}", new)
    assert with_section(once, f"profile:{name}", new) == once


@settings(max_examples=50)
@given(files())
def test_writing_what_is_there_changes_nothing(text: str) -> None:
    for name, section in parse_ini(text, FILE).sections.items():
        assert with_section(text, name, {key: entry.value for key, entry in section.entries.items()}) == text


def _outside(text: str, name: str) -> str:
    """Return the text without the entries (and heading) of one section; comments stay."""
    lines, inside = [], False
    for line in split_lines(text):
        if line.startswith("["):
            inside = line.strip() == f"[profile:{name}]"
        is_entry = bool(line.strip()) and line.strip()[0] not in "#;"
        if not (inside and is_entry):
            lines.append(line)
    return "".join(lines)


def test_comments_and_order_inside_a_section_stay() -> None:
    text = "[a]\n# rate\nrate = 1  # low\nold = x\n# size\n  size: 2   # why\n\n[b]\n"
    assert with_section(text, "a", {"size": "3", "rate": "1", "new": "y"}) == (
        "[a]\n# rate\nrate = 1  # low\n# size\n  size: 3   # why\nnew = y\n\n[b]\n"
    )


def test_a_comment_behind_no_value_stays_a_comment() -> None:
    assert with_section("[a]\nrate = # none yet\n", "a", {"rate": "1"}) == "[a]\nrate = 1  # none yet\n"


def test_a_new_section_keeps_the_line_ends() -> None:
    assert with_section("[a]\r\nx = 1", "b", {"y": "2"}) == "[a]\r\nx = 1\r\n\r\n[b]\r\ny = 2\r\n"


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "a.ini").mkdir()
    with pytest.raises(BadInput, match=re.escape("a.ini: Is a directory")):
        write_atomically(folder / "a.ini", "text")
    assert [path.name for path in folder.iterdir()] == ["a.ini"]
