"""What is exported: a model's folder, the run it came from, and a plain copy of it for converters."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from profiles.errors import BadInput
from training.run_files import sha256
from training.run_metadata import RunMetadata, read_metadata
from training.runs import find_model

_WEIGHTS = (".safetensors", ".bin")


@dataclass(frozen=True)
class ModelSource:
    """A model as it was saved."""

    folder: Path
    run: RunMetadata | None
    """The run that made it; ``None`` for a folder of its own."""

    @property
    def name(self) -> str:
        """What it is called: the profile of its run, or its folder."""
        return self.run.profile if self.run else self.folder.resolve().name

    @cached_property
    def adapter(self) -> bool:
        """Whether the folder holds adapters alone."""
        return not (self.folder / "config.json").is_file() and (self.folder / "adapter_config.json").is_file()

    @property
    def base(self) -> str:
        """The model it was made from: a hub name or a folder; empty if nobody knows."""
        if self.adapter:
            return str(_read_json(self.folder / "adapter_config.json").get("base_model_name_or_path") or "")
        model = self._section("model")
        return "" if model.get("from_scratch") else str(model.get("model_path") or "")

    def setting(self, section: str, name: str) -> Any:
        """Return what its run was told; ``None`` without one."""
        return self._section(section).get(name)

    @property
    def dataset(self) -> str:
        """The data set of its run; empty without one."""
        return str(self._section("data").get("dataset_path") or "")

    @property
    def text_column(self) -> str:
        return str(self._section("data").get("text_column") or "")

    def _section(self, name: str) -> Mapping[str, Any]:
        found = self.run.config.get(name) if self.run else None
        return found if isinstance(found, dict) else {}

    @cached_property
    def kind(self) -> str:
        """``model_type`` of its configuration.

        Raises:
            BadInput: it is no model of transformers, or damaged.
        """
        if self.adapter:
            from transformers import AutoConfig  # takes a second

            from training.tasks.pretrained import load

            config: Any = load(
                self.base, "model", lambda local: AutoConfig.from_pretrained(self.base, local_files_only=local)
            )
            return str(config.model_type)
        if not (self.folder / "config.json").is_file():
            message = f"model {self.folder}: no config.json, so it is no model of transformers"
            raise BadInput(message, "a model of task custom needs the code that made it; a Whisper can be exported")
        return str(_read_json(self.folder / "config.json").get("model_type") or "")

    def weights(self) -> dict[str, str]:
        """Return SHA-256 of the files with its weights, by name."""
        files = sorted(path for path in self.folder.iterdir() if path.suffix in _WEIGHTS and path.is_file())
        return {path.name: sha256(path) for path in files}


def find_source(output: Path, reference: str) -> ModelSource:
    """Return the model that ``reference`` means, as ``find_model`` takes it.

    Raises:
        BadInput: nothing fits, or the run has no model.
    """
    folder = find_model(output, reference)
    has_run = folder.name == "model" and (folder.parent / "metadata.json").is_file()
    return ModelSource(folder, read_metadata(folder.parent) if has_run else None)


def _read_json(path: Path) -> Mapping[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BadInput(f"{path}: cannot be read as JSON", "name the folder of a saved model") from error
    return found if isinstance(found, dict) else {}
