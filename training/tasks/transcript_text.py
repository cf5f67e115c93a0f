"""The text of a transcript, without what got into it on its way and nobody says."""

from __future__ import annotations

import html
import re

MODEL_TOKEN = re.compile(r"<\|[^|<>\s]{0,40}\|>")
"""A token of a model's own in a text that was decoded with them: ``<|endoftext|>``, ``<|en|>``, ``<|0.00|>``."""
_ENTITY = re.compile(r"&(?:#\d{1,7}|#x[0-9a-fA-F]{1,6}|[A-Za-z][A-Za-z0-9]{1,31});")
_UNSEEN = re.compile("[\0-\x08\x0e-\x1b\x7f\u00ad\u200b\u200e\u200f\u202a-\u202e\u2060\u2066-\u2069\ufeff]")
"""Control characters, soft hyphens, spaces without width, marks of direction. Joiners (U+200C, U+200D) belong to the
spelling."""
_WINDOWS = re.compile("[\x80-\x84\x86-\x9f]")
"""Control characters that in fact are letters and quotes of Windows' code page 1252, as HTML takes them, too."""


def plain_text(text: str) -> str:
    """Return a transcript in one line: white space of any kind is one space, HTML entities are their characters, tokens
    of models and characters that nobody sees are left out."""
    if "&" in text:
        text = _ENTITY.sub(lambda entity: html.unescape(entity[0]), text)
    if "<|" in text:
        text = MODEL_TOKEN.sub(" ", text)
    if not text.isprintable():
        text = _WINDOWS.sub(lambda letter: html.unescape(f"&#{ord(letter[0])};"), text)
        text = _UNSEEN.sub("", text)
    return " ".join(text.split())


def odd_parts(text: str) -> list[str]:
    """Return the entities and tokens of models in a transcript, which :func:`plain_text` changes."""
    entities = [entity for entity in _ENTITY.findall(text) if html.unescape(entity) != entity] if "&" in text else []
    return [*entities, *MODEL_TOKEN.findall(text)]
