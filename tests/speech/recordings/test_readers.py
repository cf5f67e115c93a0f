"""One reader for each kind of source: what lies there is recognised, and any bytes give recordings or bad input."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sounds import write_rows, write_tone

from profiles.errors import BadInput
from speech.data.speech_clips import FileSource
from speech.recordings.readers import READERS, kind_of, read_bigquery
from speech.recordings.recording import Columns, ExclusionReason, MissingSource, ReadRequest, Recording, UrlSource


def read(source: Path | str, columns: Columns | None = None, kind: str = "") -> list[Recording]:
    return list(READERS[kind_of(str(source), kind)](ReadRequest(str(source), columns or Columns())))


def facts(recording: Recording) -> tuple[str, ...]:
    return (recording.id, recording.text, recording.speaker, recording.language, recording.split)


def lines(path: Path, *records: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records), encoding="utf-8")
    return path


def test_a_table_names_files_or_addresses(tmp_path: Path) -> None:
    write_tone(tmp_path / "a.wav")
    rows = [
        ("a.wav", "eins", "anna", "de-DE", "train"),
        ("https://x.example/b.mp3?k=1", " two \n lines ", "", "en", "dev"),
    ]
    table = write_rows(tmp_path / "all.tsv", "path,sentence,speaker,locale,split", rows, delimiter="\t")
    first, second = read(table)
    assert (kind_of(str(table)), facts(first)) == ("table", ("a.wav", "eins", "anna", "de-DE", "train"))
    assert first.audio == FileSource((tmp_path / "a.wav").resolve())
    assert facts(second) == ("https://x.example/b.mp3", "two lines", "", "en", "validation")
    assert second.audio == UrlSource("https://x.example/b.mp3?k=1")


def test_under_an_unusual_name_the_one_column_of_sound_files_is_that_of_the_recordings(tmp_path: Path) -> None:
    rows = [("1", "a.wav", "eins", "b.mp3"), ("2", "c.M4A", "zwei", "nothing")]
    (first, _) = read(write_rows(tmp_path / "all.csv", "Nr,Datei,text,Remarks", rows))
    assert first.id == "a.wav"
    for name in ("Memo 1.flac", "Memo 2.wav", "Memo 3.wav"):
        write_tone(tmp_path / "audio" / name)
    memos = [("1", "Memo 1", "eins", "cough"), ("2", "Memo 2", "zwei", ""), ("3", "Memo 4", "drei", "")]
    (memo, _, gone) = read(write_rows(tmp_path / "memos.csv", "#,Memo,What I said,Notes", memos))
    assert memo.audio == FileSource((tmp_path / "audio" / "Memo 1.flac").resolve()) and memo.text == "eins"
    assert gone.exclusion is not None and gone.exclusion.reason is ExclusionReason.NOT_THERE
    two = write_rows(tmp_path / "two.csv", "left,right,text", [("a.wav", "b.wav", "eins")])
    with pytest.raises(BadInput, match="no column 'audio_path'"):
        read(two)


def label_studio_task(number: int, *values: dict[str, object], cancelled: bool = False) -> dict[str, object]:
    results = [{"type": "textarea", "from_name": "transcription", "value": value} for value in values]
    choice = {"type": "choices", "value": {"choices": ["clean"]}}
    return {
        "id": number,
        "annotations": [{"was_cancelled": cancelled, "result": [choice, *results]}],
        "predictions": [],
        "data": {"audio": f"/data/local-files/?d=clips/{number}.wav"},
    }


def test_label_studios_full_export(tmp_path: Path) -> None:
    sounds = [FileSource(write_tone(tmp_path / "clips" / f"{number}.wav").resolve()) for number in range(3)]
    tasks = [
        label_studio_task(0, {"text": ["good", "day"]}, {"text": ["a note"]}),
        label_studio_task(1, *({"start": n / 4, "end": (n + 1) / 4, "text": [f"part {n}"]} for n in range(2))),
        label_studio_task(2, {"text": ["no"]}, cancelled=True),
    ]
    (tmp_path / "export.json").write_text(json.dumps(tasks), encoding="utf-8")
    recordings = read(tmp_path / "export.json")
    assert [(recording.id, recording.text, recording.audio) for recording in recordings] == [
        ("0", "good day", sounds[0]),
        ("1-0", "part 0", sounds[1]),
        ("1-1", "part 1", sounds[1]),
        ("2", "", sounds[2]),
    ]
    assert [(recording.offset, recording.duration) for recording in recordings[1:3]] == [(0.0, 0.25), (0.25, 0.25)]


def test_columns_that_are_named_are_taken(tmp_path: Path) -> None:
    write_tone(tmp_path / "a.wav")
    table = write_rows(tmp_path / "all.csv", "clip,said,who,text", [("a.wav", "yes", "anna", "no")])
    assert facts(read(table, Columns("clip", "said", "who"))[0]) == ("a.wav", "yes", "anna", "", "")
    with pytest.raises(BadInput, match="no column 'wo' for the speakers"):
        read(table, Columns("clip", "said", "wo"))


@pytest.mark.parametrize("ending", ["csv", "json", "parquet"])
def test_the_parts_of_an_export_are_one_source(ending: str, tmp_path: Path) -> None:
    for number in range(2):
        record = {"audio_url": f"gs://bucket/{number}.wav", "text": f"part {number}", "speaker_id": number}
        path = tmp_path / f"export-{number:012}.{ending}"
        if ending == "json":
            lines(path, record)
        elif ending == "csv":
            write_rows(path, ",".join(record), [tuple(record.values())])
        else:
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist([record]), path)
    recordings = read(tmp_path)
    assert [(recording.text, recording.speaker) for recording in recordings] == [("part 0", "0"), ("part 1", "1")]
    assert recordings[0].audio == UrlSource("https://storage.googleapis.com/bucket/0.wav")


def test_a_folder_with_a_table_for_each_split(tmp_path: Path) -> None:
    for split in ("train", "dev", "notes"):
        write_rows(tmp_path / f"{split}.csv", "audio_path,text", [("gone.wav", split)])
    assert [(recording.text, recording.split) for recording in read(tmp_path)] == [
        ("dev", "validation"),
        ("train", "train"),
    ]


def test_an_audiofolder_with_one_table_or_one_in_each_split(tmp_path: Path) -> None:
    write_tone(tmp_path / "one/test/a.wav")
    lines(tmp_path / "one/metadata.jsonl", {"file_name": "test/a.wav", "transcription": "a", "speaker_id": 7})
    write_rows(
        tmp_path / "two/train/metadata.csv", "file_name,text", [(write_tone(tmp_path / "two/train/b.wav").name, "b")]
    )
    assert [facts(recording) for recording in read(tmp_path / "one")] == [("test/a.wav", "a", "7", "", "test")]
    assert [facts(recording) for recording in read(tmp_path / "two")] == [("b.wav", "b", "", "", "train")]
    assert kind_of(str(tmp_path / "two")) == "audiofolder"


def test_common_voice(tmp_path: Path) -> None:
    write_tone(tmp_path / "clips/a.mp3.wav")
    header = "client_id,path,sentence,up_votes,locale,segment"
    row = ("f00", "a.mp3.wav", '"Ja", sagte er.', "2", "de", "")
    for name in ("train", "validated"):
        (tmp_path / f"{name}.tsv").write_text("\t".join(header.split(",")) + "\n" + "\t".join(row) + "\n")
    assert kind_of(str(tmp_path)) == "common-voice"
    assert [facts(recording) for recording in read(tmp_path)] == [
        ("a.mp3.wav", '"Ja", sagte er.', "f00", "de", "train")
    ]


def test_a_split_without_a_recording_is_none(tmp_path: Path) -> None:
    write_tone(tmp_path / "clips/a.wav")
    header = "client_id\tpath\tsentence\n"
    for name, rows in (("train", "f00\ta.wav\tja\n"), ("dev", ""), ("test", "")):
        (tmp_path / f"{name}.tsv").write_text(header + rows)
    assert [(kind, [facts(recording)[1] for recording in read(tmp_path, kind=kind)]) for kind in ("common-voice",)] == [
        ("common-voice", ["ja"])
    ]
    (tmp_path / "train.tsv").write_text(header + "f00\tclips/a.wav\tja\n")
    assert [recording.text for recording in read(tmp_path, kind="table")] == ["ja"]
    with pytest.raises(BadInput, match="the table is empty"):
        read(tmp_path / "dev.tsv")


@pytest.mark.parametrize("top", ["", "LibriSpeech"])
def test_librispeech(top: str, tmp_path: Path) -> None:
    chapter = tmp_path / top / "dev-clean/84/121123"
    write_tone(chapter / "84-121123-0000.flac")
    (chapter / "84-121123.trans.txt").write_text("84-121123-0000 GO, DO YOU HEAR\n84-121123-0001 GONE\n")
    first, second = read(tmp_path)
    assert kind_of(str(tmp_path)) == "librispeech"
    assert facts(first) == ("84-121123-0000", "GO, DO YOU HEAR", "84", "en", "validation")
    assert second.exclusion and second.exclusion.reason is ExclusionReason.NOT_THERE


def test_voxpopuli(tmp_path: Path) -> None:
    folder = tmp_path / "transcribed_data/de"
    write_tone(folder / "2009/2009x.ogg")
    columns = "id raw_text normalized_text speaker_id split gender".split()
    rows = [columns, ["2009x", "", 'das "ist" es', "28", "dev", "m"], ["", "kein", "kein", "None", "dev", "m"]]
    (folder / "asr_dev.tsv").write_text("".join("\t".join(row) + "\n" for row in rows))
    first, second = read(tmp_path)
    assert kind_of(str(folder)) == kind_of(str(tmp_path)) == "voxpopuli"
    assert facts(first) == ("2009x", 'das "ist" es', "28", "de", "validation")
    assert (second.speaker, second.exclusion and second.exclusion.reason) == ("", ExclusionReason.NOT_THERE)


def test_a_manifest_of_nemo(tmp_path: Path) -> None:
    write_tone(tmp_path / "a.wav", seconds=4.0)
    common = {"audio_filepath": "a.wav", "text": "hello", "source_lang": "en"}
    manifest = lines(
        tmp_path / "train_manifest.json",
        {**common, "duration": 1.25, "offset": 0.5, "target_lang": "en"},
        {**common, "duration": 2, "target_lang": "it"},
        {**common, "duration": "long"},
    )
    first, second, third = read(manifest)
    assert (kind_of(str(manifest)), facts(first)) == ("nemo", ("a.wav@0.5", "hello", "", "en", "train"))
    assert (first.offset, first.duration, second.duration) == (0.5, 1.25, 2.0)
    reasons = [recording.exclusion and recording.exclusion.reason for recording in (first, second, third)]
    assert reasons == [None, ExclusionReason.TRANSLATION, ExclusionReason.BAD_CELL]


def test_a_data_set_of_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets  # 2 s

    sound = [{"bytes": b"sound", "path": None}]
    columns = {"audio": sound, "transcript": ["hi"], "speaker_id": [3], "locale": [None]}
    split = datasets.Dataset.from_dict(columns).cast_column("audio", datasets.Audio())
    monkeypatch.setattr(datasets, "load_dataset", lambda path, name: {"test.other": split, "invalidated": split})
    (recording,) = read("somebody/speech")
    assert facts(recording) == ("test.other-0", "hi", "3", "", "test")
    assert recording.audio.read() == b"sound"
    monkeypatch.setattr(datasets, "load_dataset", lambda path, name: {"all": split})
    assert facts(read("somebody/speech")[0]) == ("all-0", "hi", "3", "", "")


class Warehouse:
    """A client that holds one table."""

    def list_rows(self, table: str) -> Iterable[Mapping[str, object]]:
        if table != "shop.calls.clips":
            raise RuntimeError("404 Not found: Table")
        yield {"uri": "https://x.example/a.wav", "text": "hello", "speaker": 7}
        yield {"uri": "/etc/hostname", "text": "not from here", "speaker": None}


def test_a_table_of_bigquery() -> None:
    request = ReadRequest("bigquery:shop.calls.clips")
    first, second = read_bigquery(request, Warehouse)
    assert (facts(first), first.audio) == (
        ("https://x.example/a.wav", "hello", "7", "", ""),
        UrlSource("https://x.example/a.wav"),
    )
    assert second.exclusion and second.exclusion.reason is ExclusionReason.OUTSIDE
    with pytest.raises(BadInput, match="404 Not found"):
        list(read_bigquery(ReadRequest("bigquery:shop.calls.none"), Warehouse))


def test_bigquery_without_its_client_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "google.cloud.bigquery", None)
    with pytest.raises(BadInput, match="pip install .*google-cloud-bigquery"):
        list(read_bigquery(ReadRequest("bigquery:shop.calls.clips")))


def test_a_name_may_be_one_of_the_hub_and_a_path_is_none() -> None:
    assert kind_of("owner/name") == "hub"
    for path in ("./gone", "gone.parquet", "gone.csv", "a/b/c", ""):
        with pytest.raises(BadInput, match=r"not there|no source was given"):
            kind_of(path)


@pytest.mark.parametrize(
    "cell",
    [
        "../secret.wav",
        "/etc/hostname",
        "link.wav",
        "inside/../../secret.wav",
        "folder/secret.wav",
        "./folder/../link.wav",
        "%2e%2e/secret.wav",
        "..%2fsecret.wav",
        "file:///etc/hostname",
        "FILE:///etc/hostname",
        "'/etc/hostname'",
    ],
)
def test_nothing_outside_of_the_folder_is_followed(cell: str, tmp_path: Path) -> None:
    secret = write_tone(tmp_path / "secret.wav")
    folder = tmp_path / "table"
    (folder / "inside").mkdir(parents=True)
    (folder / "link.wav").symlink_to(secret)
    (folder / "folder").symlink_to(tmp_path)
    table = write_rows(folder / "all.csv", "audio_path,text", [(cell, "text")])
    (recording,) = read(table)
    assert (recording.audio, recording.exclusion and recording.exclusion.reason) == (
        MissingSource(cell),
        ExclusionReason.OUTSIDE,
    )


def test_a_further_folder_is_followed_if_a_person_names_it(tmp_path: Path) -> None:
    sound = write_tone(tmp_path / "elsewhere/a.wav")
    table = write_rows(tmp_path / "table/all.csv", "audio_path,text", [(sound, "whole"), ("a.wav", "relative")])
    recordings = READERS["table"](ReadRequest(str(table), roots=(tmp_path / "elsewhere",)))
    assert [recording.audio for recording in recordings] == [FileSource(sound.resolve())] * 2


@pytest.mark.parametrize("cell", ["http://x.example/a", "ftp://x/a", "s3://b/a"])
def test_no_scheme_but_https_is_followed(cell: str, tmp_path: Path) -> None:
    (recording,) = read(write_rows(tmp_path / "all.csv", "audio_path,text", [(cell, "text")]))
    assert recording.exclusion and recording.exclusion.reason is ExclusionReason.NOT_HTTPS


def test_a_url_of_a_file_in_the_folder_is_read(tmp_path: Path) -> None:
    sound = write_tone(tmp_path / "my sound.wav")
    (recording,) = read(write_rows(tmp_path / "all.csv", "audio_path,text", [(sound.as_uri(), "text")]))
    assert recording.audio == FileSource(sound.resolve())


def test_a_missing_file_says_as_what_it_was_looked_for(tmp_path: Path) -> None:
    (recording,) = read(write_rows(tmp_path / "all.csv", "audio_path,text", [("my%20clip.wav", "text")]))
    assert recording.exclusion and recording.exclusion.reason is ExclusionReason.NOT_THERE
    assert recording.exclusion.detail == "no such file, nor my clip.wav"


def test_a_split_that_is_none_is_not_trained_on(tmp_path: Path) -> None:
    (recording,) = read(
        write_rows(tmp_path / "all.csv", "audio_path,text,split", [("https://x.example/a", "text", "holdout")])
    )
    assert (
        recording.exclusion
        and recording.exclusion.detail == "column split: 'holdout' is none of train, validation, test"
    )


@pytest.mark.parametrize("cell", ["a\0b", "x" * 300, "x" * 5000, "~root", "/dev/zero", ".", "a/" * 400])
def test_a_cell_that_is_no_file_is_left_out(cell: str, tmp_path: Path) -> None:
    table = lines(tmp_path / "all.jsonl", {"audio_path": cell, "text": "text"})
    (recording,) = read(table)
    assert recording.exclusion is not None


LAYOUTS = {
    "table": ("all.csv", ""),
    "audiofolder": ("metadata.jsonl", ""),
    "common-voice": ("train.tsv", "client_id\tpath\tsentence\n"),
    "librispeech": ("dev-clean/1/2/1-2.trans.txt", ""),
    "voxpopuli": ("de/asr_train.tsv", "id\traw_text\n"),
    "nemo": ("all.json", ""),
    "ljspeech": ("metadata.csv", "a|"),
    "kaldi": ("text", "a "),
    "mls": ("train/transcripts.txt", "1_2_3\t"),
    "fleurs": ("de_de/train.tsv", "1\ta.wav\t"),
    "pairs": ("a.txt", ""),
}
HEADS = ("", "audio_path,text,offset,duration\n", '{"audio_filepath": "', "a.wav\t")


@pytest.mark.parametrize("kind", LAYOUTS)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=25)
@given(head=st.sampled_from(HEADS), data=st.binary(max_size=120) | st.text(max_size=60).map(str.encode))
def test_any_bytes_give_recordings_or_bad_input(kind: str, tmp_path: Path, head: str, data: bytes) -> None:
    name, begin = LAYOUTS[kind]
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes((begin or head).encode() + data)
    check(path if kind in ("table", "nemo") else tmp_path, kind)


values = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.just("\ud800")
cells = st.recursive(values, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(), inner, max_size=2))
keys = st.sampled_from(["audio_filepath", "text", "duration", "offset", "id", "split", "source_lang"])


@pytest.mark.parametrize("kind", ["table", "nemo", "audiofolder"])
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=25)
@given(st.lists(st.dictionaries(keys, cells, min_size=1), min_size=1, max_size=3))
def test_any_json_gives_recordings_or_bad_input(kind: str, tmp_path: Path, records: list[dict[str, object]]) -> None:
    lines(path := tmp_path / "metadata.jsonl", *records)
    check(tmp_path if kind == "audiofolder" else path, kind)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30)
@given(st.binary(max_size=100), st.booleans(), st.booleans())
def test_any_parquet_gives_recordings_or_bad_input(tmp_path: Path, data: bytes, begun: bool, ended: bool) -> None:
    path = tmp_path / "all.parquet"
    path.write_bytes(b"PAR1" * begun + data + b"\x10\0\0\0PAR1" * ended)
    with pytest.raises(BadInput):
        read(path)


def check(source: Path, kind: str) -> None:
    """Whatever was read can be written."""
    try:
        recordings = read(source, kind=kind)
    except BadInput:
        return
    for recording in recordings:
        (
            recording.id.encode(),
            recording.text.encode(),
            recording.shown_source.encode(),
            recording.audio.stamp().encode(),
        )
        assert recording.offset >= 0 and "\n" not in recording.id + recording.text
