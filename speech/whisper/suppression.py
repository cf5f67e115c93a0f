"""Suppressed tokens, which are allowed again if training texts contain them; and special tokens, which texts may not
contain.

OpenAI's models suppress about ninety tokens, such as ``:``, ``(`` and ``"``, because they are not spoken. A model that
is trained on texts with them learns them, but could not generate them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from profiles.errors import counted
from training.tasks.data_files.plain_text import MODEL_TOKEN


def model_tokens(tokenizer: Any) -> re.Pattern[str]:
    """Return a pattern that matches special tokens and timestamps spelled out in a text."""
    special = set(tokenizer.all_special_tokens)
    names = [name for name in tokenizer.get_added_vocab() if name in special or MODEL_TOKEN.fullmatch(name)]
    return re.compile("|".join(map(re.escape, sorted(names, key=len, reverse=True))) or r"(?!)")


def allow_training_tokens(generation: Any, texts: Sequence[Sequence[int]], tokenizer: Any) -> str:
    """Allow a model to generate all tokens of its training texts (:func:`unsuppress`).

    Return a remark on the newly allowed tokens; empty if there are none.
    """
    lifted = unsuppress(generation, texts)
    names = {token: tokenizer.decode([token]).strip() for token in set().union(*lifted)}
    names[int(tokenizer.eos_token_id)] = "nothing"
    shown = " ".join(dict.fromkeys(names[token] for token in sorted(set().union(*lifted)) if names[token]))
    count = sum(any(names[token] for token in tokens) for tokens in lifted)
    holding = f"{counted(count, 'training transcript')} of {len(texts)}"
    remark = f"the model's settings forbid it to write {shown}, which {holding} hold: they allow it from now on"
    return f"{remark}, in the model saved too" if shown else ""


def unsuppress(generation: Any, texts: Sequence[Sequence[int]]) -> list[set[int]]:
    """Remove the tokens of training texts from a ``GenerationConfig``'s suppression lists.

    Return the tokens of each text that were suppressed.

    Args:
        texts: tokens of each text, including the end token. The first one is checked with ``begin_suppress_tokens``.
    """
    never, not_first = (set(getattr(generation, name, None) or ()) for name in _LISTS)
    lifted = [never.intersection(text) | not_first.intersection(text[:1]) for text in texts]
    used = never.intersection(*[set().union(*texts)])
    firsts = not_first.intersection(text[0] for text in texts if text)
    for name, tokens, needed in ((_LISTS[0], never, used), (_LISTS[1], not_first, firsts)):
        if needed:
            setattr(generation, name, sorted(tokens - needed) or None)
    return lifted


_LISTS = ("suppress_tokens", "begin_suppress_tokens")
