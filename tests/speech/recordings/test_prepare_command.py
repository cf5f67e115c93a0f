"""``prepare`` as it is typed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from https_site import Site
from sounds import read_rows, write_rows, write_tone

from app.cli.main import main

COMMANDS = Path(__file__).parents[3] / "examples" / "spoken_commands"
Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def forty(folder: Path) -> Path:
    """Recordings of four voices, the last of which cannot be used."""
    rows = [(write_tone(folder / f"{i}.wav", i).name, f"number {i}", f"p{i % 4}") for i in range(39)]
    return write_rows(folder / "all.csv", "audio_path,text,speaker", [*rows, ("gone.wav", "nothing", "p1")])


@pytest.mark.slow
def test_it_says_what_became_of_the_recordings_and_what_to_type_next(capsys: Capture) -> None:
    assert main(["prepare", str(forty(Path("source"))), "--out", "ready"]) == 0
    out, err = capsys.readouterr()
    assert "left out        1, each with its reason in ready/left_out.csv" in out
    assert "not there, such as gone.wav\n" in out
    assert out.splitlines()[-1].endswith("cli_typer.py train whisper-tiny-lora --dataset ready")
    assert "recordings: 39/39" in err and "no speaker is in two splits" in err


@pytest.mark.slow
def test_a_folder_need_not_be_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["prepare", str(forty(Path("source")))]) == 0
    assert Path("prepared/train.csv").is_file()


@pytest.mark.slow
def test_json_is_one_document(capsys: Capture) -> None:
    assert main(["prepare", str(forty(Path("source"))), "--out", "ready", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert sum(split["clips"] for split in document["splits"].values()) == 39
    assert (document["kind"], document["left_out"], document["exit_code"]) == ("table", {"not there": 1}, 0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing.csv"], "source nothing.csv: not there"),
        ([".", "--output", "ready"], "with --out ready"),
        (["."], "nothing there has a known form"),
        ([".", "--kind", "tape"], "unknown kind of source: 'tape'"),
        (["bigquery:nothing"], "not the name of a table"),
    ],
)
def test_a_source_that_is_none_is_bad_input(arguments: list[str], message: str, capsys: Capture) -> None:
    assert main(["prepare", *arguments, "--out", "ready"]) == 2
    assert message in capsys.readouterr().err
    assert not Path("ready").exists()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_forty_recordings_behind_addresses_are_prepared_and_trained_on(
    site: Site, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(site.ca_file))
    spoken = read_rows(COMMANDS / "test.csv")[::12]
    site.answers = {f"/{row['id']}.opus": (COMMANDS / row["audio_path"]).read_bytes() for row in spoken}
    rows = [(row["id"], f"{site.url}/{row['id']}.opus", row["text"], row["voice"]) for row in spoken]
    source = write_rows(Path("all.csv"), "id,url,text,speaker", rows)
    assert main(["prepare", str(source), "--out", "ready", "--allow-private", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (sum(split["clips"] for split in document["splits"].values()), document["left_out"]) == (40, {})
    settings = ["max_steps=2", "batch_size=4", "eval_generate=false", "workers=1"]
    flags = [word for setting in settings for word in ("--set", setting)]
    assert main(["distributed-train", "demo", "--dataset", "ready", *flags, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["status"] == "completed"
