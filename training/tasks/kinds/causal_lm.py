"""A language model."""

from __future__ import annotations

from profiles.schema import Profile
from training.tasks.base import Task
from training.tasks.registry import register


def _make(profile: Profile) -> Task:
    from training.tasks.causal_lm import CausalLMTask

    return CausalLMTask(profile)


register("causal_lm", "a language model that learns texts, or conversations", _make)
