"""Inputs of tasks that learn texts or conversations."""

from __future__ import annotations

from typing import Any

from profiles.schema import Profile
from training.tasks.inputs.base import TaskInputs
from training.tasks.inputs.model_size import ModelSize, decoder_size, size_of
from training.tasks.published_models import model_folder


class TextInputs(TaskInputs):
    """A data set of texts or conversations, and a language model."""

    packages = ("transformers",)
    reads_dataset = True

    def refusal_in_stages(self, profile: Profile) -> str:
        return ""

    def findings(self, profile: Profile) -> dict[str, Any]:
        from training.tasks.text.conversations import conversation_files, read_conversations
        from training.tasks.text.texts import read_texts  # loads numpy

        path, column = profile.data.dataset_path, profile.data.text_column
        if files := conversation_files(path, column):
            conversations = read_conversations(files)
            return {"splits": {split: len(rows) for split, rows in conversations.items()}, "unit": "conversations"}
        texts = read_texts(path, column)
        characters = {split: sum(map(len, documents)) for split, documents in texts.items()}
        return {"splits": characters, "unit": "characters"}

    def check_data(self, profile: Profile) -> None:
        from training.tasks.text.conversations import conversation_files, read_conversations
        from training.tasks.text.row_files import row_files
        from training.tasks.text.texts import read_texts, text_files  # loads numpy

        path, column = profile.data.dataset_path, profile.data.text_column
        if files := conversation_files(path, column):
            read_conversations(files)
        elif row_files(path):
            read_texts(path, column)
        else:
            text_files(path)

    def model_size(self, profile: Profile) -> ModelSize | None:
        folder, length = model_folder(profile.model.model_path), profile.data.block_size
        return size_of(folder, lambda config: decoder_size(config, length)) if folder is not None else None
