"""What a person has agreed to run, by the hash of its content: it is not asked again until the content changes."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterable
from pathlib import Path

import platformdirs

from training.run_files import private_folder, write_whole


def digest_of(what: str, files: Iterable[Path]) -> str:
    """Return the hash of what would run: its name, and names and contents of its files, those that are missing too."""
    whole = hashlib.sha256()
    for part in (what, *(text for path in sorted(set(files)) for text in (str(path), _content(path)))):
        data = part.encode(errors="surrogateescape")
        whole.update(len(data).to_bytes(8, "big") + data)
    return whole.hexdigest()


def _content(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return ""


def is_approved(digest: str) -> bool:
    """Whether a person has agreed to exactly this before."""
    return (_folder() / digest).is_file()


def approve(digest: str, what: str) -> None:
    """Remember the agreement for this user; ``what`` describes the content in one line. Where nothing can be written,
    the question is asked again."""
    with contextlib.suppress(OSError):
        _folder().parent.mkdir(parents=True, exist_ok=True)
        write_whole(private_folder(_folder()) / digest, _line(what))


def has_changed(what: str) -> bool:
    """Whether a person agreed to this under the same name when its content was another one."""
    wanted = _line(what)
    with contextlib.suppress(OSError):
        return any(path.read_bytes() == wanted for path in _folder().iterdir())
    return False


def _line(what: str) -> bytes:
    return f"{what}\n".encode(errors="backslashreplace")


def _folder() -> Path:
    return Path(platformdirs.user_config_dir("muster", appauthor=False)) / "approved"
