"""Whether a model hears the language that the source tells."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from training.recordings.journal import Journal
from training.recordings.recording import Fault, Reason, Recording

_BATCH = 16


class Ear(Protocol):
    """A model that tells languages."""

    @property
    def name(self) -> str:
        """What its answers are remembered by."""
        ...

    def languages(self, files: Sequence[Path]) -> list[str]:
        """Codes of the languages in sound files."""
        ...

    def code(self, language: str) -> str:
        """The code of a language given by name or code; empty if the model does not know it."""
        ...


def hear_languages(
    ear: Ear,
    clips: Sequence[tuple[str, Path]],
    journal: Journal,
    progress: Callable[[str, int, int | None], None],
) -> None:
    """Let the model listen to the clips (key and file) that it has not heard before."""
    fresh = [(key, file) for key, file in dict(clips).items() if (ear.name, key) not in journal.heard]
    for start in range(0, len(fresh), _BATCH):
        batch = fresh[start : start + _BATCH]
        for (key, _), heard in zip(batch, ear.languages([file for _, file in batch])):
            journal.add_language(ear.name, key, heard)
        progress("languages", min(start + _BATCH, len(fresh)), len(fresh))


def judge_language(recording: Recording, ear: Ear, key: str, journal: Journal) -> Fault | None:
    """Return why a recording is left out: another language was heard than is told. Where none is told: ``None``."""
    told, heard = ear.code(recording.language), journal.heard.get((ear.name, key), "")
    if told and heard and told != heard:
        return Fault(Reason.LANGUAGE, f"sounds like {heard}, not {told}")
    return None
