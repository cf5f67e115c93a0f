"""Language models: blocks, loss per token, adapters, saving."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    pipeline,
)

from profiles.errors import BadInput
from tests.tasks.tiny_tasks import ProfileMaker, byte_tokenizer, learn, silent
from training.tasks.text import causal_lm, texts
from training.tasks.text.causal_lm import CausalLMTask
from training.tasks.text.texts import Blocks, hold_out_tail, read_texts

TEXT = "the quick brown fox jumps over the lazy dog\n" * 20


@pytest.fixture(scope="session", params=["gpt2", "llama"])
def small_lm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lm") / str(request.param)
    byte_tokenizer().save_pretrained(folder)
    torch.manual_seed(0)
    if request.param == "gpt2":
        config = GPT2Config(vocab_size=258, n_positions=32, n_embd=16, n_layer=1, n_head=2, resid_pdrop=0, embd_pdrop=0)
        config.attn_pdrop, config.eos_token_id, config.bos_token_id = 0, 256, 256
        GPT2LMHeadModel(config).save_pretrained(folder)
    else:
        shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
        LlamaForCausalLM(
            LlamaConfig(vocab_size=258, max_position_embeddings=32, eos_token_id=256, bos_token_id=256, **shape)
        ).save_pretrained(folder)
    return folder


Prepared = Callable[..., CausalLMTask]


@pytest.fixture
def prepared(make_profile: ProfileMaker, small_lm: Path, tmp_path: Path) -> Prepared:
    """Make a task of flat options and prepare it: on :data:`TEXT`, where they name no other data set."""
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "input.txt").write_text(TEXT)
    given = {"task": "causal_lm", "model_path": small_lm, "dataset_path": tmp_path / "text", "block_size": 16}

    def make(**options: object) -> CausalLMTask:
        task = CausalLMTask(make_profile(**{**given, **options}))
        task.prepare(silent)
        return task

    return make


@given(st.integers(0, 100), st.integers(2, 20))
def test_every_token_but_the_first_is_predicted_once(count: int, size: int) -> None:
    blocks = Blocks(np.arange(count, dtype=np.uint32), size)
    pairs = [pair for i in range(len(blocks)) for pair in zip(*blocks[i])]
    assert pairs == [(i, i + 1) for i in range(count - 1)]
    assert all(len(blocks[i][0]) <= size for i in range(len(blocks)))


@given(st.integers(30, 300), st.integers(2, 10))
def test_held_out_tail_shares_no_prediction_with_training(count: int, size: int) -> None:
    tokens = np.arange(count, dtype=np.uint32)
    splits = hold_out_tail({"train": tokens}, size)
    targets = [int(t) for split in ("train", "validation") for i in range(len(Blocks(splits[split], size)))
               for t in Blocks(splits[split], size)[i][1]]  # fmt: skip
    assert targets == list(range(1, count))


def test_loss_is_the_models_own(prepared: Prepared) -> None:
    task = prepared()
    model = task.build_model().eval()
    inputs, targets = task.train[0]
    whole = torch.from_numpy(np.append(inputs, targets[-1]))[None]
    with torch.no_grad():
        ours = task.loss(model, task.collate([task.train[0]], None))
        theirs = model(input_ids=whole, labels=whole).loss
    assert float(ours) == pytest.approx(float(theirs), abs=1e-5)


def test_short_block_counts_only_its_own_tokens(prepared: Prepared) -> None:
    task = prepared()
    model = task.build_model().eval()
    validation = task.evaluation["validation"]
    short = validation[len(validation) - 1]
    assert len(short[0]) < 16
    with torch.no_grad():
        alone, other = (task.collate([block], None) for block in (short, task.train[0]))
        both = task.collate([short, task.train[0]], None)
        total = sum(float(task.loss(model, part)) * task.weight(part) for part in (alone, other))
        assert task.weight(both) == task.weight(alone) + task.weight(other) == len(short[0]) + 16
        assert float(task.loss(model, both)) == pytest.approx(total / task.weight(both), abs=1e-5)


class Counted:
    """A tokenizer that counts the characters that it is given."""

    def __init__(self, real: PreTrainedTokenizerFast) -> None:
        self.real, self.characters = real, 0

    def __call__(self, text: str, **options: object) -> object:
        self.characters += len(text)
        return self.real(text, **options)

    def __getattr__(self, name: str) -> object:
        return getattr(self.real, name)


@pytest.mark.parametrize("with_validation", [True, False])
def test_an_early_look_tokenises_what_it_looks_at(
    prepared: Prepared, make_profile: ProfileMaker, small_lm: Path, tmp_path: Path, with_validation: bool
) -> None:
    (tmp_path / "train.txt").write_text("".join(f"{line} the quick brown fox\n" for line in range(4000)))
    if with_validation:
        (tmp_path / "validation.txt").write_text(TEXT)
    options = {"task": "causal_lm", "model_path": str(small_lm), "dataset_path": str(tmp_path), "block_size": 16}
    task = CausalLMTask(make_profile(**options))
    task.tokenizer = Counted(task.tokenizer)
    samples = task.prepare_subset(silent, 40)
    assert 40 * 16 < task.tokenizer.characters <= 16 * 40 * 16
    assert len(task.train) == 40 and task.evaluation == {}
    assert len(set(re.findall(r"\d{4}", byte_tokenizer().decode(task.train.tokens)))) >= 8  # from all over the text
    whole = prepared(dataset_path=tmp_path)
    assert samples == pytest.approx(len(whole.train), rel=0.1)
    assert task.evaluation_sizes == {"validation": pytest.approx(len(whole.evaluation["validation"]), rel=0.15)}
    limited = CausalLMTask(make_profile(**options, max_train_samples=7))
    assert limited.prepare_subset(silent, 5) == 7


def test_an_early_look_at_little_text_is_all_of_it(prepared: Prepared) -> None:
    task = prepared()
    whole = len(task.train)
    assert task.prepare_subset(silent, 40) == len(task.train) == whole


def test_metrics_are_loss_and_perplexity(prepared: Prepared) -> None:
    metrics = prepared().metrics({"loss_sum": 6.0, "weight": 3.0})
    assert metrics == {"loss": 2.0, "perplexity": math.exp(2.0)}


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"tuning": "full"}, {"tuning": "lora", "gradient_checkpointing": True}])
def test_training_saving_and_opening(prepared: Prepared, tmp_path: Path, options: dict[str, object]) -> None:
    task = prepared(**options)
    model = task.build_model().train()
    batch = task.collate([task.train[i] for i in range(8)], None)
    losses = learn(task, model, [batch] * 15, 3e-3)
    assert losses[-1] < losses[0]
    out = tmp_path / "out"
    out.mkdir()
    task.save(model.eval(), out)
    again = AutoModelForCausalLM.from_pretrained(out)
    with torch.no_grad():
        assert float(task.loss(again, batch)) == pytest.approx(float(task.loss(model, batch)), abs=1e-4)
    assert pipeline("text-generation", model=str(out))("the quick", max_new_tokens=2, max_length=None)


class Tokenizing:
    """Notes what it is given."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.given = inner, list[str]()
        self.backend_tokenizer, self.eos_token_id = self.inner.backend_tokenizer, self.inner.eos_token_id

    def __call__(self, text: str, **how: Any) -> Any:
        self.given.append(text)
        return self.inner(text, **how)


