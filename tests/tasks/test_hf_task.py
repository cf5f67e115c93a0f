"""Models of transformers by their auto class, with rows of a table: random ones of a layer, made here."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from transformers import (
    AutoModelForSequenceClassification,
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    T5Config,
    T5ForConditionalGeneration,
)

from profiles.errors import BadInput
from profiles.files.resolve import profile_from_options
from tests.tasks.tiny_tasks import byte_tokenizer, learn, silent
from training.tasks.hf.hf_task import HfTask
from training.tasks.registry import inputs_of

SHAPE = {
    "vocab_size": 260,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
}


def gpt2() -> Any:
    return GPT2LMHeadModel(GPT2Config(vocab_size=260, n_positions=32, n_embd=16, n_layer=1, n_head=2))


def bert() -> Any:
    return BertForSequenceClassification(BertConfig(**SHAPE, max_position_embeddings=32))


def t5() -> Any:
    config = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2, "decoder_start_token_id": 0}
    return T5ForConditionalGeneration(T5Config(vocab_size=260, **config))


TEXTS = [{"text": f"{word} {number}", "label": word} for number in range(10) for word in ("good", "bad")]
PAIRS = [{"source": f"copy {number}", "target": f"{number}", "note": "x"} for number in range(12)]
CASES: dict[str, tuple[Callable[[], Any], list[dict[str, Any]]]] = {
    "AutoModelForCausalLM": (gpt2, TEXTS),
    "AutoModelForSequenceClassification": (bert, TEXTS),
    "AutoModelForSeq2SeqLM": (t5, PAIRS),
}


def task_for(auto_class: str, folder: Path, rows: list[dict[str, Any]] | None = None, **options: Any) -> HfTask:
    make, usual = CASES[auto_class]
    torch.manual_seed(0)
    if not (folder / "config.json").exists():
        make().save_pretrained(folder)
        byte_tokenizer().save_pretrained(folder)
    table = folder / "train.jsonl"
    table.write_text("".join(json.dumps(row) + "\n" for row in rows or usual))
    paths = {"model_path": str(folder), "dataset_path": str(table)}
    task = HfTask(profile_from_options("p", {"task": "hf", "auto_class": auto_class, **paths, **options}))
    task.prepare(silent)
    return task


@pytest.mark.parametrize("auto_class", CASES)
def test_each_kind_learns_its_rows_and_opens_again(auto_class: str, tmp_path: Path) -> None:
    task = task_for(auto_class, tmp_path / "model")
    model = task.build_model()
    batch = task.collate([task.train[number] for number in range(6)], None)
    losses = learn(task, model, [batch] * 30, 0.01)
    assert losses[-1] < 0.8 * losses[0]
    model.eval()
    with torch.no_grad():
        metrics = task.metrics(task.evaluate(model, batch, generate=False))
    kinds = {"AutoModelForSequenceClassification": "accuracy"}
    assert set(metrics) == {"loss", kinds.get(auto_class, "perplexity")}
    (tmp_path / "saved").mkdir()
    task.save(model, tmp_path / "saved")
    again = task_for(auto_class, tmp_path / "model", model_path=str(tmp_path / "saved"))
    with torch.no_grad():
        assert float(again.loss(again.build_model().eval(), batch)) == pytest.approx(metrics["loss"], rel=1e-5)


@pytest.mark.parametrize("auto_class", CASES)
def test_batches_of_parts_add_up_to_the_whole(auto_class: str, tmp_path: Path) -> None:
    """Whatever the padding, the weighted mean of losses is that of one batch."""
    task = task_for(auto_class, tmp_path)
    model = task.build_model().eval()
    samples = [task.train[number] for number in range(6)]
    with torch.no_grad():
        parts = [task.evaluate(model, task.collate(part, None), False) for part in (samples[:1], samples[1:])]
        whole = task.evaluate(model, task.collate(samples, None), False)
    assert sum(part["weight"] for part in parts) == whole["weight"]
    assert sum(part["loss_sum"] for part in parts) == pytest.approx(whole["loss_sum"], rel=1e-4)


def test_classes_are_those_of_the_rows_and_their_names_are_saved(tmp_path: Path) -> None:
    task = task_for("AutoModelForSequenceClassification", tmp_path / "model")
    assert task.classes == ["bad", "good"] and len(task.train) + len(task.evaluation["validation"]) == 20
    (tmp_path / "saved").mkdir()
    task.save(task.build_model(), tmp_path / "saved")
    assert AutoModelForSequenceClassification.from_pretrained(tmp_path / "saved").config.id2label == {
        0: "bad",
        1: "good",
    }
    numbers = [{"text": "a", "label": number} for number in (2, 0, 0, 2)]
    assert task_for("AutoModelForSequenceClassification", tmp_path / "model", numbers).classes == ["0", "1", "2"]


def test_numbers_that_are_not_whole_are_predicted(tmp_path: Path) -> None:
    rows = [{"text": "a", "score": 0.5}, {"text": "b", "score": 2.0}] * 5
    task = task_for("AutoModelForSequenceClassification", tmp_path, rows)
    batch = task.collate([task.train[0], task.train[1]], None)
    assert task.classes == [] and batch["labels"].dtype == torch.float32
    with torch.no_grad():
        assert set(task.metrics(task.evaluate(task.build_model(), batch, False))) == {"loss"}


def test_a_classifier_of_a_model_without_a_padding_token_takes_batches(tmp_path: Path) -> None:
    gpt2().save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    task = task_for("AutoModelForSequenceClassification", tmp_path)
    batch = task.collate([task.train[0], task.train[1]], None)
    assert torch.isfinite(task.loss(task.build_model(), batch))


def test_columns_are_named_in_the_profile_and_others_are_left_out(tmp_path: Path) -> None:
    rows = [{"headline": "a", "body": "b", "topic": "x", "id": 7}] * 4
    options = {"hf.input_columns": "headline, body", "hf.target_column": "topic"}
    task = task_for("AutoModelForSequenceClassification", tmp_path, rows, **options)
    assert set(task.train[0]) == {"input_ids", "attention_mask", "labels"}
    assert task.tokenizer.decode(task.train[0]["input_ids"]) == "ab"


def test_rows_of_tokens_are_taken_as_they_are(tmp_path: Path) -> None:
    rows = [{"input_ids": [5, 6, 7], "labels": [-100, 6, 7], "id": "a"}, {"input_ids": [5], "labels": [5], "id": "b"}]
    task = task_for("AutoModelForCausalLM", tmp_path, rows * 3)
    batch = task.collate([task.train[1], task.train[0]], None)
    assert batch["labels"].tolist() == [[-100, 6, 7], [5, -100, -100]]


def test_a_data_set_saved_by_datasets_has_its_splits_and_classes(tmp_path: Path) -> None:
    features = datasets.Features({"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["no", "yes"])})
    rows = datasets.Dataset.from_dict({"text": ["a", "b"], "label": [1, 0]}, features=features)
    datasets.DatasetDict({"train": rows, "test": rows}).save_to_disk(tmp_path / "data")
    task = task_for("AutoModelForSequenceClassification", tmp_path / "m", dataset_path=str(tmp_path / "data"))
    assert task.classes == ["no", "yes"] and set(task.evaluation) == {"validation", "test"}
    assert inputs_of("hf").training_samples(task.profile) == 1


@pytest.mark.parametrize(
    ("auto_class", "rows", "said"),
    [
        ("AutoModelForSeq2SeqLM", [{"source": "a"}] * 3, "which column is the answer"),
        ("AutoModelForCausalLM", [{"body": "a"}] * 3, "which column is the text"),
        ("AutoModelForSequenceClassification", [{"text": "a", "label": None}] * 3, "has no label"),
    ],
)
def test_rows_without_a_column_are_refused(auto_class: str, rows: list[Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=said):
        task_for(auto_class, tmp_path, rows)


def test_a_class_that_is_none_of_transformers_is_refused(tmp_path: Path) -> None:
    folder = task_for("AutoModelForCausalLM", tmp_path).profile.model.model_path
    with pytest.raises(BadInput, match="AutoModelForSeq2SeqLM makes no model of .*of type gpt2"):
        HfTask(profile_from_options("p", {"task": "hf", "auto_class": "AutoModelForSeq2SeqLM", "model_path": folder}))
    with pytest.raises(BadInput, match="AutoModelForCausalLn.*did you mean 'AutoModelForCausalLM'"):
        HfTask(profile_from_options("p", {"task": "hf", "auto_class": "AutoModelForCausalLn", "model_path": folder}))
