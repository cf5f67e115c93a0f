"""Clean transcripts from markup and invisible characters."""

from __future__ import annotations

import html
import re

MODEL_TOKEN = re.compile(r"<\|[^|<>\s]{0,40}\|>")
"""A model's special token in a decoded text: ``<|endoftext|>``, ``<|en|>``, ``<|0.00|>``."""
_ENTITY = re.compile(r"&(?:#\d{1,7}|#x[0-9a-fA-F]{1,6}|[A-Za-z][A-Za-z0-9]{1,31});")
_INVISIBLE = re.compile("[\0-\x08\x0e-\x1b\x7f\u00ad\u200b\u200e\u200f\u202a-\u202e\u2060\u2066-\u2069\ufeff]")
"""Control characters, soft hyphens, zero-width spaces, direction marks. Joiners (U+200C, U+200D) are part of the
spelling and are kept."""
_WINDOWS = re.compile("[\x80-\x84\x86-\x9f]")
"""C1 control characters that are really letters and quotes of Windows code page 1252, as HTML also assumes."""


def plain_text(text: str) -> str:
    """Return a transcript on one line: white space collapsed, HTML entities decoded, special tokens and invisible
    characters removed."""
    if "&" in text:
        text = _ENTITY.sub(lambda entity: html.unescape(entity[0]), text)
    if "<|" in text:
        text = MODEL_TOKEN.sub(" ", text)
    if not text.isprintable():
        text = _WINDOWS.sub(lambda letter: html.unescape(f"&#{ord(letter[0])};"), text)
        text = _INVISIBLE.sub("", text)
    return " ".join(text.split())


def find_markup(text: str) -> list[str]:
    """Return the entities and special tokens in a transcript, which :func:`plain_text` decodes or removes."""
    entities = [entity for entity in _ENTITY.findall(text) if html.unescape(entity) != entity] if "&" in text else []
    return [*entities, *MODEL_TOKEN.findall(text)]
