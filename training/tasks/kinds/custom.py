"""A user-defined job: a function that creates model and data."""

from __future__ import annotations

from training.lazy import lazy
from training.tasks.registry import register

_code = lazy("training.tasks.custom")
_SUMMARY = "a model and data of your own, made by the function that model_path names"
register("custom", _SUMMARY, lambda profile: _code.CustomTask(profile), trait="own code")
