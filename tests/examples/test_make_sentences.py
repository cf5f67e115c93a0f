"""The script that makes spoken sentences: texts, splits by speaker, and files as they are announced."""

from __future__ import annotations

import csv
import random
from itertools import islice
from pathlib import Path
from types import ModuleType

import pytest
import soundfile

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
ALL = {"espeak", "flite-slt", "flite-awb", "flite-rms", "pico-US"}
SPLITS = ("train", "validation", "test")


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(EXAMPLES)
    import make_sentences

    return make_sentences


def rows(folder: Path, split: str) -> list[dict[str, str]]:
    with (folder / f"{split}.csv").open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_sentences_have_3_to_12_words_numbers_and_names(script: ModuleType) -> None:
    found = list(islice(script.sentences(random.Random(1)), 1_000))
    assert {len(text.split()) for text in found} == set(range(3, 13))
    assert len(set(found)) > 900
    assert sum(any(word.isdigit() for word in text.split()) for text in found) > 400
    assert sum(bool(set(script.NAMES) & set(text.strip(".").split())) for text in found) > 400


def test_a_plan_depends_on_seed_and_size_alone(script: ModuleType) -> None:
    first, again, other = (script.plan_split("train", 50, seed, ALL) for seed in (0, 0, 1))
    assert [(clip.id, clip.text, clip.voice, clip.pace) for clip in first] == [
        (clip.id, clip.text, clip.voice, clip.pace) for clip in again
    ]
    assert [clip.text for clip in first] != [clip.text for clip in other]


def test_nobody_speaks_in_two_splits(script: ModuleType) -> None:
    planned = {split: script.plan_split(split, 2_000, 0, ALL) for split in SPLITS}
    speakers = [{script.speaker_of(clip.voice) for clip in planned[split]} for split in SPLITS]
    assert not speakers[0] & speakers[1] and not speakers[0] & speakers[2] and not speakers[1] & speakers[2]
    assert {name for name in speakers[2] if not name.startswith("espeak")} == {"awb"}


def test_voices_that_are_not_installed_are_left_out(script: ModuleType) -> None:
    assert {clip.voice.split("-")[0] for clip in script.plan_split("train", 90, 0, {"espeak"})} == {"espeak"}
    assert {clip.voice[:9] for clip in script.plan_split("train", 90, 0, {"flite-slt"})} == {"flite-slt"}
    assert script.plan_split("validation", 90, 0, {"flite-slt"}) == []
    assert "festival-ked" in script.left_out(ALL)


@pytest.mark.slow
def test_a_handful_of_clips(script: ModuleType, tmp_path: Path) -> None:
    if not script.installed_voices():
        pytest.skip("needs a synthesizer: espeak-ng, flite, festival or ttspico")
    script.make(tmp_path / "a", 8, tell=False)
    made = [
        row for split in SPLITS if (tmp_path / "a" / f"{split}.csv").is_file() for row in rows(tmp_path / "a", split)
    ]
    assert len(made) >= 6
    for row in made:
        about = soundfile.info(tmp_path / "a" / row["audio_path"])
        assert about.samplerate == int(row["rate"])
        assert about.duration == pytest.approx(float(row["duration"]), abs=0.1)
        assert about.duration > 0.5
        assert row["snr"] == "" or 5 <= float(row["snr"]) <= 30
    table = (tmp_path / "a" / "train.csv").read_bytes()
    script.make(tmp_path / "b", 8, tell=False)
    assert (tmp_path / "b" / "train.csv").read_bytes() == table
