"""One export from beginning to end: checked before, written whole or not at all, compared with the original.

Its manifest (``manifest.json``) says where it came from, what was written, with which versions, and how it was checked;
a Hugging Face folder has a model card too (``README.md``): data, error rates before and after, licence of the base.
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
from profiles.schema import ModelSettings
from training.export.exporters import (
    CheckClip,
    CheckResult,
    Exporter,
    MergedWhisper,
    clips_to_check,
    compare,
    exporter_of,
    listen,
)
from training.export.formats import Format, ModelSource
from training.plan import document, finite, utc_now, versions_of
from training.run_files import sha256, whole_folder, write_whole
from training.tasks.whisper.model import WhisperModelWrapper

MANIFEST = "manifest.json"
KIND = "muster-export"
"""What tells an export's manifest from those of others."""
_HUB_LICENCES = {"openai/whisper": "apache-2.0"}
"""Licences that the cards of published models name, by the beginning of their names."""

_LABELS = {"wer": "WER", "cer": "CER", "loss": "loss"}


def told_of_check(result: CheckResult | None, bound: float, unchecked: str) -> dict[str, Any]:
    """Return what the manifest says of the check: figures, and no word that somebody spoke."""
    if result is None:
        return {"checked": False, "reason": unchecked}
    return {
        "checked": True,
        "samples": len(result.heard),
        "texts_the_same": result.same,
        "words_differing": result.differing,
        "bound": bound,
    }


def write_manifest(
    folder: Path, source: ModelSource, made: Format, quantize: str, check: Mapping[str, Any]
) -> dict[str, Any]:
    """Write the manifest of a whole export into its folder, and return it."""
    run, paths = source.run, sorted(path for path in folder.rglob("*") if path.is_file() and path != folder / MANIFEST)
    content = {
        "kind": KIND,
        "version": 1,
        "format": made.name,
        "precision": quantize or made.usual,
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
        "versions": versions_of(("muster-train", "torch", "transformers", *made.converter, *made.runtime)),
        "check": dict(check),
    }
    write_whole(folder / MANIFEST, document(finite(content)), mode=0o644)
    return content


def public_name(name: str) -> str:
    """Return a hub name as it is, and of a folder its last part: a path says more of its owner than of the model."""
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
    told = licence or "unknown: find it out before you share the model"
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
        f"Of the base model: {told}. To share this model you also need the right to share what it was trained on.",
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
    before, after = (found if isinstance(found := metrics.get(when), Mapping) else {} for when in ("before", "after"))
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
    return f"{100 * value:.1f} %" if name in ("wer", "cer") else f"{value:.3g}"


def _cell(value: Any) -> str:
    """Text in one cell of a table: no line ends, no column ends, no code of a page."""
    return re.sub(r"[|<>`\s]+", " ", str(value)).strip()[:200]


def _use(adapter: bool) -> list[str]:
    if adapter:
        opened = 'model = PeftModel.from_pretrained(base, "THIS_FOLDER").merge_and_unload()'
        return ["```python", "from peft import PeftModel", "", opened, "```"]
    return [
        "```python",
        "from transformers import pipeline",
        "",
        'print(pipeline("automatic-speech-recognition", "THIS_FOLDER")("clip.wav"))',
        "```",
    ]


def licence_of(base: str) -> str:
    """Return the licence of a base model: of its card, if it is a folder here; of a table; else empty."""
    card = Path(base).expanduser() / "README.md"
    if base and card.is_file():
        front = card.read_text(encoding="utf-8", errors="replace")[:20_000]
        found = re.search(r"\A---\n(?:.*\n)*?license:\s*[\"']?([\w.+-]{1,60})", front)
        if found:
            return found[1]
    return next((licence for name, licence in _HUB_LICENCES.items() if base.startswith(name)), "")


Say = Callable[[str], None]


@dataclass(frozen=True)
class ExportRequest:
    """What is wanted."""

    source: ModelSource
    format: Format
    out: Path
    quantize: str = ""
    files: tuple[Path, ...] = ()
    """Recordings to check with; none: of the run's data."""
    check: bool = True
    bound: float = 0.1
    """Share of the words that may differ from those of the original."""
    adapter: bool = False
    """Keep adapters apart instead of merging them (hf)."""
    overwrite: bool = False
    """Replace an earlier export."""


