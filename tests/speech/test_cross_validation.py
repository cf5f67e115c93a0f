"""Folds of the samples: each is judged once a round, by a model that does not know it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from profiles.errors import BadInput
from speech.data.speech_clips import Clip, FileSource
from speech.data.speech_dataset import read_speech
from speech.whisper.cleaning.cross_validation import (
    Fold,
    judge_fold,
    plan_folds,
    profile_of,
    read_results,
    training_clips,
    write_data,
)
from tests.tasks.tiny_tasks import ProfileMaker, silent


def clips(count: int) -> list[Clip]:
    return [Clip(f"clip{number}", FileSource(Path("x.wav")), "a text", "here") for number in range(count)]


def held(folds: list[Fold]) -> list[list[str]]:
    return [[clip.id for clip in fold.held] for fold in folds]


def test_each_sample_is_held_out_once_a_round_and_trained_on_in_all_other_folds(
    tmp_path: Path, make_profile: ProfileMaker
) -> None:
    known = clips(11)
    first, second = plan_folds(tmp_path, make_profile(), known, 3, 2)
    for folds in (first, second):
        assert sorted(name for names in held(folds) for name in names) == sorted(clip.id for clip in known)
        assert {len(fold.held) for fold in folds} == {3, 4}
        assert all({*fold.held}.isdisjoint(fold.others) and len(fold.held + fold.others) == 11 for fold in folds)
    assert held(first) != held(second)


def test_other_texts_or_settings_are_judged_anew(tmp_path: Path, make_profile: ProfileMaker) -> None:
    known = clips(4)
    other = [*known[:3], Clip("clip3", FileSource(Path("x.wav")), "another", "here")]
    profiles = make_profile(), make_profile(learning_rate=1e-3)
    planned = [plan_folds(tmp_path, profile, some, 2, 1) for profile in profiles for some in (known, other)]
    assert len({folds[0][0].folder for folds in planned}) == 4
    assert plan_folds(tmp_path, make_profile(output_dir="elsewhere"), known, 2, 1) == planned[0]


def test_few_samples_cannot_be_divided(tmp_path: Path, make_profile: ProfileMaker) -> None:
    with pytest.raises(BadInput, match="3 samples cannot be divided into 2 folds") as none:
        plan_folds(tmp_path, make_profile(), clips(3), 2, 1)
    assert none.value.hint == "pass --folds 0: nothing is trained"
    with pytest.raises(BadInput, match="5 samples cannot be divided into 4 folds") as fewer:
        plan_folds(tmp_path, make_profile(), clips(5), 4, 1)
    assert fewer.value.hint == "pass --folds 2 or less, or add samples"


@pytest.mark.slow
def test_recordings_that_the_run_bore_broken_end_no_fold(
    trained_whisper: Path, tmp_path: Path, make_profile: ProfileMaker
) -> None:
    data = tmp_path / "data"
    shutil.copytree(trained_whisper, data, ignore=shutil.ignore_patterns("model", "base", "cache"))
    profile = make_profile(dataset_path=str(data), max_broken_share=0.5)
    ((whole, part),) = plan_folds(tmp_path / "folds", profile, training_clips(profile), 2, 1)
    for clip in part.held:
        assert isinstance(clip.audio, FileSource)
        clip.audio.path.write_text("no sound")
    strict = make_profile(dataset_path=str(data), max_broken_share=0.01)
    assert profile_of(whole, strict, 1).data.max_broken_share == 1
    for fold in (whole, part):
        write_data(fold)
        judge_fold(fold, strict, trained_whisper / "model", "cpu", 4, silent)
    assert {one.clip.id for one in read_results([[whole, part]])} == {clip.id for clip in whole.held}


@pytest.mark.slow
def test_a_fold_trains_as_many_epochs_on_the_others_alone(
    trained_whisper: Path, tmp_path: Path, make_profile: ProfileMaker
) -> None:
    options = {"max_steps": 100, "early_stopping_patience": 3, "eval_interval": 5, "pseudo_share": 0.5}
    profile = make_profile(dataset_path=str(trained_whisper), **options)
    ((fold, _),) = plan_folds(tmp_path, profile, training_clips(profile), 2, 1)
    write_data(fold)
    own = profile_of(fold, profile, 2)
    splits = read_speech(own.data.dataset_path)
    assert [clip.id for clip in splits["train"]] == [clip.id for clip in fold.others]
    assert [clip.id for clip in splits["validation"]] == [clip.id for clip in fold.held]
    assert (own.training.max_steps, own.run.workers, own.data.pseudo_share) == (50, 2, 0)
    assert (own.evaluation.early_stopping_patience, own.evaluation.eval_interval) == (0, 0)


@pytest.mark.slow
def test_what_was_heard_is_kept_and_the_fold_goes(
    trained_whisper: Path, misheard: Path, tmp_path: Path, make_profile: ProfileMaker
) -> None:
    profile = make_profile(dataset_path=str(misheard))
    planned = plan_folds(tmp_path / "folds", profile, training_clips(profile), 2, 1)
    for fold in planned[0]:
        write_data(fold)
        judge_fold(fold, profile, trained_whisper / "model", "cpu", 4, silent)
        assert fold.result.is_file()
        assert not fold.folder.exists()
    found = {one.clip.id: one for one in read_results(planned)}
    assert (found["clip1"].heard, found["clip1"].wer) == (("two",), 1.0)
    assert found["clip1"].margin > 1 > found["clip0"].margin
    planned[0][0].result.write_text("[]{")
    with pytest.raises(BadInput, match="not what was written here"):
        read_results(planned)
