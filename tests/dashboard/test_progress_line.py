"""What the first tab says in words: what was reached stands there whole, whatever the width; what is waited for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from run_folders import BEGAN, new_folder, started, steps, view_of

from app.dashboard.reader import Picture
from app.dashboard.tabs.charts import newest_text
from app.dashboard.tabs.overview import loss_chart, progress_line
from app.dashboard.tabs.ribbons import strips
from app.run_view.headline import headline
from app.run_view.run_state import RunState, reduce_events
from app.run_view.tables.evaluations import evaluation_lines, learnt_by_heart
from training.records.events import EvaluationEvent, MemberEvent, ProgressEvent, RunEvent
from training.records.launched_script import LaunchedScript
from training.records.run_folder import RunFolder


def evaluated(step: int, wer: float, **more: float) -> EvaluationEvent:
    metrics = {"wer": wer, **more}
    return EvaluationEvent(
        time=BEGAN + step, step=step, split="validation", loss=None, metrics=metrics, samples=9, seconds=1.0
    )


def line(width: int, *evaluations: EvaluationEvent) -> str:
    events = [*started(total=2700), *steps(1, 30), *evaluations]
    return progress_line(reduce_events(events), BEGAN + 754, width).plain


@pytest.mark.parametrize(
    ("width", "reached"), [(78, "WER 80.1 % -> 7.1 %"), (114, "WER on validation: 80.1 % -> 7.1 %")]
)
def test_what_was_reached_is_whole(width: int, reached: str) -> None:
    shown = line(width, evaluated(0, 0.801), evaluated(900, 0.071))
    assert shown.startswith("step 30/2700") and shown.endswith(reached) and len(shown) <= width


@pytest.mark.parametrize("width", range(70, 120))
def test_that_texts_are_unfinished_is_told_whole_at_every_width(width: int) -> None:
    shown = line(width, evaluated(0, 0.801), evaluated(900, 0.071, cut=0.25))
    assert "WER" in shown and shown.endswith("unfinished") and len(shown) <= width


def test_the_bar_gives_way_before_words_do() -> None:
    shown = line(92, evaluated(0, 0.801))
    assert shown.endswith("WER on validation: 80.1 % before") and len(shown) <= 92
    assert len(line(78)) == len("step 30/2700  " + 18 * "-" + "  1.1 %  24.0 samples/s  trained 12:34")


def test_more_wrong_words_than_were_said_are_over_100_per_cent() -> None:
    assert line(98, evaluated(0, 1.801)).endswith("WER on validation: over 100 % before")
    assert line(98, evaluated(0, 1.801), evaluated(900, 0.071)).endswith("WER on validation: over 100 % -> 7.1 %")


@pytest.mark.parametrize(
    ("losses", "by_heart"),
    [
        ((2.0, 0.5, 0.6, 0.62), True),
        ((2.0, 0.5, 0.62), False),
        ((2.0, 0.5, 0.45), False),
        ((2.0, 0.7, 0.9, 0.5, 0.6, 0.62), False),
    ],
)
def test_a_run_says_that_it_learns_by_heart_where_only_the_held_out_loss_rises(
    losses: tuple[float, ...], by_heart: bool
) -> None:
    events = [evaluated(20 * n, 0.3).model_copy(update={"loss": loss}) for n, loss in enumerate(losses)]
    state = reduce_events([*started(), *steps(1, 60), *events])
    words = "validation: the loss rises (0.5000 -> 0.6200) while that of training falls: it learns by heart"
    assert any(line.startswith(words) for line in evaluation_lines(state)) is by_heart
    assert any("learns by heart" in line for line in learnt_by_heart(state)) is by_heart


@pytest.mark.parametrize(
    ("wer", "loss", "told"), [(0.789, 10.5, True), (0.789, 1.0, False), (0.1, 1.3, False), (0.27, 1.11, False)]
)
def test_a_model_that_got_worse_is_told_with_what_may_help(wer: float, loss: float, told: bool) -> None:
    events = [evaluated(0, 0.263).model_copy(update={"loss": 1.102}),
              evaluated(30, wer).model_copy(update={"loss": loss})]  # fmt: skip
    last = evaluation_lines(reduce_events([*started(), *events]))[-1]
    assert (last == "validation: worse than before training; a lower learning_rate or fewer epochs may help") is told


def test_a_value_of_an_earlier_evaluation_says_of_which_step(tmp_path: Path) -> None:
    test = evaluated(0, 1.933).model_copy(update={"split": "test"})
    picture = Picture(tmp_path, reduce_events([*started(), test, evaluated(0, 1.801), evaluated(30, 0.45)]))
    assert newest_text(picture, "test wer") == "over 100 % at 0"
    assert newest_text(picture, "validation wer") == "45.0 %"
    first, second = evaluation_lines(picture.state)
    assert first.endswith("over 100 % (step 0)") and second.endswith("over 100 % -> 45.0 %")


def test_machines_that_are_ready_and_do_not_train_say_why(tmp_path: Path) -> None:
    """They measure the model first; without a word it looks as if they hung."""
    plan = RunFolder.open(new_folder(tmp_path)).plan()
    preparing = Picture(tmp_path, reduce_events(started()), plan=plan)
    assert loss_chart(preparing).empty == "the loss appears here with the first step"
    ready = MemberEvent(member=0, time=BEGAN, status="ready", name="studio")
    measuring = Picture(tmp_path, reduce_events([*started(), ready]), plan=plan)
    assert loss_chart(measuring).empty.startswith("the model is evaluated first")


def preparing(*ranks: int) -> RunState:
    """A run whose machines prepare their data."""
    joined = [MemberEvent(member=rank, time=BEGAN, status="joined", name=f"pc-{rank}") for rank in ranks]
    busy = [ProgressEvent(member=rank, time=BEGAN, phase="features", done=rank, total=9) for rank in ranks]
    return reduce_events([RunEvent(time=BEGAN, status="starting"), *joined, *busy])


def test_what_is_prepared_is_said_once(tmp_path: Path) -> None:
    """The headline shows the phase of the last machine; each machine shows its own where there are several."""
    alone, both = preparing(0), preparing(0, 1)
    assert headline(view_of(alone, BEGAN)).details[-1] == headline(view_of(both, BEGAN)).details[-1] == "features 0/9"
    assert not progress_line(alone, BEGAN, 80)
    assert [strip.words for strip in strips(Picture(tmp_path, alone))] == [""]
    assert [strip.words for strip in strips(Picture(tmp_path, both))] == ["features 0/9", "features 1/9"]


def test_a_launched_script_is_not_waited_for_as_if_it_told_its_loss(tmp_path: Path) -> None:
    launch = LaunchedScript(script="/home/ada/train.py")
    plan = RunFolder.open(new_folder(tmp_path, 1)).plan().model_copy(update={"launch": launch})
    joined = [RunEvent(time=BEGAN, status="running"), MemberEvent(member=0, time=BEGAN, status="joined", name="studio")]
    picture = Picture(tmp_path, reduce_events(joined), plan=plan)
    assert loss_chart(picture).empty == "a script reports no steps and no loss; tab 5 shows what it prints"
    assert headline(replace(picture, now=BEGAN + 90)).word == "Healthy"
