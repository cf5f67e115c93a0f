"""Instruction data: read conversations from files or the hub, and tokenise them with a loss mask for the responses."""

from __future__ import annotations

import hashlib
import json
import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from profiles.errors import BadInput
from training.tasks.data_files.splits import held_out_count, id_hash
from training.tasks.text.chat_template import Turn, renderer_of, turns
from training.tasks.text.conversation_rows import Conversation, is_text_row, row_to_conversation
from training.tasks.text.row_files import Cells, row_files, rows_of
from training.tasks.text.special_tokens import SpecialTokens

__all__ = ["Conversation", "renderer_of", "row_to_conversation", "turns"]

logger = logging.getLogger("muster.data")

IGNORED = -100
"""Target of a token that is excluded from the loss."""
_MAX_LISTED = 5
"""Maximum number of unusable rows whose locations are listed in an error."""

Ids = npt.NDArray[np.int64]
Conversations = dict[str, list[Conversation]]


def conversation_files(path: str, text_column: str = "") -> dict[str, list[Path]]:
    """Return the parts of a data set's conversation table by split; empty for plain text, or if it is not local.

    Raises:
        BadInput: a table cannot be read, or the choice among several is ambiguous.
    """
    files = row_files(path)
    if text_column or ("train" in files and is_text_row(next(rows_of(files["train"][0]))[0])):
        return {}
    return files


def read_conversations(files: Mapping[str, Sequence[Path]], hold_out: bool = True) -> Conversations:
    """Read conversation tables by split.

    Args:
        hold_out: hold out a tenth of the training rows if there is no validation split.

    Raises:
        BadInput: a table cannot be read, or rows are not conversations (listed by file and line).
    """
    splits = {
        split: _conversations((row for part in parts for row in rows_of(part)), parts[0].name)
        for split, parts in files.items()
    }
    return hold_out_rows(splits) if hold_out else splits


def _conversations(rows: Iterable[tuple[Cells, str]], name: str) -> list[Conversation]:
    conversations: list[Conversation] = []
    errors: list[tuple[BadInput, str]] = []
    for row, location in rows:
        try:
            conversations.append(row_to_conversation(row, location))
        except BadInput as error:
            errors.append((error, location))
    if errors:
        raise _combined_error(errors, len(errors) + len(conversations))
    for remark, count in Counter(remark for talk in conversations for remark in talk.remarks).items():
        logger.warning("%s: in %d of %d rows, %s", name, count, len(conversations), remark)
    return conversations


def _combined_error(errors: Sequence[tuple[BadInput, str]], rows: int) -> BadInput:
    """Return the first error, with the number and locations of the others."""
    (first_error, _), *others = errors
    if not others:
        return first_error
    places = ", ".join(location.rpartition(", ")[2] for _, location in others[:_MAX_LISTED])
    unnamed = f", and {len(others) - _MAX_LISTED} more" if len(others) > _MAX_LISTED else ""
    return BadInput(
        f"{first_error.message}; {len(errors)} of {rows} rows cannot be used, also {places}{unnamed}", first_error.hint
    )


def hold_out_rows(splits: Conversations) -> Conversations:
    """Return ``splits`` with a validation split: if missing, a tenth of the training rows, chosen by content hash.

    Raises:
        BadInput: there are fewer than two training rows.
    """
    if "validation" in splits:
        return splits
    train = splits["train"]
    if len(train) < 2:
        raise BadInput("the data set has fewer than 2 conversations and no validation split", "add rows")
    ranked = sorted(range(len(train)), key=lambda index: id_hash(_content(train[index])))
    held = set(ranked[: held_out_count(len(train))])
    logger.warning("no validation split: %d of %d conversations are held out to evaluate on", len(held), len(train))
    remaining = [talk for index, talk in enumerate(train) if index not in held]
    return {**splits, "train": remaining, "validation": [train[index] for index in sorted(held)]}


def _content(conversation: Conversation) -> str:
    segments = [(segment.text, segment.learnt) for segment in conversation.segments]
    return json.dumps(segments or conversation.messages, default=str)


