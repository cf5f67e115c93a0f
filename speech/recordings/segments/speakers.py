"""Names of speakers in transcripts, as meeting programs write them: nobody says them.

Of a text in which a colon may mean anything, only names that come again are taken for speakers.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

_GAP = r"[^\S\n]"
_NAME = rf"[^\W\d_][\w.'’&/()-]*(?:{_GAP}[\w.'’&/()-]+){{0,3}}"
_TIME = r"(?:\d{1,2}:)?\d{1,2}:\d{2}(?:[.,]\d{1,3})?"
_HEADING = re.compile(
    rf"^{_GAP}*(?:\[{_NAME}\]{_GAP}*{_TIME}|{_NAME}(?:{_GAP}{{2,}}|\t){_TIME}|{_NAME}{_GAP}*[\[(]{_TIME}[\])]):?{_GAP}*$",
    re.MULTILINE,
)
"""A line with a name and a time only: of Otter and Teams with spaces between, of Zoom and Rev with brackets."""
_CREDIT = re.compile(r"^Transcribed by https?://otter\.ai\s*\Z", re.MULTILINE)
_LABEL = re.compile(rf"\s*(?:{_TIME}\s+)?({_NAME})(?::(?=\s|$)|：)\s*")
_FEWEST_LABELS = 3


def without_headings(text: str) -> str:
    """Return a text without its lines of a name and a time, such as ``Speaker 1  0:05``."""
    return _CREDIT.sub("", _HEADING.sub("", text))


def without_names(lines: Sequence[str], turn_count: int) -> tuple[list[str], list[str]]:
    """Return lines without the names before them, such as ``Ann Smith: Hello``, and these names.

    A name is a speaker's if it comes again, and a third of all turns has one; a single name must be before all.

    Args:
        turn_count: lines of a text, cues of subtitles.
    """
    labels = [_LABEL.match(line) for line in lines]
    counts = Counter(label[1] for label in labels if label)
    speakers = [name for name, count in counts.items() if count > 1]
    labelled = sum(counts[name] for name in speakers)
    if labelled + len(counts) - len(speakers) == turn_count:
        speakers = list(counts) if speakers else []
    if counts.total() < _FEWEST_LABELS or (3 if len(speakers) > 1 else 1) * labelled < turn_count:
        return list(lines), []
    spoken = (line[label.end() :] if label and label[1] in speakers else line for line, label in zip(lines, labels))
    return list(spoken), speakers
