"""Convert rows of instruction data, in the formats of unsloth, axolotl and LLaMA-Factory, to conversations.

A row holds messages (``role`` and ``content``, or ``from`` and ``value``), or prompt and response in separate columns,
or segments that are each marked as learnt or not. Texts are kept verbatim.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from profiles.errors import BadInput
from training.tasks.text.message_rows import (
    TEXT_ONLY,
    Draft,
    Message,
    are_messages,
    content_of,
    draft_of,
    drafts_of,
    parse_json,
    text_of,
)

MESSAGES = ("messages", "conversations", "conversation", "chat", "dialog", "dialogue", "turns", "texts", "contents")
PROMPTS = ("instruction", "prompt", "question", "query", "problem", "text_input", "input_text")
INPUTS = ("input", "context", "passage", "document", "article", "text")
"""Columns with a prompt's input, which is appended to it."""
RESPONSES = ("response", "completion", "answer", "output", "solution", "generation", "output_text")
_NO_INPUT = re.compile("<?no ?input>?", re.IGNORECASE)
"""Placeholders for an empty input in Alpaca-like data."""
_SYSTEMS = ("system", "system_prompt", "system_message", "system_instruction", "systeminstruction")
IGNORED_COLUMNS = frozenset({"", "id", "idx", "index", "prompt_id", "source", "category", "__index_level_0__"})
"""Columns that are ignored without a remark."""
MAX_MESSAGES = 64
"""Maximum number of messages in one conversation."""

_PREFERENCE = "preference data, and one response is learnt here"
_REFUSED = {
    **dict.fromkeys(
        ("chosen", "rejected", "chosen_messages", "rejected_messages"),
        (_PREFERENCE, "rename chosen to response (chosen_messages to messages), and leave the rejected out"),
    ),
    "kto_tag": (_PREFERENCE, "keep the rows where it is true, and leave the column out"),
    "completions": (_PREFERENCE, "keep one text in a column response"),
    "input_ids": ("tokens, which another tokenizer may have made", "give the texts: prompt and response, or text"),
    "choices": ("choices that would not be asked", "write them into the prompt, and leave the column out"),
    "options": ("choices that would not be asked", "write them into the prompt, and leave the column out"),
    **dict.fromkeys(
        ("image", "images", "video", "videos", "audio", "audios"),
        (TEXT_ONLY, "leave the rows with it out, or the column"),
    ),
}
"""Unsupported columns that change the meaning of a row: the reason, and what to do."""


@dataclass(frozen=True)
class LabelledText:
    """A piece of text that bypasses the chat template."""

    text: str
    learnt: bool


@dataclass(frozen=True)
class Conversation:
    """Messages ending with one of the assistant's, or segments."""

    messages: tuple[Message, ...]
    location: str
    """Table and line, for error messages."""
    unlearnt: frozenset[int] = frozenset()
    """Indices of assistant messages that are excluded from the loss."""
    tools: tuple[Any, ...] = ()
    """Tools that the assistant may call, as JSON schemas."""
    segments: tuple[LabelledText, ...] = ()
    """Used instead of messages."""
    remarks: tuple[str, ...] = ()
    """Remarks on parts of the row that are not used."""

    @property
    def learnt(self) -> list[int]:
        """Indices of the messages that are learnt."""
        numbered = enumerate(self.messages)
        return [
            number for number, message in numbered if message["role"] == "assistant" and number not in self.unlearnt
        ]


def is_text_row(row: Mapping[str, Any]) -> bool:
    """Whether a row is plain text: it has a column ``text``, and no column of a conversation."""
    cells = _Cells(row, "")
    return "text" in cells.names and not any(map(cells.has, (*MESSAGES, *PROMPTS, *RESPONSES, "segments")))


def row_to_conversation(row: Mapping[str, Any], location: str) -> Conversation:
    """Return the conversation of one row.

    Raises:
        BadInput: unknown columns, an empty text, unsupported data, or nothing to learn from.
    """
    cells = _Cells(row, location)
    cells.refuse_other_kinds()
    if cells.has("segments"):
        return Conversation((), location, segments=_segments(cells), remarks=cells.unread("segments"))
    column = next(filter(cells.has, MESSAGES), "") or cells.only_message_column()
    if column:
        drafts, used = _messages(cells, column)
    elif isinstance(cells.value("prompt"), list):
        drafts, used = _prompt_and_completion(cells), {"prompt", "completion"}
    else:
        drafts, used = _prompt_and_response(cells)
    return _conversation(cells, drafts, used)


