"""Train or fine-tune a causal language model on text, or on conversations with the loss on responses only."""

from __future__ import annotations

import copy
import hashlib
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, StoppingCriteriaList

from profiles.errors import BadInput, counted
from profiles.locations import is_on_hub
from profiles.schema import QUANTISED, Profile
from training.records.bounded_fields import LONGEST_TEXT
from training.tasks.base import Batch, Progress, StageMaker, Task
from training.tasks.cache import cache_root
from training.tasks.data_files.splits import held_out_count
from training.tasks.frozen_base import with_quantised_base
from training.tasks.outputs.showcase import SampleOutput
from training.tasks.pretrained import (
    adapter_folder,
    add_lora,
    base_of,
    from_pretrained,
    read_with_adapters,
    recompute_activations,
    save_weights,
)
from training.tasks.text.chat_template import PLAIN_TEMPLATE
from training.tasks.text.conversations import (
    IGNORED,
    ChatTokens,
    Conversation,
    conversation_files,
    hub_conversations,
    read_conversations,
    tokenise_conversations,
)
from training.tasks.text.packing import unpacked
from training.tasks.text.texts import Blocks, hold_out_tail, read_texts, sample_tokens, tokenise
from training.tasks.text.token_loss import token_loss

_PROMPT, _NEW = 32, 48
"""Prompt tokens of a shown plain-text sample, and tokens that the model generates."""
_SECONDS = 5.0
"""Time limit for generating one shown sample."""
_HASHED = 1_000_000
"""Evenly spread tokens of a split that are hashed to compare the data of two machines."""


