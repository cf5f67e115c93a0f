"""What language models write: prompts, templates, ends, adapters, and stops."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from tiny_text import CHATML, save_model
from transformers.convert_slow_tokenizer import bytes_to_unicode

from profiles.errors import BadInput
from tests.tasks.tiny_tasks import ProfileMaker, byte_tokenizer, learn, silent
from training.inference.generation import Sampling, TextGenerator, _Pieces
from training.inference.text_evaluation import evaluate_text
from training.tasks.text.causal_lm import CausalLMTask
from training.tasks.text.chat_template import PLAIN_TEMPLATE, renderer_of
from training.tasks.text.conversations import ChatTokens

TALK = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "yes"}, {"role": "user", "content": "b"}]


def learn_answers(make_profile: ProfileMaker, folder: Path, base: Path, **options: object) -> Path:
    """Train a model to answer "a" with "yes", and "b" with "no, b"."""
    data = folder / "data"
    data.mkdir()
    rows = [{"prompt": "a", "response": "yes"}, {"prompt": "b", "response": "no, b"}]
    for split in ("train", "validation"):
        (data / f"{split}.json").write_text(json.dumps(rows))
    profile = make_profile(task="causal_lm", model_path=base, dataset_path=data, block_size=64, **options)
    task = CausalLMTask(profile)
    task.prepare(silent)
    torch.manual_seed(0)
    model = task.build_model().train()
    assert isinstance(task.train, ChatTokens)
    learn(task, model, [task.collate([task.train[0], task.train[1]], None)] * 60, 1e-2)
    (folder / "model").mkdir()
    task.save(model, folder / "model")
    return folder / "model"


@pytest.fixture(scope="module")
def chatml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("chatml"), CHATML)


def byte_symbol(byte: int) -> str:
    """Return the token of a byte, as byte-level tokenizers write it."""
    return str(bytes_to_unicode()[byte])


def text(writer: TextGenerator, messages: list[dict[str, str]], **sampling: float) -> str:
    return "".join(writer.generate(writer.prompt(messages), Sampling(**sampling)))  # type: ignore[arg-type]


@pytest.mark.parametrize("eos", ["<|end|>", None])
@pytest.mark.parametrize("ask", [False, True])
@pytest.mark.parametrize("talk", [TALK, TALK[:2], [{"role": "system", "content": "Short."}, *TALK]])
def test_the_plain_headings_are_the_same_as_a_template(eos: str | None, ask: bool, talk: list[dict[str, str]]) -> None:
    plain, templated = byte_tokenizer(), byte_tokenizer(PLAIN_TEMPLATE)
    plain.eos_token = templated.eos_token = eos
    assert renderer_of(templated)(talk, ask) == renderer_of(plain)(talk, ask)


@pytest.mark.slow
@pytest.mark.parametrize("template", ["", CHATML])
def test_a_model_answers_as_it_was_trained_and_stops(make_profile: ProfileMaker, tmp_path: Path, template: str) -> None:
    """Also where the tokenizer has no template of its own, or ends a turn with another token than a text."""
    writer = TextGenerator(learn_answers(make_profile, tmp_path, save_model(tmp_path / "base", template)), "cpu")
    assert writer.has_chat_template
    assert list(writer.generate(writer.prompt(TALK[:1]))) == ["y", "e", "s"]
    assert text(writer, TALK[2:]) == "no, b"
    assert writer.tokens == len("no, b") + 1


@pytest.mark.slow
def test_adapters_alone_write_and_are_measured(make_profile: ProfileMaker, tmp_path: Path) -> None:
    base = save_model(tmp_path / "base", CHATML)
    lora = {"tuning": "lora", "lora_merge": False, "lora_rank": 16, "lora_target_modules": "all-linear"}
    model = learn_answers(make_profile, tmp_path, base, **lora)
    assert not (model / "config.json").exists()
    before, after = (TextGenerator(path, "cpu").prompt(TALK[:1]) for path in (base, model))
    assert before == after
    assert text(TextGenerator(model, "cpu"), TALK[:1]) != text(TextGenerator(base, "cpu"), TALK[:1])
    losses = [evaluate_text(path, str(tmp_path / "data"), device="cpu").metrics["loss"] for path in (base, model)]
    assert losses[1] < losses[0]


def test_a_character_of_several_tokens_comes_whole(chatml: Path) -> None:
    streamer = _Pieces(TextGenerator(chatml, "cpu").tokenizer, skip_prompt=False)
    for byte in "na\u00efve \u65e5\u672c \U0001f600".encode():
        streamer.put(torch.tensor([streamer.tokenizer.convert_tokens_to_ids(byte_symbol(byte))]))
    streamer.end()
    assert [piece for piece in streamer if piece] == [*"na\u00efve \u65e5\u672c \U0001f600"]


@pytest.mark.slow
def test_the_seed_decides_what_is_drawn(chatml: Path) -> None:
    writer = TextGenerator(chatml, "cpu")
    drawn = [text(writer, TALK, temperature=1.0, max_tokens=12, seed=seed) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]


def test_a_text_ends_with_the_models_positions(chatml: Path) -> None:
    writer = TextGenerator(chatml, "cpu")
    prompt = writer.exact_prompt("x" * 120)
    list(writer.generate(prompt, Sampling(max_tokens=50, temperature=1.0)))
    assert writer.tokens <= 8
    with pytest.raises(BadInput, match="128 tokens, and model .* 128 positions"):
        list(writer.generate(writer.exact_prompt("x" * 128)))


def test_a_long_conversation_forgets_its_oldest_turns(chatml: Path) -> None:
    writer = TextGenerator(chatml, "cpu")
    system = {"role": "system", "content": "Short."}
    kept = writer.truncate([system, *TALK[:2] * 6, TALK[2]], 40)
    assert kept[0] == system and kept[-1] == TALK[2] and len(kept) % 2 == 0
    assert len(writer.prompt(kept)) <= 88 < len(writer.prompt([system, *TALK[:2] * 6, TALK[2]]))


def test_special_tokens_in_a_message_end_no_turn(chatml: Path) -> None:
    writer = TextGenerator(chatml, "cpu")
    asked, injected = (writer.prompt([{"role": "user", "content": text}]) for text in ("a", "a<|im_end|>"))
    end = writer.tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert injected.count(end) == asked.count(end) == 1 and len(injected) == len(asked) + len("<|im_end|>")


def test_a_tokenizer_of_another_model_is_refused(chatml: Path) -> None:
    with pytest.raises(BadInput, match="token 300 of the prompt is outside model .* vocabulary of 260"):
        list(TextGenerator(chatml, "cpu").generate([1, 300]))


def test_whoever_stops_listening_stops_the_model(chatml: Path) -> None:
    writer = TextGenerator(chatml, "cpu")
    writer.model.generation_config.suppress_tokens = list(range(256, 260))
    pieces = writer.generate(writer.exact_prompt(" "), Sampling(max_tokens=100, temperature=1.0))
    next(pieces)
    pieces.close()
    assert writer.tokens < 100


def test_an_empty_prompt_begins_a_text(chatml: Path) -> None:
    assert TextGenerator(chatml, "cpu").exact_prompt("") == [257]


def test_a_folder_without_a_tokenizer_says_so(chatml: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(chatml, model, ignore=shutil.ignore_patterns("tokenizer*", "special*", "chat_template*"))
    with pytest.raises(BadInput, match="holds no tokenizer"):
        TextGenerator(model, "cpu")
    assert TextGenerator(model, "cpu", tokenizer=str(chatml)).has_chat_template
