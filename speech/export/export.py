"""Run one export: validate the request, write it atomically, and compare its transcripts with the original's.

The manifest (``manifest.json``) records the source, the files, the package versions and the result of the check. A
Hugging Face folder also gets a model card (``README.md``): data, error rates before and after, licence of the base.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from profiles.errors import BadInput, RunFailed, counted
from profiles.quantities import error_rate_text, loss_text, share_text
from profiles.schema import ModelSettings
from speech.export.exporters import (
    CheckClip,
    CheckResult,
    Exporter,
    MergedWhisper,
    compare,
    exporter_of,
    select_check_clips,
    transcribe,
)
from speech.export.formats import Format, ModelSource
from speech.whisper.model import WhisperModelWrapper
from training.records.run_files import atomic_folder, document, finite, sha256, utc_now, versions_of, write_atomically

MANIFEST = "manifest.json"
KIND = "muster-export"
"""Marks a manifest as one of Muster's exports."""
_HUB_LICENCES = {"openai/whisper": "apache-2.0"}
"""Licences of published models, by prefix of the hub name."""

_LABELS = {"wer": "WER", "cer": "CER", "loss": "loss"}


def check_record(result: CheckResult | None, bound: float, skip_reason: str) -> dict[str, Any]:
    """Return the manifest's entry for the check: figures only, no transcripts, which may be private."""
    if result is None:
        return {"checked": False, "reason": skip_reason}
    return {
        "checked": True,
        "samples": len(result.transcripts),
        "texts_the_same": result.identical,
        "words_differing": result.word_difference,
        "bound": bound,
    }


def write_manifest(
    folder: Path, source: ModelSource, export_format: Format, quantize: str, check: Mapping[str, Any]
) -> dict[str, Any]:
    """Write the manifest of a complete export into its folder, and return it."""
    run, paths = source.run, sorted(path for path in folder.rglob("*") if path.is_file() and path != folder / MANIFEST)
    content = {
        "kind": KIND,
        "version": 1,
        "format": export_format.name,
        "precision": quantize or export_format.default_precision,
        "made": utc_now(),
        "source": {
            "run": run.run_id if run else "",
            "profile": run.profile if run else "",
            "model": source.name,
            "base_model": public_name(source.base),
            "sha256": source.weights(),
        },
        "files": [
            {"name": path.relative_to(folder).as_posix(), "bytes": path.stat().st_size, "sha256": sha256(path)}
            for path in paths
        ],
        "versions": versions_of(
            ("muster-train", "torch", "transformers", *export_format.converter, *export_format.runtime)
        ),
        "check": dict(check),
    }
    write_atomically(folder / MANIFEST, document(finite(content)), mode=0o644)
    return content


def public_name(name: str) -> str:
    """Return a hub name unchanged, and only the last component of a path, which may reveal private folder names."""
    return Path(name).name if name.startswith(("/", ".", "~")) or name.count("/") > 1 else name


def model_card(source: ModelSource, precision: str, adapter: bool) -> str:
    """Return the card of a Hugging Face folder as text."""
    licence = licence_of(source.base)
    base = public_name(source.base)
    front = {
        "library_name": "peft" if adapter else "transformers",
        "pipeline_tag": "automatic-speech-recognition",
        **({"base_model": base} if "/" in base else {}),
        **({"license": licence} if licence else {}),
        "tags": ["muster"],
    }
    terms = licence or "unknown: find it out before you share the model"
    scratch = source.setting("model", "from_scratch")
    origin = (
        f", fine-tuned from `{base}` with Muster"
        if base
        else ", trained from random weights with Muster" * bool(scratch)
    )
    lines = [
        *("---", *(f"{name}: {json.dumps(value)}" for name, value in front.items()), "---", ""),
        f"# {source.name}",
        "",
        f"A model of type `whisper`{origin}; weights in {precision}.",
        "",
        *_training(source),
        *_metrics(source),
        "## Licence",
        "",
        f"Of the base model: {terms}. To share this model you also need the right to share what it was trained on.",
        "",
        "## Use",
        "",
        *_use(adapter),
    ]
    return "\n".join(lines) + "\n"


