"""A data set of the Hugging Face hub, or of its cache on this machine, by name (``name`` or ``name:configuration``)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from training.recordings.readers.cells import LANGUAGE, SPEAKER, TEXT, split_named
from training.recordings.recording import Recording, Request, one_line


def read(request: Request) -> Iterator[Recording]:
    """Give the recordings of its training, validation and test splits; if it has none of these, of all it has.

    Raises:
        BadInput: not there, or without an audio or a text column.
    """
    from training.tasks.hub_speech import load_hub_dataset  # the datasets package takes 2 s to import

    loaded = load_hub_dataset(request.source)
    splits = {key: split_named(re.split(r"[.\-_]", key)[0]) for key in loaded}  # train.clean.100, test.other
    for key in [key for key in loaded if splits[key]] or list(loaded):
        yield from _of_split(loaded[key], f"{request.source}, {key}", splits[key], request)


def _of_split(dataset: Any, where: str, split: str, request: Request) -> Iterator[Recording]:
    from training.tasks.hub_speech import HubSource, undecoded_audio
    from training.tasks.speech_clips import find_text_column

    there = dataset.column_names
    audio, column = undecoded_audio(dataset, where)
    wanted = request.columns.text or next((name for name in TEXT if name in there), "")
    text = find_text_column(there, wanted, None, f"data set {where}")
    speaker = request.columns.speaker or next((name for name in SPEAKER if name in there), "")
    language = next((name for name in LANGUAGE if name in there), "")
    rest = dataset.select_columns([name for name in dict.fromkeys(("id", text, speaker, language)) if name in there])
    for number, row in enumerate(rest):
        cells = {name: "" if value is None else str(value) for name, value in row.items()}
        yield Recording(
            cells.get("id") or f"{where.partition(', ')[2]}-{number}",
            HubSource(audio, column, number),
            one_line(cells[text]),
            f"{where}, row {number}",
            cells.get(speaker, ""),
            cells.get(language, ""),
            split,
        )
