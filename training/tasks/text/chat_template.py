"""Render conversations with the tokenizer's chat template, split at the boundaries of the assistant's texts."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from jinja2 import TemplateError

from profiles.errors import BadInput
from training.tasks.text.conversation_rows import Conversation
from training.tasks.text.message_rows import Message

_HEADINGS = {
    "system": "",
    "user": "### Instruction:\n",
    "assistant": "### Response:\n",
    "tool": "### Tool:\n",
}


PLAIN_TEMPLATE = (
    "{% set headings = "
    + json.dumps(_HEADINGS)
    + " %}{% for message in messages %}{{ headings[message['role']] + message['content'] }}"
    "{{ eos_token if message['role'] == 'assistant' and eos_token else '' }}"
    "{{ '' if loop.last and not add_generation_prompt and eos_token else '\\n\\n' }}"
    "{% endfor %}{{ headings['assistant'] if add_generation_prompt else '' }}"
)
"""Template of the plain headings of :func:`renderer_of`, for models whose tokenizer has no template."""


class Render(Protocol):
    """Renders a conversation as model input; with ``ask`` up to where the assistant's next text begins."""

    def __call__(self, messages: Sequence[Message], ask: bool, tools: Sequence[Any] = ()) -> str: ...


class Turn(NamedTuple):
    """A piece of a rendered conversation."""

    text: str
    learnt: bool
    """Whether it is a response (with its end token) that the loss covers."""


def turns(conversation: Conversation, render: Render) -> list[Turn]:
    """Split a rendered conversation at the boundaries of the assistant's texts.

    A template may render earlier responses differently from the last one, as those of reasoning models do. Then only
    the last response is learnt, rendered as at inference.

    Raises:
        BadInput: the template rejects the conversation, or omits part of it.
    """
    if conversation.segments:
        return [Turn(segment.text, segment.learnt) for segment in conversation.segments]
    try:
        return _turns(conversation, render)
    except BadInput as error:
        raise BadInput(f"{conversation.location}: {error.message}", error.hint) from error


def _turns(conversation: Conversation, render: Render) -> list[Turn]:
    pieces: list[Turn] = []
    written = ""
    for number, message in enumerate(conversation.messages):
        if message["role"] != "assistant":
            continue
        answered = render(conversation.messages[: number + 1], False, conversation.tools)
        if not answered.startswith(written):
            number = conversation.learnt[-1]
            answered = render(conversation.messages[: number + 1], False, conversation.tools)
            return _turn(conversation, render, number, answered, "")
        pieces += _turn(conversation, render, number, answered, written)
        written = answered
    return pieces


def _turn(conversation: Conversation, render: Render, number: int, answered: str, written: str) -> list[Turn]:
    """Return an assistant message and the text before it, without the prefix that is already ``written``."""
    asked = render(conversation.messages[:number], True, conversation.tools)
    start = max(_start(asked, answered, conversation.messages[number]["content"]), len(written))
    return [Turn(answered[len(written) : start], False), Turn(answered[start:], number not in conversation.unlearnt)]


def _start(asked: str, answered: str, content: str) -> int:
    """Return where the assistant's text begins; the generation prompt may be longer than the prefix of an answer."""
    if answered.startswith(asked):
        return len(asked)
    common = next((n for n, (left, right) in enumerate(zip(asked, answered)) if left != right), len(answered))
    for text in filter(None, (content, content.strip())):  # many templates trim it
        if (position := answered.find(text, max(0, common - len(text)))) >= 0:
            return position
    return common


def renderer_of(tokenizer: Any) -> Render:
    """Return the renderer of a tokenizer: its chat template, else plain headings."""
    template = str(getattr(tokenizer, "chat_template", None) or "")
    writes_calls = "tool_calls" in template

    def render(messages: Sequence[Message], ask: bool, tools: Sequence[Any] = ()) -> str:
        if tools and "tools" not in template:
            raise BadInput("the tokenizer's chat template writes no tools", "write them into the system's text")
        for key in ("reasoning_content", "thinking"):
            if key not in template and any(key in message for message in messages):
                hint = "write it at the beginning of the content, as <think>...</think>"
                raise BadInput(f"the tokenizer's chat template writes no {key}", hint)
        spoken = messages if writes_calls else [_calls_as_text(message) for message in messages]
        if not template:
            return _plain(spoken, ask, tokenizer.eos_token or "")
        return _apply_template(tokenizer, spoken, ask, tools)

    return render


def _apply_template(tokenizer: Any, messages: Sequence[Message], ask: bool, tools: Sequence[Any]) -> str:
    system = _system_text(messages)
    # for a template without a system role, like Gemma's, the system text is prepended to the user's first message
    forms: tuple[Callable[[Sequence[Message]], list[Message]], ...] = (list, without_system)
    reason = "it leaves the system's text out"
    for form in forms if system else forms[:1]:
        options = {"tools": list(tools)} if tools else {}
        try:
            text = str(
                tokenizer.apply_chat_template(form(messages), tokenize=False, add_generation_prompt=ask, **options)
            )
        except (TemplateError, ValueError, TypeError, LookupError) as error:
            reason = " ".join(str(error).split())[:200]
        else:
            if system in text or form is without_system:
                return text
    message = f"the tokenizer's chat template refuses a conversation: {reason}"
    raise BadInput(message, "user and assistant take turns, the user first: join or remove what does not fit")


def _system_text(messages: Sequence[Message]) -> str:
    return next((str(message["content"]).strip() for message in messages if message["role"] == "system"), "")


def without_system(messages: Sequence[Message]) -> list[Message]:
    """Return the messages with the system text prepended to the first one, for templates without a system role."""
    system = "\n\n".join(message["content"] for message in messages if message["role"] == "system")
    others = [dict(message) for message in messages if message["role"] != "system"]
    if system and others:
        others[0]["content"] = f"{system}\n\n{others[0]['content']}"
    return others


def _calls_as_text(message: Message) -> Message:
    """Return a message with its tool calls as JSON in the text, for templates that do not support them."""
    if "tool_calls" not in message:
        return message
    calls = [json.dumps(call["function"], ensure_ascii=False) for call in message["tool_calls"]]
    content = "\n".join([*([message["content"]] if message["content"] else []), *calls])
    return {**{name: value for name, value in message.items() if name != "tool_calls"}, "content": content}


def _plain(messages: Sequence[Message], ask: bool, end: str) -> str:
    written = ""
    for message in messages:
        written += f"{_HEADINGS[message['role']]}{message['content']}"
        written += f"{end}\n\n" if message["role"] == "assistant" else "\n\n"
    return written + _HEADINGS["assistant"] if ask else written.removesuffix("\n\n") if end else written
