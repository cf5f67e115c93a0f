"""Patches of a data set: what each kind does, in which order, and that taking the files away undoes it."""

from __future__ import annotations

import re
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from profiles.errors import BadInput
from speech.data.patches import KINDS, apply_patches, read_patches
from speech.data.speech_clips import Clip, FileSource
from speech.data.speech_dataset import clips_of_split, read_speech, read_tables, read_with_validation

IDS = tuple(f"clip{number}" for number in range(8))


def write_set(folder: Path, splits: tuple[str, ...] = ("train", "test")) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "x.wav").write_bytes(b"")
    for split in splits:
        lines = [f"{name},x.wav,{split} {name}" for name in IDS]
        (folder / f"{split}.csv").write_text("\n".join(["id,audio_path,text", *lines]))
    return folder


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_set(tmp_path / "data")


def patch(data: Path, kind: str, text: str | bytes, name: str = "a.csv") -> Path:
    path = data / "patches" / kind / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def texts(data: Path, split: str = "train") -> dict[str, str]:
    return {clip.id: clip.text for clip in read_speech(str(data))[split]}


def test_each_kind_does_its_part(data: Path) -> None:
    patch(data, "override_text", "id,text,split\nclip0,new,\nclip1,other,test\n")
    patch(data, "protect", "id\nclip2\n")
    patch(data, "delete", "id,split\nclip2,\nclip3,train\nclip0,test\n")
    train, test = texts(data), texts(data, "test")
    assert (train["clip0"], train["clip1"], train["clip2"]) == ("new", "train clip1", "train clip2")
    assert "clip3" not in train
    assert test["clip1"] == "other"
    assert "clip0" not in test
    assert test["clip3"] == "test clip3"


def test_each_change_has_its_line_and_both_texts(data: Path) -> None:
    override = patch(data, "override_text", "id,text\nclip0,new\n")
    protect, delete = patch(data, "protect", "id\nclip1\n"), patch(data, "delete", "id\nclip0\nclip1\n")
    found = [c for c in read_tables(str(data)).changes if c.split == "train"]
    assert [(c.id, c.kind, c.where, c.before, c.after) for c in found] == [
        ("clip0", "override_text", f"{override}, line 2", "train clip0", "new"),
        ("clip0", "delete", f"{delete}, line 2", "new", "(left out)"),
        ("clip1", "protect", f"{protect}, line 2", f"(left out) by {delete}, line 3", "train clip1"),
    ]


def test_what_is_incomplete_may_be_left_out_or_given_a_text(data: Path) -> None:
    with (data / "train.csv").open("a") as file:
        file.write("\ngone,none.wav,text\nempty,x.wav,\n")
    with pytest.raises(BadInput, match="line 11, column text: empty"):
        read_speech(str(data))
    patch(data, "delete", "id\ngone\n")
    patch(data, "override_text", "id,text\nempty,is said\n")
    assert texts(data)["empty"] == "is said"


def test_a_lone_table_takes_the_patches_of_its_split(data: Path) -> None:
    patch(data, "delete", "id,split\nclip0,test\nclip1,train\nelsewhere,\n")
    (data / "mine.csv").write_bytes((data / "train.csv").read_bytes())
    assert "clip0" not in {clip.id for clip in clips_of_split(str(data / "test.csv"), "train")}
    mine = read_tables(str(data / "mine.csv"))
    assert [clip.id for clip in mine.splits["train"] if clip.left_out] == ["clip1"]
    assert mine.notes == []


def test_patches_move_nothing_between_train_and_what_is_held_out(tmp_path: Path) -> None:
    data = write_set(tmp_path / "data", ("train",))
    held = {clip.id for clip in read_with_validation(str(data))["validation"]}
    assert len(held) == 1
    patch(data, "delete", "id\n" + "\n".join(list(set(IDS) - held)[:4]) + "\n")
    found = read_with_validation(str(data))
    assert {clip.id for clip in found["validation"]} == held
    assert {clip.id for clip in clips_of_split(str(data), "validation")} == held
    assert len(found["train"]) == 3


@pytest.mark.parametrize(
    ("kind", "text", "said"),
    [
        ("delete", "id\nclip0\nnobody\n", r"delete/a.csv, line 3: no sample 'nobody'"),
        ("delete", "id\nclip0\nclip0\n", r"delete/a.csv, line 3: 'clip0' is there already, in .*a.csv, line 2"),
        ("protect", "id,split\nclip0,validation\n", r"protect/a.csv, line 2: no sample 'clip0' in validation"),
    ],
)
def test_lines_without_effect_are_told(data: Path, kind: str, text: str, said: str) -> None:
    patch(data, kind, text)
    (note,) = read_tables(str(data)).notes
    assert re.search(said, note)


