"""Instruction data: conversations from tables of prompts and responses, or from lists of messages.

A row is one of: ``messages`` (a list of ``{"role", "content"}``), ``prompt`` and ``response`` (or ``completion``), or
``instruction``, ``input`` (may be empty) and ``output``; a column ``system`` goes before each but the first.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from profiles.errors import BadInput
from training.tasks.speech_clips import HELD_OUT, SPLITS
from training.tasks.tables import read_table

logger = logging.getLogger("muster.data")

PROMPTS = ("prompt", "question", "instruction")
RESPONSES = ("response", "completion", "answer", "output")
ROLES = ("system", "user", "assistant")
MOST_TURNS = 64
"""Messages of one conversation."""
_ENDS = (".csv", ".jsonl")
_OTHER_ROLES = {"human": "user", "gpt": "assistant", "model": "assistant", "bot": "assistant"}

Message = dict[str, str]
"""``role`` (one of ``ROLES``) and ``content``."""


@dataclass(frozen=True)
class Conversation:
    """Messages that end with one of the assistant."""

    messages: tuple[Message, ...]
    where: str
    """Table and line, for messages to a person."""


Conversations = dict[str, list[Conversation]]


def conversation_files(path: str) -> dict[str, Path]:
    """Return the tables of a data set by split; empty where it is plain text or not here."""
    source = Path(path).expanduser()
    if source.is_file():
        return {"train": source} if source.suffix in _ENDS else {}
    found = {}
    for split, names in SPLITS.items():
        files = (source / f"{name}{end}" for name in names for end in _ENDS)
        file = next((file for file in files if file.is_file()), None)
        if file is not None:
            found[split] = file
    return found if "train" in found else {}


def read_conversations(files: Mapping[str, Path]) -> Conversations:
    """Read tables of conversations, by split; a tenth of the training rows is held out if none else is.

    Raises:
        BadInput: a table cannot be read, or a row is no conversation (named by file and line).
    """
    return hold_out_rows({split: [row_to_conversation(*row) for row in _rows(file)] for split, file in files.items()})


def hold_out_rows(splits: Conversations) -> Conversations:
    """Return ``splits`` with a validation split: if there is none, a tenth of the training rows by their content.

    Raises:
        BadInput: there are fewer than two training rows.
    """
    if "validation" in splits:
        return splits
    train = splits["train"]
    if len(train) < 2:
        raise BadInput("the data set has fewer than 2 conversations and no validation split", "add rows")
    ranked = sorted(range(len(train)), key=lambda index: _hash(train[index]))
    held = set(ranked[: max(1, round(len(train) * HELD_OUT))])
    logger.warning("no validation split: %d of %d conversations are held out to evaluate on", len(held), len(train))
    rest = [one for index, one in enumerate(train) if index not in held]
    return {**splits, "train": rest, "validation": [train[index] for index in sorted(held)]}


def _hash(conversation: Conversation) -> bytes:
    return hashlib.blake2b(json.dumps(conversation.messages).encode(), digest_size=16).digest()


def _rows(path: Path) -> Iterator[tuple[Mapping[str, Any], str]]:
    if path.suffix == ".csv":
        for row in read_table(path).rows:
            yield row.cells, row.where
        return
    read_any = False
    for number, line in enumerate(_lines(path), start=1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise BadInput(f"{where}: not JSON", "one JSON object a line") from error
        if not isinstance(record, dict):
            raise BadInput(f"{where}: not a JSON object", "one JSON object a line")
        read_any = True
        yield record, where
    if not read_any:
        raise BadInput(f"{path}: the file is empty", "it needs a JSON object a line")


def _lines(path: Path) -> list[str]:
    try:
        return path.read_bytes().decode("utf-8-sig").split("\n")
    except OSError as error:
        raise BadInput(f"{path}: {error.strerror}", "check the path") from error
    except UnicodeDecodeError as error:
        raise BadInput(f"{path}, byte {error.start}: not UTF-8", "save the file as UTF-8") from error


def row_to_conversation(row: Mapping[str, Any], where: str) -> Conversation:
    """Return the conversation of one row.

    Raises:
        BadInput: it has no known columns, an empty text, or messages in no order that can be learnt from.
    """
    messages = _messages(row, where) if row.get("messages") else _pair(row, where)
    if len(messages) > MOST_TURNS:
        raise BadInput(f"{where}: {len(messages)} messages, more than {MOST_TURNS}", "divide the conversation")
    if messages[-1]["role"] != "assistant" or not any(message["role"] == "user" for message in messages):
        raise BadInput(f"{where}: a conversation has a user's message and ends with the assistant's", "correct it")
    return Conversation(tuple(messages), where)


def _pair(row: Mapping[str, Any], where: str) -> list[Message]:
    prompt = _first(row, PROMPTS, where)
    response = _first(row, RESPONSES, where)
    more = _text(row.get("input"))
    system = _text(row.get("system"))
    asked = f"{prompt}\n\n{more}" if more else prompt
    before = [{"role": "system", "content": system}] if system else []
    return [*before, {"role": "user", "content": asked}, {"role": "assistant", "content": response}]


def _first(row: Mapping[str, Any], names: Sequence[str], where: str) -> str:
    name = next((name for name in names if name in row), None)
    if name is None:
        there = ", ".join(map(str, list(row)[:8]))
        message = f"{where}: neither messages nor {' or '.join(names)}; it has: {there}"
        raise BadInput(message, "name the columns prompt and response, or instruction, input and output")
    text = _text(row[name])
    if not text:
        raise BadInput(f"{where}, column {name}: empty", "fill it in or remove the row")
    return text


def _text(value: Any) -> str:
    return value.strip() if isinstance(value, str) else ""


def _messages(row: Mapping[str, Any], where: str) -> list[Message]:
    given = row["messages"]
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except (ValueError, RecursionError) as error:
            raise BadInput(f"{where}, column messages: not JSON", "a list of role and content") from error
    if not isinstance(given, list) or not given:
        raise BadInput(f"{where}, column messages: not a list", "a list of role and content")
    return [_message(one, where) for one in given]


def _message(given: Any, where: str) -> Message:
    record = given if isinstance(given, dict) else {}
    role = str(record.get("role", record.get("from", "")))
    role = _OTHER_ROLES.get(role, role)
    content = _text(record.get("content", record.get("value")))
    if role not in ROLES or not content:
        hint = f"roles are {', '.join(ROLES)}, and content is text"
        raise BadInput(f"{where}, column messages: a message of role {role[:40]!r} without use", hint)
    return {"role": role, "content": content}


def hub_conversations(name: str) -> Conversations | None:
    """Return the conversations of a data set of the hub; ``None`` where it holds plain text.

    Raises:
        BadInput: it cannot be had, or a row is no conversation.
    """
    from training.tasks.hub_speech import load_hub_dataset  # the datasets package takes 2 s to import

    loaded = load_hub_dataset(name)
    found: Conversations = {}
    for split, names in SPLITS.items():
        key = next((candidate for candidate in names if candidate in loaded), None)
        if key is not None and _is_instructions(loaded[key].column_names):
            found[split] = [row_to_conversation(row, f"{name}, {key}, row {i}") for i, row in enumerate(loaded[key])]
    return hold_out_rows(found) if found.get("train") else None


def _is_instructions(columns: Sequence[str]) -> bool:
    pair = any(name in columns for name in PROMPTS) and any(name in columns for name in RESPONSES)
    return pair or "messages" in columns


Render = Callable[[Sequence[Message], bool], str]
"""``render(messages, ask)``: a conversation as the model reads it; ``ask``: up to where the assistant's text begins."""
