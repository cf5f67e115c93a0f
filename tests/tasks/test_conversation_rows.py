"""Rows of instruction data as unsloth, axolotl and LLaMA-Factory read them: what is asked, and what is learnt."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from profiles.errors import BadInput
from tests.tasks.tiny_tasks import byte_tokenizer
from training.tasks.text.conversation_rows import MAX_MESSAGES, LabelledText, is_text_row, row_to_conversation
from training.tasks.text.conversations import IGNORED, tokenise_conversations
from training.tasks.text.message_rows import text_of

Texts = list[tuple[str, str]]


def spoken(row: dict[str, Any]) -> Texts:
    return [(message["role"], message["content"]) for message in row_to_conversation(row, "row").messages]


def learnt_text(row: dict[str, Any]) -> str:
    """What of a row is learnt, with a tokenizer of bytes and no chat template."""
    tokenizer = byte_tokenizer()
    (_, targets) = tokenise_conversations("train", [row_to_conversation(row, "row")], tokenizer, 500)[0]
    return str(tokenizer.decode(targets[targets != IGNORED]))


HELLO = [("user", "hi"), ("assistant", "hello")]
SHAREGPT = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}]
OPENAI = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
PARTS = [
    {"role": "user", "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]},
    {"role": "assistant", "content": [{"type": "text", "text": "hello"}]},
]
GEMINI = [{"role": "user", "parts": [{"text": "hi"}]}, {"role": "model", "parts": [{"text": "hel"}, {"text": "lo"}]}]


@pytest.mark.parametrize(
    "row",
    [
        {"contents": GEMINI},
        {"contents": json.dumps(GEMINI)},
        {"request": GEMINI},
        {"text_input": "hi", "output": "hello"},
        {"input_text": "hi", "output_text": "hello"},
        {"conversations": SHAREGPT},
        {"conversations": json.dumps(SHAREGPT)},
        {"conversations": [SHAREGPT]},
        {"conversations": {"from": ["human", "gpt"], "value": ["hi", "hello"]}},
        {"messages": OPENAI},
        {"messages": PARTS},
        {"chat": OPENAI},
        {"trace_of_agent": OPENAI},
        {"messages": [*OPENAI, {"role": "user", "content": "and?"}]},
        {"messages": [{"role": "system", "content": ""}, *OPENAI]},
        {"messages": [{"role": "Human", "text": "hi"}, {"role": "Bot", "text": "hello"}]},
        {"prompt": OPENAI[:1], "completion": OPENAI[1:]},
        {"prompt": OPENAI[:1], "completion": "hello"},
        {"instruction": "", "input": "hi", "output": "hello"},
        {"INSTRUCTION": "hi", "RESPONSE": "hello"},
        {"instruction": "hi", "input": None, "output": "hello", "system": None, "history": []},
        {"instruction": "hi", "output": "hello", "prompt": "### Instruction: hi", "text": "### hi ### hello"},
        {"input": "hi", "output": "hello"},
        {"problem": "hi", "solution": "hello"},
        {"prompt": "hi", "generation": "hello"},
    ],
)
def test_forms_of_the_same_conversation(row: dict[str, Any]) -> None:
    assert spoken(row) == HELLO
    assert learnt_text(row) == "hello<|end|>"


@pytest.mark.parametrize(
    ("row", "asked"),
    [
        ({"instruction": "colour?", "context": "The door is green."}, "colour?\n\nThe door is green."),
        ({"question": "colour?", "context": "It is green."}, "colour?\n\nIt is green."),
        ({"question": "who?", "article": "Ann came."}, "who?\n\nAnn came."),
        ({"instruction": "Classify", "text": "I love it"}, "Classify\n\nI love it"),
        ({"instruction": 3, "input": 4.5}, "3\n\n4.5"),
        ({"instruction": "  a", "input": "    b\n"}, "  a\n\n    b\n"),
    ],
)
def test_what_a_prompt_is_about_follows_it(row: dict[str, Any], asked: str) -> None:
    assert spoken({**row, "answer": 7}) == [("user", asked), ("assistant", "7")]


def test_a_history_comes_before_and_is_learnt() -> None:
    row = {"instruction": "c", "output": "d", "system": "s", "history": [["a", "b"]]}
    assert spoken(row) == [("system", "s"), ("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")]
    assert learnt_text(row) == learnt_text({**row, "history": '[["a", "b"]]'}) == "b<|end|>d<|end|>"


def test_a_history_of_messages_is_one_and_never_the_conversation() -> None:
    row = {"instruction": "c", "output": "d", "history": OPENAI}
    assert spoken(row) == [*HELLO, ("user", "c"), ("assistant", "d")]
    assert spoken({"prompt": "c", "response": "d", "trace_of_agent": OPENAI}) == [("user", "c"), ("assistant", "d")]


@pytest.mark.parametrize("column", ["answer", "response", "completion"])
def test_messages_that_end_with_a_question_are_answered_by_the_column(column: str) -> None:
    asked = {"role": "user", "content": "and?"}
    row = {"messages": [*OPENAI, asked], column: "so", "reasoning": "hm"}
    assert spoken(row) == [*HELLO, ("user", "and?"), ("assistant", "so")]
    assert row_to_conversation(row, "row").remarks == ("column reasoning is not read",)
    assert spoken({"messages": OPENAI[:1], column: "hello"}) == HELLO
    assert spoken({"messages": OPENAI, column: "other"}) == HELLO


@pytest.mark.parametrize("column", ["systemInstruction", "system_instruction"])
def test_geminis_system_instruction_is_the_systems_text(column: str) -> None:
    row = {column: {"role": "system", "parts": [{"text": "Be brief."}]}, "contents": GEMINI}
    assert spoken(row) == [("system", "Be brief."), *HELLO]


def test_geminis_thoughts_are_reasoning() -> None:
    thought = {"role": "model", "parts": [{"text": "Hm.", "thought": True}, {"text": "hello"}]}
    (_, answer) = row_to_conversation({"contents": [GEMINI[0], thought]}, "row").messages
    assert (answer["reasoning_content"], answer["content"]) == ("Hm.", "hello")


def test_a_systems_message_counts_more_than_the_column() -> None:
    talk = [{"role": "developer", "content": "own"}, *OPENAI]
    assert spoken({"messages": talk, "system": "column"})[0] == ("system", "own")
    assert spoken({"conversations": SHAREGPT, "system_prompt": "column"})[0] == ("system", "column")


def test_flags_say_which_answers_are_learnt() -> None:
    for flag in ("weight", "train", "loss_weight"):
        talk = [
            OPENAI[0],
            {**OPENAI[1], flag: 0},
            {"role": "user", "content": "b"},
            {**OPENAI[1], "content": "c", flag: 1},
        ]
        assert learnt_text({"messages": talk}) == "c<|end|>"
    earlier = [*OPENAI, {"role": "user", "content": "b"}]
    assert learnt_text({"prompt": earlier, "completion": [{"role": "assistant", "content": "c"}]}) == "c<|end|>"


def test_segments_are_learnt_where_their_labels_say_so() -> None:
    row = {"segments": [{"label": False, "text": "ask "}, {"label": True, "text": " yes<|end|>"}]}
    assert row_to_conversation(row, "row").segments == (LabelledText("ask ", False), LabelledText(" yes<|end|>", True))
    assert learnt_text(row) == " yes<|end|>"


CALL = {"name": "weather", "arguments": {"city": "Ulm"}}


@pytest.mark.parametrize(
    "message",
    [
        {"from": "function_call", "value": json.dumps(CALL)},
        {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": CALL}]},
        {"role": "assistant", "tool_calls": [{"function": {**CALL, "arguments": '{"city": "Ulm"}'}}]},
        {"role": "assistant", "content": "", "function_call": CALL},
        {"role": "assistant", "content": [{"type": "tool_call", "value": json.dumps(CALL)}]},
    ],
)
def test_forms_of_a_call_of_a_tool(message: dict[str, Any]) -> None:
    talk = [OPENAI[0], message, {"from": "observation", "value": "rain"}, {"from": "gpt", "value": "wet"}]
    conversation = row_to_conversation({"messages": talk, "tools": [{"name": "weather"}]}, "row")
    assert conversation.messages[1]["tool_calls"] == [{"type": "function", "function": CALL}]
    assert conversation.messages[2] == {"role": "tool", "content": "rain"}
    assert conversation.tools == ({"name": "weather"},)


def test_calls_without_a_template_for_them_are_learnt_as_json() -> None:
    talk = [OPENAI[0], {"from": "function_call", "value": json.dumps(CALL)}, {"from": "observation", "value": "rain"}]
    assert learnt_text({"messages": [*talk, {"from": "gpt", "value": "wet"}]}) == f"{json.dumps(CALL)}<|end|>wet<|end|>"


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"prompt": "a"}, "neither messages nor response"),
        (
            {"article": "a", "summary": "b"},
            "rename the column that asks to prompt, and the one that answers to response",
        ),
        ({"prompt": "", "response": "b"}, "column prompt: empty"),
        ({"prompt": "a", "response": " \n"}, "column response: empty"),
        ({"prompt": "a", "response": None}, "column response: empty"),
        ({"prompt": "a", "response": float("nan")}, "column response: empty"),
        ({"prompt": "a", "response": ["b"]}, "column response: a list"),
        ({"prompt": "a", "response": {"text": "b"}}, "column response: an object"),
        ({"prompt": "a", "response": True}, "column response: true or false"),
        ({"prompt": "a", "response": "\ud83d"}, "half a character"),
        ({"prompt": "a", "instruction": "b", "output": "c"}, "instruction and prompt hold different texts"),
        ({"question": "a", "solution": "b", "answer": "c"}, "answer and solution hold different texts"),
        (
            {"prompt": "a", "output": "b", "system": "c", "system_prompt": "d"},
            "system and system_prompt hold different",
        ),
        ({"prompt": "a", "Prompt": "b", "output": "c"}, "columns 'prompt' and 'Prompt'"),
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, "preference data.*rename chosen to response"),
        ({"prompt": "a", "completion": "b", "label": True}, "preference data"),
        ({"conversations": SHAREGPT, "kto_tag": True}, "preference data"),
        ({"messages": OPENAI, "label": False}, "preference data"),
        ({"chosen_messages": OPENAI, "rejected_messages": OPENAI}, "chosen_messages to messages"),
        ({"messages": [OPENAI[0], {**OPENAI[1], "weight": 0.5}]}, "a weight of 0.5"),
        ({"input_ids": [1], "labels": [1]}, "tokens"),
        ({"prompt": "a", "completions": ["b"], "labels": [True]}, "one response is learnt here"),
        ({"question": "a", "choices": ["b"], "answer": "b"}, "write them into the prompt"),
        ({"messages": OPENAI, "images": ["a.png"]}, "nothing but text"),
        ({"instruction": "a", "output": "b", "history": ["c"]}, "not pairs of a prompt and a response"),
        ({"instruction": "a", "output": "b", "history": [["c", ""]]}, "column history: an empty text"),
        ({"segments": [{"text": "a", "label": False}]}, "no segment is learnt"),
        ({"segments": [{"text": "a"}]}, "not a list of text and label"),
        ({"messages": "[" * 9}, "not JSON"),
        ({"messages": "[{'role': 'user'}]"}, "Python's form"),
        ({"messages": {"role": "user"}}, "not a list"),
        ({"messages": ["a", "b"]}, "message 1: unknown role ''"),
        ({"messages": [{"role": "narrator", "content": "a"}]}, "unknown role 'narrator'"),
        ({"messages": OPENAI[:1]}, "ends with the assistant's"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "has a user's message"),
        ({"messages": [OPENAI[0], {"role": "assistant", "content": None}]}, "message 2: .* without content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}, OPENAI[1]]}, "type image_url"),
        ({"contents": [{"role": "user", "parts": [{"fileData": {"fileUri": "a"}}]}, GEMINI[1]]}, "type fileData"),
        ({"contents": [GEMINI[0], {"role": "model", "parts": [{"functionCall": {"name": "f"}}]}]}, "write tool_calls"),
        ({"contents": [GEMINI[0], {"role": "model", "parts": []}]}, "message 2: .* without content"),
        ({"messages": [OPENAI[0], {"role": "assistant", "content": [{"text": "a", "train": False}]}]}, "segments"),
        ({"messages": [{**OPENAI[0], "train": True}, OPENAI[1]]}, "only the assistant's are learnt"),
        ({"messages": [OPENAI[0], {**OPENAI[1], "weight": 0}]}, "no response is learnt"),
        ({"messages": [OPENAI[0], {"role": "assistant", "tool_calls": [{}]}]}, "without the name of a function"),
        ({"messages": OPENAI * (MAX_MESSAGES // 2 + 1)}, f"more than {MAX_MESSAGES}"),
    ],
)
def test_rows_that_cannot_be_used(row: dict[str, Any], reason: str) -> None:
    with pytest.raises(BadInput, match=reason) as caught:
        row_to_conversation(row, "row 1")
    assert caught.value.message.startswith("row 1")


def test_what_is_not_read_is_said() -> None:
    row = {"prompt": "a", "response": "b", "id": 4, "Complex_CoT": "thought", "empty": None}
    assert row_to_conversation(row, "row").remarks == ("column Complex_CoT is not read",)
    talk = [{**OPENAI[0], "mask": None}, {**OPENAI[1], "mask": True, "id": 7}]
    assert row_to_conversation({"messages": talk}, "row").remarks == ("key mask of a message is not read",)
    talk = [*OPENAI, {"role": "user", "content": "and?"}]
    assert row_to_conversation({"messages": talk}, "row").remarks == ("what follows the last response is not read",)


def test_a_row_of_a_text_is_none_of_a_conversation() -> None:
    assert is_text_row({"text": "Once upon a time", "url": "http://example.org"})
    assert not is_text_row({"text": "I love it", "output": "positive"})
    assert not is_text_row({"messages": OPENAI, "text": ""})


@given(st.text(st.characters(exclude_categories=("Cs",)), min_size=1).filter(lambda text: text.strip() != ""))
def test_texts_stay_as_they_are_written(text: str) -> None:
    assert spoken({"prompt": text, "completion": text}) == [("user", text), ("assistant", text)]


@given(st.text() | st.integers() | st.floats() | st.none() | st.booleans() | st.lists(st.text()))
def test_a_cell_is_a_text_or_refused(value: Any) -> None:
    usable = isinstance(value, str) and value.encode("utf-8", "ignore").decode() == value
    if usable or (type(value) in (int, float) and math.isfinite(value)):
        assert text_of(value, "here") == str(value)
    else:
        with pytest.raises(BadInput, match="^here: "):
            text_of(value, "here")


@pytest.mark.parametrize("nothing", [math.nan, None, "", "<noinput>", "Noinput"])
def test_an_input_that_holds_nothing_is_not_asked(nothing: object) -> None:
    row = {"instruction": "hi", "input": nothing, "output": "hello", "system": None if nothing else math.nan}
    assert spoken(row) == HELLO


def test_a_response_that_holds_nothing_is_refused() -> None:
    with pytest.raises(BadInput, match="column output: empty"):
        row_to_conversation({"instruction": "hi", "output": math.nan}, "row")


@pytest.mark.parametrize(("column", "remarks"), [("Be kind.", ()), ("Be brief.", ("column system is not read",))])
def test_a_second_system_text_is_remarked_on(column: str, remarks: tuple[str, ...]) -> None:
    messages = [{"role": "system", "content": "Be kind."}, *OPENAI]
    conversation = row_to_conversation({"messages": messages, "system": column}, "row")
    assert conversation.messages[0]["content"] == "Be kind." and conversation.remarks == remarks
