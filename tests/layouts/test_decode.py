"""Texts that stages generate together are those of one process, token for token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.modeling_outputs import BaseModelOutput

from tests.layouts.families import BLOCKS, LENGTH, WORDS, architecture, config
from tests.layouts.pipeline_runs import PRECISION, QueueCarrier, queue_carriers, side_by_side
from tests.layouts.staged_records import tied_llama
from training.inference.generation import Sampling, TextGenerator
from training.inference.text_evaluation import evaluate_text
from training.layouts.decode import follow, leading, new_cache
from training.layouts.stages.pretrained_stage import build_stage
from training.layouts.stages.stage import Cut

Compute = Callable[[Any], torch.Tensor]
NEW = 8


def models_of(family: str, bounds: Sequence[int]) -> list[Any]:
    """Return the stages of a model whose texts do not repeat one token."""
    settings = config(family)
    settings.initializer_range = settings.init_std = 0.5
    stages = range(len(bounds) - 1)
    return [build_stage(architecture(settings), settings, Cut(tuple(bounds), number)).eval() for number in stages]


def led(models: Sequence[Any], compute: Compute) -> tuple[torch.Tensor, list[QueueCarrier]]:
    """Return what the last of some stages computes as the leader of the others."""
    carriers = queue_carriers(len(models))

    def lead() -> torch.Tensor:
        with torch.no_grad(), leading(models[-1], carriers[-1], PRECISION):
            return compute(models[-1])

    works: list[Callable[[], Any]] = [
        partial(follow, model, carrier, PRECISION) for model, carrier in zip(models[:-1], carriers)
    ]
    return side_by_side([*works, lead])[-1], carriers


def written(model: Any) -> torch.Tensor:
    words = torch.randint(3, WORDS, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    mask = (torch.arange(LENGTH) >= torch.tensor([[0], [4]])).long()
    options = {"attention_mask": mask, "do_sample": False, "max_new_tokens": NEW, "max_time": 60.0, "pad_token_id": 0}
    tokens: torch.Tensor = model.generate(input_ids=words, **options)
    return tokens


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama-tied", "gpt2", "neox", "qwen3", "mistral", "gemma3"])
def test_stages_write_the_tokens_of_one_process(family: str) -> None:
    (whole,) = models_of(family, (0, BLOCKS))
    expected = written(whole)
    models = models_of(family, (0, 3, 5, BLOCKS))
    tokens, carriers = led(models, written)
    assert len(set(expected[0, LENGTH:].tolist())) > 1
    assert torch.equal(tokens, expected)
    assert all(name not in vars(model) for model in models for name in ("forward", "generate"))
    hidden = 4 * 2 * 32 * (LENGTH + NEW - 1)  # each token crosses once: keys and values of earlier ones are kept
    assert carriers[0].traffic.bytes_sent < hidden + NEW * 400


def heard(model: Any) -> torch.Tensor:
    """Return the likeliest tokens after two sounds, which a Whisper writes one after the other."""
    encoded = BaseModelOutput(model.encode(torch.randn(2, 8, 20, generator=torch.Generator().manual_seed(2))))
    cache, texts = new_cache(model.config), [torch.ones(2, 1, dtype=torch.long)]
    for _ in range(NEW):
        inputs = {"encoder_outputs": encoded, "decoder_input_ids": texts[-1], "past_key_values": cache}
        texts.append(model(**inputs, use_cache=True).logits[:, -1:].argmax(-1))
    return torch.cat(texts, 1)


def encoded_by(model: Any, features: torch.Tensor) -> torch.Tensor:
    output: torch.Tensor = model.model.encoder(features).last_hidden_state
    return output


@pytest.mark.slow
@pytest.mark.parametrize("bounds", [(0, 3, BLOCKS), (0, 4, 6, BLOCKS), (0, 2, 5, BLOCKS), (0, 7, BLOCKS)])
def test_an_encoder_is_computed_once_for_all_tokens(bounds: Sequence[int]) -> None:
    (whole,), models = models_of("whisper", (0, BLOCKS)), models_of("whisper", bounds)
    for model in (whole, *models):
        model.encode = partial(encoded_by, model)
    expected, (tokens, carriers) = heard(whole), led(models, heard)
    assert len(set(expected[0].tolist())) > 2
    assert torch.equal(tokens, expected)
    encoded, hidden = 4 * 2 * 10 * 32, 4 * 2 * 32 * NEW
    assert max(carrier.traffic.bytes_sent for carrier in carriers[:-1]) < 2 * encoded + hidden + 2000


@pytest.mark.slow
def test_workers_that_hold_a_model_together_write_and_measure_what_one_does(tmp_path: Path) -> None:
    options = tied_llama(tmp_path, 3, 40)
    model, data = options["model_path"], options["dataset_path"]
    texts, losses = [], []
    for workers in (1, 2):
        writer = TextGenerator(model, "cpu", workers=workers)
        texts.append("".join(writer.generate(writer.exact_prompt("the quick"), Sampling(12))))
        losses.append(evaluate_text(model, str(data), "validation", "cpu", workers=workers).metrics["loss"])
    assert texts[0] == texts[1]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
