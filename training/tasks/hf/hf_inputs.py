"""Inputs of the task ``hf``: rows of a table, and a transformers model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from profiles.declarations import Section, option
from profiles.schema import Profile
from training.tasks.inputs.base import TaskInputs


class HfOptions(Section):
    """Options of the task ``hf``."""

    auto_class: str = option(
        "AutoModelForCausalLM",
        "class of transformers that reads the model: AutoModelForCausalLM, AutoModelForSequenceClassification, "
        "AutoModelForSeq2SeqLM, or another one that computes a loss, for rows with input_ids and labels",
        alias="auto_class",
        pattern=r"^AutoModelFor\w+$",
    )
    input_columns: str = option("", "column of the text, or two by comma for pairs; empty: text, sentence, source, ...")
    target_column: str = option("", "column of the class or the answer; empty: label, target, summary, ...")
    max_length: int = option(0, "longest text; what is beyond is cut; 0: as the model's tokenizer", unit="tokens", ge=0)


class HfInputs(TaskInputs):
    """Rows of a table."""

    packages: Sequence[str] = ("transformers",)
    reads_dataset = True

    def findings(self, profile: Profile) -> dict[str, Any]:
        from training.tasks.hf.rows import read_rows

        self.check_data(profile)
        return {
            "splits": {name: len(rows) for name, rows in read_rows(profile.data.dataset_path).items()},
            "unit": "rows",
        }

    def check_data(self, profile: Profile) -> None:
        from training.tasks.hf.rows import column_names, read_rows

        for split, rows in read_rows(profile.data.dataset_path).items():
            self._choose(profile, column_names(rows), f"{profile.data.dataset_path}, {split}")

    def check_columns(self, profile: Profile, table: Path, columns: Sequence[str]) -> None:
        self._choose(profile, columns, str(table))

    def training_samples(self, profile: Profile) -> int:
        from training.tasks.hf.rows import read_rows

        rows = len(read_rows(profile.data.dataset_path)["train"])
        return min(rows, profile.data.max_train_samples or rows)

    def _choose(self, profile: Profile, columns: Sequence[str], source: str) -> None:
        from training.tasks.hf.rows import choose_columns, kind_of

        options = profile.model.of(HfOptions)
        kind = kind_of(options.auto_class)
        choose_columns(columns, kind, options.input_columns, options.target_column, f"data set {source}")
