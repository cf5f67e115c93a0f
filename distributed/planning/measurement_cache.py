"""What was measured before, on disk: one small file for each machine and task, and for each pair of machines."""

from __future__ import annotations

import hashlib
import json
import time
from pathlib import Path
from typing import Any, TypeVar

import platformdirs
from pydantic import BaseModel, ValidationError

from profiles.errors import BadInput
from training.run_files import explain, write_whole

_LARGEST = 1_000_000
D = TypeVar("D", bound=BaseModel)


class MeasurementCache:
    """Documents by what they depend on, with their age.

    Args:
        folder: ``None`` for the user's cache folder of this operating system.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder or Path(platformdirs.user_cache_dir("muster", appauthor=False)) / "measurements"

    def get(self, kind: type[D], key: dict[str, Any], max_age: float = float("inf")) -> D | None:
        """Return a document not older than ``max_age`` seconds; ``None`` where there is none that can be read."""
        path = self._path(kind, key)
        try:
            if path.stat().st_size > _LARGEST:
                return None
            held = json.loads(path.read_bytes())
            age = time.time() - float(held["measured_at"])
            return kind.model_validate_json(json.dumps(held["document"])) if 0 <= age <= max_age else None
        except (OSError, ValueError, KeyError, TypeError, ValidationError, RecursionError):
            return None  # whatever is wrong with the file: measuring again mends it

    def put(self, key: dict[str, Any], document: BaseModel) -> None:
        """Keep a document, whole or not at all.

        Raises:
            BadInput: the folder cannot be written.
        """
        path = self._path(type(document), key)
        held = {"measured_at": time.time(), "document": document.model_dump(mode="json")}
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_whole(path, json.dumps(held).encode())
        except OSError as error:
            raise BadInput(*explain(error, path)) from None

    def _path(self, kind: type[BaseModel], key: dict[str, Any]) -> Path:
        words = json.dumps([kind.__name__, key], sort_keys=True)
        return self.folder / f"{hashlib.sha256(words.encode()).hexdigest()[:32]}.json"