class CausalLMTask(Task):
    """Next-token prediction with any ``AutoModelForCausalLM``; loss per token."""

    name = "causal_lm"
    gains_from_compiling = True
    uses_global_rng = False
    showcase_kind = "text"
    max_shown = 3
    train: Blocks | ChatTokens
    evaluation: Mapping[str, Blocks | ChatTokens]
    _auto: Any = AutoModelForCausalLM
    """What makes the model, or one stage of it."""

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        path = profile.model.model_path
        adapter = adapter_folder(path)
        self.config: Any = from_pretrained(AutoConfig, base_of(adapter) if adapter else path, "model")
        self.tokenizer: Any = from_pretrained(AutoTokenizer, path, "tokenizer")
        positions, size = getattr(self.config, "max_position_embeddings", None), profile.data.block_size
        if positions is not None and size > positions:
            message = f"block_size is {size}, but model {path} has {positions} positions"
            raise BadInput(message, f"set block_size to {positions} or less")

    def prepare(self, progress: Progress) -> None:
        splits = self.read(progress)
        self.train, self.evaluation = splits.pop("train"), splits

    def read(self, progress: Progress, hold_out: bool = True) -> dict[str, Blocks | ChatTokens]:
        """Return the samples of every split, within the configured limits.

        Args:
            hold_out: whether part of the training data becomes the validation split if there is none.

        Raises:
            BadInput: the data set cannot be used.
        """
        data = self.profile.data
        if conversations := self._conversations(hold_out):
            return self._tokenise(conversations)
        root = cache_root(data.cache_dir)
        tokens = {
            split: tokenise(documents, self.tokenizer, root, progress, f"tokens ({split})")
            for split, documents in read_texts(data.dataset_path, data.text_column).items()
        }
        for split, ids in tokens.items():
            self._check_vocabulary(split, ids)
        splits = hold_out_tail(tokens, data.block_size) if hold_out else tokens
        return {split: Blocks(ids, data.block_size).head(self._limit(split)) for split, ids in splits.items()}

    def _limit(self, split: str) -> int:
        return self.profile.data.max_train_samples if split == "train" else self.profile.data.max_eval_samples

    def prepare_subset(self, progress: Progress, limit: int) -> int:
        data = self.profile.data
        if conversations := self._conversations():
            rows = conversations.pop("train")
            self.evaluation_sizes = {split: len(rows) for split, rows in conversations.items()}
            self.train, self.evaluation = self._tokenise({"train": rows[:: -(-len(rows) // limit)]})["train"], {}
            return len(rows)
        documents = read_texts(data.dataset_path, data.text_column)
        token_limit = limit * data.block_size + 1
        sampled = sample_tokens(documents["train"], self.tokenizer, token_limit)
        if sampled is None:
            return super().prepare_subset(progress, limit)
        tokens, tokens_per_character = sampled
        self._check_vocabulary("train", tokens)
        self.train, self.evaluation = Blocks(tokens, data.block_size).head(limit), {}
        blocks = {
            split: math.ceil(sum(map(len, texts)) * tokens_per_character / data.block_size)
            for split, texts in documents.items()
        }
        if "validation" not in blocks:
            blocks["validation"] = held_out_count(blocks["train"])
            blocks["train"] -= blocks["validation"]
        sizes = {split: min(count, self._limit(split) or count) for split, count in blocks.items()}
        count = sizes.pop("train")
        self.evaluation_sizes = sizes
        return count

    def _conversations(self, hold_out: bool = True) -> dict[str, list[Conversation]]:
        """Read instruction data within the configured limits; empty if the data set is plain text."""
        data = self.profile.data
        if is_on_hub(data.dataset_path):
            splits = None if data.text_column else hub_conversations(data.dataset_path)
        else:
            files = conversation_files(data.dataset_path, data.text_column)
            splits = read_conversations(files, hold_out) if files else None
        return {split: list(rows[: self._limit(split) or None]) for split, rows in (splits or {}).items()}

    def _tokenise(self, conversations: Mapping[str, Sequence[Conversation]]) -> dict[str, Blocks | ChatTokens]:
        size = self.profile.data.block_size
        ready = {
            split: tokenise_conversations(split, rows, self.tokenizer, size) for split, rows in conversations.items()
        }
        for split, chats in ready.items():
            self._check_vocabulary(split, np.concatenate([ids for ids, _ in chats.rows]))
        self.remarks = [remark for chats in ready.values() for remark in chats.remarks]
        return {**ready}

    def _check_vocabulary(self, split: str, tokens: Any) -> None:
        if len(tokens) < 2:
            raise BadInput(
                f"{split}: the text has {counted(len(tokens), 'token')}", "there is nothing to predict: add text"
            )
        largest = int(tokens.max())
        if largest >= self.config.vocab_size:
            message = f"{split}: token {largest} is outside the model's vocabulary of {self.config.vocab_size}"
            raise BadInput(message, "model and tokenizer do not belong together")

    def build_model(self) -> nn.Module:
        settings = self.profile.model
        model = self._read_model()
        if settings.base_precision in QUANTISED:
            model = with_quantised_base(model, settings.base_precision)
        if settings.gradient_checkpointing:
            recompute_activations(model)
        if settings.tuning == "lora":
            return cast(nn.Module, add_lora(model, settings, ()))
        return cast(nn.Module, model)

    def build_stage(self, stages: StageMaker) -> nn.Module:
        self._auto = stages.reader(AutoModelForCausalLM, self.config)
        return stages.with_own_adapters(self.build_model())

    def _read_model(self) -> Any:
        if self.profile.model.from_scratch:
            return self._auto.from_config(copy.deepcopy(self.config), dtype=torch.float32)
        model = self.profile.model
        return read_with_adapters(self._auto, model.model_path, as_stored=model.base_precision in QUANTISED)

    def table(self, split: str) -> str:
        blocks = self.train if split == "train" else self.evaluation[split]
        if isinstance(blocks, ChatTokens):
            return blocks.fingerprint()
        tokens = np.asarray(blocks.tokens[:: max(1, len(blocks.tokens) // _HASHED)], dtype=np.int64)
        return hashlib.blake2b(tokens.tobytes(), digest_size=8).hexdigest()

    def collate(self, samples: Sequence[Any], rngs: Sequence[np.random.Generator] | None) -> Batch:
        """Return inputs and labels [batch, longest]; padding and prompts are ignored in the loss."""
        longest = max(len(inputs) for inputs, _ in samples)
        ids = torch.zeros((len(samples), longest), dtype=torch.long)
        labels = torch.full((len(samples), longest), IGNORED)
        for row, (inputs, targets) in enumerate(samples):
            ids[row, : len(inputs)] = torch.from_numpy(inputs)
            labels[row, : len(targets)] = torch.from_numpy(targets)
        return {"input_ids": ids, "labels": labels, "tokens": float((labels != IGNORED).sum())}

    def weight(self, batch: Batch) -> float:
        """Number of target tokens."""
        return float(batch["tokens"])

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        # The labels are already shifted: a model that shifts them again would drop a token of every block.
        with unpacked():
            logits = model(input_ids=batch["input_ids"], use_cache=False).logits
        return token_loss(logits.flatten(0, 1), batch["labels"].flatten())

    def sample_output(self, model: nn.Module, batch: Batch) -> SampleOutput:
        """Greedily continue a prompt, or the beginning of a plain text."""
        ids, targets = batch["input_ids"][0], batch["labels"][0]
        first_target = int((targets != IGNORED).nonzero()[0])
        start = first_target + 1 if first_target else min(_PROMPT, max(1, len(ids) // 2))
        answer = targets[start - 1 : start - 1 + _NEW]
        answer = answer[: int((answer != IGNORED).cumprod(0).sum())]
        positions = getattr(self.config, "max_position_embeddings", None) or start + _NEW
        prompt = ids[max(0, start - max(positions - _NEW, positions // 2)) : start][None]
        end = time.monotonic() + _SECONDS

        def is_late(tokens: torch.Tensor, scores: object, **_: object) -> torch.Tensor:
            return tokens.new_full(tokens.shape[:1], self.on_any_device(time.monotonic() > end), dtype=torch.bool)

        output = cast(Any, model).generate(
            input_ids=prompt, attention_mask=torch.ones_like(prompt), do_sample=False, temperature=None, top_p=None,
            top_k=None, max_new_tokens=min(_NEW, positions - prompt.shape[1]),
            stopping_criteria=StoppingCriteriaList([is_late]), pad_token_id=self.tokenizer.pad_token_id or 0,
        )  # fmt: skip
        pieces = (ids[:start], answer, output[0, prompt.shape[1] :])
        before, right, generated = (self.tokenizer.decode(piece, skip_special_tokens=True) for piece in pieces)
        exact = self.tokenizer.decode(prompt[0], clean_up_tokenization_spaces=False)
        return SampleOutput(
            before, right, generated, exact_prompt=exact[-LONGEST_TEXT:]
        )  # the end of a long one, where the answer begins

    def metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Return ``loss`` (nats per token) and ``perplexity``."""
        metrics = super().metrics(sums)
        if "loss" in metrics:
            metrics["perplexity"] = math.exp(min(metrics["loss"], 700.0))
        return metrics

    def save(self, model: nn.Module, directory: Path) -> None:
        save_weights(model, directory, self._read_model, merge=self.profile.model.lora_merge)
        if isinstance(getattr(self, "train", None), ChatTokens) and not self.tokenizer.chat_template:
            self.tokenizer.chat_template = PLAIN_TEMPLATE  # the saved model is prompted as it was trained
        self.tokenizer.save_pretrained(str(directory))
