"""``evaluate`` of a language model: its loss on a text or on responses, and what only models of speech have."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from app.cli.main import main
from profiles.errors import BadInput, ExitCode
from tests.tasks.tiny_tasks import byte_tokenizer
from training.inference.text_evaluation import evaluate_text
from training.records.model_folders import is_language_model

VOCABULARY = 258


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model to which every token is as likely as any other."""
    byte_tokenizer().save_pretrained(tmp_path / "model")
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    made = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=64, **shape))
    torch.nn.init.zeros_(made.lm_head.weight)
    made.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_a_lone_text_is_measured_whole(model: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("a" * 129)
    result = evaluate_text(model, str(tmp_path / "text.txt"))
    assert (result.metrics["tokens"], result.metrics["samples"], result.block_size) == (128, 2, 64)
    assert result.metrics["loss"] == pytest.approx(math.log(VOCABULARY))
    assert result.metrics["perplexity"] == pytest.approx(VOCABULARY)


def test_of_conversations_the_responses_are_measured(model: Path, tmp_path: Path) -> None:
    rows = [{"prompt": "a", "response": "yes"}, {"prompt": "b", "response": "no"}]
    (tmp_path / "train.json").write_text(json.dumps(rows))
    (tmp_path / "test.json").write_text(json.dumps(rows[:1]))
    result = evaluate_text(model, str(tmp_path))
    assert (result.split, result.metrics["tokens"]) == ("test", len("yes") + 1)
    assert evaluate_text(model, str(tmp_path / "train.json")).metrics["tokens"] == len("yesno") + 2
    with pytest.raises(BadInput, match="no split 'dev'"):
        evaluate_text(model, str(tmp_path), "dev")


@pytest.mark.slow
def test_the_command_tells_loss_and_perplexity(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text.txt").write_text("some text")
    assert main(["evaluate", str(model), str(tmp_path / "text.txt"), "--device", "cpu"]) == ExitCode.DONE
    assert f"{model}: loss 5.553, perplexity 258.0\n" in capsys.readouterr().out
    same = ["evaluate", str(model), str(tmp_path / "text.txt"), "--against", str(model), "--device", "cpu", "--json"]
    assert main(same) == ExitCode.DONE
    document = json.loads(capsys.readouterr().out)
    assert document["metrics"] == document["against"]["metrics"]
    assert main(["evaluate", str(model), str(tmp_path / "text.txt"), "--language", "de"]) == ExitCode.BAD_INPUT
    assert "--language: the model is a language model, which hears nothing" in capsys.readouterr().err


def test_a_whisper_is_no_language_model(model: Path, tmp_path: Path) -> None:
    assert is_language_model(model) and not is_language_model(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "whisper"}')
    assert not is_language_model(tmp_path)
