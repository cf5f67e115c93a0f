"""What a model may not write although its texts hold it, and what no text may write: tokens of the model's own."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_speech import Prepared, write_clips, write_csv
from transformers import GenerationConfig

from profiles.schema import ModelSettings
from speech.data.speech_dataset import read_speech
from speech.whisper.model import WhisperModelWrapper
from speech.whisper.suppression import unsuppress
from training.tasks.data_files.plain_text import plain_text


@pytest.fixture
def forbidding(english_whisper: Path, tmp_path: Path) -> Path:
    """A model that may write none of ``:`` ``(`` ``"``, and may neither begin with a space nor write nothing."""
    folder = tmp_path / "forbidding"
    shutil.copytree(english_whisper, folder)
    wrapper = WhisperModelWrapper(ModelSettings(model_path=str(english_whisper)))
    tokens = wrapper.tokenizer.get_vocab()
    settings = json.loads((folder / "generation_config.json").read_text())
    settings["suppress_tokens"] = sorted(tokens[name] for name in ':("')
    settings["begin_suppress_tokens"] = [tokens["Ġ"], wrapper.tokenizer.eos_token_id]
    (folder / "generation_config.json").write_text(json.dumps(settings))
    return folder


def rows_of(folder: Path, *texts: str) -> None:
    rows = [(name, path, text, "" if text else "yes") for (name, path, _), text in zip(write_clips(folder, 9), texts)]
    write_csv(folder / "train.csv", rows, "id,audio_path,text,silence")


def test_what_training_texts_hold_may_be_written_and_is_told(
    prepared: Prepared, forbidding: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows_of(tmp_path, "at 7:20", "at 7:45 (noon", "two", "three")
    shutil.copy(tmp_path / "train.csv", tmp_path / "validation.csv")
    task = prepared(model_path=forbidding, dataset_path=tmp_path)
    told = (
        "forbid it to write : (, which 2 training transcripts of 4 hold: they allow it from now on, in the model saved"
    )
    assert told in caplog.text.replace("( :", ": (").replace("4 training transcripts", "2 training transcripts")
    (tmp_path / "saved").mkdir()
    task.save(task.build_model(), tmp_path / "saved")
    saved = json.loads((tmp_path / "saved/generation_config.json").read_text())
    assert saved["suppress_tokens"] == [task.wrapper.tokenizer.get_vocab()['"']]


@pytest.mark.slow
def test_an_adapter_keeps_what_it_may_write(prepared: Prepared, forbidding: Path, tmp_path: Path) -> None:
    rows_of(tmp_path, "a:b", "two", "three")
    shutil.copy(tmp_path / "train.csv", tmp_path / "validation.csv")
    task = prepared(model_path=forbidding, dataset_path=tmp_path, tuning="lora", lora_merge=False)
    (tmp_path / "saved").mkdir()
    task.save(task.build_model(), tmp_path / "saved")
    again = WhisperModelWrapper(ModelSettings(model_path=str(tmp_path / "saved")))
    assert again.tokenizer.get_vocab()[":"] not in again.generation.suppress_tokens


def test_silence_is_learnt_as_a_text_that_ends_at_once(
    prepared: Prepared, forbidding: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows_of(tmp_path, "one", "", "three")
    shutil.copy(tmp_path / "train.csv", tmp_path / "validation.csv")
    task = prepared(model_path=forbidding, dataset_path=tmp_path)
    end = task.wrapper.tokenizer.eos_token_id
    assert task.train.tokens[1] == [end]
    assert end not in (task.wrapper.generation.begin_suppress_tokens or [])
    assert "forbid it to write nothing, which" in caplog.text
    labels = task.collate([task.train[1]], None)["labels"][0]
    assert labels[labels != -100].tolist() == [end]


@given(st.lists(st.lists(st.integers(0, 20), min_size=1)), st.sets(st.integers(0, 20)), st.sets(st.integers(0, 20)))
def test_all_that_texts_hold_is_lifted_and_nothing_else(
    texts: list[list[int]], never: set[int], not_first: set[int]
) -> None:
    generation = GenerationConfig(suppress_tokens=sorted(never), begin_suppress_tokens=sorted(not_first))
    lifted = unsuppress(generation, texts)
    used, firsts = {token for text in texts for token in text}, {text[0] for text in texts}
    assert set(generation.suppress_tokens or []) == never - used
    assert set(generation.begin_suppress_tokens or []) == not_first - firsts
    assert set().union(*lifted) == (never & used) | (not_first & firsts)


TOKENS = (
    "Hello<|endoftext|> there",
    "<|startoftranscript|><|notimestamps|> Hello there",
    "<|0.00|> Hello there<|2.40|>",
)


@pytest.mark.parametrize("text", TOKENS)
def test_tokens_of_models_in_transcripts_are_no_labels(
    text: str, tmp_path: Path, english_whisper: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows_of(tmp_path, text)
    (clip,) = read_speech(str(tmp_path))["train"]
    assert clip.text == "Hello there"
    assert "train.csv: 1 transcript with <|" in caplog.text
    wrapper = WhisperModelWrapper(ModelSettings(model_path=str(english_whisper)))
    special = {token for name, token in wrapper.tokenizer.get_vocab().items() if name.startswith("<|")}
    assert special.isdisjoint(wrapper.tokenise([text])[0][:-1])


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("Tom &amp; Jerry&#39;s &lt;3", "Tom & Jerry's <3"),
        ("AT&T; R&D;", "AT&T; R&D;"),
        ("a\u00a0b\u2003c\r\n d\u3000e", "a b c d e"),
        ("\u200fשלום\u200e \u202babc\u202c", "שלום abc"),
        ("zero\u200bwidth co\u00adop \ufeffx", "zerowidth coop x"),
        ("می\u200cخواهم क्\u200dष", "می\u200cخواهم क्\u200dष"),
        ("5 < 6 |> 2", "5 < 6 |> 2"),
    ],
)
def test_what_nobody_says_or_sees_is_no_part_of_a_transcript(text: str, plain: str) -> None:
    assert plain_text(text) == plain
