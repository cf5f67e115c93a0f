"""Label Studio's full JSON export (a transcription of recordings) as records of a table.

A task becomes one record with the columns of its data and the text of its first ``textarea``; one whose texts belong to
regions of the recording becomes a record for each, with ``start`` and ``end`` in seconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

_LOCAL_FILE = "/data/local-files/?d="
"""Before the path of a file that Label Studio reads from a folder."""


def is_task(record: Mapping[str, Any]) -> bool:
    """Whether a JSON object is a task of an export, which holds ``data`` and ``annotations``."""
    return isinstance(record.get("data"), dict) and isinstance(record.get("annotations"), list)


def records_of(task: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the records of one task; the text is empty if nobody has written one."""
    base = {"id": task.get("id"), **{name: _path(value) for name, value in task["data"].items()}}
    values = list(_texts(task["annotations"]))
    regions = [value for value in values if "start" in value and "end" in value]
    for number, value in enumerate(regions):
        region = {name: value[name] for name in ("text", "start", "end")}
        yield {**base, "id": f"{base['id']}-{number}", **region}
    if not regions:
        yield {**base, "text": values[0]["text"] if values else ""}


def _texts(annotations: list[Any]) -> Iterator[dict[str, Any]]:
    """Yield the values of the textareas of the first annotation that was not cancelled, its lines joined."""
    submitted = (entry for entry in annotations if isinstance(entry, dict) and not entry.get("was_cancelled"))
    for result in next(submitted, {}).get("result") or ():
        value = result.get("value") if isinstance(result, dict) and result.get("type") == "textarea" else None
        if isinstance(value, dict) and value.get("text"):
            lines = value["text"] if isinstance(value["text"], list) else [value["text"]]
            yield {**value, "text": " ".join(map(str, lines))}


def _path(value: Any) -> Any:
    return value.partition(_LOCAL_FILE)[2] if isinstance(value, str) and _LOCAL_FILE in value else value
