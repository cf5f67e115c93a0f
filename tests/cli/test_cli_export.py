"""``export`` from the command line to the folder that other programs open."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from app.cli.main import main
from training.records.plan import RunMetadata

Capture = pytest.CaptureFixture[str]
Clips = list[tuple[str, str, str]]


def exported(to: str, model: Path, clips: Clips, capsys: Capture) -> tuple[Path, dict[str, object]]:
    """The folder that the command wrote, and its document."""
    checked = [word for _, file, _ in clips for word in ("--check-with", f"speech/{file}")]
    assert main(["export", str(model), "--to", to, "--out", f"out-{to}", *checked, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["exit_code"] == 0
    assert [one["original"] == one["exported"] for one in document["heard"]] == [True] * 4
    assert document["manifest"]["check"]["texts_the_same"] == 4
    return Path(document["folder"]), document["manifest"]


@pytest.mark.slow
def test_a_plain_folder_is_written_and_opens(model: Path, clips: Clips, capsys: Capture) -> None:
    from transformers import WhisperForConditionalGeneration

    folder, manifest = exported("hf", model, clips, capsys)
    assert WhisperForConditionalGeneration.from_pretrained(folder).config.d_model == 16
    assert {"model.safetensors", "README.md"} <= {file["name"] for file in manifest["files"]}
    assert main(["export", str(model), "--to", "hf", "--out", str(folder)]) == 2
    assert "--overwrite" in capsys.readouterr().err


@pytest.mark.slow
def test_a_folder_for_faster_whisper_hears_the_same(model: Path, clips: Clips, capsys: Capture) -> None:
    pytest.importorskip("ctranslate2")
    folder, _ = exported("ctranslate2", model, clips, capsys)
    assert (folder / "model.bin").stat().st_size > 0


@pytest.mark.slow
def test_a_place_that_cannot_be_written_leaves_nothing_and_names_the_option(model: Path, capsys: Capture) -> None:
    Path("file").write_text("mine")
    assert main(["export", str(model), "--to", "hf", "--out", "file/new", "--no-check"]) == 2
    assert capsys.readouterr().err.endswith("hint: move it, or choose another place with --out\n")
    assert Path("file").read_text() == "mine" and [path.name for path in Path().iterdir()] == ["file"]


@pytest.mark.slow
def test_a_run_whose_settings_nobody_knows_is_exported(model: Path, capsys: Capture) -> None:
    run = Path("output/20261122-000000-abcd-mine")
    shutil.copytree(model, run / "model")
    settings = {"model": {"speech_task": "sing"}, "data": 3}
    metadata = RunMetadata(run_id=run.name[:20], start_time="", profile="mine", config=settings)
    (run / "metadata.json").write_text(metadata.model_dump_json())
    assert main(["export", "mine", "--to", "hf", "--no-check"]) == 0
    assert (run / "exports" / "hf" / "model.safetensors").is_file()


def test_a_model_that_is_not_there_is_told_before_anything_is_loaded(capsys: Capture) -> None:
    assert main(["export", "nothing"]) == 2
    assert "name one with --to: hf, ctranslate2, gguf, onnx, coreml" in capsys.readouterr().err
    assert main(["export", "nothing", "--to", "hf"]) == 2
    assert capsys.readouterr().err.startswith("error: no run 'nothing'")
