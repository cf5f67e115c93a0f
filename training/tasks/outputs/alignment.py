"""Word-by-word alignment of a written text with the text that was meant."""

from __future__ import annotations

from collections.abc import Callable


def aligned_texts(reference: str, hypothesis: str, fold: Callable[[str], str] = str) -> list[tuple[str, str]]:
    """Return pairs of aligned words (Levenshtein); a word without counterpart is paired with an empty string.

    Args:
        fold: returns what is compared of a word; not empty.
    """
    from jiwer import process_words  # 0.2 s

    reference_words, hypothesis_words = reference.split(), hypothesis.split()
    meant, written = (" ".join(map(fold, words)) for words in (reference_words, hypothesis_words))
    alignment = process_words([meant], [written])
    pairs = list[tuple[str, str]]()
    for chunk in alignment.alignments[0]:
        left = reference_words[chunk.ref_start_idx : chunk.ref_end_idx]
        right = hypothesis_words[chunk.hyp_start_idx : chunk.hyp_end_idx]
        if chunk.type in ("equal", "substitute"):
            pairs += zip(left, right, strict=True)
        else:
            pairs += [(word, "") for word in left] + [("", word) for word in right]
    return pairs
