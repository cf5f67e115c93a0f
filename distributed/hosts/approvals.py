"""Code that the user has approved to run, by the hash of its content; changed content needs a new approval."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterable
from pathlib import Path

import platformdirs

from training.records.run_files import private_folder, write_atomically


def digest_of(name: str, files: Iterable[Path]) -> str:
    """Return the hash of code: its name, and the paths and contents of its files; a missing file counts as empty."""
    digest = hashlib.sha256()
    for field in (name, *(text for path in sorted(set(files)) for text in (str(path), _content(path)))):
        data = field.encode(errors="surrogateescape")
        digest.update(len(data).to_bytes(8, "big") + data)
    return digest.hexdigest()


def _content(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return ""


def is_approved(digest: str) -> bool:
    """Whether the user has approved exactly this content."""
    return (_folder() / digest).is_file()


def approve(digest: str, description: str) -> None:
    """Remember the approval for this user; ``description`` names the content in one line. If nothing can be written,
    the user is asked again."""
    with contextlib.suppress(OSError):
        _folder().parent.mkdir(parents=True, exist_ok=True)
        write_atomically(private_folder(_folder()) / digest, _line(description))


def has_changed(description: str) -> bool:
    """Whether the user approved other content under the same description."""
    line = _line(description)
    with contextlib.suppress(OSError):
        return any(path.read_bytes() == line for path in _folder().iterdir())
    return False


def _line(description: str) -> bytes:
    return f"{description}\n".encode(errors="backslashreplace")


def _folder() -> Path:
    return Path(platformdirs.user_config_dir("muster", appauthor=False)) / "approved"
