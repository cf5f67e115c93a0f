"""What tests of tasks share: profiles from flat options, a tokenizer of bytes, a training in a few lines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import nn
from transformers import PreTrainedTokenizerFast

from profiles.files.resolve import profile_from_options
from profiles.schema import Profile, Section
from training.tasks.base import Batch, Task
from training.tasks.custom import CustomJob, CustomTask
from training.tasks.pretrained import PROXIES

ProfileMaker = Callable[..., Profile]


def silent(phase: str, done: int, total: int | None) -> None:
    """A progress display that shows nothing."""


def custom_task(*parts: Any, **more: Any) -> CustomTask:
    """The task of a job that its factory makes of these parts."""
    task = CustomTask(profile_from_options("own", {"task": "custom"}), lambda: CustomJob(*parts, **more))
    task.prepare(silent)
    return task


def byte_tokenizer(template: str = "") -> PreTrainedTokenizerFast:
    """Bytes, a beginning and an end."""
    vocabulary = {symbol: index for index, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    inner = Tokenizer(models.BPE(vocab={**vocabulary, "<|end|>": 256, "<bos>": 257}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|end|>", bos_token="<bos>")
    made.chat_template = template or None
    return made


def learn(task: Task, model: nn.Module, batches: Sequence[Batch], rate: float) -> list[float]:
    """Take an optimizer step on each batch; return the losses."""
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=rate)
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        loss = task.loss(model, batch)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


@pytest.fixture
def no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub's name does not resolve, and there is no proxy that could know it."""
    for name in PROXIES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_ENDPOINT", "https://hub.invalid")


@pytest.fixture
def make_profile(tmp_path: Path) -> ProfileMaker:
    """Make a profile from flat options (paths as they are); its cache is in the test's own folder."""

    def make(**options: object) -> Profile:
        given = {"cache_dir": tmp_path / "cache", **options}
        options = {name: str(value) if isinstance(value, Path) else value for name, value in given.items()}
        sections: dict[str, dict[str, object]] = {}
        for section, field in Profile.model_fields.items():
            kind = field.annotation
            if isinstance(kind, type) and issubclass(kind, Section):
                sections[section] = {name: options.pop(name) for name in kind.model_fields if name in options}
        assert not options, options
        return Profile(name="test", **sections)

    return make