@pytest.mark.parametrize(
    ("kind", "text", "said"),
    [
        (
            "override_text",
            "id,text\nclip0,one\nclip0,two\n",
            r"a.csv, line 3: another text for 'clip0' than in .* line 2",
        ),
        ("override_text", "id,text\nclip0,\n", r"a.csv, line 2, column text: empty"),
        ("override_text", "id\nclip0\n", r"a.csv: no column 'text'"),
        ("delete", "name\nclip0\n", r"a.csv: no column 'id'"),
        ("delete", "id,split\nclip0,trian\n", r"a.csv, line 2, column split: no split 'trian'"),
        ("delete", b"id\nclip\xff\n", r"a.csv, line 2: not UTF-8"),
        ("delete", "id\n" + "\n".join(IDS), r"train: patches leave out all of its clips \(8\)"),
        ("delte", "id\nclip0\n", r"delte: no kind of patch.*did you mean 'delete'"),
        (".", "id\nclip0\n", r"a.csv: no kind of patch"),
    ],
)
def test_faults_are_refused_with_their_place(data: Path, kind: str, text: str | bytes, said: str) -> None:
    patch(data, kind, text)
    with pytest.raises(BadInput) as caught:
        read_speech(str(data))
    assert re.search(said, f"{caught.value.message} {caught.value.hint}", 16)


def test_what_other_programs_leave_behind_is_no_patch(data: Path) -> None:
    patch(data, "delete", b"\x00\x01", "._a.csv")
    patch(data, "delete", "id\nclip0\n", "notes.txt")
    (data / "patches" / "README.md").write_text("why")
    tables = read_tables(str(data))
    assert tables.changes == []
    assert "notes.txt: not a CSV file" in tables.notes[0]


def refusal(data: Path) -> str:
    """What is said of a data set that is refused; the name of the file where it is not."""
    try:
        read_tables(str(data))
    except BadInput as error:
        return error.message
    return "a.csv"


CLIPS = {"train": [Clip(name, FileSource(Path("x.wav")), name, f"t, line {i}") for i, name in enumerate(IDS)]}
lines = st.lists(st.tuples(st.sampled_from((*IDS, "nobody")), st.sampled_from(("", "train", "test"))), max_size=9)


@given(overridden=lines, protected=lines, deleted=lines)
def test_order_and_idempotence(overridden: list, protected: list, deleted: list) -> None:
    with tempfile.TemporaryDirectory() as name:
        data = Path(name)
        patch(data, "override_text", "id,split,text\n" + "".join(f"{i},{s},new {i}\n" for i, s in overridden) + "z,,z")
        for kind, given_lines in (("protect", protected), ("delete", deleted)):
            patch(data, kind, "id,split\n" + "".join(f"{i},{s}\n" for i, s in given_lines) + "z,\n")
        patches = read_patches(data)
    (once, _), clips = apply_patches(CLIPS, patches, {}), CLIPS["train"]
    meant = [{i for i, split in given_lines if split != "test"} for given_lines in (overridden, protected, deleted)]
    for before, after in zip(clips, once["train"], strict=True):
        assert after.text == (f"new {before.id}" if before.id in meant[0] else before.text)
        assert bool(after.left_out) == (before.id in meant[2] - meant[1])
    assert apply_patches(once, patches, {})[0] == once


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(kind=st.sampled_from(KINDS), content=st.one_of(st.binary(max_size=200), st.text(max_size=200).map(str.encode)))
def test_no_file_ends_in_a_traceback_and_without_it_all_is_as_before(data: Path, kind: str, content: bytes) -> None:
    before, tables = read_tables(str(data)), (data / "train.csv").read_bytes()
    patch(data, kind, b"id,text\n" * (len(content) % 2) + content)
    assert "a.csv" in refusal(data)
    shutil.rmtree(data / "patches")
    assert read_tables(str(data)) == before
    assert (data / "train.csv").read_bytes() == tables


def test_a_remark_on_patches_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "train.csv").write_text("id,audio_path,text\na,a.wav,one\n")
    (tmp_path / "patches" / "delete").mkdir(parents=True)
    (tmp_path / "patches" / "delete" / "x.csv").write_text("id\nnobody\n")
    (tmp_path / "a.wav").write_bytes(b"x")
    for _ in range(2):
        clips_of_split(str(tmp_path), "train")
    assert [record.getMessage().endswith("no sample 'nobody'") for record in caplog.records] == [True]
