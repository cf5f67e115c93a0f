"""The pictures of the documentation are drawn from the screens as they are."""

from __future__ import annotations

import html
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
WORDS = {
    "machines": ("Which machines take part?", "demo-macbook", "NVIDIA RTX 4070", "Continue"),
    "access": ("Can Muster log in there?", "new host key", "no key", "Password"),
    "checks": ("Are they ready to train?", "nothing is installed there yet", "demo-pc"),
    "links": ("How fast is the network", "demo-studio", "Mbit/s"),
    "strategy": ("How should they train together?", "Fast", "One machine", "recommended"),
    "dashboard-overview": ("Healthy", "3/3 machines", "step", "demo-studio", "Detach"),
    "dashboard-machines": ("Degraded", "lost", "silent for 5 s", "samples/s"),
    "dashboard-charts": ("loss", "validation wer", "learning rate"),
    "dashboard-network": ("synchronisations", "planned", "Mbit/s"),
    "dashboard-logs": ("root cause", "en1: link is down", "No route to host"),
    "plan": ("Review and start", "This run takes", "alone would take"),
}


def text_of(picture: Path) -> str:
    """Return what a picture says, blanks put together."""
    parts = re.findall(r"<text[^>]*>([^<]*)</text>", picture.read_text(encoding="utf-8"))
    said = " ".join(html.unescape(" ".join(parts)).replace("\xa0", " ").split())
    return re.sub(r"\b[0-9a-f]{16}\b", "HASH", said)  # of a plan: it counts the folder that the data lie in


@pytest.mark.timeout(300)
def test_the_documentation_has_the_pictures_of_these_screens(tmp_path: Path) -> None:
    """A screen that has changed needs its picture drawn anew: docs/make_pictures.py does it."""
    subprocess.run([sys.executable, ROOT / "docs" / "make_pictures.py", "--output", tmp_path], check=True, timeout=280)
    assert {path.stem for path in tmp_path.iterdir()} == set(WORDS)
    for name, words in WORDS.items():
        drawn, kept = (folder / f"{name}.svg" for folder in (tmp_path, ROOT / "docs" / "pictures"))
        said = text_of(drawn)
        assert [word for word in words if word not in said] == [], name
        assert text_of(kept) == said, name


def test_pictures_are_small_and_load_nothing() -> None:
    for path in (ROOT / "docs" / "pictures").iterdir():
        drawing = path.read_text(encoding="utf-8")
        assert len(drawing) < 130_000
        assert "@font-face" not in drawing and "url(http" not in drawing
