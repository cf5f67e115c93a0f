"""``generate`` and ``chat``, with random language models of one layer."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from fake_run import FakeRun, finished_run, training

from app.cli.main import main
from app.cli.train.request import TrainRequest
from app.cli.train.start import distributed_train
from profiles.errors import ExitCode
from training.records.runs import list_runs

Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="session")
def writers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models with a chat template: ``base`` and ``tuned``; ``plain`` has none."""
    from tests.tasks.tiny_text import CHATML, save_model  # imports transformers

    folder = tmp_path_factory.mktemp("writers")
    save_model(folder / "base", CHATML, seed=1)
    save_model(folder / "tuned", CHATML, seed=2)
    save_model(folder / "plain", seed=3)
    return folder


def language_run(writers: Path, profile: str = "instruct-lora") -> Path:
    """Return the folder of a completed run whose model is ``tuned``."""
    Path("texts").mkdir(exist_ok=True)
    Path("texts/train.json").write_text(json.dumps([{"prompt": "a", "response": "b"}] * 20))
    options = {"model_path": str(writers / "base"), "dataset_path": "texts", "workers": "1", "block_size": "64"}
    distributed_train(TrainRequest(profile, options), FakeRun(training()))
    run = list_runs(Path("output"))[0].path
    shutil.rmtree(run / "model")
    shutil.copytree(writers / "tuned", run / "model")
    return run


def document(capsys: Capture, *arguments: str) -> dict[str, Any]:
    capsys.readouterr()
    code = main(["generate", *arguments, "--max-tokens", "9", "--device", "cpu", "--json"])
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert found["exit_code"] == code
    return found


@pytest.mark.slow
def test_a_prompt_comes_as_an_argument_a_file_or_a_pipe(
    writers: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = str(writers / "tuned")
    first = document(capsys, model, "Who are you?")
    assert first["tokens"] == 9 and first["prompt"] == "Who are you?"
    Path("prompt.txt").write_text("Who are you?")
    assert document(capsys, model, "--file", "prompt.txt") == first
    monkeypatch.setattr("sys.stdin", io.StringIO("Who are you?"))
    assert document(capsys, model) == first
    assert document(capsys, model, "Who are you?", "--exact")["text"] != first["text"]
    assert document(capsys, model, "Who are you?", "--temperature", "1", "--seed", "4")["text"] != first["text"]


@pytest.mark.slow
def test_the_newest_language_model_stands_beside_its_base(writers: Path, capsys: Capture) -> None:
    run = language_run(writers)
    finished_run()  # of speech, and newer
    found = document(capsys, "Who are you?", "--compare")
    assert Path(found["model"]) == run / "model" and found["base"]["model"] == str(writers / "base")
    assert found["text"] == document(capsys, str(writers / "tuned"), "Who are you?")["text"]
    assert found["base"]["text"] == document(capsys, str(writers / "base"), "Who are you?")["text"]
    assert main(["generate", run.name[:20], "Hi", "--compare", "--max-tokens", "3", "--device", "cpu"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith(("before: ", "after: "))] == [
        f"before: {writers / 'base'}",
        f"after: {run / 'model'}",
    ]


@pytest.mark.slow
def test_a_model_from_scratch_has_none_before_it(writers: Path, capsys: Capture) -> None:
    language_run(writers, "nanogpt")
    assert "from scratch" in document(capsys, "Who are you?", "--compare")["error"]["message"]


def test_what_cannot_write_says_why(tmp_path: Path, capsys: Capture) -> None:
    speech, own = tmp_path / "speech-model", tmp_path / "own-model"
    for folder, config in ((speech, {"model_type": "whisper"}), (own, {})):
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
    assert "transcribe" in document(capsys, str(speech), "Hi")["error"]["hint"]
    assert "no language model" in document(capsys, str(own), "Hi")["error"]["message"]
    assert "no run 'Hello'" in document(capsys, "Hello")["error"]["message"]


@pytest.mark.slow
def test_bytes_that_are_no_text_are_refused_in_one_line(writers: Path, capsys: Capture) -> None:
    error = document(capsys, str(writers / "tuned"), "caf\udce9")["error"]
    assert error["message"] == "the prompt is no text in UTF-8"


@pytest.mark.slow
def test_an_empty_prompt_is_none_except_where_a_text_is_to_begin(writers: Path, capsys: Capture) -> None:
    Path("empty.txt").write_text(" \n")
    model = str(writers / "tuned")
    assert document(capsys, model, "--file", "empty.txt")["error"]["message"] == "the prompt is empty"
    assert document(capsys, model, "--file", "empty.txt", "--exact")["tokens"] > 0


def test_a_terminal_is_asked_for_no_prompt(writers: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    assert document(capsys, str(writers / "tuned"))["error"]["message"] == "no prompt was given"


def talk(capsys: Capture, monkeypatch: pytest.MonkeyPatch, model: Path, *lines: str) -> list[dict[str, Any]]:
    capsys.readouterr()
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
    options = ["--max-tokens", "9", "--temperature", "0", "--device", "cpu", "--json"]
    assert main(["chat", str(model), *options]) == ExitCode.DONE
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def answers(documents: list[dict[str, Any]]) -> list[str]:
    texts = [""]
    for one in documents:
        texts[-1] += one.get("text", "")
        texts += [""] if one.get("end") else []
    return texts[:-1]


@pytest.mark.slow
def test_a_chat_remembers_until_it_is_reset(writers: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    documents = talk(capsys, monkeypatch, writers / "tuned", "Hi", "Hi", "", "/reset", "Hi", "/bye")
    assert documents[0] == {"ready": str(writers / "tuned")}
    first, second, reset, third, unknown = answers(documents)
    assert first == third != second
    assert reset == unknown == ""
    assert [one["note"] for one in documents if one.get("note")] == [
        "begun anew",
        "/bye is unknown: /reset begins anew, Ctrl-C ends",
    ]


@pytest.mark.slow
def test_bytes_that_are_no_text_end_no_chat(writers: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    first, none, after = answers(documents := talk(capsys, monkeypatch, writers / "tuned", "Hi", "caf\udce9", "/reset"))
    assert first and not none and not after
    assert any("no text in UTF-8" in one.get("note", "") for one in documents)


@pytest.mark.slow
def test_a_message_that_is_too_long_ends_no_chat(
    writers: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    documents = talk(capsys, monkeypatch, writers / "tuned", "Hi", "x" * 200, "Hi")
    first, none, _ = answers(documents)
    assert first and not none
    assert any("128 positions" in one.get("note", "") for one in documents)


@pytest.mark.slow
def test_ctrl_c_ends_a_chat(writers: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    typed = iter(["Hi"])

    def read(_: str) -> str:
        try:
            return next(typed)
        except StopIteration:
            raise KeyboardInterrupt from None

    monkeypatch.setattr("builtins.input", read)
    assert main(["chat", str(writers / "tuned"), "--max-tokens", "3", "--device", "cpu"]) == ExitCode.DONE
    assert "/reset begins anew, Ctrl-C ends" in capsys.readouterr().err


@pytest.mark.slow
def test_a_model_of_plain_text_goes_on_and_does_not_converse(writers: Path, capsys: Capture) -> None:
    plain = str(writers / "plain")
    assert document(capsys, plain, "Once upon")["tokens"] > 0
    assert main(["chat", plain, "--device", "cpu"]) == ExitCode.BAD_INPUT
    error = capsys.readouterr().err
    assert "has no chat template, so it cannot converse" in error and f"generate {plain} TEXT" in error
