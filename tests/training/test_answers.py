"""What members say that their model wrote."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from profiles.optimisation import EvaluationSettings
from tests.training.memory_exchange import RoomExchange, together
from tests.training.toy_task import ToyTask
from training.data.batches import Samples
from training.hardware.device import Precision
from training.loop.evaluation import Evaluator, from_payloads, to_payload
from training.tasks.base import Answer, Batch
from training.tasks.outputs.predictions import BEFORE, FOLDER, NAME, Prediction, read_predictions

SHARES = {0: range(3), 1: range(3, 5)}


def test_answers_of_all_members_come_in_the_order_of_the_split() -> None:
    own, other = [Answer(0, "yes", False), Answer(2, "né", True)], [Answer(3, "no", False)]
    assert from_payloads({1: to_payload(other), 0: to_payload(own)}, SHARES) == [*own, *other]


def test_what_a_member_says_of_others_or_of_nothing_is_left_out() -> None:
    rows: list[object] = [[0, "not mine", 0], [4, "mine", 0], [4, "twice", 0], [True, "", 0], ["3", "", 0], [3, 7, 0]]
    rows += [[3, "x" * 5000, 0], "nothing", [3]]
    lies = {0: b"\xff", 1: json.dumps({"answers": rows}).encode(), 7: to_payload([Answer(1, "stranger", False)])}
    assert from_payloads(lies, SHARES) == [Answer(4, "mine", False)]


def test_no_more_is_sent_than_there_is_room_for() -> None:
    payload = to_payload([Answer(sample, "ü" * 2000, False) for sample in range(2000)])
    assert 3_900_000 < len(payload) < 4 << 20
    assert from_payloads({0: payload}, {0: range(2000)})[-1].sample < 400


class WritingTask(ToyTask):
    """Writes the number of each sample."""

    generates_text = True

    def collate(self, samples: Sequence[Any], rngs: Sequence[Any] | None) -> Batch:
        return {**super().collate(samples, rngs), "numbers": [number for number, _, _ in samples]}

    def answer(self, model: nn.Module, batch: Batch, generate: bool) -> tuple[dict[str, float], list[Answer]]:
        return self.evaluate(model, batch, generate), [Answer(n, f"sample {n}", False) for n in batch["numbers"]]

    def predictions(self, split: str, answers: Sequence[Answer]) -> list[Prediction]:
        return [Prediction(str(a.sample), "", "x", a.text, "x", a.text, 1, 1, 1, 1) for a in answers]


def test_three_members_write_one_file_before_and_after(tmp_path: Path) -> None:
    def body(member: RoomExchange) -> list[str]:
        task, warnings = WritingTask(), list[str]()
        task.prepare(lambda *_: None)
        samples, cpu = Samples(task, 0, torch.device("cpu"), 0.0, "here"), torch.device("cpu")
        evaluator = Evaluator(
            samples,
            task.build_model(),
            Precision(None, cpu),
            member,
            EvaluationSettings(),
            2,
            warn=warnings.append,
            run_dir=tmp_path / str(member.rank),
        )
        for step in (0, 7):
            assert evaluator.evaluate("validation", step, {0: 4, 1: 4, 2: 4}) is not None
        return warnings

    assert together(3, body)[0] == {0: [], 1: [], 2: []}
    assert [path.name for path in tmp_path.iterdir()] == ["0"]
    for name in (BEFORE, NAME):
        found = read_predictions(tmp_path / "0" / FOLDER / name)
        assert [one.prediction for one in found] == [f"sample {number}" for number in range(10)]
