"""Text that the stages of a pipeline generate together.

All stages run the same loop of transformers over the same logits: in each turn the whole text passes through the
stages, and the last one gives the logits of its end to all. No keys and values of earlier tokens are kept, so the costs
of a token grow with the text: what is generated here is a few short samples.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from training.hardware.device import Precision
from training.layouts.carrier import Carrier, gather_among
from training.layouts.messages import as_bytes
from training.layouts.pipeline import Pipeline
from training.layouts.stages.cut import CutModel, record_of
from training.tasks.base import Batch


@contextmanager
def generating(model: nn.Module, carrier: Carrier, precision: Precision) -> Iterator[None]:
    """Let ``generate`` of a cut causal language model give on every stage what that of the whole model would.

    All stages call it with the same arguments. It does not heed ``max_time``, after which stages would stop apart.
    """
    from transformers.modeling_outputs import CausalLMOutputWithPast  # takes a second

    base: Any = record_of(model)[0]
    forward, generate = base.forward, base.generate

    def end_logits(_: nn.Module, inputs: Batch) -> torch.Tensor:
        logits: torch.Tensor = forward(**inputs).logits
        return logits[:, -1:]

    pipeline = Pipeline(CutModel(model, end_logits), carrier, precision)

    @functools.wraps(forward)
    def forward_of_all(**inputs: Any) -> CausalLMOutputWithPast:
        results = pipeline.results([inputs])
        payload = as_bytes(results[0].float().cpu()).numpy().tobytes() if results else b""
        logits = torch.frombuffer(bytearray(gather_among(carrier, payload)[-1]), dtype=torch.float32)
        return CausalLMOutputWithPast(logits=logits.view(len(inputs["input_ids"]), 1, -1).to(precision.device))

    def generate_alike(*args: Any, max_time: float | None = None, **options: Any) -> Any:
        return generate(*args, use_cache=False, **options)

    base.forward, base.generate = forward_of_all, generate_alike
    try:
        yield
    finally:
        del base.forward, base.generate
