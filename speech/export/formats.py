"""The export formats (readers, packages, precisions), and the model that is exported with the run it came from.

Imports nothing heavy.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from profiles.errors import BadInput
from profiles.installation import package_line
from training.records.plan import RunMetadata, read_metadata
from training.records.run_files import sha256
from training.records.runs import find_model


@dataclass(frozen=True)
class Format:
    """One export format."""

    name: str
    reader: str
    """The programs that read it."""
    quantize: tuple[str, ...] = ()
    """Available weight precisions besides the default."""
    default_precision: str = "float32"
    """Precision if none is chosen."""
    converter: tuple[str, ...] = ()
    """Modules needed to write it, besides Muster's own dependencies."""
    runtime: tuple[str, ...] = ()
    """Modules needed to transcribe with it, for the check."""

    @property
    def missing_converter(self) -> tuple[str, ...]:
        """Converter modules that are not installed."""
        return _missing(self.converter)

    @property
    def missing_runtime(self) -> tuple[str, ...]:
        """Runtime modules that are not installed."""
        return _missing(self.runtime)

    @property
    def unsupported_reason(self) -> str:
        """Why this machine cannot run the format at all; empty if it can."""
        return "Core ML runs on macOS only" if self.name == "coreml" and sys.platform != "darwin" else ""

    @property
    def install(self) -> str:
        """Command that installs its packages without touching torch."""
        return package_line(*dict.fromkeys((*self.converter, *self.runtime)))


FORMATS = {
    entry.name: entry
    for entry in (
        Format("hf", "transformers, and all that open a model of the hub", ("float16", "bfloat16")),
        Format(
            "ctranslate2",
            "faster-whisper, whisper-ctranslate2",
            ("float16", "bfloat16", "int8", "int8_float16", "int8_bfloat16", "int16"),
            converter=("ctranslate2",),
            runtime=("ctranslate2",),
        ),
        Format(
            "gguf",
            "whisper.cpp, in its own ggml format (it reads no GGUF)",
            ("q8_0", "q5_0"),
            default_precision="float16",
            runtime=("pywhispercpp",),
        ),
        Format(
            "onnx",
            "onnxruntime, transformers.js, optimum",
            ("int8",),
            converter=("onnx", "onnxscript"),
            runtime=("onnxruntime",),
        ),
        Format(
            "coreml",
            "whisper.cpp on a Mac: its encoder for the Neural Engine",
            default_precision="float16",
            converter=("coremltools",),
            runtime=("coremltools",),
        ),
    )
}


def find_format(name: str, quantize: str) -> Format:
    """Return the format ``name``.

    Raises:
        BadInput: there is none, it has no such precision, or its converter is not installed.
    """
    if not name:
        raise BadInput("no format was named", f"name one with --to: {', '.join(FORMATS)}")
    if name not in FORMATS:
        raise BadInput(f"--to {name}: no such format", f"choose among: {', '.join(FORMATS)}")
    export_format = FORMATS[name]
    if quantize and quantize not in (export_format.default_precision, *export_format.quantize):
        choices = ", ".join((export_format.default_precision, *export_format.quantize))
        raise BadInput(f"--quantize {quantize}: {name} has no such precision", f"choose among: {choices}")
    missing = export_format.missing_converter or (
        export_format.missing_runtime if quantize == "int8" and name == "onnx" else ()
    )
    if missing:
        raise BadInput(f"export to {name} needs {', '.join(missing)}, not installed here", export_format.install)
    return export_format


def _missing(modules: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(module for module in modules if importlib.util.find_spec(module) is None)


_WEIGHTS = (".safetensors", ".bin")


@dataclass(frozen=True)
class ModelSource:
    """A saved model and the run that produced it."""

    folder: Path
    run: RunMetadata | None
    """The run that produced it; ``None`` for a standalone folder."""

    @property
    def name(self) -> str:
        """Name of the run's profile, or of the folder."""
        return self.run.profile if self.run else self.folder.resolve().name

    @cached_property
    def adapter(self) -> bool:
        """Whether the folder holds only adapters."""
        return not (self.folder / "config.json").is_file() and (self.folder / "adapter_config.json").is_file()

    @property
    def base(self) -> str:
        """The base model: a hub name or a folder; empty if unknown.

        Raises:
            BadInput: adapters whose folder does not name their base model.
        """
        if self.adapter:
            from training.tasks.pretrained import base_of  # takes seconds

            return base_of(self.folder)
        model = self._section("model")
        return "" if model.get("from_scratch") else str(model.get("model_path") or "")

    def setting(self, section: str, name: str) -> Any:
        """Return a setting of its run; ``None`` without a run."""
        return self._section(section).get(name)

    @property
    def dataset(self) -> str:
        """The data set of its run; empty without a run."""
        return str(self._section("data").get("dataset_path") or "")

    @property
    def text_column(self) -> str:
        return str(self._section("data").get("text_column") or "")

    def _section(self, name: str) -> Mapping[str, Any]:
        section = self.run.config.get(name) if self.run else None
        return section if isinstance(section, dict) else {}

    def weights(self) -> dict[str, str]:
        """Return the SHA-256 of each weights file by name."""
        files = sorted(path for path in self.folder.iterdir() if path.suffix in _WEIGHTS and path.is_file())
        return {path.name: sha256(path) for path in files}


def find_source(output: Path, reference: str) -> ModelSource:
    """Return the model that ``reference`` refers to, as resolved by ``find_model``.

    Raises:
        BadInput: nothing fits, or the run has no model.
    """
    folder = find_model(output, reference)
    has_run = folder.name == "model" and (folder.parent / "metadata.json").is_file()
    return ModelSource(folder, read_metadata(folder.parent) if has_run else None)
