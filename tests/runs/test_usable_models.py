"""Which models can be named, and what their folders say of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from profiles.errors import BadInput
from training.records.model_folders import base_model, find_usable_model, model_kind

LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}


@pytest.mark.parametrize(
    ("file", "content", "kind"),
    [
        ("config.json", LLAMA, "text"),
        ("config.json", {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}, "text"),
        ("config.json", {"model_type": "llama"}, "text"),
        ("config.json", {"model_type": "whisper"}, "speech"),
        ("config.json", {"model_type": "vit", "architectures": ["ViTForImageClassification"]}, ""),
        ("config.json", {}, ""),
        ("adapter_config.json", {"auto_mapping": {"base_model_class": "Qwen2ForCausalLM"}}, "text"),
        ("adapter_config.json", {"auto_mapping": {"base_model_class": "WhisperForConditionalGeneration"}}, "speech"),
        ("adapter_config.json", {"task_type": "CAUSAL_LM", "auto_mapping": None}, "text"),
        ("adapter_config.json", ["nothing"], ""),
    ],
)
def test_a_folder_says_what_its_model_does(tmp_path: Path, file: str, content: object, kind: str) -> None:
    (tmp_path / file).write_text(json.dumps(content))
    assert model_kind(tmp_path) == kind


def test_a_name_of_the_hub_stays_and_a_mistyped_path_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "output").mkdir()
    assert find_usable_model(Path("output"), "openai/whisper-tiny.en") == Path("openai/whisper-tiny.en")
    for reference in ("output/2026", "no-such-run", "/nowhere/model", "a/b/c"):
        with pytest.raises(BadInput, match="no run"):
            find_usable_model(Path("output"), reference)


def test_adapters_name_their_base_and_a_lone_folder_none(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "owner/base"}')
    assert base_model(tmp_path) == "owner/base"
    (tmp_path / "other").mkdir()
    with pytest.raises(BadInput, match="does not say what it was trained from"):
        base_model(tmp_path / "other")


@pytest.mark.parametrize("plan", [None, '{"version": 0}'], ids=["gone", "old"])
def test_a_run_names_its_base_without_its_plan(tmp_path: Path, plan: str | None) -> None:
    (tmp_path / "model").mkdir()
    settings = {"task": "causal_lm", "model_path": "owner/base", "of_another_version": 1}
    document = {"run_id": "r", "start_time": "2026-11-20T08:00:00", "profile": "p", "config": {"model": settings}}
    (tmp_path / "metadata.json").write_text(json.dumps(document))
    if plan:
        (tmp_path / "plan.json").write_text(plan)
    assert base_model(tmp_path / "model") == "owner/base"


def test_a_run_folder_without_documents_still_names_its_model(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    assert find_usable_model(Path("output"), str(tmp_path)) == tmp_path / "model"
