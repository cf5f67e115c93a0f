"""Instruction data for language models: rows, chat templates, and a loss on the responses alone."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from profiles.errors import BadInput
from tests.tasks.tiny_tasks import ProfileMaker, byte_tokenizer, learn, silent
from training.loop.train_member import prepare_data
from training.records.events import Event, WarningEvent
from training.run.local_plan import plan_local_run
from training.tasks.text.causal_lm import CausalLMTask
from training.tasks.text.conversation_rows import LabelledText
from training.tasks.text.conversations import (
    IGNORED,
    Conversation,
    conversation_files,
    read_conversations,
    renderer_of,
    tokenise_conversations,
    turns,
)

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}"
    "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "<start_of_turn>{{ 'model' if m['role'] == 'assistant' else 'user' }}\n{{ m['content'] | trim }}<end_of_turn>\n"
    "{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)


def conversation(*texts: str, system: str = "") -> Conversation:
    roles = ("user", "assistant")
    said = [{"role": roles[index % 2], "content": text} for index, text in enumerate(texts)]
    return Conversation((*([{"role": "system", "content": system}] if system else []), *said), "row")


def learnt_text(template: str, talk: Conversation, longest: int = 500) -> str:
    made = byte_tokenizer(template)
    inputs, targets = tokenise_conversations("train", [talk], made, longest)[0]
    np.testing.assert_array_equal(targets[targets != IGNORED], np.append(inputs[1:], targets[-1])[targets != IGNORED])
    return str(made.decode(targets[targets != IGNORED]))


@pytest.mark.parametrize(
    ("template", "learnt"),
    [
        ("", "yes<|end|>no<|end|>"),
        (CHATML, "yes<|im_end|>\nno<|im_end|>\n"),
        (GEMMA, "yes<end_of_turn>\nno<end_of_turn>\n"),
    ],
)
def test_only_responses_and_their_ends_are_learnt(template: str, learnt: str) -> None:
    assert learnt_text(template, conversation("is it?", "yes", "and that?", "no", system="Be short.")) == learnt


def test_a_template_without_a_system_role_gets_it_in_the_users_words() -> None:
    (before, _) = turns(conversation("is it?", "yes", system="Be short."), renderer_of(byte_tokenizer(GEMMA)))
    assert before.text == "<bos><start_of_turn>user\nBe short.\n\nis it?<end_of_turn>\n<start_of_turn>model\n"


def test_the_plain_template() -> None:
    (before, said) = turns(conversation("is it?", "yes", system="Be short."), renderer_of(byte_tokenizer()))
    assert before.text + said.text == "Be short.\n\n### Instruction:\nis it?\n\n### Response:\nyes<|end|>"


def test_a_template_that_refuses_is_named() -> None:
    twice = Conversation(({"role": "user", "content": "a"}, *conversation("b", "c").messages), "row")
    with pytest.raises(BadInput, match="^row: .*chat template refuses a conversation: roles must alternate"):
        tokenise_conversations("train", [twice], byte_tokenizer(GEMMA), 100)


def test_long_ones_are_cut_and_those_of_only_a_prompt_left_out(caplog: pytest.LogCaptureFixture) -> None:
    talks = [conversation("a", "b" * 99), conversation("a" * 99, "b"), conversation("a", "b")]
    found = tokenise_conversations("train", talks, byte_tokenizer(), 60)
    assert [len(found[index][0]) for index in range(len(found))] == [60, 35]
    assert "2 of 3 conversations are longer than block_size = 60 tokens and cut at their end; 1 left out" in caplog.text
    with pytest.raises(BadInput, match="no response fits into block_size = 60 tokens"):
        tokenise_conversations("train", talks[1:2], byte_tokenizer(), 60)


def test_special_tokens_in_a_message_are_learnt_as_text(caplog: pytest.LogCaptureFixture) -> None:
    talks = [conversation("a", "b"), conversation("a", "what is <|end|>?"), conversation("a <|end|>", "b")]
    rows = tokenise_conversations("train", talks, byte_tokenizer(), 60).rows
    end = byte_tokenizer().eos_token_id
    assert [list(ids).count(end) for ids, _ in rows] == [1, 1, 1] and rows[1][0][-1] == end
    assert byte_tokenizer().decode(rows[1][0]).endswith("### Response:\nwhat is <|end|>?<|end|>")
    assert "train: 2 of 3 conversations spell special tokens out, which are learnt as text" in caplog.text


def test_special_tokens_in_segments_are_tokens() -> None:
    row = Conversation((), "row", segments=(LabelledText("a<|end|>", False), LabelledText("b<|end|>", True)))
    ((ids, _),) = tokenise_conversations("train", [row], byte_tokenizer(), 60).rows
    assert list(ids).count(byte_tokenizer().eos_token_id) == 2


def test_tables_of_a_folder(tmp_path: Path) -> None:
    assert conversation_files(str(tmp_path / "input.txt")) == {}
    (tmp_path / "train.csv").write_text('\ufeffprompt;response\n"a; b";c\nd;e\n')
    (tmp_path / "dev.jsonl").write_text(json.dumps({"prompt": "f", "response": "g"}) + "\n\n")
    found = read_conversations(conversation_files(str(tmp_path)))
    assert [one.messages[0]["content"] for one in found["train"]] == ["a; b", "d"]
    assert found["validation"][0].location.endswith("dev.jsonl, line 1")
    for content, said in (("{", "line 1: not JSON"), ("[3]", "not a JSON object"), ("\n", "the file is empty")):
        (tmp_path / "dev.jsonl").write_text(content)
        with pytest.raises(BadInput, match=said):
            read_conversations(conversation_files(str(tmp_path)))


@pytest.mark.slow
def test_training_learns_the_responses(make_profile: ProfileMaker, tmp_path: Path) -> None:
    byte_tokenizer(CHATML).save_pretrained(tmp_path / "model")
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=258, max_position_embeddings=128, eos_token_id=256, bos_token_id=257, **shape)
    LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    rows = [{"prompt": f"say {word}", "response": word} for word in ("one", "two", "three", "four")]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    options = {"model_path": str(tmp_path / "model"), "dataset_path": str(tmp_path / "data.jsonl"), "block_size": 128}
    task = CausalLMTask(make_profile(task="causal_lm", tuning="lora", lora_rank=8, **options))
    task.prepare(silent)
    assert (len(task.train), len(task.evaluation["validation"])) == (3, 1)
    assert task.table("train") != task.table("validation")
    model = task.build_model().train()
    batch = task.collate([task.train[index] for index in range(3)], None)
    assert task.weight(batch) == sum(len(word) + len("<|im_end|>\n") for word in learnt_words(task))
    losses = learn(task, model, [batch] * 15, 1e-2)
    assert losses[-1] < losses[0]
    with torch.no_grad():
        sums = task.evaluate(model, batch, generate=False)
    metrics = task.metrics(sums)
    assert metrics["perplexity"] == pytest.approx(math.exp(metrics["loss"]))
    shown = task.sample_output(model.eval(), task.collate([task.evaluation["validation"][0]], None))
    word = next(row["response"] for row in rows if row["response"] not in learnt_words(task))
    assert f"say {word}" in shown.prompt and shown.reference.startswith(word) and shown.generated


def test_the_first_member_tells_what_is_not_learnt(make_profile: ProfileMaker, tmp_path: Path) -> None:
    byte_tokenizer(CHATML).save_pretrained(tmp_path / "model")
    LlamaConfig(vocab_size=258, max_position_embeddings=128).save_pretrained(tmp_path / "model")
    rows = [{"prompt": "a" * 60 if number % 2 else "a", "response": "b"} for number in range(20)]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    options = {"model_path": str(tmp_path / "model"), "dataset_path": str(tmp_path / "data.jsonl"), "block_size": 64}
    plan, told = plan_local_run(make_profile(task="causal_lm", **options), 2), list[Event]()
    for rank in range(2):
        prepare_data(plan, rank, CausalLMTask(plan.profile), told.append)
    assert [event.message for event in told if isinstance(event, WarningEvent)] == [
        "train: 10 of 18 conversations are longer than block_size = 64 tokens and cut at their end; 10 left out, whose "
        "prompts fill it"
    ]


def test_an_early_look_encodes_what_it_looks_at(make_profile: ProfileMaker, tmp_path: Path) -> None:
    byte_tokenizer(CHATML).save_pretrained(tmp_path / "model")
    LlamaConfig(vocab_size=258, max_position_embeddings=128).save_pretrained(tmp_path / "model")
    rows = [{"prompt": f"say {number}", "response": f"{number}"} for number in range(40)]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    options = {"model_path": str(tmp_path / "model"), "dataset_path": str(tmp_path / "data.jsonl"), "block_size": 128}
    task = CausalLMTask(make_profile(task="causal_lm", **options))
    assert task.prepare_subset(silent, 3) == 36  # a tenth is held out
    assert len(task.train) == 3 and task.evaluation == {} and task.evaluation_sizes == {"validation": 4}


def learnt_words(task: CausalLMTask) -> list[str]:
    samples = (task.train[index] for index in range(len(task.train)))
    texts = (str(task.tokenizer.decode(targets[targets != IGNORED])) for _, targets in samples)
    return [text.removesuffix("<|im_end|>\n") for text in texts]