def hub_conversations(name: str) -> Conversations | None:
    """Return the conversations of a hub data set; ``None`` if it is plain text.

    Raises:
        BadInput: it cannot be loaded, or a row is not a conversation.
    """
    from training.tasks.data_files.hub import load_hub_dataset, splits_of  # the datasets package takes 2 s to import

    loaded = load_hub_dataset(name)
    keys = splits_of(loaded)
    if not keys.get("train") or not len(loaded[keys["train"]]) or is_text_row(loaded[keys["train"]][0]):
        return None
    places = {key: f"{name}, {key}" for key in keys.values()}
    return hold_out_rows(
        {
            split: _conversations(((row, f"{places[key]}, row {i}") for i, row in enumerate(loaded[key])), places[key])
            for split, key in keys.items()
        }
    )


class ChatTokens:
    """Conversations of one split; a sample is ``(inputs, targets)``, the targets one token later."""

    def __init__(self, rows: Sequence[tuple[Ids, npt.NDArray[np.bool_]]], remarks: Sequence[str] = ()) -> None:
        self.rows = rows
        self.remarks = remarks
        """Remarks for the user on conversations that are not fully learnt."""

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int, /) -> tuple[Ids, Ids]:
        ids, learnt = self.rows[index]
        return ids[:-1], np.where(learnt[1:], ids[1:], IGNORED)

    def fingerprint(self) -> str:
        """Hash of all tokens."""
        digest = hashlib.blake2b(digest_size=8)
        for ids, learnt in self.rows:
            digest.update(ids.tobytes() + learnt.tobytes())
        return digest.hexdigest()


def tokenise_conversations(
    split: str, conversations: Sequence[Conversation], tokenizer: Any, longest: int
) -> ChatTokens:
    """Return a split's tokens, truncated to ``longest`` input tokens per conversation.

    Warns about truncated conversations, about special tokens in messages, which are learnt as text, and about templates
    that let only the last response be learnt.

    Raises:
        BadInput: the tokenizer's template cannot be used, or no response is left.
    """
    render, special = renderer_of(tokenizer), SpecialTokens(tokenizer)
    rows, cut, lost, rewritten, with_special = [], 0, 0, 0, 0
    for conversation in conversations:
        literal = replace(conversation, messages=special.as_text(conversation.messages))
        with_special += literal != conversation
        pieces = turns(literal, render)
        rewritten += sum(piece.learnt for piece in pieces) < len(conversation.learnt)
        ids, learnt = _row(pieces, special)
        cut += len(ids) > longest + 1
        ids, learnt = ids[: longest + 1], learnt[: longest + 1]
        if learnt[1:].any():
            rows.append((ids, learnt))
        else:
            lost += 1
    remarks, of_all = [], f"of {len(conversations)} conversations"
    if with_special:
        learnt_as = "which are learnt as text, not as tokens (write segments where tokens are meant)"
        remarks.append(f"{split}: {with_special} {of_all} spell special tokens out, {learnt_as}")
    if rewritten:
        only = "only the last response is learnt, as the chat template rewrites those before it"
        remarks.append(f"{split}: of {rewritten} {of_all} {only}")
    if cut or lost:
        longer = f"are longer than block_size = {longest} tokens and cut at their end"
        remarks.append(f"{split}: {cut} {of_all} {longer}; {lost} left out, whose prompts fill it")
    for remark in remarks:
        logger.warning(remark)
    if not rows:
        raise BadInput(f"{split}: no response fits into block_size = {longest} tokens", "raise block_size")
    return ChatTokens(rows, remarks)


def _row(pieces: Sequence[Turn], special: SpecialTokens) -> tuple[Ids, npt.NDArray[np.bool_]]:
    ids: list[int] = []
    learnt: list[bool] = []
    for piece in pieces:
        added = special.encode(piece.text)
        ids += added
        learnt += [piece.learnt] * len(added)
    return np.asarray(ids, dtype=np.int64), np.asarray(learnt, dtype=bool)
