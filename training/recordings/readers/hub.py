"""A data set of the Hugging Face hub, or of its cache on this machine, by name (``name`` or ``name:configuration``)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from training.recordings.readers.cells import LANGUAGE, SPEAKER, TEXT, split_named
from training.recordings.recording import Recording, Request, one_line


def read(request: Request) -> Iterator[Recording]:
    """Give the recordings of all splits; splits of another name count as undivided.

    Raises:
        BadInput: not there, or without an audio or a text column.
    """
    from training.tasks.hub_speech import load_hub_dataset  # the datasets package takes 2 s to import

    for key, dataset in load_hub_dataset(request.source).items():
        yield from _of_split(dataset, f"{request.source}, {key}", split_named(key), request)


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
