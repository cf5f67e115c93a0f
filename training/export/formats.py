"""The formats a model is exported to: for whom, with which packages, in which precisions. Loads nothing heavy."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import dataclass

from profiles.errors import BadInput
from training.run_metadata import versions_of


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
    speech_only: bool = True
    """Whether only a Whisper can be exported to it."""

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
        Format("hf", "transformers, and all that open a model of the hub", ("float16", "bfloat16"), speech_only=False),
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


def versions(found: Format) -> dict[str, str]:
    """Return the versions of what writes and reads a format, by package."""
    return versions_of(("muster-train", "torch", "transformers", *found.converter, *found.runtime))


def _lacking(modules: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(module for module in modules if importlib.util.find_spec(module) is None)
