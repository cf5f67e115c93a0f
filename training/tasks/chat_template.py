"""How a model reads a conversation: by its tokenizer's chat template, cut where the assistant's texts begin and end."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from jinja2 import TemplateError

from profiles.errors import BadInput
from training.tasks.conversation_rows import Conversation
from training.tasks.message_rows import Message

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
"""The plain headings of :func:`renderer_of` as a template, for models whose tokenizer has none."""


class Render(Protocol):
    """A conversation as the model reads it; with ``ask`` up to where the assistant's text begins."""

    def __call__(self, messages: Sequence[Message], ask: bool, tools: Sequence[Any] = ()) -> str: ...


class Turn(NamedTuple):
    """A piece of a conversation."""

    text: str
    learnt: bool
    """Whether it is a response, with what ends it."""


def turns(conversation: Conversation, render: Render) -> list[Turn]:
    """Cut a rendered conversation where the assistant's texts begin and end.

    A template may write earlier responses in another way than the last, as those of reasoning models do: then only the
    last is learnt, as it is when the model is asked.

    Raises:
        BadInput: the template refuses the conversation, or leaves a part of it out.
    """
    if conversation.segments:
        return [Turn(segment.text, segment.learnt) for segment in conversation.segments]
    try:
        return _turns(conversation, render)
    except BadInput as error:
        raise BadInput(f"{conversation.where}: {error.message}", error.hint) from error


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
    """Return a message of the assistant and what stands before it, without what is ``written`` already."""
    asked = render(conversation.messages[:number], True, conversation.tools)
    start = max(_start(asked, answered, conversation.messages[number]["content"]), len(written))
    return [Turn(answered[len(written) : start], False), Turn(answered[start:], number not in conversation.unlearnt)]


def _start(asked: str, answered: str, content: str) -> int:
    """Return where the assistant's text begins: a template may ask with more than it writes before an answer."""
    if answered.startswith(asked):
        return len(asked)
    same = next((n for n, (left, right) in enumerate(zip(asked, answered)) if left != right), len(answered))
    for text in filter(None, (content, content.strip())):  # many templates trim it
        if (position := answered.find(text, max(0, same - len(text)))) >= 0:
            return position
    return same


def renderer_of(tokenizer: Any) -> Render:
    """Return how a tokenizer's model reads conversations: by its chat template, else by plain headings."""
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
        return _templated(tokenizer, spoken, ask, tools)

    return render


def _templated(tokenizer: Any, messages: Sequence[Message], ask: bool, tools: Sequence[Any]) -> str:
    system = _system_text(messages)
    # a template without a system role, like Gemma's: what it says goes before the user's first words
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
    """Return the messages with the system's put before the user's first, for templates that know no system."""
    system = "\n\n".join(message["content"] for message in messages if message["role"] == "system")
    others = [dict(message) for message in messages if message["role"] != "system"]
    if system and others:
        others[0]["content"] = f"{system}\n\n{others[0]['content']}"
    return others


def _calls_as_text(message: Message) -> Message:
    """Return a message with its calls of tools as JSON in its text, for templates that know none."""
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