class _Cells:
    """A row's values by lower-case column name; an empty value counts as absent."""

    def __init__(self, row: Mapping[str, Any], location: str) -> None:
        self.location = location
        self.names: dict[str, str] = {}
        for name in map(str, row):
            lowered = name.strip().lower().replace(" ", "_")
            if lowered in self.names and lowered:
                raise BadInput(
                    f"{location}: columns {self.names[lowered]!r} and {name!r}", "rename or remove one of them"
                )
            self.names[lowered] = name
        self._values = {lowered: row[name] for lowered, name in self.names.items() if name in row}

    def value(self, name: str) -> Any:
        return self._values.get(name)

    def has(self, name: str) -> bool:
        value = self._values.get(name)
        if isinstance(value, float) and math.isnan(value):  # pandas' missing value
            return False
        return bool(value.strip()) if isinstance(value, str) else value is not None and value not in ([], {}, ())

    def location_of(self, name: str) -> str:
        return f"{self.location}, column {self.names.get(name, name)}"

    def text(self, name: str) -> str:
        return text_of(self.value(name), self.location_of(name)) if self.has(name) else ""

    def texts(self, names: Sequence[str]) -> dict[str, str]:
        return {name: self.text(name) for name in names if self.has(name)}

    def listed(self, name: str) -> list[Any]:
        """Return the list in a column, which is JSON in a CSV file."""
        value = parse_json(self.value(name), self.location_of(name)) if self.has(name) else []
        if not isinstance(value, list):
            raise BadInput(f"{self.location_of(name)}: not a list", "see the forms of a row in docs/how-to/text.md")
        return value

    def only_message_column(self) -> str:
        """Return the only column of any name that holds messages; empty if there is not exactly one, or a prompt."""
        if any(map(self.has, PROMPTS)):
            return ""
        columns = [
            name for name, value in self._values.items() if name not in PROMPTS + RESPONSES and are_messages(value)
        ]
        return columns[0] if len(columns) == 1 else ""

    def refuse_other_kinds(self) -> None:
        for name, (reason, hint) in _REFUSED.items():
            if self.has(name):
                raise BadInput(f"{self.location_of(name)}: {reason}", hint)
        if isinstance(self.value("label"), bool):
            raise BadInput(
                f"{self.location_of('label')}: {_PREFERENCE}", "keep the rows where it is true, without the column"
            )

    def unread(self, *used: str) -> tuple[str, ...]:
        others = [name for name in self.names if name not in IGNORED_COLUMNS and name not in used and self.has(name)]
        return tuple(f"column {self.names[name]} is not read" for name in others)


def _messages(cells: _Cells, column: str) -> tuple[list[Draft], set[str]]:
    """Return the messages in a column; if they end with a question, a response column may have the answer."""
    drafts, used = drafts_of(cells.value(column), cells.location_of(column)), {column}
    responses = cells.texts(RESPONSES) if drafts and drafts[-1].message["role"] != "assistant" else {}
    if responses:
        drafts.append(draft_of("assistant", _choose_text(cells, responses)))
    return drafts, {*used, *responses}


# ------------------------------------------------------------------------------------------------- columns of texts


def _prompt_and_response(cells: _Cells) -> tuple[list[Draft], set[str]]:
    prompts, responses = cells.texts(PROMPTS), cells.texts(RESPONSES)
    inputs = {name: text for name, text in cells.texts(INPUTS).items() if not _NO_INPUT.fullmatch(text.strip())}
    if prompts:
        prompt = _choose_text(cells, prompts)
        asked = [prompt, *(text for name, text in inputs.items() if name != "text" or prompt.strip() not in text)]
    else:
        asked = list(inputs.values())
    if not asked:
        raise _missing_column(cells, PROMPTS)
    if not responses:
        raise _missing_column(cells, RESPONSES)
    drafts = [
        *_history(cells),
        draft_of("user", "\n\n".join(asked)),
        draft_of("assistant", _choose_text(cells, responses)),
    ]
    return drafts, {*prompts, *INPUTS, *responses, "history"}


def _choose_text(cells: _Cells, texts: Mapping[str, str]) -> str:
    """Return the text of the first column; the others must contain it."""
    (first_name, text), *others = texts.items()
    for name, other_text in others:
        if text.strip() not in other_text:
            conflict = f"columns {cells.names[first_name]} and {cells.names[name]} hold different texts"
            raise BadInput(f"{cells.location}: {conflict}", "join them in one of the two, or remove one")
    return text