def _training(source: ModelSource) -> list[str]:
    if source.run is None:
        return []
    run, config = source.run, source.run.config
    shown = {
        "data": public_name(run.dataset),
        "tuning": config.get("model", {}).get("tuning"),
        "language": config.get("model", {}).get("language"),
        "learning rate": config.get("training", {}).get("learning_rate"),
        "workers": len(run.hosts),
        "strategy": run.strategy,
        "run": run.run_id,
    }
    rows = [f"| {name} | {_cell(value)} |" for name, value in shown.items() if value not in (None, "")]
    return ["## Training", "", "| | |", "|---|---|", *rows, ""]


def _metrics(source: ModelSource) -> list[str]:
    metrics = source.run.metrics if source.run else {}
    before, after = (
        figures if isinstance(figures := metrics.get(moment), Mapping) else {} for moment in ("before", "after")
    )
    rows = [
        f"| {_cell(split)} | {label} | {_figure(name, earlier.get(name))} | {_figure(name, value)} |"
        for split, figures in after.items()
        if isinstance(figures, Mapping) and isinstance(earlier := before.get(split, {}), Mapping)
        for name, label in _LABELS.items()
        if isinstance(value := figures.get(name), (int, float))
    ]
    if not rows:
        return []
    return ["## Result", "", "| split | | before | after |", "|---|---|---|---|", *rows, ""]


def _figure(name: str, value: Any) -> str:
    if not isinstance(value, (int, float)):
        return "-"
    return error_rate_text(value) if name in ("wer", "cer") else loss_text(value)


def _cell(value: Any) -> str:
    """Escape a value for a Markdown table cell: no line breaks, column separators or HTML."""
    return re.sub(r"[|<>`\s]+", " ", str(value)).strip()[:200]


def _use(adapter: bool) -> list[str]:
    if adapter:
        snippet = 'model = PeftModel.from_pretrained(base, "THIS_FOLDER").merge_and_unload()'
        return ["```python", "from peft import PeftModel", "", snippet, "```"]
    return [
        "```python",
        "from transformers import pipeline",
        "",
        'print(pipeline("automatic-speech-recognition", "THIS_FOLDER")("clip.wav"))',
        "```",
    ]


def licence_of(base: str) -> str:
    """Return the licence of a base model: from the card in its local folder, else from a table, else empty."""
    card = Path(base).expanduser() / "README.md"
    if base and card.is_file():
        front = card.read_text(encoding="utf-8", errors="replace")[:20_000]
        match = re.search(r"\A---\n(?:.*\n)*?license:\s*[\"']?([\w.+-]{1,60})", front)
        if match:
            return match[1]
    return next((licence for name, licence in _HUB_LICENCES.items() if base.startswith(name)), "")


Report = Callable[[str], None]


@dataclass(frozen=True)
class ExportRequest:
    """Source, format and options of one export."""

    source: ModelSource
    format: Format
    out: Path
    quantize: str = ""
    files: tuple[Path, ...] = ()
    """Recordings to check with; if empty, some of the run's data are used."""
    check: bool = True
    bound: float = 0.1
    """Largest share of the words that may differ from the original's transcripts."""
    adapter: bool = False
    """Export adapters as they are instead of merging them (hf only)."""
    overwrite: bool = False
    """Replace an earlier export."""


@dataclass(frozen=True)
class ExportOutcome:
    """Folder, manifest and check result of a finished export."""

    folder: Path
    manifest: dict[str, Any]
    result: CheckResult | None
    """``None`` if not checked; ``manifest["check"]["reason"]`` says why."""


def export(request: ExportRequest, report: Report, exporter: Exporter | None = None) -> ExportOutcome:
    """Carry out an export; ``report`` is called with a line for each stage.

    Raises:
        BadInput: the model cannot be exported to this format, or the folder exists. Nothing was written.
        RunFailed: the exported model's transcripts differ too much from the original's. Nothing is left behind.
    """
    refuse_existing(request.out, request.overwrite)
    with _merged_model(request.source) as merged, _export_folder(request.out, request.overwrite) as folder:
        clips, skip_reason = _clips(request, merged)
        original: list[str] = []
        if clips:
            report(f"listening to {counted(len(clips), 'recording')} with the original")
            original, clips = transcribe(merged.wrapper, merged.model, clips)
        report(f"writing {request.format.name}")
        exporter = exporter or exporter_of(request.format.name)
        _write(request, exporter, merged, folder)
        result = None
        if clips:
            report("listening with the exported model")
            result = compare(clips, original, exporter.transcribe(folder, merged, clips))
            _check_difference(result, request)
        check = check_record(result, request.bound, skip_reason)
        content = write_manifest(folder, request.source, request.format, request.quantize, check)
    return ExportOutcome(request.out, content, result)


