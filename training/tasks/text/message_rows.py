"""Parse messages of conversations as found in data sets: roles, multi-part contents, tool calls and loss flags."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from profiles.errors import BadInput

ROLES = {
    "system": ("developer",),
    "user": ("human", "prompter", "input"),
    "assistant": ("gpt", "model", "bot", "ai", "chatgpt", "output", "function_call", "tool_call"),
    "tool": ("observation", "function", "ipython", "tool_response", "function_response", "tool_result"),
}
"""Roles of chat templates, each with its aliases in data sets."""
_ROLE_OF = {name: role for role, others in ROLES.items() for name in (role, *others)}
_CALLS = ("function_call", "tool_call")
_ROLE_KEYS, _CONTENT_KEYS, _WEIGHT_KEYS = (
    ("role", "from"),
    ("content", "value", "text", "parts"),
    ("train", "training", "weight", "loss_weight"),
)
_PASSED_ON = ("name", "tool_call_id", "reasoning_content", "thinking")
"""Keys of a message that are passed on to chat templates."""
_READ = frozenset((*_ROLE_KEYS, *_CONTENT_KEYS, *_WEIGHT_KEYS, *_PASSED_ON, "tool_calls", "function_call"))
_TEXT_KEYS = ("text", "content", "value")
_GEMINI_CALLS = {
    "functionCall": 'write tool_calls beside the content: [{"name": ..., "arguments": {...}}]',
    "functionResponse": "write a message of the role tool, whose content is the response",
}
_IGNORED = frozenset(("id", "index"))
"""Keys that are ignored without a remark."""

Message = dict[str, Any]
"""``role`` (one of :data:`ROLES`) and ``content``; optionally ``tool_calls`` and others."""

TEXT_ONLY = "this model reads nothing but text"


@dataclass(frozen=True)
class Draft:
    """A message of a conversation that has not been validated."""

    message: Message
    learnt: bool = True
    unread: tuple[str, ...] = ()
    """Non-empty keys that are not read."""


def draft_of(role: str, content: str) -> Draft:
    return Draft({"role": role, "content": content})


def text_of(value: Any, location: str) -> str:
    """Return a text, or a number converted to text.

    Raises:
        BadInput: any other value, NaN, or a text with a lone surrogate.
    """
    if isinstance(value, str):
        if not value.isascii() and any("\ud800" <= character <= "\udfff" for character in value):
            raise BadInput(f"{location}: half a character (a lone surrogate)", "write the text again")
        return value
    usable = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not usable:
        kind = {"NoneType": "null", "dict": "an object", "list": "a list", "bool": "true or false"}
        named = kind.get(type(value).__name__, str(value)[:40])
        raise BadInput(f"{location}: {named}, which is no text", "write a text, or remove the row")
    return str(value)


def parse_json(value: Any, location: str) -> Any:
    """Parse a cell as JSON if it is a text.

    Raises:
        BadInput: the text is not JSON.
    """
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        hint = "write it as JSON; what pandas writes for a list is Python's form: save JSON lines instead"
        raise BadInput(f"{location}: not JSON", hint) from error


def are_messages(value: Any) -> bool:
    first_entry = value[0] if isinstance(value, list) and value else None
    return isinstance(first_entry, dict) and (
        any(keys <= first_entry.keys() for keys in ({"role", "content"}, {"role", "parts"}, {"from", "value"}))
    )


def drafts_of(value: Any, location: str) -> list[Draft]:
    entries = parse_json(value, location)
    if isinstance(entries, dict) and entries and all(isinstance(column, list) for column in entries.values()):
        entries = [dict(zip(entries, cells)) for cells in zip(*entries.values())]  # columns, as datasets gives them
    if isinstance(entries, list) and len(entries) == 1 and isinstance(entries[0], list):
        entries = entries[0]
    if not isinstance(entries, list) or not entries:
        raise BadInput(f"{location}: not a list", "a list of role and content")
    drafts = [_message(entry, f"{location}, message {number}") for number, entry in enumerate(entries, start=1)]
    return [draft for draft in drafts if draft is not None]


def _message(entry: Any, location: str) -> Draft | None:
    """Return a message; ``None`` for an empty system message."""
    record = entry if isinstance(entry, dict) else {}
    name = str(_first_value(record, _ROLE_KEYS) or "").strip()
    role = _ROLE_OF.get(name.lower(), "")
    if not role:
        hint = "roles are system, user (human), assistant (gpt, function_call) and tool (observation)"
        raise BadInput(f"{location}: unknown role {name[:40]!r}", hint)
    texts = _texts(_first_value(record, _CONTENT_KEYS), location)
    if name.lower() in _CALLS and isinstance(_as_json(texts.text), dict | list):
        texts = _Texts("", calls=(texts.text,))
    calls = _calls(record, texts.calls, location)
    message: Message = {"role": role, "content": texts.text}
    message |= {"tool_calls": calls} if calls else {}
    message |= {"reasoning_content": texts.reasoning} if texts.reasoning else {}
    message |= {key: record[key] for key in _PASSED_ON if record.get(key)}
    if not texts.text.strip() and not calls and role != "tool":
        if role == "system":
            return None
        raise BadInput(f"{location}: a message of the {role} without content", "fill it in or remove the row")
    unread = tuple(str(key) for key in record if key not in _READ and key not in _IGNORED and record[key] is not None)
    return Draft(message, _is_learnt(record, role, location), unread)


def _first_value(record: Mapping[str, Any], keys: Iterable[str]) -> Any:
    return next((record[key] for key in keys if record.get(key) is not None), None)


@dataclass(frozen=True)
class _Texts:
    """The contents of a message."""

    text: str
    reasoning: str = ""
    calls: tuple[str, ...] = ()
    """Tool calls as JSON."""


def _texts(value: Any, location: str) -> _Texts:
    """Return a message's contents, with its parts concatenated by type."""
    if not isinstance(value, list):
        return _Texts("" if value is None else text_of(value, location))
    texts: dict[str, list[str]] = {"text": [], "reasoning": [], "tool_call": []}
    for piece in value:
        record = piece if isinstance(piece, dict) else {"text": piece}
        kind = _kind_of_part(record)
        if kind in _GEMINI_CALLS:
            raise BadInput(f"{location}: a part {kind}, which is not read", _GEMINI_CALLS[kind])
        if kind not in texts:
            raise BadInput(f"{location}: a part of type {kind[:40]}, and {TEXT_ONLY}", "leave the row or the part out")
        if "train" in record or "weight" in record:
            hint = "set train for the whole message, or write the row as segments of text and label"
            raise BadInput(f"{location}: a part that says itself whether it is learnt", hint)
        texts[kind].append(text_of(_first_value(record, _TEXT_KEYS), location))
    return _Texts("".join(texts["text"]), "".join(texts["reasoning"]), tuple(texts["tool_call"]))


