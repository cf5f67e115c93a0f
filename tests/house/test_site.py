"""The documents as a site: every page and all that is public stand on it. `make site` builds it without a warning."""

from __future__ import annotations

import re
from pathlib import Path

import muster

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


def test_every_page_stands_in_the_navigation() -> None:
    named = re.findall(r"- ([\w/-]+\.md)", (ROOT / "mkdocs.yml").read_text())
    assert sorted(named) == sorted(str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md"))


def test_all_that_is_public_stands_on_the_page_of_the_python_interface() -> None:
    named = re.findall(r"^::: muster\.(\w+)$", (DOCS / "reference" / "api.md").read_text(), re.MULTILINE)
    assert sorted(named) == sorted(muster.__all__)
