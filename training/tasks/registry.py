"""Tasks by name. Each is imported only when it is asked for: together they take seconds to import."""

from __future__ import annotations

from profiles.errors import BadInput
from profiles.schema import Profile
from training.tasks.base import Task

TASKS = ("whisper", "causal_lm", "custom")


def task_from_profile(profile: Profile) -> Task:
    """Return the task a profile names, not yet prepared.

    Raises:
        BadInput: there is no such task, or its model cannot be used.
    """
    kind = profile.model.task
    if kind == "whisper" and profile.model.teacher_path:
        from training.tasks.distillation import DistillationTask

        return DistillationTask(profile)
    if kind == "whisper":
        from training.tasks.whisper import WhisperTask

        return WhisperTask(profile)
    if kind == "causal_lm":
        from training.tasks.causal_lm import CausalLMTask

        return CausalLMTask(profile)
    if kind == "custom":
        from training.tasks.custom import CustomTask

        return CustomTask(profile)
    raise BadInput(f"there is no task {kind!r}", f"choose one of {', '.join(TASKS)}")
