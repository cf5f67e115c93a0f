"""What the members' model wrote in an evaluation, brought together and kept in the run folder.

Every member holds the whole split, so only places and texts are sent. A member is not believed: what it says of
another's share, or twice, is left out.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence

from training.bounded import LONGEST_TEXT, harmless
from training.exchange.documents import documents
from training.tasks.base import Answer

_ROOM = 4_000_000
"""Bytes that one member sends, some 50,000 short texts; further ones stay out of the file."""


def to_payload(answers: Sequence[Answer]) -> bytes:
    """Return what a member sends of its share: as many answers as there is room for."""
    rows, room = [], _ROOM
    for answer in answers:
        row = json.dumps([answer.sample, harmless(answer.text), int(answer.cut)])
        room -= len(row) + 1
        if room < 0:
            break
        rows.append(row)
    return f'{{"answers":[{",".join(rows)}]}}'.encode()


def from_payloads(gathered: Mapping[int, bytes], shares: Mapping[int, Collection[int]]) -> list[Answer]:
    """Return the answers of all members, each about its own share only."""
    found: dict[int, Answer] = {}
    for rank, document in documents(gathered).items():
        rows = document.get("answers")
        for row in rows if isinstance(rows, list) else ():
            answer = _answer(row)
            if answer is not None and answer.sample in shares.get(rank, ()):
                found.setdefault(answer.sample, answer)
    return [found[sample] for sample in sorted(found)]


def _answer(row: object) -> Answer | None:
    if not (isinstance(row, list) and len(row) == 3):
        return None
    sample, text, cut = row
    if type(sample) is not int or not isinstance(text, str) or len(text) > LONGEST_TEXT:
        return None
    return Answer(sample, harmless(text), bool(cut))
