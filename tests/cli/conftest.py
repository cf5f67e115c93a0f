from __future__ import annotations

import shutil
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run in an empty folder, with crash logs inside it and a small data set of silence beside it."""
    monkeypatch.chdir(_work_folder(tmp_path))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("NO_COLOR", raising=False)


def _work_folder(folder: Path) -> Path:
    (folder / "work").mkdir()
    (folder / "speech").mkdir()
    for split in ("train", "validation", "test"):
        (folder / "speech" / f"{split}.csv").write_text(f"audio_path,text\n{split}.wav,one\n")
        (folder / "speech" / f"{split}.wav").touch()
    return folder / "work"


@pytest.fixture(scope="session")
def _completed_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of runs in which one has completed."""
    from fake_run import finished_run

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(_work_folder(tmp_path_factory.mktemp("completed")))
        return finished_run().parent.resolve()


@pytest.fixture
def completed_run(_completed_runs: Path) -> Path:
    """The folder of a run that has completed: each test has a copy."""
    shutil.copytree(_completed_runs, "output")
    (run,) = Path("output").iterdir()
    return run


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
