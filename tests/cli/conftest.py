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


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Whisper of two layers."""
    import torch

    from tests.speech.tiny_speech import tiny_whisper  # imports transformers

    torch.manual_seed(1)  # what it hears decides what is listed
    return tiny_whisper(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def clips() -> list[tuple[str, str, str]]:
    """Rows of a table of four recordings in the folder ``speech``."""
    from tests.speech.tiny_speech import write_clips

    return write_clips(Path("speech"), 4)
