"""Splits: nobody is in two, the same every time, and the source's own are kept."""

from __future__ import annotations

from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from speech.recordings.dividing import Division, HeldOutShares, divide
from speech.recordings.recording import MissingSource, Recording


def clip(number: int, speaker: str = "", split: str = "", file: str = "") -> Recording:
    return Recording(f"c{number}", MissingSource(file or f"{number}.wav"), "text", f"line {number}", speaker, "", split)


def sizes(recordings: list[Recording]) -> dict[str, int]:
    splits = [recording.split for recording in recordings]
    return {split: splits.count(split) for split in ("train", "validation", "test")}


@settings(max_examples=60)
@given(st.lists(st.sampled_from("abcdefghij"), min_size=3, max_size=60))
def test_no_speaker_is_in_two_splits_and_the_order_does_not_count(speakers: list[str]) -> None:
    clips = [clip(number, speaker) for number, speaker in enumerate(speakers)]
    if len(set(speakers)) < 3:
        return
    recordings = divide(clips, HeldOutShares()).recordings
    splits: dict[str, set[str]] = defaultdict(set)
    for recording in recordings:
        splits[recording.speaker].add(recording.split)
    assert all(len(speaker_splits) == 1 for speaker_splits in splits.values())
    assert all(sizes(recordings).values())
    from_reversed = divide(clips[::-1], HeldOutShares()).recordings
    assert {recording.id: recording.split for recording in from_reversed} == {
        recording.id: recording.split for recording in recordings
    }


def test_without_speakers_clips_are_divided_and_it_is_said() -> None:
    division = divide([clip(number) for number in range(40)], HeldOutShares())
    assert sizes(division.recordings) == {"train": 32, "validation": 4, "test": 4}
    assert "names no speakers" in division.notes[0]


@pytest.mark.parametrize(
    ("clips", "share", "proposed"),
    [(58, 0.1, "only 6 clips are held out for validation, too few to show small gains; --validation 0.3 holds out "
               "about 17"),
     (150, 0.1, "--validation 0.2 holds out about 30"), (58, 0.3, ""), (20, 0.1, ""), (200, 0.1, ""), (58, 0.0, "")],
)  # fmt: skip
def test_where_few_clips_are_held_out_the_option_for_more_is_named(clips: int, share: float, proposed: str) -> None:
    notes = divide([clip(number) for number in range(clips)], HeldOutShares(validation=share)).notes
    assert any(proposed in note for note in notes[1:]) if proposed else len(notes) == 1


def speakers_of(division: Division) -> dict[str, set[str]]:
    """Return in which splits each speaker is."""
    splits: dict[str, set[str]] = defaultdict(set)
    for recording in division.recordings:
        splits[recording.speaker].add(recording.split)
    return splits


@pytest.mark.parametrize("names", ["abc", "xyz", "mno", "pqr", "uvw", "ijk"])
def test_who_speaks_most_of_few_is_trained_on(names: str) -> None:
    many, *few = names
    clips = [clip(number, many) for number in range(30)] + [
        clip(30 + number, speaker) for number, speaker in enumerate(few)
    ]
    division = divide(clips, HeldOutShares())
    assert sizes(division.recordings) == {"train": 30, "validation": 1, "test": 1}
    assert division.notes == ["divided by speaker (3): no speaker is in two splits"]


def test_three_speakers_who_speak_as_much_leave_little_to_train_on_and_it_is_said() -> None:
    division = divide([clip(number, "abc"[number % 3]) for number in range(30)], HeldOutShares())
    assert sizes(division.recordings) == {"train": 10, "validation": 10, "test": 10}
    assert division.notes[1] == (
        "only 10 of 30 clips are left to train on, since whole speakers are held out; --test 0 or more speakers help"
    )


def test_two_speakers_are_enough_for_two_splits() -> None:
    clips = [clip(number, "a" if number < 15 else "b") for number in range(20)]
    division = divide(clips, HeldOutShares(validation=0.1, test=0.0))
    assert speakers_of(division) == {"a": {"train"}, "b": {"validation"}}


@pytest.mark.parametrize(
    ("names", "note"),
    [
        ("a", "divided by clip: 1 speaker is too few, so the same voice is in all splits"),
        ("ab", "divided by clip: 2 speakers are too few, so the same voices are in all splits"),
    ],
)
def test_fewer_speakers_than_splits_are_in_all_of_them(names: str, note: str) -> None:
    division = divide([clip(number, names[number % len(names)]) for number in range(20)], HeldOutShares())
    assert sizes(division.recordings) == {"train": 16, "validation": 2, "test": 2}
    assert division.notes == [note]


def test_one_speaker_is_divided_by_file_where_there_are_enough() -> None:
    division = divide([clip(number, "a", file=f"{number // 10}.wav") for number in range(60)], HeldOutShares())
    of_file = {
        number: {recording.split for recording in division.recordings[10 * number : 10 * number + 10]}
        for number in range(6)
    }
    assert all(len(splits) == 1 for splits in of_file.values()) and all(sizes(division.recordings).values())
    assert division.notes[0] == "divided by file: 1 speaker is too few, so the same voice is in all splits"


@pytest.mark.parametrize("speaker", ["", "a"])
def test_two_clips_are_too_few_to_hold_one_out(speaker: str) -> None:
    division = divide([clip(number, speaker) for number in range(2)], HeldOutShares())
    assert division.notes == ["2 clips are too few to hold any out: all are for training"]


def test_clips_of_one_file_stay_together() -> None:
    recordings = divide([clip(number, file=f"{number // 10}.wav") for number in range(60)], HeldOutShares()).recordings
    of_file = {
        number: {recording.split for recording in recordings[10 * number : 10 * number + 10]} for number in range(6)
    }
    assert all(len(splits) == 1 for splits in of_file.values()) and all(sizes(recordings).values())


def test_splits_of_the_source_are_kept_and_shared_speakers_told() -> None:
    clips = [clip(0, "a", "train"), clip(1, "a", "test"), clip(2, "b", "validation")]
    division = divide(clips, HeldOutShares())
    assert division.recordings == clips
    assert division.notes[-1].startswith("1 speaker is in training and in another split")


def test_validation_comes_out_of_training_where_there_is_none() -> None:
    clips = [clip(number, f"p{number % 5}", "test" if number < 10 else "train") for number in range(60)]
    division = divide(clips, HeldOutShares()).recordings
    assert sizes(division) == {"train": 40, "validation": 10, "test": 10}
    assert {recording.id for recording in division if recording.split == "test"} == {
        f"c{number}" for number in range(10)
    }


@pytest.mark.parametrize("count", [1, 2])
def test_too_few_clips_are_all_for_training(count: int) -> None:
    assert sizes(divide([clip(number) for number in range(count)], HeldOutShares()).recordings)["train"] == count


def test_nothing_is_held_out_where_no_share_is_asked_for() -> None:
    division = divide([clip(number) for number in range(9)], HeldOutShares(0.0, 0.0)).recordings
    assert sizes(division) == {"train": 9, "validation": 0, "test": 0}
