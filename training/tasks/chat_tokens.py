"""Conversations as tokens: the tokenizer's own chat template where it has one, and which tokens are the responses."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from jinja2 import TemplateError

from profiles.errors import BadInput
from training.tasks.conversations import Conversation, Message, Render

logger = logging.getLogger("muster.data")

IGNORED = -100
"""Target of a token that is read and not learnt."""

_HEADINGS = {"system": "", "user": "### Instruction:\n", "assistant": "### Response:\n"}

Ids = npt.NDArray[np.int64]


class Turn(NamedTuple):
    """A piece of a conversation."""

    text: str
    learnt: bool
    """Whether it is a response, with what ends it."""


class ChatTokens:
    """Conversations of one split; a sample is ``(inputs, targets)``, the targets one token later."""

    def __init__(self, rows: Sequence[tuple[Ids, npt.NDArray[np.bool_]]]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int, /) -> tuple[Ids, Ids]:
        ids, learnt = self.rows[index]
        return ids[:-1], np.where(learnt[1:], ids[1:], IGNORED)

    def first(self, count: int) -> ChatTokens:
        """Return the first ``count`` conversations; 0 is all."""
        return ChatTokens(self.rows[: count or None])

    def fingerprint(self) -> str:
        """Hash of all tokens."""
        digest = hashlib.blake2b(digest_size=8)
        for ids, learnt in self.rows:
            digest.update(ids.tobytes() + learnt.tobytes())
        return digest.hexdigest()


def encode(split: str, conversations: Sequence[Conversation], tokenizer: Any, longest: int) -> ChatTokens:
    """Return a split's tokens, at most ``longest`` to be read in a conversation; what is cut is said in a warning.

    Raises:
        BadInput: the tokenizer's template cannot be used, or nothing is left.
    """
    render = renderer_of(tokenizer)
    rows, cut, lost = [], 0, 0
    for conversation in conversations:
        ids, learnt = _row(turns(conversation, render), tokenizer)
        cut += len(ids) > longest + 1
        ids, learnt = ids[: longest + 1], learnt[: longest + 1]
        if learnt[1:].any():
            rows.append((ids, learnt))
        else:
            lost += 1
    if cut:
        what = "%s: %d of %d conversations are longer than block_size = %d tokens and cut at their end; %d left out"
        logger.warning(f"{what}, whose prompts fill it", split, cut, len(conversations), longest, lost)
    if not rows:
        raise BadInput(f"{split}: no response fits into block_size = {longest} tokens", "raise block_size")
    return ChatTokens(rows)


def _row(pieces: Sequence[Turn], tokenizer: Any) -> tuple[Ids, npt.NDArray[np.bool_]]:
    ids: list[int] = []
    learnt: list[bool] = []
    for piece in pieces:
        found = tokenizer(piece.text, add_special_tokens=False, verbose=False)["input_ids"]
        ids += found
        learnt += [piece.learnt] * len(found)
    return np.asarray(ids, dtype=np.int64), np.asarray(learnt, dtype=bool)


def turns(conversation: Conversation, render: Render) -> list[Turn]:
    """Cut a rendered conversation where the assistant's texts begin and end.

    Raises:
        BadInput: the template writes what came before in another way when more follows.
    """
    pieces: list[Turn] = []
    written = ""
    for end, message in enumerate(conversation.messages, start=1):
        if message["role"] != "assistant":
            continue
        asked = render(conversation.messages[: end - 1], True)
        said = render(conversation.messages[:end], False)
        if not said.startswith(written):
            hint = "write one response per row, or use a tokenizer with another chat template"
            raise BadInput(f"{conversation.where}: the chat template rewrites earlier messages", hint)
        start = len(asked) if said.startswith(asked) else said.rfind(message["content"])
        start = max(start, len(written))
        pieces += [Turn(said[len(written) : start], False), Turn(said[start:], True)]
        written = said
    return pieces


def renderer_of(tokenizer: Any) -> Render:
    """Return how a tokenizer's model reads conversations: by its chat template, else by plain headings."""
    if not getattr(tokenizer, "chat_template", None):
        return lambda messages, ask: _plain(messages, ask, tokenizer.eos_token or "")

    def render(messages: Sequence[Message], ask: bool) -> str:
        try:
            return _apply(tokenizer, messages, ask)
        except (TemplateError, ValueError, TypeError):
            # a template without a system role, like Gemma's: what it says goes before the user's first words
            try:
                return _apply(tokenizer, without_system(messages), ask)
            except (TemplateError, ValueError, TypeError) as error:
                reason = " ".join(str(error).split())[:200]
                message = f"the tokenizer's chat template refuses a conversation: {reason}"
                raise BadInput(message, "user and assistant take turns, the user first") from error

    return render


def _apply(tokenizer: Any, messages: Sequence[Message], ask: bool) -> str:
    text = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=ask)
    return str(text)


def without_system(messages: Sequence[Message]) -> list[Message]:
    """Return the messages with the system's put before the user's first, for templates that know no system."""
    system = "\n\n".join(message["content"] for message in messages if message["role"] == "system")
    others = [dict(message) for message in messages if message["role"] != "system"]
    if system and others:
        others[0]["content"] = f"{system}\n\n{others[0]['content']}"
    return others


def _plain(messages: Sequence[Message], ask: bool, end: str) -> str:
    written = ""
    for message in messages:
        written += f"{_HEADINGS[message['role']]}{message['content']}"
        written += f"{end}\n\n" if message["role"] == "assistant" else "\n\n"
    return written + _HEADINGS["assistant"] if ask else written.removesuffix("\n\n") if end else written
