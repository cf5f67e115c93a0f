"""Inputs of speech tasks: recordings with transcripts, a Whisper, and what both need."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from profiles.errors import BadInput
from profiles.quantities import span_text
from profiles.schema import Profile
from speech.data.patches import FOLDER as PATCHES
from speech.data.speech_clips import COLUMNS, PUBLISHED_WINDOW, find_text_column
from speech.data.speech_dataset import files_of_table
from speech.inputs import data_findings
from training.tasks.data_files.tables import Table
from training.tasks.inputs.base import Substitute, TaskInputs
from training.tasks.inputs.model_size import ModelSize


class SpeechInputs(TaskInputs):
    """A data set of recordings, and a Whisper."""

    packages = ("transformers", "av", "soundfile")
    reads_dataset = True

    def refusal_in_stages(self, profile: Profile) -> str:
        model = profile.model
        is_composed = model.teacher_path or model.encoder_path or model.student_layers
        return "cannot train students of other models yet" if is_composed else ""

    def findings(self, profile: Profile) -> dict[str, Any]:
        return data_findings.findings(profile)

    def check_data(self, profile: Profile) -> None:
        data_findings.check_data(profile)

    def training_samples(self, profile: Profile) -> int:
        return data_findings.training_clips(profile)

    def check_columns(self, profile: Profile, table: Path, columns: Sequence[str]) -> None:
        find_text_column(Table(table, tuple(columns), ()).with_spelling(COLUMNS), profile.data.text_column)

    def substitute(self, profile: Profile) -> Substitute | None:
        too_long = data_findings.too_long(profile)
        if not (instead := too_long.get("instead")):
            return None
        language = {"language": profile.model.language} if profile.model.language else {}
        reason = f"{too_long['error']}; profile {instead} is taken, which hears {span_text(PUBLISHED_WINDOW)}"
        return Substitute(instead, language, reason)

    def can_select(self, profile: Profile) -> bool:
        from speech.recordings.readers import kind_of

        with contextlib.suppress(BadInput):
            return bool(kind_of(profile.data.dataset_path))
        return False

    def files_of_table(self, profile: Profile, table: Path) -> Iterator[Path]:
        yield from files_of_table(table, profile.data.text_column, profile.data.pseudo_share > 0)
        if (table.parent / PATCHES).is_dir():
            yield table.parent / PATCHES

    def model_size(self, profile: Profile) -> ModelSize | None:
        from speech.inputs.model_size import size_for

        return size_for(profile)
