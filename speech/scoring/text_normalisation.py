"""Normalise texts for comparison: letters with their marks and digits, without case and punctuation.

Whisper's own normaliser (Radford et al. 2022, appendix C) replaces every combining mark by a space, which splits words
of Indic scripts and undercounts errors (Manohar et al. 2024, arXiv 2409.02449). Here marks that are part of the
spelling are kept: vowel signs and viramas, tones, decomposed letters. Marks that most texts of a script omit, so that
their absence is no error, are dropped: Arabic and Hebrew points, elongation, joiners, direction marks.
"""

from __future__ import annotations

import re
import unicodedata
from functools import lru_cache

import regex

WITHOUT_SPACES = frozenset({"zh", "yue", "ja", "th", "lo", "my", "km"})
"""Languages written without spaces between words: every character counts as a word."""
_DOTLESS = frozenset({"tr", "az"})
"""Languages in which the lower case of I is dotless."""
_OPTIONAL = regex.compile(
    r"[\u0591-\u05bd\u05bf\u05c1\u05c2\u05c4\u05c5\u05c7"  # points and accents of Hebrew
    r"\u0610-\u061a\u0640\u064b-\u0652\u0670\u06d6-\u06dc\u06df-\u06e8\u06ea-\u06ed"  # of Arabic, and its elongation
    r"\p{Cf}\p{Me}\p{Variation_Selector}]"
)
_BRACKETED = re.compile(r"[<\[][^>\]]*[>\]]|\([^)]+?\)")
_AM = (
    (re.compile("\u0e4d([\u0e48-\u0e4b]?)\u0e32"), "\\1\u0e33"),
    (re.compile("\u0ecd([\u0ec8-\u0ecb]?)\u0eb2"), "\\1\u0eb3"),
)
"""Thai and Lao ``am``: one letter that NFKC decomposes, and that is typed before or after a tone mark."""
_CLUSTER = regex.compile(r"\X")
_APOSTROPHES = str.maketrans(dict.fromkeys("’‘‛ʼʻ＇`´′", "'"))
_ZERO_WIDTH_SPACE = "\u200b"


def without_formatting(text: str) -> str:
    """Return a text without invisible characters, and with a single form of apostrophe."""
    text = text.replace(_ZERO_WIDTH_SPACE, " ").translate(_APOSTROPHES)
    return text if text.isascii() else regex.sub(r"\p{Cf}", "", text)


def normalise(text: str, language: str = "") -> str:
    """Return the normalised words of a text, separated by single spaces; texts in brackets are removed.

    In :data:`WITHOUT_SPACES` every character is a word.
    """
    words = fold(_BRACKETED.sub("", text), language)
    return " ".join(characters(words)) if language in WITHOUT_SPACES else words


def fold(text: str, language: str = "") -> str:
    """Return the case-folded letters (with their marks) and digits of a text; anything else becomes a single space."""
    text = unicodedata.normalize("NFC", without_formatting(text))
    if language in _DOTLESS:
        text = text.replace("İ", "i").replace("I", "ı")
    # compatibility caseless matching (Unicode 3.13, definition D146)
    text = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold()).replace("i\u0307", "i")
    for sequence, letter in _AM:
        text = sequence.sub(letter, text)
    folded_characters: list[str] = []
    for character in _OPTIONAL.sub("", text):
        counts = _character_class(character)
        if counts == "letter" or (counts == "mark" and folded_characters and folded_characters[-1] != " "):
            folded_characters.append(character)
        elif counts == "none":
            folded_characters.append(" ")
    return " ".join("".join(folded_characters).split())


@lru_cache(maxsize=4096)
def _character_class(character: str) -> str:
    category = unicodedata.category(character)[0]
    return "mark" if category == "M" else "none" if category in "SPZC" else "letter"


def characters(text: str) -> list[str]:
    """Return the grapheme clusters (letters with their marks) of a text, without spaces."""
    return [cluster for cluster in _CLUSTER.findall(text) if not cluster.isspace()]
