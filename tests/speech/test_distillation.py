"""A student learns from its teacher: the loss, the teacher's kept answers, and what cannot be compared."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_speech import tiny_whisper, write_clips, write_csv
from torch import nn

from profiles.errors import BadInput
from speech.whisper import distillation as teacher_outputs
from speech.whisper import model as whisper_model
from speech.whisper.distillation import (
    DistillationTask,
    SoftTargets,
    distillation_loss,
    divergence,
    soft_targets,
)
from tests.tasks.tiny_tasks import ProfileMaker, silent
from training.data.batches import Samples
from training.tasks.registry import task_from_profile


def reference(teacher: torch.Tensor, student: torch.Tensor, labels: torch.Tensor, alpha: float, t: float) -> float:
    """The loss position by position, in double precision: Hinton et al. 2015, section 2."""
    total, tokens = 0.0, 0
    for row in range(labels.shape[0]):
        for place in range(labels.shape[1]):
            label = int(labels[row, place])
            if label == -100:
                continue
            p = torch.softmax(teacher[row, place].double() / t, dim=0)
            q = torch.softmax(student[row, place].double() / t, dim=0)
            hard = -torch.log(torch.softmax(student[row, place].double(), dim=0)[label])
            soft = sum(p[word] * (torch.log(p[word]) - torch.log(q[word])) for word in range(len(p)))
            total += float(alpha * hard + (1 - alpha) * t * t * soft)
            tokens += 1
    return total / tokens


def random_case(seed: int, vocabulary: int = 12) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    teacher, student = (4 * torch.randn(3, 5, vocabulary, generator=generator) for _ in range(2))
    labels = torch.randint(0, vocabulary, (3, 5), generator=generator)
    labels[0, 3:] = labels[2, 1:] = labels[:, 0] = -100
    labels[1, 1] = 0
    return teacher, student, labels


def our_loss(teacher: torch.Tensor, student: torch.Tensor, labels: torch.Tensor, alpha: float, t: float) -> float:
    kept = labels != -100
    hard = nn.functional.cross_entropy(student.flatten(0, 1), labels.flatten(), ignore_index=-100)
    return float(distillation_loss(hard, student[kept], soft_targets(teacher[kept], t), alpha, t))


@given(st.integers(0, 1000), st.floats(0, 1), st.floats(0.5, 8))
def test_the_loss_is_hintons_over_the_tokens_that_count(seed: int, alpha: float, t: float) -> None:
    case = random_case(seed)
    assert our_loss(*case, alpha, t) == pytest.approx(reference(*case, alpha, t), rel=5e-3, abs=5e-3)


def test_padding_and_prompt_change_nothing() -> None:
    teacher, student, labels = random_case(7)
    before = our_loss(teacher, student, labels, 0.3, 2.0)
    teacher[labels == -100], student[labels == -100] = 50.0, -50.0
    assert our_loss(teacher, student, labels, 0.3, 2.0) == before


@given(st.integers(0, 1000))
def test_what_is_not_named_counts_as_one_and_never_adds(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    teacher, student = (3 * torch.randn(4, 200, generator=generator) for _ in range(2))
    whole = nn.functional.kl_div(student.log_softmax(-1), teacher.log_softmax(-1), log_target=True, reduction="none")
    kept = divergence(soft_targets(teacher, 1.0), student, 1.0)
    assert (kept <= whole.sum(-1) * 1.002 + 1e-3).all()
    assert (kept >= 0).all()
    coarse = divergence(soft_targets(teacher, 1.0, count=8), student, 1.0)
    assert (coarse <= kept * 1.002 + 2e-3).all()


def test_a_student_that_agrees_has_no_divergence_and_no_gradient() -> None:
    logits = torch.randn(6, 300, requires_grad=True)
    kept = divergence(soft_targets(logits.detach(), 2.0), logits, 2.0).sum()
    kept.backward()
    assert float(kept.detach()) == pytest.approx(0, abs=1e-4)
    assert logits.grad is not None and float(logits.grad.abs().max()) < 1e-3


def test_kept_answers_are_compared_in_the_mixed_precision_of_a_processor_too() -> None:
    """Its autocast refuses fp16, which the answers are kept in."""
    teacher, student = torch.randn(2, 6, 300).unbind()
    soft, alone = soft_targets(teacher, 2.0), divergence(soft_targets(teacher, 2.0), student, 2.0)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(divergence(soft, student, 2.0), alone)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(3)
    return tiny_whisper(tmp_path_factory.mktemp("models") / "teacher", layers=3)


@pytest.fixture
def prepared(make_profile: ProfileMaker, speech_folder: Path, teacher: Path) -> Any:
    def make(**options: object) -> DistillationTask:
        given = {
            "teacher_path": str(teacher),
            "model_path": "",
            "student_layers": 2,
            "dataset_path": str(speech_folder),
        }
        task = task_from_profile(make_profile(**{**given, **options}))
        assert isinstance(task, DistillationTask)
        task.prepare(silent)
        return task

    return make


def training_batch(task: DistillationTask, *indices: int) -> Any:
    found = Samples(task, 0).training_batch(indices, 0)
    assert found is not None
    return found[1]


@pytest.mark.slow
def test_kept_answers_are_what_the_teacher_says(prepared: Any) -> None:
    once, live = prepared(), prepared(augmentation=1e-9)
    assert once.profile.caches_teacher_outputs and not live.profile.caches_teacher_outputs
    torch.manual_seed(0)
    student = once.build_model().eval()
    live.build_model()
    batch = training_batch(once, 5, 2, 7)
    asked = live._teacher_outputs({name: value for name, value in batch.items() if name != "teacher"})[1]
    for kept, said in zip(batch["teacher"], asked, strict=True):
        torch.testing.assert_close(kept, said, atol=2e-2, rtol=0)
    loss = once.loss(student, batch)
    assert loss.requires_grad and float(loss.detach()) > 0


@pytest.mark.slow
def test_loss_is_the_mean_over_the_weight(prepared: Any) -> None:
    task = prepared(distill_alpha=0.25)
    student = task.build_model().eval()
    with torch.no_grad():
        whole = training_batch(task, 0, 1, 2)
        parts = [training_batch(task, index) for index in range(3)]
        total = sum(float(task.loss(student, part)) * task.weight(part) for part in parts)
        assert float(task.loss(student, whole)) == pytest.approx(total / task.weight(whole), abs=2e-4)
    assert len(whole["teacher"].tail) == task.weight(whole)


@pytest.mark.slow
def test_the_teacher_is_asked_once(prepared: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    first = prepared()

    def refuse(task: DistillationTask) -> nn.Module:
        raise AssertionError("the teacher is loaded again")

    monkeypatch.setattr(DistillationTask, "_build_teacher", refuse)
    again = prepared()
    assert torch.equal(training_batch(again, 0, 1)["teacher"].top, training_batch(first, 0, 1)["teacher"].top)
    with pytest.raises(AssertionError, match="again"):
        prepared(distill_temperature=3.0)


@pytest.mark.slow
def test_a_student_in_8_bits_learns_from_the_teacher_as_it_is(prepared: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(whisper_model, "with_quantised_base", lambda *_: pytest.fail("the teacher is quantised"))
    prepared(base_precision="int8", tuning="lora")


@pytest.mark.slow
def test_answers_are_of_the_texts_that_are_trained_on(prepared: Any, speech_folder: Path) -> None:
    before = training_batch(prepared(), 0)["teacher"]
    rows = write_clips(speech_folder, 8)
    write_csv(speech_folder / "train.csv", [(identity, path, "four") for identity, path, _ in rows])
    after = training_batch(prepared(), 0)["teacher"]
    assert (len(before.tail), len(after.tail)) == (len(" one") + 1, len(" four") + 1)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"augmentation": 0.5}, {"epochs": 1.0}], ids=["augmented", "seen once"])
def test_else_it_answers_in_every_step_and_says_so(
    prepared: Any, options: dict[str, object], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "muster.data"):
        task = prepared(**options)
    assert "the teacher runs in every step" in caplog.text
    loss = task.loss(task.build_model(), training_batch(task, 0, 1))
    loss.backward()
    assert all(parameter.grad is None for parameter in task._teacher_model.parameters())


@pytest.mark.slow
def test_a_frozen_encoder_of_the_teacher_is_heard_once(prepared: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    task = prepared(augmentation=1e-9, freeze_encoder=True)
    student = task.build_model().eval()
    batch = training_batch(task, 0, 1)
    with torch.no_grad():
        shared = task.loss(student, batch)
        monkeypatch.setattr(DistillationTask, "shares_encoder", False)
        torch.testing.assert_close(task.loss(student, batch), shared)


@pytest.mark.slow
def test_adapters_learn_from_a_teacher_too(prepared: Any) -> None:
    task = prepared(tuning="lora", lora_rank=2, lora_dropout=0.0)
    student = task.build_model()
    task.loss(student, training_batch(task, 0, 1)).backward()
    learned = [name for name, parameter in student.named_parameters() if parameter.grad is not None]
    assert learned and all("lora_" in name for name in learned)


@pytest.mark.slow
def test_alpha_1_is_the_cross_entropy(prepared: Any) -> None:
    task = prepared(distill_alpha=1.0)
    student = task.build_model().eval()
    batch = training_batch(task, 0, 1, 2)
    with torch.no_grad():
        sums = task.evaluate(student, batch, generate=False)
        assert float(task.loss(student, batch)) == pytest.approx(sums["loss_sum"] / sums["weight"])


def test_teachers_that_cannot_be_compared_are_refused(prepared: Any, tmp_path: Path) -> None:
    other = tiny_whisper(tmp_path / "other", ("en", "de"))
    with pytest.raises(BadInput, match="use different tokens: their vocabularies have"):
        prepared(model_path=str(other), student_layers=0)


@pytest.mark.slow
def test_another_teacher_on_another_machine_is_told(prepared: Any, tmp_path: Path) -> None:
    one, other = prepared(), prepared(teacher_path=str(tiny_whisper(tmp_path / "other", layers=3)))
    tables = [task.table("train") for task in (one, other)]
    assert tables[0] != tables[1] and tables[0].partition("+")[0] == tables[1].partition("+")[0]


def test_a_token_takes_258_bytes(tmp_path: Path) -> None:
    soft: SoftTargets = soft_targets(torch.randn(5, 51_865), 2.0)
    teacher_outputs.write_outputs(tmp_path, iter([soft]), 51_865, lambda done: None)
    assert (tmp_path / "outputs.bin").stat().st_size == 5 * 258
    again = teacher_outputs.TeacherOutputs(tmp_path, [2, 3], 51_865).of([1])
    assert all(torch.equal(kept, whole[2:]) for kept, whole in zip(again, soft, strict=True))
