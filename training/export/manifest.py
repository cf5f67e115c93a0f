"""What an export says of itself: where it came from, what was written, with which versions, and how it was checked.

That is in ``manifest.json``; a Hugging Face folder has a model card too (``README.md``): data, error rates before and
after, licence of the base.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from training.export.exporters import CheckResult
from training.export.formats import Format, versions
from training.export.source import ModelSource
from training.run_files import sha256, write_whole
from training.run_metadata import document, finite, utc_now

NAME = "manifest.json"
KIND = "muster-export"
"""What tells an export's manifest from those of others."""
_HUB_LICENCES = {"openai/whisper": "apache-2.0"}
"""Licences that the cards of published models name, by the beginning of their names."""

_TASKS = {"whisper": "automatic-speech-recognition"}
_LABELS = {"wer": "WER", "cer": "CER", "loss": "loss", "perplexity": "perplexity"}


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
    run, paths = source.run, sorted(path for path in folder.rglob("*") if path.is_file() and path != folder / NAME)
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
        "versions": versions(made),
        "check": dict(check),
    }
    write_whole(folder / NAME, document(finite(content)), mode=0o644)
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
        "pipeline_tag": _TASKS.get(source.kind, "text-generation"),
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
        f"A model of type `{source.kind}`{origin}; weights in {precision}.",
        "",
        *_training(source),
        *_metrics(source),
        "## Licence",
        "",
        f"Of the base model: {told}. To share this model you also need the right to share what it was trained on.",
        "",
        "## Use",
        "",
        *_use(source, adapter),
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


def _use(source: ModelSource, adapter: bool) -> list[str]:
    if adapter:
        opened = 'model = PeftModel.from_pretrained(base, "THIS_FOLDER").merge_and_unload()'
        return ["```python", "from peft import PeftModel", "", opened, "```"]
    kind = _TASKS.get(source.kind, "text-generation")
    asked = '"clip.wav"' if source.kind in _TASKS else '"Once upon a time"'
    return [
        "```python",
        "from transformers import pipeline",
        "",
        f'print(pipeline("{kind}", "THIS_FOLDER")({asked}))',
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
