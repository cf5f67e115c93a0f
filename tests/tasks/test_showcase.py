"""By which rule samples are shown, and the file that holds them."""

from __future__ import annotations

from pathlib import Path

import pytest

from training.tasks.outputs.predictions import Prediction
from training.tasks.outputs.showcase import (
    Sample,
    SampleOutput,
    Showcase,
    read_showcase,
    showcase_of_items,
    showcase_of_texts,
)


def clips(**edits: int) -> list[Prediction]:
    """Clips of four words each by name, with so many of them wrong."""
    said = "open the red door"
    return [Prediction(name, "", said, "x", said, "x", wrong, 4, 0, 1) for name, wrong in edits.items()]


def silent(heard: str) -> Prediction:
    return Prediction("silent", "", "", heard, "", heard, len(heard.split()), 0, 0, 0)


def chosen(before: list[Prediction], after: list[Prediction]) -> dict[str, str]:
    found = showcase_of_texts("test", 7, before, after)
    return {one.why: one.id for one in found.samples} if found else {}


def test_the_most_improved_the_middle_and_the_worst_clip_are_shown() -> None:
    before, after = clips(a=4, b=4, c=4, d=2, e=1), clips(a=3, b=0, c=4, d=1, e=1)
    found = chosen(before, after)
    assert found == {"improved most": "b", "middle of the others": "e", "most errors after training": "c"}
    showcase = showcase_of_texts("test", 7, before, after)
    assert showcase is not None and "Of 5 held-out clips" in showcase.rule
    assert [(one.first, one.last) for one in showcase.samples] == [(1.0, 0.0), (0.25, 0.25), (1.0, 1.0)]


def test_a_sentence_put_right_is_shown_before_one_word_that_was_three() -> None:
    word = [Prediction("w", "", "no", "x", "no", "x", wrong, 1, 0, 1) for wrong in (3, 0)]
    before, after = [word[0], *clips(a=3)], [word[1], *clips(a=0)]
    assert chosen(before, after) == {"improved most": "a", "none has an error after training": "w"}


def test_fewer_than_three_clips_are_shown_as_they_are() -> None:
    assert chosen(clips(a=4), clips(a=0)) == {"improved most": "a"}
    assert chosen(clips(a=4, b=1), clips(a=0, b=1)) == {"improved most": "a", "most errors after training": "b"}
    assert chosen([], clips(a=0)) == chosen(clips(b=1), clips(a=0)) == {}


def test_no_clip_is_called_improved_that_is_not() -> None:
    assert chosen(clips(a=0, b=1), clips(a=2, b=2)) == {"none improved": "b", "most errors after training": "a"}


def test_words_that_are_heard_in_silence_are_errors() -> None:
    found = showcase_of_texts("test", 7, [silent("thank you")], [silent("")])
    assert found is not None and [(one.why, one.first, one.last) for one in found.samples] == [("improved most", 2, 0)]


def test_one_word_heard_as_two_is_not_more_than_all_wrong() -> None:
    before, after = [*clips(a=4), silent("thank you")], [*clips(a=0), silent("")]
    assert chosen(before, after)["improved most"] == "a"


def test_the_best_the_middle_and_the_worst_item_are_shown() -> None:
    samples = tuple(Sample(id=name, before="", first=1.0) for name in "abcde")
    first = Showcase(kind="items", split="validation", step=0, of=5, samples=samples)
    losses = {"a": 0.3, "b": 0.1, "c": float("nan"), "d": 0.2}
    found = showcase_of_items(first, 9, {name: SampleOutput(loss=loss) for name, loss in losses.items()})
    assert found is not None and (found.step, found.of) == (9, 4)
    assert [(one.why, one.id) for one in found.samples] == [("best", "b"), ("middle", "d"), ("worst", "c")]
    assert showcase_of_items(first, 9, {}) is None


def test_the_file_is_read_as_it_was_written_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "new" / "showcase.json"
    written = showcase_of_texts("test", 7, clips(a=4), clips(a=0))
    assert written is not None and read_showcase(path) is None
    written.write(path)
    assert read_showcase(path) == written
    for damaged in (b"{", path.read_bytes().replace(b'"sound":""', b'"sound":"\\"><script>"'), b" " * (5 << 20)):
        path.write_bytes(damaged)
        assert read_showcase(path) is None


@pytest.mark.parametrize("figure", [float("nan"), float("inf")])
def test_a_loss_that_is_no_number_is_none(figure: float) -> None:
    assert Sample(id="a", last=figure).last is None
