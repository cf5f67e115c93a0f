"""What a document tells a person to type is the program that both an installation and a clone have."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from app.cli.commands import COMMANDS

ROOT = Path(__file__).parents[2]
ENTRIES = re.compile(r"(python3?|muster) (cli_typer|wizard)\.py")
TYPED = re.compile(r"^muster ([a-z-]+)(?: ([a-z-]+))?", re.MULTILINE)
OUTSIDE_GROUPS = {"train", "launch", "wizard", "tour", "profiles", "demo-run"}
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.stem)
def test_a_document_names_commands_as_the_help_does(document: Path) -> None:
    text = document.read_text()
    assert ENTRIES.findall(text) == []
    names = {(entry.group, entry.name or name) for name, entry in COMMANDS.items()}
    typed = [(first, second) for first, second in TYPED.findall(text) if first not in OUTSIDE_GROUPS]
    assert [words for words in typed if words not in names and words[0] not in ("runs", "profiles")] == []
