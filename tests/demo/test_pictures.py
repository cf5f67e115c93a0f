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
    "tour": ("Which machines take part?", "WER test 85.8 % ->"),
}
SCENES = (("1 picked of 1 found",), ("3 picked of 3 found",), ("How fast is the network",), ("How should they train",),
          ("3/3 machines", "step"), ("2/3 machines", "demo-studio lost"), ("3/3 machines", "is back"),
          ("Completed", "WER test 85.8 % -> 0."))  # fmt: skip
"""What the moving picture shows, in this order; others may stand between."""
PICTURES = ROOT / "docs" / "pictures"


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
        drawn, kept = (folder / f"{name}.svg" for folder in (tmp_path, PICTURES))
        said = text_of(drawn)
        assert [word for word in words if word not in said] == [], name
        assert text_of(kept) == said, name


def test_pictures_are_small_and_load_nothing() -> None:
    for path in PICTURES.iterdir():
        drawing = path.read_text(encoding="utf-8")
        assert len(drawing) < (200_000 if path.stem == "tour" else 130_000)
        assert "@font-face" not in drawing and "url(http" not in drawing and "<script" not in drawing


def seen(drawing: str, share: float | None) -> str:
    """Return what the moving picture says after a share of its time; ``None``: where nothing moves."""
    for number, still in re.findall(r"\.s(\d+){visibility:(\w+);animation", drawing):
        frames = re.search(rf"@keyframes k{number}{{(.*)}}\n", drawing)
        assert frames is not None
        changes = re.findall(r"([\d.]+)%{visibility:(\w+)}", frames[1])
        now = still if share is None else [state for at, state in changes if float(at) / 100 <= share][-1]
        if now == "hidden":
            drawing = re.sub(rf'<g class="s{number}">.*</g>', "", drawing)
    rows = dict[float, list[tuple[float, str]]]()
    for x, y, words in re.findall(r'<text class="c\d+" x="([\d.]+)" y="([\d.]+)"[^>]*>([^<]*)</text>', drawing):
        rows.setdefault(float(y), []).append((float(x), html.unescape(words)))
    lines = (" ".join(words for _, words in sorted(row)) for _, row in sorted(rows.items()))
    return " ".join(" ".join(lines).replace("\xa0", " ").split())


def test_the_moving_picture_tells_the_tour_and_stands_at_its_end() -> None:
    drawing = (PICTURES / "tour.svg").read_text(encoding="utf-8")
    seconds = re.search(r"animation:k\d+ ([\d.]+)s", drawing)
    assert seconds is not None and 15 < float(seconds[1]) < 25
    moments = iter([seen(drawing, number / 100) for number in range(100)])
    missing = [words for words in SCENES if not any(all(word in said for word in words) for said in moments)]
    assert missing == []
    assert all(word in seen(drawing, None) for word in SCENES[-1])
    assert "prefers-reduced-motion" in drawing