@dataclass(frozen=True)
class ExportOutcome:
    """What was made."""

    folder: Path
    manifest: dict[str, Any]
    result: CheckResult | None
    """``None``: not checked; ``manifest["check"]["reason"]`` says why."""


def export(request: ExportRequest, say: Say, exporter: Exporter | None = None) -> ExportOutcome:
    """Carry an export out; ``say`` is told each stage.

    Raises:
        BadInput: the model cannot be exported so, or the folder is there already. Nothing was written.
        RunFailed: the exported model writes other texts than the original. Nothing is left.
    """
    refuse_existing(request.out, request.overwrite)
    with _plain(request.source) as plain, _written(request.out, request.overwrite) as folder:
        clips, unchecked = _clips(request, plain)
        original: list[str] = []
        if clips:
            say(f"listening to {counted(len(clips), 'recording')} with the original")
            original, clips = listen(plain.wrapper, plain.model, clips)
        say(f"writing {request.format.name}")
        exporter = exporter or exporter_of(request.format.name)
        _write(request, exporter, plain, folder)
        result = None
        if clips:
            say("listening with the exported model")
            result = compare(clips, original, exporter.listen(folder, plain, clips))
            _refuse_other_texts(result, request)
        told = told_of_check(result, request.bound, unchecked)
        content = write_manifest(folder, request.source, request.format, request.quantize, told)
    return ExportOutcome(request.out, content, result)


def refuse_existing(out: Path, overwrite: bool) -> None:
    """Raise ``BadInput`` where something is there that may not be replaced: only an export is, and only if asked."""
    if not out.exists() and not out.is_symlink():
        return
    if not is_export(out):
        raise BadInput(f"{out}: it exists, and is not an export of Muster", "choose another folder with --out")
    if not overwrite:
        raise BadInput(f"{out}: this export exists", "choose another folder with --out, or --overwrite")


def is_export(folder: Path) -> bool:
    """Whether a folder holds an export that Muster wrote."""
    try:
        text = (folder / MANIFEST).read_text(encoding="utf-8", errors="replace")[:200]
    except OSError:
        return False
    return not folder.is_symlink() and f'"kind": "{KIND}"' in text


@contextlib.contextmanager
def _written(out: Path, overwrite: bool) -> Iterator[Path]:
    """Fill a temporary folder that becomes ``out``; an export that it replaces goes when the new one is whole."""
    old: Path | None = None
    try:
        with whole_folder(out.parent, out.name, "--out") as folder:
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
def _plain(source: ModelSource) -> Iterator[MergedWhisper]:
    """A folder with the whole model: the run's own, or, of adapters, a merged one that lives as long as the export."""
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


def _clips(request: ExportRequest, plain: MergedWhisper) -> tuple[list[CheckClip], str]:
    """Return the recordings to check with, or none and the reason."""
    if not request.check:
        return [], "not wanted"
    if request.adapter:
        return [], "adapters are written as they are"
    if request.format.deaf:
        return [], f"{', '.join(request.format.deaf)} is not installed: {request.format.install}"
    if request.format.elsewhere:
        return [], request.format.elsewhere
    return clips_to_check(request.source, plain.wrapper, request.files), ""


def _write(request: ExportRequest, exporter: Exporter, plain: MergedWhisper, folder: Path) -> None:
    if request.adapter:
        shutil.copytree(request.source.folder, folder, dirs_exist_ok=True)
    else:
        exporter.write(plain, folder, request.quantize)
    if request.format.name == "hf":
        card = model_card(request.source, request.quantize or request.format.usual, request.adapter)
        (folder / "README.md").write_text(card, encoding="utf-8")


def _refuse_other_texts(result: CheckResult, request: ExportRequest) -> None:
    if result.differing <= request.bound:
        return
    worst = next(one for one in result.heard if one.original != one.exported)
    said = f"{worst.name}: {worst.original[:80]!r} became {worst.exported[:80]!r}"
    message = f"the {request.format.name} model differs in {result.differing:.1%} of the words: {said}"
    hint = "nothing was kept; choose another --quantize, or allow more with --max-difference"
    raise RunFailed(message, hint)


def check_files(files: Sequence[Path]) -> None:
    """Raise ``BadInput`` where a recording to check with is not there."""
    for file in files:
        if not file.is_file():
            raise BadInput(f"--check-with {file}: no such file", "check the path")
