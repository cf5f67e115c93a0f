"""``blacklist``: what a model cannot learn is found, and nothing that is protected."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from profiles.errors import BadInput
from speech.data.patches import Patch, Patches
from speech.data.speech_clips import Clip, FileSource
from speech.data.speech_dataset import read_speech
from speech.whisper.cleaning.blacklist import (
    Bounds,
    ListeningPass,
    SuspectClip,
    choose,
    find_suspects,
    plan_passes,
    write_blacklist,
)
from tests.tasks.tiny_tasks import ProfileMaker, silent


def doubt(name: str, *wers: float, margin: float = 9.0) -> SuspectClip:
    clip, count = Clip(name, FileSource(Path("x.wav")), "a text", "here"), len(wers)
    return SuspectClip(clip, ("heard",) * count, wers, (margin,) * count, 1.0, False)


def names(found: Sequence[SuspectClip]) -> list[str]:
    return [one.clip.id for one in found]


def test_only_what_is_wrong_again_and_again_is_listed_the_worst_first() -> None:
    found = [doubt("a", 0.6, 0.6, 0.1), doubt("b", 0, 0, 2), doubt("c", 1, 1, 1), doubt("d", 0.5, 0.4, 0.5)]
    assert names(choose(found, Bounds(wer=0.5, repeated=2, most=1), Patches())) == ["c", "a", "d"]
    assert names(choose(found, Bounds(wer=0.5, repeated=3, most=1), Patches())) == ["c"]


def test_a_transcript_that_is_nearly_as_likely_as_what_was_heard_is_none_of_them() -> None:
    found = [doubt("hard", 1, margin=0.5), doubt("wrong", 1, margin=3.0)]
    assert names(choose(found, Bounds(margin=2.0, most=1), Patches())) == ["wrong"]


def test_what_is_protected_in_training_is_never_listed() -> None:
    lines = {name: [Patch("protect", name, split, "", "p, line 2")] for name, split in (("a", ""), ("b", "test"))}
    found = choose([doubt("a", 1), doubt("b", 1)], Bounds(repeated=1, most=1), Patches(lines))
    assert names(found) == ["b"]


def test_many_of_them_hint_at_the_model() -> None:
    found = [doubt(str(number), 1.0 * (number < 3)) for number in range(20)]
    with pytest.raises(BadInput, match=r"3 of 20 samples \(15 %\) .* more than 10 %.*not learnt enough"):
        choose(found, Bounds(repeated=1, most=0.1), Patches())


def test_models_listen_first_then_noise_makes_up_the_number() -> None:
    one, two = Path("one"), Path("two")
    assert plan_passes([one, two], 4) == [
        ListeningPass(one),
        ListeningPass(two),
        ListeningPass(one, 0),
        ListeningPass(one, 1),
    ]
    assert plan_passes([one, two], 1) == [ListeningPass(one)]


@pytest.mark.slow
def test_a_wrong_transcript_is_found_and_left_out_by_the_file(
    trained_whisper: Path, make_profile: ProfileMaker, misheard: Path
) -> None:
    profile = make_profile(dataset_path=str(misheard))
    found = find_suspects(profile, plan_passes([trained_whisper / "model"], 2), "cpu", 3, silent)
    bounds = Bounds(most=0.5, margin=1.0)
    (wrong,) = choose(found, bounds, Patches())
    assert (wrong.clip.id, wrong.heard[0], wrong.wers[0], wrong.hint) == ("clip1", "two", 1.0, "")
    path = write_blacklist(str(misheard), "", [wrong], bounds)
    assert [clip.id for clip in read_speech(str(misheard))["train"]] == ["clip0", "clip2", "clip3"]
    assert len(read_speech(str(misheard))["validation"]) == 4
    assert write_blacklist(str(misheard), "", [wrong], bounds) != path
    shutil.rmtree(misheard / "patches")
    assert len(read_speech(str(misheard))["train"]) == 4
