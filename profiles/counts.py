"""Numbers with their nouns, for sentences."""

from __future__ import annotations


def counted(count: int, one: str, many: str = "") -> str:
    """Return ``1 clip`` or ``3 clips``.

    Args:
        one: what there is one of; words after the noun may follow it where ``many`` says them too.
        many: what there are several or none of; ``one`` with an s by default.
    """
    return f"{count} {one if count == 1 else many or one + 's'}"
