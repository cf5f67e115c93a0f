"""A language model."""

from __future__ import annotations

from training.lazy import lazy
from training.tasks.registry import register

_code = lazy("training.tasks.causal_lm")
register(
    "causal_lm", "a language model that learns texts, or conversations", lambda profile: _code.CausalLMTask(profile)
)
