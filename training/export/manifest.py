"""``manifest.json`` of an export: where it came from, what was written, with which versions, and how it was checked."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from training.export.check import CheckResult
from training.export.formats import Format, versions
from training.export.source import ModelSource, sha256
from training.run_files import write_whole
from training.run_metadata import document, finite, utc_now

NAME = "manifest.json"
KIND = "muster-export"
"""What tells an export's manifest from those of others."""


def files_of(folder: Path) -> list[dict[str, Any]]:
    """Return name, size in bytes and SHA-256 of every file of a folder but the manifest, by name."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path != folder / NAME)
    return [
        {"name": path.relative_to(folder).as_posix(), "bytes": path.stat().st_size, "sha256": sha256(path)}
        for path in paths
    ]


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
    run = source.run
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
        "files": files_of(folder),
        "versions": versions(made),
        "check": dict(check),
    }
    write_whole(folder / NAME, document(finite(content)), mode=0o644)
    return content


def public_name(name: str) -> str:
    """Return a hub name as it is, and of a folder its last part: a path says more of its owner than of the model."""
    return Path(name).name if name.startswith(("/", ".", "~")) or name.count("/") > 1 else name
