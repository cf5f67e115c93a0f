"""One export from beginning to end: checked before, written whole or not at all, compared with the original."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from profiles.counts import counted
from profiles.errors import BadInput, RunFailed
from profiles.schema import ModelSettings
from training.export import manifest
from training.export.exporters import (
    CheckClip,
    CheckResult,
    Exporter,
    Plain,
    clips_to_check,
    compare,
    exporter_of,
    listen,
)
from training.export.formats import Format
from training.export.manifest import model_card
from training.export.source import ModelSource
from training.run_files import whole_folder
from training.tasks.whisper.model import WhisperModelWrapper

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


def export(request: ExportRequest, say: Say) -> ExportOutcome:
    """Carry an export out; ``say`` is told each stage.

    Raises:
        BadInput: the model cannot be exported so, or the folder is there already. Nothing was written.
        RunFailed: the exported model writes other texts than the original. Nothing is left.
    """
    refuse_existing(request.out, request.overwrite)
    if request.source.kind != "whisper":
        raise BadInput(f"model {request.source.folder} is no Whisper", "its folder is a plain hf folder already")
    with _plain(request.source) as plain, _written(request.out, request.overwrite) as folder:
        clips, unchecked = _clips(request, plain)
        original: list[str] = []
        if clips:
            say(f"listening to {counted(len(clips), 'recording')} with the original")
            original, clips = listen(plain.wrapper, plain.model, clips)
        say(f"writing {request.format.name}")
        exporter = exporter_of(request.format.name)
        _write(request, exporter, plain, folder)
        result = None
        if clips:
            say("listening with the exported model")
            result = compare(clips, original, exporter.listen(folder, plain, clips))
            _refuse_other_texts(result, request)
        told = manifest.told_of_check(result, request.bound, unchecked)
        content = manifest.write_manifest(folder, request.source, request.format, request.quantize, told)
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
    """Whether a folder holds an export of ours."""
    try:
        text = (folder / manifest.NAME).read_text(encoding="utf-8", errors="replace")[:200]
    except OSError:
        return False
    return not folder.is_symlink() and f'"kind": "{manifest.KIND}"' in text


@contextlib.contextmanager
def _written(out: Path, overwrite: bool) -> Iterator[Path]:
    """Fill a temporary folder that becomes ``out``; an export that it replaces goes when the new one is whole."""
    old: Path | None = None
    try:
        with whole_folder(out.parent, out.name) as folder:
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
def _plain(source: ModelSource) -> Iterator[Plain]:
    """A folder with the whole model: the run's own, or, of adapters, a merged one that lives as long as the export."""
    task = source.setting("model", "speech_task") or "transcribe"
    wrapper = WhisperModelWrapper(ModelSettings(model_path=str(source.folder), speech_task=task))
    model: Any = wrapper.build().eval()
    if not source.adapter:
        yield Plain(source.folder, wrapper, model)
        return
    with tempfile.TemporaryDirectory(prefix="muster-merged-") as name:
        wrapper.save(model, Path(name), wrapper.default_language)
        yield Plain(Path(name), wrapper, model)


def _clips(request: ExportRequest, plain: Plain) -> tuple[list[CheckClip], str]:
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


def _write(request: ExportRequest, exporter: Exporter, plain: Plain, folder: Path) -> None:
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
