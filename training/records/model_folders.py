"""Models of runs, folders and the hub, and the properties that their folders tell without loading them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from profiles.declarations import trait_of
from profiles.errors import BadInput
from profiles.schema import Profile
from training.records.plan import read_metadata
from training.records.runs import find_model, finished_model, list_all_runs, list_runs

_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w.-]+")
_WRITING = ("ForCausalLM", "LMHeadModel")
"""How transformers' classes of models end that go on from a text."""
_TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt")


def find_usable_model(output_dir: Path, reference: str, usable: Callable[[Path], bool] = lambda folder: True) -> Path:
    """Return the model of :func:`find_model`, or ``owner/name`` unchanged, which is a model of the hub.

    Args:
        usable: whether a model folder is suitable, if no model is named: the newest run with such a model is taken.

    Raises:
        BadInput: nothing fits, or the run has no model.
    """
    if not reference:
        runs = [*list_runs(output_dir), *list_all_runs(output_dir)]  # of this folder first
        models = (finished_model(run.path) for run in runs)
        newest = next((model for model in models if model and usable(model)), None)
        return newest or find_model(output_dir, reference)
    try:
        return find_model(output_dir, reference)
    except BadInput:
        if _HUB_NAME.fullmatch(reference) and not Path(reference).parent.exists():
            return Path(reference)
        raise


def model_kind(folder: Path) -> Literal["speech", "text", ""]:
    """Return whether a model, or the base model of adapters, is of speech or text; empty: neither, or its folder does
    not tell."""
    config = _read_json(folder / "config.json")
    if config:
        architectures = config.get("architectures") or ["AutoModelForCausalLM"]
        kind = str(config.get("model_type") or "")
    else:
        config = _read_json(folder / "adapter_config.json")
        mapping = config.get("auto_mapping") or {}
        architectures = ["ForCausalLM" if config.get("task_type") == "CAUSAL_LM" else mapping.get("base_model_class")]
        kind = str(architectures[0] or "")
    if kind.lower().startswith("whisper"):
        return "speech"
    return "text" if kind and str(architectures[0]).endswith(_WRITING) else ""


def is_language_model(folder: Path) -> bool:
    """Whether a model is a causal language model, according to its folder."""
    return model_kind(folder) == "text"


def is_speech_model(folder: Path) -> bool:
    """Whether a model is a speech model, according to its folder."""
    return model_kind(folder) == "speech"


def holds_tokenizer(folder: Path) -> bool:
    """Whether a tokenizer was saved beside a model."""
    return any((folder / name).is_file() for name in _TOKENIZERS)


def has_chat_template(folder: Path) -> bool:
    """Whether a chat template was saved with a model, in a file of its own or with the tokenizer's settings."""
    return (folder / "chat_template.jinja").is_file() or bool(
        _read_json(folder / "tokenizer_config.json").get("chat_template")
    )


def starting_model(profile: Profile) -> str:
    """Return the model that a profile trains, a folder or a name of the hub; empty: from scratch, or from code."""
    model = profile.model
    return _starting_model(model.model_path, model.from_scratch, model.task)


def _starting_model(model_path: object, from_scratch: object, task: object) -> str:
    return "" if from_scratch or trait_of(str(task)) == "own code" else str(model_path or "")


def base_model(model: Path) -> str:
    """Return the model from which a run's model, or adapters, were trained: a folder or a name of the hub.

    Raises:
        BadInput: it was trained from scratch, or its origin is unknown.
    """
    base = str(_read_json(model / "adapter_config.json").get("base_model_name_or_path") or "")
    if not base and (model.parent / "metadata.json").is_file():
        settings = read_metadata(model.parent).config.get("model")
        if isinstance(settings, dict):  # of the version that trained it
            base = _starting_model(settings.get("model_path"), settings.get("from_scratch"), settings.get("task"))
            if not base:
                raise BadInput(f"{model} was trained from scratch: there is no model before it", "leave out --compare")
    if not base:
        hint = "name a run, or leave out --compare and ask both models one after the other"
        raise BadInput(f"{model} does not say what it was trained from", hint)
    return base


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