def refuse_existing(out: Path, overwrite: bool) -> None:
    """Raise ``BadInput`` if ``out`` exists and may not be replaced: only an export is, and only with ``overwrite``."""
    if not out.exists() and not out.is_symlink():
        return
    if not is_export(out):
        raise BadInput(f"{out}: it exists, and is not an export of Muster", "choose another folder with --out")
    if not overwrite:
        raise BadInput(f"{out}: this export exists", "choose another folder with --out, or --overwrite")


def is_export(folder: Path) -> bool:
    """Whether a folder holds an export written by Muster."""
    try:
        text = (folder / MANIFEST).read_text(encoding="utf-8", errors="replace")[:200]
    except OSError:
        return False
    return not folder.is_symlink() and f'"kind": "{KIND}"' in text


@contextlib.contextmanager
def _export_folder(out: Path, overwrite: bool) -> Iterator[Path]:
    """Yield a temporary folder that becomes ``out``; an earlier export is removed once the new one is complete."""
    old: Path | None = None
    try:
        with atomic_folder(out.parent, out.name, "--out") as folder:
            yield folder
            if overwrite and is_export(out):
                old = Path(tempfile.mkdtemp(prefix=".old-", dir=out.parent)) / out.name
                out.rename(old)
    except BaseException:
        if old is not None and old.exists() and not out.exists():
            old.rename(out)
        raise
    finally:
        if old is not None:
            shutil.rmtree(old.parent, ignore_errors=True)


@contextlib.contextmanager
def _merged_model(source: ModelSource) -> Iterator[MergedWhisper]:
    """Yield the full model: the source folder itself, or for adapters a temporary folder with them merged."""
    task = "translate" if source.setting("model", "speech_task") == "translate" else "transcribe"
    try:
        wrapper = WhisperModelWrapper(ModelSettings(model_path=str(source.folder), speech_task=task))
    except BadInput as error:
        raise BadInput(error.message, f"{error.hint}; only a Whisper is exported") from error
    model: Any = wrapper.build().eval()
    if not source.adapter:
        yield MergedWhisper(source.folder, wrapper, model)
        return
    with tempfile.TemporaryDirectory(prefix="muster-merged-") as name:
        wrapper.save(model, Path(name))
        yield MergedWhisper(Path(name), wrapper, model)


def _clips(request: ExportRequest, merged: MergedWhisper) -> tuple[list[CheckClip], str]:
    """Return the recordings to check with, or none and the reason why."""
    if not request.check:
        return [], "not wanted"
    if request.adapter:
        return [], "adapters are written as they are"
    if request.format.missing_runtime:
        return [], f"{', '.join(request.format.missing_runtime)} is not installed: {request.format.install}"
    if request.format.unsupported_reason:
        return [], request.format.unsupported_reason
    return select_check_clips(request.source, merged.wrapper, request.files), ""


def _write(request: ExportRequest, exporter: Exporter, merged: MergedWhisper, folder: Path) -> None:
    if request.adapter:
        shutil.copytree(request.source.folder, folder, dirs_exist_ok=True)
    else:
        exporter.write(merged, folder, request.quantize)
    if request.format.name == "hf":
        card = model_card(request.source, request.quantize or request.format.default_precision, request.adapter)
        (folder / "README.md").write_text(card, encoding="utf-8")


def _check_difference(result: CheckResult, request: ExportRequest) -> None:
    if result.word_difference <= request.bound:
        return
    worst = next(pair for pair in result.transcripts if pair.original != pair.exported)
    example = f"{worst.name}: {worst.original[:80]!r} became {worst.exported[:80]!r}"
    message = f"the {request.format.name} model differs in {share_text(result.word_difference)} of the words: {example}"
    hint = "nothing was kept; choose another --quantize, or allow more with --max-difference"
    raise RunFailed(message, hint)


def check_files(files: Sequence[Path]) -> None:
    """Raise ``BadInput`` if a recording to check with does not exist."""
    for file in files:
        if not file.is_file():
            raise BadInput(f"--check-with {file}: no such file", "check the path")
