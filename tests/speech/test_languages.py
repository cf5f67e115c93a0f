"""Clips in several languages: by their table, by choice, and as the model hears them."""

from __future__ import annotations

import shutil
import subprocess
from functools import partial
from pathlib import Path

import pytest
import torch
from tiny_speech import Prepared, tiny_whisper, write_clips, write_csv

from profiles.errors import BadInput
from speech.scoring.error_analysis import by_language
from speech.scoring.word_errors import count_errors, normalizer_for
from speech.whisper import samples
from speech.whisper.model import WhisperModelWrapper
from speech.whisper.task import WhisperTask
from tests.tasks.tiny_tasks import ProfileMaker
from tests.training.group import OneByOne, run_group
from tests.training.memory_exchange import Room, RoomExchange
from training.loop.trainer import Trainer
from training.records.plan import RunPlan
from training.run.local_plan import plan_local_run
from training.run.orders import Control
from training.tasks.outputs.predictions import read_predictions

CODES = ("de", "French", "", "en", "de", "en")


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    """Six clips with a column ``language`` that one of them leaves empty."""
    rows = [(*row, code) for row, code in zip(write_clips(tmp_path, 6), CODES, strict=True)]
    for split in ("train", "validation"):
        write_csv(tmp_path / f"{split}.csv", rows, "id,audio_path,text,language")
    return tmp_path


@pytest.fixture
def prepared(prepared: Prepared, multilingual_whisper: Path, mixed: Path) -> Prepared:
    return partial(prepared, model_path=multilingual_whisper, dataset_path=mixed)


def test_clips_of_some_languages_are_taken(prepared: Prepared) -> None:
    data = prepared(language="en", languages="german, fr").train
    assert [clip.id for clip in data.clips] == ["clip0", "clip1", "clip4"]
    data = prepared(language="en", languages="en").train
    assert [clip.id for clip in data.clips] == ["clip2", "clip3", "clip5"]
    with pytest.raises(BadInput, match="line 4: clip2 has no language"):
        prepared(languages="en")
    none = r"train: no clip is in one of the languages es: they are in en \(3\), de \(2\), fr \(1\)"
    with pytest.raises(BadInput, match=none):
        prepared(language="en", languages="es")


@pytest.mark.slow
def test_what_no_table_says_the_model_hears_once(
    prepared: Prepared, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = prepared(language="auto")
    data = task.train
    model = task.wrapper.build().eval()
    with torch.no_grad():
        features = torch.from_numpy(data.store[2])[None]
        (heard,) = task.wrapper.detect_languages(model, task.wrapper.encode_audio(model, features))
    assert data.languages == ["de", "fr", heard, "en", "de", "en"]
    assert f"of 1 clip without a language the model hears {heard} in 1" in caplog.text
    firsts = task.collate([data[index] for index in range(6)], None)["decoder_input_ids"][:, 1].tolist()
    assert firsts == [task.wrapper.prompt(code)[1] for code in data.languages]

    def refuse(*_: object) -> list[str]:
        raise AssertionError("it listens again")

    monkeypatch.setattr(samples.WhisperModelWrapper, "detect_languages", refuse)
    assert prepared(language="auto").train.languages == data.languages


def test_an_untrained_model_hears_no_language(prepared: Prepared) -> None:
    with pytest.raises(BadInput, match="from scratch cannot tell the language"):
        prepared(language="auto", from_scratch=True)


def test_a_saved_model_keeps_what_it_was_trained_for(prepared: Prepared, tmp_path: Path) -> None:
    task = prepared(language="en", languages="en, de")
    model = task.build_model().eval()
    (tmp_path / "saved").mkdir()
    task.save(model, tmp_path / "saved")
    again = WhisperModelWrapper(task.profile.model.model_copy(update={"model_path": str(tmp_path / "saved")}))
    assert again.generation.trained_languages == ["de", "en"] and again.generation.language is None
    with torch.no_grad():
        codes = again.detect_languages(model, again.encode_audio(model, torch.randn(40, 16, 100)))
    assert set(codes) <= {"de", "en"}


def test_where_words_have_no_spaces_characters_are_counted() -> None:
    said, heard = (normalizer_for("zh")(text) for text in ("今天天气很好", "今天天气不好"))
    errors = count_errors([said], [heard])
    assert (errors["word_edits"], errors["words"]) == (1, 6)


SAID = {"en": ("one", "two", "open"), "de": ("eins", "zwei", "auf")}


@pytest.fixture
def spoken(tmp_path: Path) -> Path:
    """English and German words of a synthesizer."""
    if not shutil.which("espeak-ng"):
        pytest.skip("needs espeak-ng")  # a synthesizer of two languages, which pip cannot install
    (tmp_path / "audio").mkdir()
    rows = []
    for code, words in SAID.items():
        for word in words:
            path = tmp_path / "audio" / f"{code}-{word}.wav"
            subprocess.run(["espeak-ng", "-v", code, "-s", "260", "-w", str(path), word], check=True)
            rows.append((path.stem, f"audio/{path.name}", word, code))
    for split in ("train", "validation"):
        write_csv(tmp_path / f"{split}.csv", rows, "id,audio_path,text,language")
    return tmp_path


@pytest.mark.slow
def test_two_workers_train_on_two_languages(make_profile: ProfileMaker, spoken: Path, tmp_path: Path) -> None:
    model = tiny_whisper(tmp_path / "model", ("en", "de"))
    options = {"max_steps": 3, "batch_size": 2, "eval_before": False, "eval_interval": 0, "long_audio": "cut"}
    profile = make_profile(model_path=model, dataset_path=spoken, device="cpu", **options)
    plan = plan_local_run(profile, 2)
    members = train(plan, tmp_path / "run")
    assert torch.equal(*(torch.cat([one.reshape(-1) for one in member.parameters]) for member in members))
    parts = by_language(read_predictions(tmp_path / "run" / "evaluation" / "predictions.csv"))
    assert [(part.name, part.recordings) for part in parts] == [("de", 3), ("en", 3)]
    assert (tmp_path / "run" / "model" / "config.json").is_file()


class Hearing(OneByOne, WhisperTask):
    """A member's task."""


def train(plan: RunPlan, folder: Path) -> list[Trainer]:
    """Train two members in this process, a thread each."""
    room = Room(2, lambda name: ())
    found = run_group(plan, lambda rank: RoomExchange(room, rank), lambda _: Hearing(plan.profile), folder,
                      lambda _: Control())  # fmt: skip
    assert [member.error for member in found.values()] == [None, None]
    return [found[rank].trainer for rank in range(2)]


@pytest.mark.parametrize(("text", "words"), [("Open it...", "open it"), ("... !?", ""), ("It is 3.5 .", "it is 3.5")])
def test_dots_at_the_end_of_an_english_text_are_no_word(text: str, words: str) -> None:
    assert normalizer_for("en")(text) == words
