"""Where a cell of a stranger's table may lead: ``https`` addresses, and files inside the folders a person named.

Nothing else is followed: no ``http``, ``file`` or other scheme, no absolute path, ``..`` or symbolic link out of those
folders, no device and no pipe.
"""

from __future__ import annotations

import re
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from training.recordings.recording import Fault, NoSource, Reason, Unusable, UrlSource
from training.tasks.speech_clips import FileSource
from training.tasks.tables import as_stored

if TYPE_CHECKING:
    from training.recordings.recording import Source

_SCHEME = re.compile(r"([a-zA-Z][a-zA-Z0-9+.-]*)://")
_LONGEST = 4096  # characters of a path or address


def located(cell: str, base: Path, roots: Sequence[Path] = ()) -> tuple[Source, Fault | None]:
    """Return :func:`source_of`, or what the cell holds and why that cannot be used."""
    try:
        return source_of(cell, base, roots), None
    except Unusable as error:
        return NoSource(cell), error.fault


def source_of(cell: str, base: Path, roots: Sequence[Path] = ()) -> FileSource | UrlSource:
    """Return the recording that ``cell`` names.

    Args:
        base: the table's folder.
        roots: further folders in which recordings may be; relative paths are looked for in all of them.

    Raises:
        Unusable: it names none, or one that is not followed.
    """
    if not cell:
        raise Unusable(Reason.NOT_THERE, "no file and no address")
    if len(cell) > _LONGEST:
        raise Unusable(Reason.BAD_CELL, f"a path of {len(cell)} characters")
    scheme = _SCHEME.match(cell)
    if scheme is None:
        return _file(cell, (base, *roots))
    match scheme[1].lower():
        case "https":
            return UrlSource(cell)
        case "gs":  # how BigQuery names an object of Cloud Storage; a public one is read without its client
            return UrlSource(f"https://storage.googleapis.com/{cell[len(scheme[0]) :]}")
        case other:
            raise Unusable(Reason.NOT_HTTPS, f"{other} is not followed, only https and files")


def _file(cell: str, roots: Sequence[Path]) -> FileSource:
    outside = False
    for root in roots:
        try:
            path = as_stored(root, cell).resolve()
            mode = path.stat().st_mode
        except (OSError, ValueError, RuntimeError):  # not there; a zero byte; links in a circle
            continue
        if not any(path.is_relative_to(allowed.resolve()) for allowed in roots):
            outside = True
        elif stat.S_ISREG(mode):
            return FileSource(path)
    if outside or Path(cell).is_absolute() or ".." in Path(cell).parts:
        raise Unusable(Reason.OUTSIDE, "leads out of the table's folder; --audio-root FOLDER allows one more")
    raise Unusable(Reason.NOT_THERE, "no such file")
