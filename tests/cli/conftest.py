from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run in an empty folder, with crash logs inside it and a small data set of silence beside it."""
    (tmp_path / "work").mkdir()
    (tmp_path / "speech").mkdir()
    for split in ("train", "validation", "test"):
        (tmp_path / "speech" / f"{split}.csv").write_text(f"audio_path,text\n{split}.wav,one\n")
        (tmp_path / "speech" / f"{split}.wav").touch()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("NO_COLOR", raising=False)
