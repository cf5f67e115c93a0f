"""Train a transformers model as its class computes the loss, on rows of a table.

A row is tokenised when it is read. A batch has the keys that the model's forward takes: ``input_ids``,
``attention_mask``, ``labels``, each [batch, longest] but for classes, whose labels are [batch].
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import transformers
from torch import nn
from transformers import AutoConfig, AutoTokenizer

from profiles.declarations import invalid_choice
from profiles.errors import BadInput
from profiles.schema import Profile
from training.tasks.base import Batch, Progress, Task
from training.tasks.hf.hf_inputs import HfOptions
from training.tasks.hf.rows import TOKENS, Row, RowColumns, choose_columns, column_names, kind_of, read_rows
from training.tasks.outputs.model_call import loss_of
from training.tasks.pretrained import from_pretrained, read_checked, read_weights, save_weights

IGNORED = -100
"""Label of what counts in no loss."""
_LONGEST = 512
"""Tokens of a text where neither tokenizer nor model says how many it can have."""
_UNKNOWN = 1 << 30
"""A tokenizer that knows no limit says a number beyond this one."""


class HfTask(Task):
    """A model of transformers with the loss that its forward returns for ``labels``."""

    name = "hf"
    uses_global_rng = False
    counts = Task.counts | {"correct"}

    def __init__(self, profile: Profile) -> None:
        self.profile, self.options = profile, profile.model.of(HfOptions)
        self.kind = kind_of(self.options.auto_class)
        classes = [name for name in dir(transformers) if name.startswith("AutoModelFor")]
        if self.options.auto_class not in classes:
            problem = invalid_choice(self.options.auto_class, classes)
            raise BadInput(f"auto_class = {self.options.auto_class}: {problem}", "name a class of transformers")
        self._auto: Any = getattr(transformers, self.options.auto_class)
        path = profile.model.model_path
        self.config: Any = from_pretrained(AutoConfig, path, "model")
        if type(self.config) not in self._auto._model_mapping.keys():  # noqa: SIM118 - it is no mapping
            message = f"{self.options.auto_class} makes no model of {path}, which is of type {self.config.model_type}"
            raise BadInput(message, "set another auto_class")
        self.tokenizer: Any = from_pretrained(AutoTokenizer, path, "tokenizer")
        if self.tokenizer.pad_token is None:  # as of GPT: padding is masked, so any token serves
            self.tokenizer.pad_token = self.tokenizer.eos_token or self.tokenizer.convert_ids_to_tokens(0)
        self.classes: list[str] = []
        self._is_regression = False

    def prepare(self, progress: Progress) -> None:
        data = self.profile.data
        splits = read_rows(data.dataset_path)
        limits = {"train": data.max_train_samples}
        columns = {split: self._columns(split, rows) for split, rows in splits.items()}
        if columns["train"].kind == "classification":
            self._find_classes(columns["train"], splits["train"])
        self._check_vocabulary()
        read = {
            split: TokenisedRows(rows, columns[split], self, limits.get(split, data.max_eval_samples))
            for split, rows in splits.items()
        }
        self.train, self.evaluation = read.pop("train"), read

    def _columns(self, split: str, rows: Sequence[Row]) -> RowColumns:
        options, source = self.options, f"data set {self.profile.data.dataset_path}, {split}"
        return choose_columns(column_names(rows), self.kind, options.input_columns, options.target_column, source)

    def _find_classes(self, columns: RowColumns, rows: Sequence[Row]) -> None:
        """Take the classes from the rows, in order; numbers that are not whole are values to be predicted."""
        named = getattr(getattr(rows, "features", {}).get(columns.target), "names", None)
        values = list(named or dict.fromkeys(row[columns.target] for row in rows))
        if named is None and (wrong := [value for value in values if value is None]):
            raise BadInput(f"a row has no {columns.target}: {wrong[0]!r}", "give every row a class")
        numbers = [float(value) for value in values if named is None and _is_number(value)]
        self._is_regression = len(numbers) == len(values) and any(number != int(number) for number in numbers)
        if self._is_regression:
            self.config.num_labels, self.config.problem_type = 1, "regression"
            return
        whole = len(numbers) == len(values) and min(numbers) >= 0
        names = [*map(str, range(int(max(numbers)) + 1))] if whole else [str(v) for v in values]
        self.classes = names if named or whole else sorted(names)
        self.config.id2label = dict(enumerate(self.classes))
        self.config.label2id = {name: number for number, name in enumerate(self.classes)}

    def _check_vocabulary(self) -> None:
        size = getattr(self.config.get_text_config(), "vocab_size", None)
        if size is not None and len(self.tokenizer) > size:
            message = f"the tokenizer has {len(self.tokenizer)} tokens, and the model a vocabulary of {size}"
            raise BadInput(message, "model and tokenizer do not belong together")

    def build_model(self) -> nn.Module:
        if self.config.pad_token_id is None:  # classifiers look for the last token before the padding
            self.config.pad_token_id = self.tokenizer.pad_token_id
        if self.profile.model.from_scratch:
            model = self._auto.from_config(copy.deepcopy(self.config), dtype=torch.float32)
        elif self.kind == "classification":  # its head is new
            path, options = self.profile.model.model_path, {"config": self.config, "dtype": torch.float32}
            options |= {"ignore_mismatched_sizes": True}
            model = read_checked(
                path, "model", lambda local: self._auto.from_pretrained(path, local_files_only=local, **options)
            )
        else:
            model = read_weights(self._auto, self.profile.model.model_path)
        return cast(nn.Module, model)

    @property
    def longest(self) -> int:
        """Tokens of the longest text."""
        positions = getattr(self.config.get_text_config(), "max_position_embeddings", None)
        known = (self.options.max_length, self.tokenizer.model_max_length, positions)
        return min((length for length in known if length and length < _UNKNOWN), default=_LONGEST)

    def tokens_of(self, row: Row, columns: RowColumns) -> dict[str, Any]:
        """Return what the model takes of a row, as lists of numbers without padding."""
        if columns.kind == "tokens":
            return {name: value for name, value in row.items() if name in self._accepted and value is not None}
        texts = [str(row[name]) for name in columns.inputs]
        limit = {"truncation": True, "max_length": self.longest}
        encoded = dict(self.tokenizer(*texts, **limit))
        if columns.kind == "causal":
            encoded["labels"] = list(encoded[TOKENS])
        elif columns.kind == "seq2seq":
            encoded["labels"] = self.tokenizer(text_target=str(row[columns.target]), **limit)[TOKENS]
        else:
            encoded["labels"] = self._class_of(row[columns.target])
        return {name: value for name, value in encoded.items() if name in self._accepted}

    @property
    def _accepted(self) -> set[str]:
        kind = self._auto._model_mapping[type(self.config)]
        return set(inspect.signature((kind[0] if isinstance(kind, tuple) else kind).forward).parameters)

    def _class_of(self, value: Any) -> int | float:
        if self._is_regression:
            return float(value)
        if isinstance(value, bool | int) or (_is_number(value) and str(int(float(value))) in self.classes):
            return int(float(value))
        if str(value) in self.config.label2id:
            return int(self.config.label2id[str(value)])
        raise BadInput(f"class {value!r} is in no training row", "add rows with it, or leave those of it out")

    def collate(self, samples: Sequence[Any], rngs: Sequence[np.random.Generator] | None) -> Batch:
        names = [name for name in samples[0] if all(name in sample for sample in samples)]
        return {name: self._padded(name, [sample[name] for sample in samples]) for name in names}

    def _padded(self, name: str, values: Sequence[Any]) -> torch.Tensor:
        if not isinstance(values[0], Sequence):
            return torch.tensor(values)
        filler = IGNORED if name == "labels" else self.tokenizer.pad_token_id if name == TOKENS else 0
        longest = max(map(len, values))
        return torch.tensor([[*value, *[filler] * (longest - len(value))] for value in values])

    def weight(self, batch: Batch) -> float:
        """Return the number of labels that the loss is a mean over: of texts their tokens, of classes the samples."""
        labels = batch.get("labels")
        if labels is None or labels.dim() < 2:
            return float(len(batch[TOKENS]))
        counted = labels[:, 1:] if self.kind == "causal" else labels  # its first token is predicted by none
        return float((counted != IGNORED).sum())

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        return loss_of(model(**batch))

    def evaluate(self, model: nn.Module, batch: Batch, generate: bool) -> dict[str, float]:
        output, weight = model(**batch), self.weight(batch)
        sums = {"loss_sum": float(loss_of(output)) * weight, "weight": weight}
        if self.classes:
            sums["correct"] = float((output.logits.argmax(-1) == batch["labels"]).sum())
        return sums

    def metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Return ``loss``, and ``accuracy`` of classes or ``perplexity`` of texts."""
        metrics = super().metrics(sums)
        if "correct" in sums and sums.get("weight"):
            metrics["accuracy"] = sums["correct"] / sums["weight"]
        elif "loss" in metrics and self.kind in ("causal", "seq2seq"):
            metrics["perplexity"] = math.exp(min(metrics["loss"], 700.0))
        return metrics

    def save(self, model: nn.Module, directory: Path) -> None:
        save_weights(model, directory, lambda: cast(Any, model), merge=True)
        self.tokenizer.save_pretrained(str(directory))


class TokenisedRows:
    """The rows of a split, tokenised when they are read."""

    def __init__(self, rows: Sequence[Row], columns: RowColumns, task: HfTask, limit: int) -> None:
        self._rows, self._columns, self._task = rows, columns, task
        self._size = min(len(rows), limit or len(rows))

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int, /) -> dict[str, Any]:
        if not 0 <= index < self._size:
            raise IndexError(index)
        return self._task.tokens_of(self._rows[index], self._columns)


def _is_number(value: Any) -> bool:
    try:
        float(value)
    except (TypeError, ValueError):
        return False
    return not isinstance(value, bool)