def _missing_column(cells: _Cells, names: Sequence[str]) -> BadInput:
    empty = next((name for name in names if name in cells.names), "")
    if empty:
        return BadInput(f"{cells.location_of(empty)}: empty", "fill it in or remove the row")
    columns = ", ".join(list(cells.names.values())[:8])
    alternatives = "text, nor messages nor" if names is PROMPTS else "messages nor"
    message = f"{cells.location}: neither {alternatives} {' or '.join(names)}; it has: {columns}"
    return BadInput(message, "rename the column that asks to prompt, and the one that answers to response")


def _history(cells: _Cells) -> list[Draft]:
    """Return earlier turns: pairs of prompt and response, or messages."""
    turns, drafts = cells.listed("history"), list[Draft]()
    if are_messages(turns):
        return drafts_of(turns, cells.location_of("history"))
    for pair in turns:
        if not isinstance(pair, list) or len(pair) != 2:
            raise BadInput(f"{cells.location_of('history')}: not pairs of a prompt and a response", "correct it")
        asked, answered = (text_of(cell, cells.location_of("history")) for cell in pair)
        if not asked.strip() or not answered.strip():
            raise BadInput(f"{cells.location_of('history')}: an empty text", "fill it in or remove the pair")
        drafts += [draft_of("user", asked), draft_of("assistant", answered)]
    return drafts


def _prompt_and_completion(cells: _Cells) -> list[Draft]:
    """Return the messages of TRL's format: prompt messages, and completion messages."""
    before = [Draft(draft.message, False) for draft in drafts_of(cells.value("prompt"), cells.location_of("prompt"))]
    answers = cells.value("completion")
    if isinstance(answers, list):
        return before + drafts_of(answers, cells.location_of("completion"))
    if not cells.has("completion"):
        raise _missing_column(cells, RESPONSES)
    return [*before, draft_of("assistant", cells.text("completion"))]


def _segments(cells: _Cells) -> tuple[LabelledText, ...]:
    segments = []
    for entry in cells.listed("segments"):
        if not isinstance(entry, dict) or not isinstance(entry.get("label"), bool):
            raise BadInput(f"{cells.location_of('segments')}: not a list of text and label", "label is true or false")
        segments.append(LabelledText(text_of(entry.get("text"), cells.location_of("segments")), entry["label"]))
    if not any(segment.learnt and segment.text for segment in segments):
        raise BadInput(f"{cells.location_of('segments')}: no segment is learnt", "set label to true where it is")
    return tuple(segments)


# --------------------------------------------------------------------------------------------------- conversations


def _conversation(cells: _Cells, drafts: Sequence[Draft], used: Collection[str]) -> Conversation:
    """Validate a conversation and add the row's system text and tools; messages after the last answer are dropped."""
    systems = {name: content_of(cells.value(name), cells.location_of(name)) for name in _SYSTEMS if cells.has(name)}
    system_texts = {draft.message["content"].strip() for draft in drafts if draft.message["role"] == "system"}
    if not system_texts:
        drafts = [*([draft_of("system", _choose_text(cells, systems))] if systems else []), *drafts]
    used_systems = [name for name, text in systems.items() if not system_texts or text.strip() in system_texts]
    if len(drafts) > MAX_MESSAGES:
        raise BadInput(f"{cells.location}: {len(drafts)} messages, more than {MAX_MESSAGES}", "divide the conversation")
    roles = [draft.message["role"] for draft in drafts]
    if "assistant" not in roles or "user" not in roles:
        raise BadInput(
            f"{cells.location}: a conversation has a user's message and ends with the assistant's", "correct it"
        )
    end = len(roles) - roles[::-1].index("assistant")
    trailing = ("what follows the last response is not read",) if end < len(roles) else ()
    unlearnt = frozenset(number for number, draft in enumerate(drafts[:end]) if not draft.learnt)
    messages, tools = tuple(draft.message for draft in drafts[:end]), tuple(cells.listed("tools"))
    keys = dict.fromkeys(key for draft in drafts for key in draft.unread)
    remarks = (
        *trailing,
        *cells.unread(*used, *used_systems, "tools"),
        *(f"key {key} of a message is not read" for key in keys),
    )
    conversation = Conversation(messages, cells.location, unlearnt, tools, remarks=remarks)
    if not conversation.learnt:
        raise BadInput(
            f"{cells.location}: no response is learnt", "set train or weight where one is, or remove the row"
        )
    return conversation