def test_cached_tokens_are_not_made_again(prepared: Prepared) -> None:
    task = prepared()
    first = task.train[3]
    task.tokenizer = tokenizer = Tokenizing(task.tokenizer)
    task.prepare(silent)
    np.testing.assert_array_equal(task.train[3], first)
    assert tokenizer.given == []


def test_long_texts_are_tokenised_in_pieces(tmp_path: Path) -> None:
    tokenizer = Tokenizing(byte_tokenizer())
    tokens = texts.tokenise([TEXT], tokenizer, tmp_path, silent, "text", piece=50)
    assert len(tokenizer.given) > 1 and "".join(tokenizer.given) == TEXT
    assert tokenizer.inner.decode(tokens) == TEXT


def test_folder_with_splits(tmp_path: Path) -> None:
    (tmp_path / "train.txt").write_bytes(b"\xef\xbb\xbfa\r\nb")
    (tmp_path / "validation.txt").write_text("c")
    assert read_texts(str(tmp_path)) == {"train": ["a\nb"], "validation": ["c"]}


def test_folder_of_texts(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("2")
    (tmp_path / "a.txt").write_text("1")
    (tmp_path / "test.txt").write_text("3")
    assert read_texts(str(tmp_path)) == {"train": ["1", "2"], "test": ["3"]}


def test_documents_are_divided_by_the_end_token(prepared: Prepared, tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.txt").write_text(name * 40)
    task = prepared(dataset_path=tmp_path)
    assert isinstance(task.train, Blocks)
    assert task.train.tokens[40] == 256


def test_bad_inputs(prepared: Prepared, tmp_path: Path) -> None:
    empty = tmp_path / "empty.txt"
    empty.touch()
    latin = tmp_path / "latin.txt"
    latin.write_bytes("Größe".encode("latin-1"))
    short = tmp_path / "short.txt"
    short.write_text("abc")
    nothing = tmp_path / "nothing"
    nothing.mkdir()
    for path, said in (
        (empty, "the file is empty"),
        (latin, "line 1: not UTF-8"),
        (short, "fewer than 2 blocks"),
        (nothing, "no train.txt"),
        (tmp_path / "none.txt", "no such file"),
    ):
        with pytest.raises(BadInput, match=said):
            prepared(dataset_path=path)


def test_block_longer_than_the_positions(prepared: Prepared) -> None:
    with pytest.raises(BadInput, match="block_size is 64, but model .* has 32 positions"):
        prepared(block_size=64)


def test_tokenizer_of_another_model(prepared: Prepared, tmp_path: Path) -> None:
    byte_tokenizer().save_pretrained(tmp_path)
    GPT2Config(vocab_size=50, n_positions=32, n_embd=16, n_layer=1, n_head=2).save_pretrained(tmp_path)
    with pytest.raises(BadInput, match="is outside the model's vocabulary of 50"):
        prepared(model_path=tmp_path, from_scratch=True)


def test_another_end_token_is_not_answered_from_the_cache(tmp_path: Path) -> None:
    class Letters:
        """A tokenizer whose end token is a setting beside its document."""

        def __init__(self, end: int) -> None:
            self.eos_token_id = end
            self.backend_tokenizer = SimpleNamespace(to_str=lambda: "letters")

        def __call__(self, text: str, **_: object) -> dict[str, list[int]]:
            return {"input_ids": [ord(letter) for letter in text]}

    made = [texts.tokenise(["a", "b"], Letters(end), tmp_path, silent, "tokens").tolist() for end in (1, 2, 1)]
    assert made == [[97, 1, 98, 1], [97, 2, 98, 2], [97, 1, 98, 1]]


def test_a_shown_text_goes_on_from_the_beginning_of_a_held_out_one(
    prepared: Prepared, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(causal_lm, "_SECONDS", 600.0)  # on a busy machine, time would end one of two texts
    task = prepared()
    model, sample = task.build_model().eval(), task.evaluation["validation"][0]
    text = task.tokenizer.decode([*sample[0], sample[1][-1]])
    found = task.sample_output(model, task.collate([sample], None))
    assert (found.prompt + found.reference, len(found.prompt)) == (text, 8)
    assert found.loss is None and found == task.sample_output(model, task.collate([sample], None))
    with torch.no_grad():
        ids = torch.from_numpy(sample[0][:8])[None]
        first = task.tokenizer.decode(model(input_ids=ids).logits[0, -1:].argmax(-1))
    assert found.generated.startswith(first) and found.generated != first
    task.on_any_device = lambda is_late: True
    assert task.sample_output(model, task.collate([sample], None)).generated == first
