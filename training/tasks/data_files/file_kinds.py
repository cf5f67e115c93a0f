"""Recognise files that are not text by their first bytes. Some of them could be decoded as text, such as a PDF."""

from __future__ import annotations

from pathlib import Path

from profiles.errors import BadInput
from profiles.locations import LFS_POINTER, pointer_error

_KINDS = (
    (b"%PDF-", "a PDF", "save its text as .txt"),
    (b"{\\rtf", "a document with formatting (RTF)", "save it as plain text"),
    (b"PK\3\4", "an archive or an office document", "unpack it, or save it as text or CSV"),
    (b"\x1f\x8b", "compressed", "unpack it: gunzip FILE"),
    (b"\x28\xb5\x2f\xfd", "compressed", "unpack it: zstd -d FILE"),
    (b"\xfd7zXZ\0", "compressed", "unpack it: unxz FILE"),
)
"""First bytes, kind of file, and what to do."""


def check_is_text(path: Path, data: bytes) -> None:
    """Reject content that is of a kind other than text.

    Raises:
        BadInput: it is; the message names the kind.
    """
    if data.startswith(LFS_POINTER):
        raise pointer_error(path)
    for begin, kind, hint in _KINDS:
        if data.startswith(begin):
            raise BadInput(f"{path}: {kind}, not text", hint)
