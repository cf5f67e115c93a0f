"""A language model."""

from __future__ import annotations

from training.lazy import lazy
from training.tasks.registry import register
from training.tasks.text.text_inputs import TextInputs

_MODULE = "training.tasks.text.causal_lm"
_code = lazy(_MODULE)
_SUMMARY = "a language model that learns texts, or conversations"
register(
    "causal_lm",
    _SUMMARY,
    lambda profile: _code.CausalLMTask(profile),
    trait="texts",
    inputs=TextInputs,
    module=_MODULE,
)
