"""Special tokens that texts of a conversation spell out stay text: no message can end its turn or begin another one.

Tokenizers make one token of ``<|im_end|>``, whoever wrote it. Those of the chat template, and of raw texts and
segments, are meant; those inside messages are encoded as the characters they are.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from training.tasks.text.message_rows import Message

_MARK = "\ufdd0"
"""A noncharacter, before each special token that a message spells out; encoding removes it."""


class SpecialTokens:
    """The special tokens of a tokenizer.

    Tokens that it has added without calling them special, such as ``<think>``, are tokens in any text.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        tokens = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
        pattern = "|".join(map(re.escape, sorted(tokens, key=len, reverse=True))) or r"(?!)"
        self._spelled = re.compile(pattern)
        self._meant = re.compile(rf"(?<!{_MARK})({pattern})")

    def as_text(self, messages: Sequence[Message]) -> tuple[Message, ...]:
        """Return messages for a chat template, with their special tokens marked as text."""
        return tuple(self._mark(message) for message in messages)

    def _mark(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._spelled.sub(rf"{_MARK}\g<0>", value)
        if isinstance(value, dict):
            return {key: self._mark(entry) for key, entry in value.items()}
        return [self._mark(entry) for entry in value] if isinstance(value, list) else value

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a rendered text, without any added to it."""
        pieces = self._meant.split(text) if _MARK in text else [text]
        return [token for piece in pieces if piece for token in self._encode(piece)]

    def _encode(self, piece: str) -> list[int]:
        literal = {"split_special_tokens": True} if _MARK in piece else {}
        encoded = self._tokenizer(piece.replace(_MARK, ""), add_special_tokens=False, verbose=False, **literal)
        return list(encoded["input_ids"])
