"""The shipped recordings and the tiny Whisper's folder fit each other, and are what their README says."""

from __future__ import annotations

import csv
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import soundfile
from transformers import (
    GenerationConfig,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
    WhisperProcessor,
    WhisperTokenizer,
    pipeline,
)

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
DATA = EXAMPLES / "spoken_commands"
MODEL = EXAMPLES / "tiny_whisper"
SPLITS = ("train", "validation", "test")
COLUMNS = ["id", "audio_path", "text", "duration", "voice", "speaker"]

Rows = dict[str, list[dict[str, str]]]


@pytest.fixture(scope="module")
def rows() -> Rows:
    found: Rows = {}
    for split in SPLITS:
        with (DATA / f"{split}.csv").open(newline="", encoding="utf-8") as file:
            found[split] = list(csv.DictReader(file))
    return found


@pytest.fixture(scope="module")
def tokenizer() -> WhisperTokenizer:
    return WhisperTokenizer.from_pretrained(MODEL)


def voices(rows: Rows, split: str) -> set[str]:
    return {row["voice"] for row in rows[split]}


def timbre(row: dict[str, str]) -> str:
    """The person, or the family of espeak-ng's voices, without accent, number or vocal-tract factor."""
    return re.sub(r"(?<=\w\w)\d+$", "", row["speaker"].removeprefix("espeak-"))


def test_thousands_of_clips_by_a_hundred_voices(rows: Rows) -> None:
    assert len(rows["train"]) > 3_000
    assert len(rows["validation"]) >= 200
    assert len(rows["test"]) >= 400
    assert len(voices(rows, "train")) >= 100
    assert len(voices(rows, "test")) >= 15


def test_columns_and_ids(rows: Rows) -> None:
    every = [row for split in SPLITS for row in rows[split]]
    assert all(list(row) == COLUMNS for row in every)
    assert len({row["id"] for row in every}) == len(every)


def test_no_timbre_is_in_two_splits(rows: Rows) -> None:
    train, validation, test = ({timbre(row) for row in rows[split]} for split in SPLITS)
    assert not train & test
    assert not train & validation
    assert not validation & test


def test_a_recorded_person_is_in_the_test_split_alone(rows: Rows) -> None:
    assert {row["speaker"] for row in rows["test"] if "espeak" not in row["voice"]} == {"awb"}


def test_every_test_voice_has_its_even_share(rows: Rows) -> None:
    clips = Counter(row["speaker"] for row in rows["test"])
    assert len(clips) == 15
    assert max(clips.values()) - min(clips.values()) <= 1


def test_every_file_is_readable_and_fits_the_window(rows: Rows) -> None:
    for split in SPLITS:
        for row in rows[split]:
            about = soundfile.info(DATA / row["audio_path"])
            assert (about.samplerate, about.channels) == (16_000, 1), row["id"]
            assert about.duration == pytest.approx(float(row["duration"]), abs=0.01), row["id"]
            assert about.duration <= 2.0, row["id"]


def test_clips_hold_sound(rows: Rows) -> None:
    for row in rows["test"][::10]:
        samples, _ = soundfile.read(DATA / row["audio_path"], dtype="float32")
        assert np.abs(samples).max() > 0.05, row["id"]


def test_no_file_is_left_over(rows: Rows) -> None:
    listed = {row["audio_path"] for split in SPLITS for row in rows[split]}
    assert {path.relative_to(DATA).as_posix() for path in DATA.rglob("*.opus")} == listed


def test_size_is_within_8_megabytes() -> None:
    assert sum(path.stat().st_size for path in DATA.rglob("*") if path.is_file()) <= 8_000_000


def test_every_word_is_one_token(rows: Rows, tokenizer: WhisperTokenizer) -> None:
    words = {word for split in SPLITS for row in rows[split] for word in row["text"].split()}
    assert len(words) >= 20
    assert all(len(tokenizer(word, add_special_tokens=False).input_ids) == 1 for word in words)


def test_every_word_is_in_every_split(rows: Rows) -> None:
    train, validation, test = ({word for row in rows[split] for word in row["text"].split()} for split in SPLITS)
    assert train == validation == test


def test_transcripts_come_back_from_the_tokenizer(rows: Rows, tokenizer: WhisperTokenizer) -> None:
    texts = [row["text"] for row in rows["test"]] + ["Anything else, 42 \N{SNOWMAN}"]
    back = tokenizer.batch_decode(tokenizer(texts).input_ids, skip_special_tokens=True)
    assert [text.strip() for text in back] == texts


def test_prompt_of_tokenizer_and_generation_agree(tokenizer: WhisperTokenizer) -> None:
    settings = GenerationConfig.from_pretrained(MODEL)
    prompt = tokenizer("one").input_ids[:4]
    assert tokenizer.convert_ids_to_tokens(prompt) == [
        "<|startoftranscript|>",
        "<|en|>",
        "<|transcribe|>",
        "<|notimestamps|>",
    ]
    assert prompt == [
        settings.decoder_start_token_id,
        settings.lang_to_id["<|en|>"],
        settings.task_to_id["transcribe"],
        settings.no_timestamps_token_id,
    ]


def test_shape_fits_front_end_and_tokenizer(tokenizer: WhisperTokenizer) -> None:
    config = WhisperConfig.from_pretrained(MODEL)
    features = WhisperFeatureExtractor.from_pretrained(MODEL)
    assert config.vocab_size == len(tokenizer)
    assert config.num_mel_bins == features.feature_size
    assert config.max_source_positions * 2 == features.nb_max_frames
    assert WhisperForConditionalGeneration(config).num_parameters() < 1_000_000


def test_pipeline_opens_the_folder_once_it_has_weights(tmp_path: Path, rows: Rows) -> None:
    model = WhisperForConditionalGeneration(WhisperConfig.from_pretrained(MODEL))
    model.generation_config = GenerationConfig.from_pretrained(MODEL)
    model.save_pretrained(tmp_path)
    WhisperProcessor.from_pretrained(MODEL).save_pretrained(tmp_path)
    recognizer = pipeline("automatic-speech-recognition", model=str(tmp_path))
    samples, rate = soundfile.read(DATA / rows["test"][0]["audio_path"], dtype="float32")
    assert isinstance(recognizer({"raw": samples, "sampling_rate": rate})["text"], str)


@pytest.mark.parametrize("shape", ["tiny", "scratch"])
def test_model_folder_is_what_its_script_makes(tmp_path: Path, shape: str) -> None:
    command = [sys.executable, str(EXAMPLES / "make_tiny_whisper.py"), "--shape", shape, "--output", str(tmp_path)]
    subprocess.run(command, check=True, capture_output=True)
    made = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert made == {path.name: path.read_bytes() for path in (EXAMPLES / f"{shape}_whisper").iterdir()}


@pytest.mark.skipif(not shutil.which("espeak-ng"), reason="needs espeak-ng")
def test_script_speaks_the_clips_of_the_table(monkeypatch: pytest.MonkeyPatch, rows: Rows) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    import make_spoken_commands as script

    planned = script.plan_split("validation", script.CLIPS["validation"])
    assert [(clip.id, clip.text, clip.voice) for clip in planned] == [
        (row["id"], row["text"], row["voice"]) for row in rows["validation"]
    ]
    clip = script.speak(planned[:1], script.LONGEST)[0]
    assert len(clip.speech) / script.RATE == pytest.approx(float(rows["validation"][0]["duration"]), abs=0.15)
