"""Speech data sets of the Hugging Face hub (or of its local cache)."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
from huggingface_hub.constants import HF_HUB_CACHE

from profiles.errors import BadInput, counted
from speech.data.speech_clips import LANGUAGE_COLUMNS, NOISE_COLUMNS, Clip, SpeechSplits, find_text_column
from training.tasks.data_files.hub import load_hub_dataset, splits_of
from training.tasks.data_files.splits import SPEAKER_COLUMNS
from training.tasks.data_files.tables import Table, row_of

logger = logging.getLogger("muster.data")


@dataclass(frozen=True)
class HubSource:
    """A recording in a row of a data set with an undecoded audio column."""

    dataset: Any
    column: str
    row: int

    def stamp(self) -> str:
        return f"{self.dataset._fingerprint} {self.column} {self.row}"

    def read(self) -> bytes:
        cell = self.dataset[self.row][self.column]
        if cell["bytes"] is not None:
            return bytes(cell["bytes"])
        path = Path(cell["path"]).resolve()
        if not any(path.is_relative_to(folder) for folder in _allowed_folders(self.dataset)):
            raise PermissionError(f"the data set names {cell['path']}, a file outside its cache, which is not read")
        return path.read_bytes()


def _allowed_folders(dataset: Any) -> list[Path]:
    """Return the folders that a hub data set may read files from, as a row could name any file of this machine."""
    config = datasets.config
    shared = (config.HF_DATASETS_CACHE, config.DOWNLOADED_DATASETS_PATH, config.EXTRACTED_DATASETS_PATH)
    file_folders = [Path(file["filename"]).parent for file in dataset.cache_files]
    return [Path(folder).expanduser().resolve() for folder in (*shared, HF_HUB_CACHE, *file_folders)]


def read_hub_speech(name: str, text_column: str) -> SpeechSplits:
    """Read the clips of a hub data set; rows without a text are skipped with a warning.

    Raises:
        BadInput: not found, or without an audio or a text column.
    """
    loaded = load_hub_dataset(name)
    keys = splits_of(loaded)
    if not keys:
        raise BadInput(f"data set {name}: no train, validation or test split; it has: {', '.join(loaded)}", "")
    return {split: _clips(loaded[key], f"{name}, {key}", text_column) for split, key in keys.items()}


def undecoded_audio(dataset: Any, title: str) -> tuple[Any, str]:
    """Return a data set of only the audio column, undecoded, and the column's name.

    Raises:
        BadInput: it has none.
    """
    audio = next((name for name, kind in dataset.features.items() if _is_audio(kind)), None)
    if audio is None:
        raise BadInput(f"data set {title}: no audio column; it has: {', '.join(dataset.column_names)}", "")
    return dataset.select_columns([audio]).cast_column(audio, datasets.Audio(decode=False)), audio


def _is_audio(kind: Any) -> bool:
    return isinstance(kind, datasets.Audio) or (isinstance(kind, dict) and {"bytes", "path"} == kind.keys())


def _clips(dataset: Any, title: str, text_column: str) -> list[Clip]:
    undecoded, audio = undecoded_audio(dataset, title)
    text_column_name = find_text_column(Table(Path(f"data set {title}"), tuple(dataset.column_names), ()), text_column)
    texts = dataset[text_column_name]
    spoken = next((name for name in LANGUAGE_COLUMNS if name in dataset.column_names), "")
    languages = dataset[spoken] if spoken else [""] * len(dataset)
    ids = dataset["id"] if "id" in dataset.column_names else range(len(dataset))
    further = {name: dataset[name] for name in (*SPEAKER_COLUMNS, *NOISE_COLUMNS) if name in dataset.column_names}
    clips = []
    for row, (identity, transcript, language) in enumerate(zip(ids, texts, languages)):
        if cleaned := row_of({text_column_name: transcript}, Path(title), row).text(text_column_name):
            source = HubSource(undecoded, audio, row)
            columns = {name: str(cells[row]) for name, cells in further.items() if cells[row] is not None}
            location = f"{title}, row {row}"
            clips.append(Clip(f"{identity}", source, cleaned, location, str(language or ""), columns=columns))
    if len(clips) < len(dataset):
        logger.warning("%s: left out %s without a text", title, counted(len(dataset) - len(clips), "row"))
    return clips
