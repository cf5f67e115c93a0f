"""Any transformers model that computes its loss, with rows of a table."""

from __future__ import annotations

from training.lazy import lazy
from training.tasks.hf.hf_inputs import HfInputs, HfOptions
from training.tasks.registry import register

_MODULE = "training.tasks.hf.hf_task"
_code = lazy(_MODULE)
_SUMMARY = "a model of transformers by its auto class (classification, seq2seq, ...), with rows of a table"
register("hf", _SUMMARY, lambda profile: _code.HfTask(profile), HfOptions, inputs=HfInputs, module=_MODULE)