def _kind_of_part(record: Mapping[str, Any]) -> str:
    """Return the type of a part; where it states none, as in Gemini's, its only key is the type."""
    if record.get("thought"):
        return "reasoning"
    keys = [] if _first_value(record, _TEXT_KEYS) is not None else [str(key) for key in record if record[key]]
    stated = record.get("type") or next(iter(keys), "text")
    return str(stated).removeprefix("input_").removeprefix("output_")


def content_of(value: Any, location: str) -> str:
    """Return a text that may be given in parts, as Gemini's system instruction and Anthropic's system text are."""
    return _texts(value.get("parts") if isinstance(value, dict) else value, location).text


def _is_learnt(record: Mapping[str, Any], role: str, location: str) -> bool:
    """Read axolotl's ``train``, OpenAI's ``weight`` and LLaMA-Factory's ``loss_weight``."""
    if record.get("train_detail"):
        raise BadInput(f"{location}: train_detail is not read", "write the row as segments of text and label")
    flag = _first_value(record, _WEIGHT_KEYS)
    if flag not in (None, 0, 1):
        raise BadInput(f"{location}: a weight of {str(flag)[:40]}", "a message is learnt (1) or not (0)")
    if flag and role != "assistant":
        raise BadInput(f"{location}: of messages only the assistant's are learnt, not the {role}'s", "use segments")
    return flag is None or bool(flag)


def _calls(record: Mapping[str, Any], texts: Iterable[str], location: str) -> list[Any]:
    """Return an assistant's tool calls in the format of chat templates: arguments are objects, not JSON texts."""
    called = record.get("tool_calls") or record.get("function_call") or [_as_json(text) for text in texts]
    calls = []
    for entry in (call for group in _as_list(called) for call in _as_list(group)):
        function = entry.get("function", entry) if isinstance(entry, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise BadInput(
                f"{location}: a call without the name of a function", 'like {"name": ..., "arguments": {...}}'
            )
        arguments = function.get("arguments", {})
        function = {**function, "arguments": _as_json(arguments) if isinstance(arguments, str) else arguments}
        identity = {"id": entry["id"]} if entry.get("id") else {}
        calls.append({"type": "function", **identity, "function": function})
    return calls


def _as_list(group: Any) -> list[Any]:
    return group if isinstance(group, list) else [group]


def _as_json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
