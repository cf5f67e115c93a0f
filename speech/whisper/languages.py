"""Whisper's languages and special tokens."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from transformers import GenerationConfig, WhisperConfig

from profiles.schema import EVERY_LANGUAGE
from speech.data.language_codes import NAMES, language_code
from training.tasks.pretrained import read_checked

_TASKS = ("transcribe", "translate")
_ENGLISH_ONLY_VOCABULARY = 51864  # openai's English-only checkpoints hold language tokens that mean nothing


def selected_languages(setting: str) -> frozenset[str] | None:
    """Return the codes in a comma-separated list; ``None`` if it selects all languages.

    Raises:
        BadInput: Whisper does not support one of them.
    """
    names = [name.strip() for name in setting.split(",") if name.strip()]
    if not names or EVERY_LANGUAGE in names:
        return None
    return frozenset(language_code(name, "languages") for name in names)


def read_generation(folders: Sequence[str], config: WhisperConfig, tokenizer: Any) -> Any:
    """Return the completed ``GenerationConfig`` of the first folder (or hub model) that has one.

    Raises:
        BadInput: none can be read.
    """

    def read(local: bool) -> Any:
        for folder in folders:
            with suppress(OSError):  # not every folder has generation_config.json
                return GenerationConfig.from_pretrained(folder, local_files_only=local)
        return GenerationConfig.from_model_config(config)

    return complete_generation(read_checked(folders[-1], "generation settings", read), config, tokenizer)


def complete_generation(generation: Any, config: WhisperConfig, tokenizer: Any) -> Any:
    """Add the fields that old or hand-made model folders lack to a ``GenerationConfig``, and return it."""
    vocabulary: dict[str, int] = tokenizer.get_vocab()
    named = (f"<|{code}|>" for code in NAMES)
    languages = {token: vocabulary[token] for token in named if token in vocabulary}
    tasks = {name: vocabulary[f"<|{name}|>"] for name in _TASKS if f"<|{name}|>" in vocabulary}
    is_multilingual = len(languages) > 1 and bool(tasks) and config.vocab_size != _ENGLISH_ONLY_VOCABULARY
    defaults: dict[str, Any] = {
        "is_multilingual": is_multilingual,
        "no_timestamps_token_id": vocabulary.get("<|notimestamps|>"),
        "max_length": config.max_target_positions,
    }
    if getattr(generation, "is_multilingual", is_multilingual):
        defaults |= {"lang_to_id": languages, "task_to_id": tasks}
    for name, value in defaults.items():
        if getattr(generation, name, None) is None:
            setattr(generation, name, value)
    generation.forced_decoder_ids = None  # the deprecated way to set language and task
    return generation
