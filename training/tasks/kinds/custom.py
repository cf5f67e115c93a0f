"""A user-defined job: a function that creates model and data."""

from __future__ import annotations

from profiles.schema import Profile
from training.lazy import lazy
from training.tasks.inputs.base import TaskInputs
from training.tasks.inputs.model_size import ModelSize
from training.tasks.registry import register

_code = lazy("training.tasks.custom")
_SUMMARY = "a model and data of your own, made by the function that model_path names"


class _OwnCode(TaskInputs):
    def refusal_in_stages(self, profile: Profile) -> str:
        guesses = profile.training.optimizer == "muon"
        return "does not know the output layer of a model of your own: optimizer = muon" if guesses else ""

    def model_size(self, profile: Profile) -> ModelSize | None:
        return None


register("custom", _SUMMARY, lambda profile: _code.CustomTask(profile), trait="own code", inputs=_OwnCode)
