"""The formats a model is exported to: for whom, with which packages, in which precisions; and what is
exported: a model's folder and the run it came from. Loads nothing heavy."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from profiles.errors import BadInput
from training.plan import RunMetadata, read_metadata
from training.run_files import sha256
from training.runs import find_model


@dataclass(frozen=True)
class Format:
    """One format."""

    name: str
    reader: str
    """The programs that read it."""
    quantize: tuple[str, ...] = ()
    """Precisions of the weights besides the usual one."""
    usual: str = "float32"
    """Precision where none is chosen."""
    converter: tuple[str, ...] = ()
    """Modules that write it, besides those of Muster itself."""
    runtime: tuple[str, ...] = ()
    """Modules that the check listens with."""
    extra: str = ""
    """Name of the extra in ``pyproject.toml`` that brings both."""

    @property
    def lacking(self) -> tuple[str, ...]:
        """Modules of the converter that are not installed."""
        return _lacking(self.converter)

    @property
    def deaf(self) -> tuple[str, ...]:
        """Modules that the check lacks."""
        return _lacking(self.runtime)

    @property
    def elsewhere(self) -> str:
        """Why this machine cannot run the format, whatever is installed; empty if it can."""
        return "Core ML runs on macOS only" if self.name == "coreml" and sys.platform != "darwin" else ""

    @property
    def install(self) -> str:
        """What to type to get its packages; torch stays as it is."""
        return f"{sys.executable} -m pip install -c constraints.txt -e '.[{self.extra}]'"


FORMATS = {
    found.name: found
    for found in (
        Format("hf", "transformers, and all that open a model of the hub", ("float16", "bfloat16")),
        Format(
            "ctranslate2",
            "faster-whisper, whisper-ctranslate2",
            ("float16", "bfloat16", "int8", "int8_float16", "int8_bfloat16", "int16"),
            converter=("ctranslate2",),
            runtime=("ctranslate2",),
            extra="ctranslate2",
        ),
        Format(
            "gguf",
            "whisper.cpp, in its own ggml format (it reads no GGUF)",
            ("q8_0", "q5_0"),
            usual="float16",
            runtime=("pywhispercpp",),
            extra="gguf",
        ),
        Format(
            "onnx",
            "onnxruntime, transformers.js, optimum",
            ("int8",),
            converter=("onnx", "onnxscript"),
            runtime=("onnxruntime",),
            extra="onnx",
        ),
        Format(
            "coreml",
            "whisper.cpp on a Mac: its encoder for the Neural Engine",
            usual="float16",
            converter=("coremltools",),
            runtime=("coremltools",),
            extra="coreml",
        ),
    )
}


def find_format(name: str, quantize: str) -> Format:
    """Return the format ``name``.

    Raises:
        BadInput: there is none, it has no such precision, or its converter is not installed.
    """
    if name not in FORMATS:
        raise BadInput(f"--to {name}: no such format", f"choose among: {', '.join(FORMATS)}")
    found = FORMATS[name]
    if quantize and quantize not in (found.usual, *found.quantize):
        can = ", ".join((found.usual, *found.quantize))
        raise BadInput(f"--quantize {quantize}: {name} has no such precision", f"choose among: {can}")
    needed = found.lacking or (found.deaf if quantize == "int8" and name == "onnx" else ())
    if needed:
        raise BadInput(f"export to {name} needs {', '.join(needed)}, not installed here", found.install)
    return found


def _lacking(modules: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(module for module in modules if importlib.util.find_spec(module) is None)


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
        """The model it was made from: a hub name or a folder; empty if nobody knows.

        Raises:
            BadInput: of adapters, whose folder does not say it.
        """
        if self.adapter:
            from training.tasks.pretrained import base_of  # takes seconds

            return base_of(self.folder)
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
