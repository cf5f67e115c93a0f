"""Speech to text with a Whisper."""

from __future__ import annotations

from profiles.schema import Profile
from training.lazy import lazy
from training.tasks.base import Task
from training.tasks.registry import register

_code = lazy("speech.inputs.task_inputs")
_SUMMARY = "speech to text with a Whisper: recordings and their transcripts"


def _make(profile: Profile) -> Task:
    if profile.model.teacher_path:
        from speech.whisper.distillation import DistillationTask

        return DistillationTask(profile)
    from speech.whisper.task import WhisperTask

    return WhisperTask(profile)


register("whisper", _SUMMARY, _make, trait="speech", inputs=lambda: _code.SpeechInputs(), module="speech.whisper.task")
