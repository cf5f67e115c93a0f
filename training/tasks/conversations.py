"""Instruction data: conversations from tables, their tokens, and which of these are the responses.

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
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from jinja2 import TemplateError

from profiles.errors import BadInput
from training.tasks.speech_clips import by_split, held_out, id_hash
from training.tasks.tables import json_lines, read_table, read_text

PROMPTS = ("prompt", "question", "instruction")
RESPONSES = ("response", "completion", "answer", "output")
ROLES = ("system", "user", "assistant")
MOST_TURNS = 64
"""Messages of one conversation."""
_ENDS = (".csv", ".jsonl")
_OTHER_ROLES = {"human": "user", "gpt": "assistant", "model": "assistant", "bot": "assistant"}

Message = dict[str, str]
"""``role`` (one of ``ROLES``) and ``content``."""

Render = Callable[[Sequence[Message], bool], str]
"""``render(messages, ask)``: a conversation as the model reads it; ``ask``: up to where the assistant's text begins."""
logger = logging.getLogger("muster.data")

IGNORED = -100
"""Target of a token that is read and not learnt."""

_HEADINGS = {"system": "", "user": "### Instruction:\n", "assistant": "### Response:\n"}

Ids = npt.NDArray[np.int64]


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
    found = by_split(lambda name: next((path for end in _ENDS if (path := source / f"{name}{end}").is_file()), None))
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
    ranked = sorted(range(len(train)), key=lambda index: id_hash(json.dumps(train[index].messages)))
    held = set(ranked[: held_out(len(train))])
    logger.warning("no validation split: %d of %d conversations are held out to evaluate on", len(held), len(train))
    rest = [one for index, one in enumerate(train) if index not in held]
    return {**splits, "train": rest, "validation": [train[index] for index in sorted(held)]}


def _rows(path: Path) -> Iterator[tuple[Mapping[str, Any], str]]:
    if path.suffix == ".csv":
        yield from ((row.cells, row.where) for row in read_table(path).rows)
        return
    records = list(json_lines(path, read_text(path, "save the file as UTF-8")))
    if not records:
        raise BadInput(f"{path}: the file is empty", "it needs a JSON object a line")
    yield from ((record, f"{path}, line {number}") for number, record in records)


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
    from training.tasks.hub_speech import load_hub_dataset, splits_of  # the datasets package takes 2 s to import

    loaded = load_hub_dataset(name)
    found: Conversations = {}
    for split, key in splits_of(loaded).items():
        columns = loaded[key].column_names
        pair = any(name in columns for name in PROMPTS) and any(name in columns for name in RESPONSES)
        if pair or "messages" in columns:
            found[split] = [row_to_conversation(row, f"{name}, {key}, row {i}") for i, row in enumerate(loaded[key])]
    return hold_out_rows(found) if found.get("train") else None


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
        # a template without a system role, like Gemma's: what it says goes before the user's first words
        for form in (list, without_system):
            try:
                return str(tokenizer.apply_chat_template(form(messages), tokenize=False, add_generation_prompt=ask))
            except (TemplateError, ValueError, TypeError) as error:
                reason = " ".join(str(error).split())[:200]
        message = f"the tokenizer's chat template refuses a conversation: {reason}"
        raise BadInput(message, "user and assistant take turns, the user first")

    return render


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
