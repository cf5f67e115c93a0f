"""A job of one's own: a function that makes model and data."""

from __future__ import annotations

from profiles.schema import Profile
from training.tasks.base import Task
from training.tasks.registry import register


def _make(profile: Profile) -> Task:
    from training.tasks.custom import CustomTask

    return CustomTask(profile)


register("custom", "a model and data of your own, made by the function that model_path names", _make)
