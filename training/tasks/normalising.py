"""What of a text counts when it is compared: letters with their marks and digits, without case and punctuation.

Whisper's own normaliser (Radford et al. 2022, appendix C) puts a space for every combining mark. That takes words of
Indic scripts apart and counts fewer errors than there are (Manohar et al. 2024, arXiv 2409.02449). Here marks stay
where they spell: vowel signs and viramas, tones, letters that Unicode composes of several. What is left out in most
texts of a script, and so is no error, is dropped: points of Arabic and Hebrew, elongation, joiners, marks of direction.
"""

from __future__ import annotations

import re
import unicodedata
from functools import lru_cache

import regex

WITHOUT_SPACES = frozenset({"zh", "yue", "ja", "th", "lo", "my", "km"})
"""Languages whose words are not set apart: every character stands for itself."""
_DOTLESS = frozenset({"tr", "az"})
"""Languages in which the small letter of I has no dot."""
_OPTIONAL = regex.compile(
    r"[\u0591-\u05bd\u05bf\u05c1\u05c2\u05c4\u05c5\u05c7"  # points and accents of Hebrew
    r"\u0610-\u061a\u0640\u064b-\u0652\u0670\u06d6-\u06dc\u06df-\u06e8\u06ea-\u06ed"  # of Arabic, and its elongation
    r"\p{Cf}\p{Me}\p{Variation_Selector}]"
)
_NOT_SAID = re.compile(r"[<\[][^>\]]*[>\]]|\([^)]+?\)")
_AM = (
    (re.compile("\u0e4d([\u0e48-\u0e4b]?)\u0e32"), "\\1\u0e33"),
    (re.compile("\u0ecd([\u0ec8-\u0ecb]?)\u0eb2"), "\\1\u0eb3"),
)
"""Thai and Lao ``am``: one letter, which compatibility forms take apart, and which is typed before or after a tone."""
_CLUSTER = regex.compile(r"\X")
_APOSTROPHES = str.maketrans(dict.fromkeys("’‘‛ʼʻ＇`´′", "'"))
_ZERO_WIDTH_SPACE = "\u200b"


def without_formatting(text: str) -> str:
    """Return a text without characters that nobody sees, and with one form of apostrophe."""
    text = text.replace(_ZERO_WIDTH_SPACE, " ").translate(_APOSTROPHES)
    return text if text.isascii() else regex.sub(r"\p{Cf}", "", text)


def normalised(text: str, language: str = "") -> str:
    """Return the words of a text as they are compared, one space between two; in :data:`WITHOUT_SPACES` its characters
    are the words. What stands in brackets is not said."""
    words = folded(_NOT_SAID.sub("", text), language)
    return " ".join(characters(words)) if language in WITHOUT_SPACES else words


def folded(text: str, language: str = "") -> str:
    """Return the letters, with their marks, and digits of a text without case; one space for all else between them."""
    text = unicodedata.normalize("NFC", without_formatting(text))
    if language in _DOTLESS:
        text = text.replace("İ", "i").replace("I", "ı")
    # what is alike in a caseless comparison (Unicode 3.13, definition D146)
    text = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold()).replace("i\u0307", "i")
    for parts, letter in _AM:
        text = parts.sub(letter, text)
    kept: list[str] = []
    for character in _OPTIONAL.sub("", text):
        counts = _counts(character)
        if counts == "letter" or (counts == "mark" and kept and kept[-1] != " "):
            kept.append(character)
        elif counts == "none":
            kept.append(" ")
    return " ".join("".join(kept).split())


@lru_cache(maxsize=4096)
def _counts(character: str) -> str:
    category = unicodedata.category(character)[0]
    return "mark" if category == "M" else "none" if category in "SPZC" else "letter"


def characters(text: str) -> list[str]:
    """Return the characters of a text as readers see them, without spaces: letters with their marks (grapheme
    clusters)."""
    return [cluster for cluster in _CLUSTER.findall(text) if not cluster.isspace()]
