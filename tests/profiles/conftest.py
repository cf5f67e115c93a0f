from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write ``config.ini`` and saved profiles (``name="text"``) to a folder; returns the config's path."""

    def make(config: str, **saved: str) -> Path:
        path = tmp_path / "config.ini"
        path.write_text(config)
        for name, text in saved.items():
            folder = tmp_path / "profiles" / "saved"
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{name}.ini").write_text(text)
        return path

    return make
