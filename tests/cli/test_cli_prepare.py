"""``prepare`` as it is typed."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from app.cli.main import main

sys.path.append(str(Path(__file__).parents[1] / "recordings"))

from sounds import write_rows, write_tone

Capture = pytest.CaptureFixture[str]


def forty(folder: Path) -> Path:
    """Recordings of four voices, the last of which cannot be used."""
    rows = [(write_tone(folder / f"{i}.wav", i).name, f"number {i}", f"p{i % 4}") for i in range(39)]
    return write_rows(folder / "all.csv", "audio_path,text,speaker", [*rows, ("gone.wav", "nothing", "p1")])


def test_it_says_what_became_of_the_recordings_and_what_to_type_next(capsys: Capture) -> None:
    assert main(["prepare", str(forty(Path("source"))), "--out", "ready"]) == 0
    out, err = capsys.readouterr()
    assert "left out        1, each with its reason in ready/left_out.csv" in out
    assert "not there, such as gone.wav: no such file" in out
    assert out.splitlines()[-1].endswith("cli_typer.py distributed-train whisper-tiny-lora --dataset ready")
    assert "recordings: 39/39" in err and "nobody is in two splits" in err


def test_json_is_one_document(capsys: Capture) -> None:
    assert main(["prepare", str(forty(Path("source"))), "--out", "ready", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert sum(split["clips"] for split in found["splits"].values()) == 39
    assert (found["kind"], found["left_out"], found["exit_code"]) == ("table", {"not there": 1}, 0)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nothing.csv"], "source nothing.csv: not there"),
        (["."], "nothing there that is known"),
        ([".", "--kind", "tape"], "no kind 'tape' of source"),
        (["bigquery:nothing"], "not the name of a table"),
    ],
)
def test_a_source_that_is_none_is_bad_input(arguments: list[str], said: str, capsys: Capture) -> None:
    assert main(["prepare", *arguments, "--out", "ready"]) == 2
    assert said in capsys.readouterr().err
    assert not Path("ready").exists()


@pytest.mark.slow
def test_forty_recordings_are_prepared_and_trained_on(capsys: Capture) -> None:
    source = forty(Path("source"))
    assert main(["prepare", str(source), "--out", "ready"]) == 0
    settings = ["max_steps=2", "batch_size=4", "eval_generate=false", "workers=1", "strategy=auto"]
    flags = [word for setting in settings for word in ("--set", setting)]
    assert main(["distributed-train", "demo", "--dataset", "ready", *flags, "--json"]) == 0
    metrics = json.loads(capsys.readouterr().out.partition("distributed-train")[2].partition("\n")[2])
    assert metrics["status"] == "completed"
