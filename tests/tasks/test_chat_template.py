"""Chat templates that rewrite, drop or refuse what they are given; the labels of their conversations."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from profiles.errors import BadInput
from tests.tasks.tiny_tasks import byte_tokenizer
from training.tasks.text.chat_template import renderer_of, turns
from training.tasks.text.conversation_rows import row_to_conversation
from training.tasks.text.conversations import IGNORED, tokenise_conversations

THOUGHT = (
    "{% for m in messages %}<{{ m['role'] }}>"
    "{% if m['role'] == 'assistant' and loop.last %}<think></think>{% endif %}{{ m['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
"""As Qwen3's: only the last answer has an (empty) thought."""
ASKS_FOR_A_THOUGHT = THOUGHT.replace("<think></think>", "") + "{% if add_generation_prompt %}<think>{% endif %}"
"""As DeepSeek's: the model is asked with the beginning of a thought, which a plain answer does not have."""
NO_SYSTEM = "{% for m in messages if m['role'] != 'system' %}<{{ m['role'] }}>{{ m['content'] }}</s>{% endfor %}"
TOOLS = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}"
    "{% for call in m['tool_calls'] %}[{{ call['function']['name'] }} {{ call['function']['arguments'] | tojson }}]"
    "{% endfor %}</s>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def talk(*texts: str, **more: Any) -> dict[str, Any]:
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)], **more}


def learnt(template: str, row: dict[str, Any]) -> list[str]:
    pieces = turns(row_to_conversation(row, "row 7"), renderer_of(byte_tokenizer(template)))
    return [piece.text for piece in pieces if piece.learnt]


def labelled(template: str, row: dict[str, Any]) -> str:
    tokenizer = byte_tokenizer(template)
    _, targets = tokenise_conversations("train", [row_to_conversation(row, "row 7")], tokenizer, 500)[0]
    return str(tokenizer.decode(targets[targets != IGNORED]))


def test_of_a_template_that_rewrites_earlier_answers_the_last_is_learnt(caplog: pytest.LogCaptureFixture) -> None:
    assert learnt(THOUGHT, talk("hi", "hello", "name?", "Ann")) == ["<think></think>Ann</s>"]
    with caplog.at_level(logging.WARNING, "muster.data"):
        assert labelled(THOUGHT, talk("hi", "hello", "name?", "Ann")) == "<think></think>Ann</s>"
    assert "train: of 1 of 1 conversations only the last response is learnt, as the chat template rew" in caplog.text


def test_a_template_that_rewrites_nothing_there_is_learnt_whole() -> None:
    assert learnt(THOUGHT, talk("name?", "Ann")) == ["<think></think>Ann</s>"]


@pytest.mark.parametrize("answer", ["Ann", "a", "e", "<b>", "s", "    if x:\n        y"])
def test_a_template_that_asks_with_more_than_it_writes(answer: str) -> None:
    assert learnt(ASKS_FOR_A_THOUGHT, talk("hi", answer, "b", answer)) == [f"{answer}</s>"] * 2


def test_a_template_that_trims_answers_teaches_no_prompt() -> None:
    trimming = ASKS_FOR_A_THOUGHT.replace("m['content']", "m['content'] | trim")
    assert learnt(trimming, talk("hi", " Ann \n")) == ["Ann</s>"]


def test_a_system_text_that_a_template_drops_goes_before_the_users() -> None:
    row = row_to_conversation(talk("hi", "hello", system="Be short."), "row")
    (asked, _) = turns(row, renderer_of(byte_tokenizer(NO_SYSTEM)))
    assert asked.text == "<user>Be short.\n\nhi</s>"


def test_two_answers_in_a_row_are_both_learnt_where_the_template_takes_them() -> None:
    row = talk("hi", "hello")
    row["messages"].append({"role": "assistant", "content": "you"})
    assert learnt(ASKS_FOR_A_THOUGHT, row) == ["hello</s>", "you</s>"]


CALLING = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "now", "arguments": "{}"}}]}
TOOL_TALK = {
    "messages": [
        {"role": "user", "content": "time?"},
        CALLING,
        {"role": "tool", "content": "12:00"},
        {"role": "assistant", "content": "noon"},
    ]
}


def test_calls_of_tools_are_learnt_as_the_template_writes_them() -> None:
    assert learnt(TOOLS, TOOL_TALK) == ["[now {}]</s>", "noon</s>"]
    (asked, *_) = turns(
        row_to_conversation({**TOOL_TALK, "tools": [{"name": "now"}]}, "row"), renderer_of(byte_tokenizer(TOOLS))
    )
    assert asked.text == '[{"name": "now"}]<user>time?</s><assistant>'


def test_tools_that_a_template_would_drop_are_refused() -> None:
    with pytest.raises(BadInput, match="^row 7: the tokenizer's chat template writes no tools"):
        learnt(THOUGHT, {**TOOL_TALK, "tools": ["t"]})


REASONING = [
    {"role": "user", "content": "name?"},
    {"role": "assistant", "content": [{"type": "reasoning", "text": "hm"}, {"type": "text", "text": "Ann"}]},
]


def test_reasoning_is_learnt_as_the_template_writes_it() -> None:
    template = THOUGHT.replace("<think></think>", "<think>{{ m['reasoning_content'] }}</think>")
    assert learnt(template, {"messages": REASONING}) == ["<think>hm</think>Ann</s>"]
    with pytest.raises(BadInput, match="^row 7: the tokenizer's chat template writes no reasoning_content"):
        learnt(THOUGHT, {"messages": REASONING})


UNCHANGING = renderer_of(byte_tokenizer(THOUGHT.replace("<think></think>", "")))
SPOKEN = st.text(st.characters(exclude_categories=("Cs",), exclude_characters="<>"), min_size=1).filter(str.strip)


@given(st.lists(st.tuples(SPOKEN, SPOKEN), min_size=1, max_size=4))
def test_pieces_are_the_whole_conversation_and_those_learnt_are_the_answers(pairs: list[tuple[str, str]]) -> None:
    pieces = turns(row_to_conversation(talk(*(text for pair in pairs for text in pair)), "row"), UNCHANGING)
    assert "".join(piece.text for piece in pieces) == "".join(
        f"<user>{asked}</s><assistant>{answered}</s>" for asked, answered in pairs
    )
    assert [piece.text for piece in pieces if piece.learnt] == [f"{answered}</s>" for _, answered in pairs]
