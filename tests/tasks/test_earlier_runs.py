"""Runs of a Whisper that an earlier version began."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_speech import ProfileMaker, silent

from profiles.errors import BadInput
from training import same_data
from training.batches import Samples
from training.same_data import check_unchanged, describe
from training.tasks.whisper.samples import SpeechSample
from training.tasks.whisper.task import WhisperTask

Held = Callable[[WhisperTask, SpeechSample], dict[str, Any]]


def whole_window(task: WhisperTask, sample: SpeechSample) -> dict[str, Any]:
    """What a sample held before windows followed the clips."""
    window = task.wrapper.log_mel.fill(sample.features, sample.silence)
    return {
        "features": window,
        "tokens": sample.tokens,
        "text": sample.text,
        "language": sample.language,
        "longest": sample.longest,
    }


def cut_window(task: WhisperTask, sample: SpeechSample) -> dict[str, Any]:
    """What it held when they did, and all of that was compared."""
    return dataclasses.asdict(sample)


@pytest.fixture
def task(make_profile: ProfileMaker, english_whisper: Path, speech_folder: Path) -> WhisperTask:
    task = WhisperTask(make_profile(model_path=str(english_whisper), dataset_path=str(speech_folder)))
    task.prepare(silent)
    return task


def described(task: WhisperTask) -> same_data.Description:
    return describe(task, task.build_model(), Samples(task, 1), 1, lambda text: None, "float32")


def as_then(task: WhisperTask, held: Held, **changes: object) -> dict[str, Any]:
    """What an earlier version wrote down of the same data, whose first training sample had ``changes``."""
    found = described(task).model_dump()
    for split, samples in {"train": task.train, **task.evaluation}.items():
        for index in found["splits"][split]["looks"]:
            change = changes if (split, index) == ("train", "0") else {}
            found["splits"][split]["looks"][index] = same_data._look({**held(task, samples[int(index)]), **change})
    del found["form"], found["precision"]
    return found


@pytest.mark.parametrize("held", [whole_window, cut_window])
def test_it_goes_on_with_the_same_recordings(task: WhisperTask, held: Held) -> None:
    check_unchanged(as_then(task, held), described(task), "the run began with")


@pytest.mark.parametrize("change", [{"text": "another"}, {"tokens": [1, 2, 3]}])
@pytest.mark.parametrize("held", [whole_window, cut_window])
def test_it_does_not_with_others(task: WhisperTask, held: Held, change: dict[str, object]) -> None:
    then = as_then(task, held, **change)
    with pytest.raises(BadInput, match="sample 0 of train is different.*where an earlier version .* began the run"):
        check_unchanged(then, described(task), "the run began with")


def test_what_it_wrote_down_and_nobody_understands_is_said() -> None:
    with pytest.raises(BadInput, match="what the run recorded of its data cannot be read.*start a new run"):
        check_unchanged({"splits": 3}, same_data.Description(splits={}, shapes="", frozen=""), "the run began with")
