"""Joins drawings of a terminal into one SVG that shows them in turn: without a script, so that it moves in a README.

What several drawings share is written once. Each part has a CSS animation of its visibility, which says in which of the
drawings it is seen. Where a reader wants less motion, or nothing can move, the last drawing stands.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

_CELL = 12.2
"""Width of a character."""
_STYLE = re.compile(r"\.(terminal-\d+-r\d+) { (.*?);? }")
_TEXT = re.compile(r'<text class="([^"]*)" x="([\d.]+)" y="([\d.]+)" textLength="([\d.]+)"[^>]*>([^<]*)</text>')
_RECT = re.compile(r'<rect fill="([^"]*)" x="([\d.]+)" y="([\d.]+)" width="([\d.]+)" height="([\d.]+)" shape')
_BLANK = "&#160;"
_BODY = '<g transform="translate(9, 41)"'
_FONT = "font:20px Fira Code,monospace;font-variant-east-asian:full-width"
_ScenesOf = dict[str, frozenset[int]]
"""The scenes in which a part is seen, by the part as SVG text, in the order of the drawings."""


class Scene(NamedTuple):
    """A drawing (SVG text, as Textual exports it), and for how many seconds it is shown."""

    drawing: str
    seconds: float


def moving_picture(scenes: Sequence[Scene], title: str) -> str:
    """Return an SVG that shows the scenes in turn, again and again.

    Args:
        scenes: drawings of one size.
        title: what the picture shows, for those who do not see it.
    """
    drawings = [scene.drawing for scene in scenes]
    styles = sorted({style for drawing in drawings for _, style in _STYLE.findall(drawing)})
    rects, texts = _scenes_of(map(_rects, drawings)), _scenes_of(_texts(drawing, styles) for drawing in drawings)
    seen = sorted({*rects.values(), *texts.values()}, key=sorted)
    head, frame = re.sub(r"terminal-\d+-", "", drawings[0]).split("</defs>", 1)
    parts = [f'{head[: head.index(">")]} role="img" aria-label="{title}">', "<style>", f".m{{{_FONT}}}",
             *re.findall(r"\.title {[^}]*}", head),
             *(f".c{number}{{{style}}}" for number, style in enumerate(styles)),
             *_animations(seen, [scene.seconds for scene in scenes]), "</style>",
             " ".join(frame[: frame.index(_BODY)].split()), f'{_BODY} class="m">',
             *_groups(rects, seen), *_groups(texts, seen), "</g>", "</svg>", ""]  # fmt: skip
    return "\n".join(parts)


def _rects(drawing: str) -> Iterator[str]:
    """Yield the backgrounds of a drawing; neighbours of one colour are one."""
    joined: list[tuple[str, float, str, float, str]] = []
    for fill, left, y, width, height in _RECT.findall(drawing):
        last = joined[-1] if joined else ("", 0.0, "", 0.0, "")
        if (last[0], last[2]) == (fill, y) and abs(last[1] + last[3] - float(left)) < _CELL / 2:
            joined[-1] = (fill, last[1], y, last[3] + float(width), height)
        else:
            joined.append((fill, float(left), y, float(width), height))
    for fill, x, y, size, height in joined:
        place = f'x="{x:g}" y="{y}" width="{size:g}" height="{height}"'
        yield f'<rect fill="{fill}" {place} shape-rendering="crispEdges"/>'


def _texts(drawing: str, styles: Sequence[str]) -> Iterator[str]:
    """Yield the texts of a drawing, without the blanks around them where these show nothing."""
    style_of = dict(_STYLE.findall(drawing))
    for kind, x, y, length, words in _TEXT.findall(drawing):
        style, bare = style_of[kind], words.strip()
        if "underline" not in style:
            bare = re.sub(f"^(?:{_BLANK})+|(?:{_BLANK})+$", "", bare)
        if not bare:
            continue
        before, blanks = (words.index(bare) // len(_BLANK), (len(words) - len(bare)) // len(_BLANK))
        place = f'x="{float(x) + before * _CELL:g}" y="{y}" textLength="{float(length) - blanks * _CELL:g}"'
        yield f'<text class="c{styles.index(style)}" {place}>{bare}</text>'


def _scenes_of(drawings: Iterable[Iterable[str]]) -> _ScenesOf:
    scenes: _ScenesOf = {}
    for number, parts in enumerate(drawings):
        for part in parts:
            scenes[part] = scenes.get(part, frozenset()) | {number}
    return scenes


def _groups(scenes_of: _ScenesOf, seen: Sequence[frozenset[int]]) -> Iterator[str]:
    """Yield a group for the parts that are seen in the same scenes."""
    for number, scenes in enumerate(seen):
        parts = [part for part, numbers in scenes_of.items() if numbers == scenes]
        if parts:
            yield "".join((f'<g class="s{number}">', *parts, "</g>"))


def _animations(seen: Sequence[frozenset[int]], seconds: Sequence[float]) -> Iterator[str]:
    """Yield the rules that show each group in its scenes, for as many ``seconds`` as each of these lasts."""
    whole, last = sum(seconds), len(seconds) - 1
    for number, scenes in enumerate(seen):
        if len(scenes) == len(seconds):
            continue
        changes = [scene for scene in range(len(seconds)) if not scene or (scene in scenes) != (scene - 1 in scenes)]
        frames = "".join(f"{100 * sum(seconds[:scene]) / whole:.4g}%{_visible(scene in scenes)}" for scene in changes)
        yield f"@keyframes k{number}{{{frames}}}"
        yield f".s{number}{_visible(last in scenes)[:-1]};animation:k{number} {whole:g}s step-end infinite}}"
    yield "@media (prefers-reduced-motion:reduce){g{animation:none!important}}"


def _visible(shown: bool) -> str:
    return f"{{visibility:{'visible' if shown else 'hidden'}}}"
