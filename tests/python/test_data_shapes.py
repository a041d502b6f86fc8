"""Every shape, recognised and named; what each mistake is told as."""

from __future__ import annotations

from typing import Any

import pytest

from megatrain.data import DataError
from megatrain.data.records import BadValueError
from megatrain.data.shapes import (
    ChatExample,
    PairExample,
    TextExample,
    example_bytes,
    recognise,
    renamed,
    strings_of,
    to_example,
)

U = {"role": "user", "content": "hi"}
A = {"role": "assistant", "content": "yo"}


def example(value: dict[str, Any], shape: str | None = None, chat_template: bool = True) -> Any:
    return to_example(value, shape or recognise(value, "a:1"), chat_template=chat_template)


@pytest.mark.parametrize(
    ("value", "shape"),
    [
        ({"text": "a", "id": 1}, "text"),
        ({"prompt": "a", "completion": "b"}, "prompt_completion"),
        ({"instruction": "a", "input": "", "output": "b"}, "alpaca"),
        ({"conversations": [], "id": 1}, "sharegpt"),
        ({"messages": [], "tools": None}, "messages"),
        ({"messages": [], "prompt": "a", "text": None}, "messages"),  # a prompt alone, and a null, are nothing
    ],
)
def test_a_shape_is_recognised_by_its_keys(value: dict[str, Any], shape: str) -> None:
    assert recognise(value, "a:1") == shape


def test_no_shape_or_two_are_asked_about() -> None:
    with pytest.raises(
        DataError, match=r"a:1: no known shape has the keys Text, id .*messages: messages; .*data.columns"
    ):
        recognise({"Text": "a", "id": 1}, "a:1")
    with pytest.raises(DataError, match=r"a:1: with the keys .* it may be messages or text; say which in data.format"):
        recognise({"messages": [], "text": "a"}, "a:1")
    with pytest.raises(DataError, match="no known shape has the keys none"):
        recognise({}, "a:1")


def test_columns_are_renamed() -> None:
    row = {"question": "q", "answer": "a", "completion": "old", "id": 1}
    columns = {"prompt": "question", "completion": "answer"}
    assert renamed(row, columns) == {"prompt": "q", "completion": "a", "id": 1}
    assert renamed(row, {}) == row
    assert renamed({"id": 1}, columns) == {"id": 1}


def test_texts_and_pairs() -> None:
    assert example({"text": "a"}) == TextExample("a")
    assert example({"prompt": "", "completion": "b"}) == PairExample("", "b")
    both = example({"prompt": [U], "completion": [A]})
    assert both == ChatExample([U, A], trained_from=1)


def test_alpaca_is_a_chat_where_there_is_a_template() -> None:
    row = {"instruction": "Add.", "input": "1 2", "output": "3"}
    said = [{"role": "user", "content": "Add.\n\n1 2"}, {"role": "assistant", "content": "3"}]
    assert example(row) == ChatExample(said)
    assert example({**row, "system": "Count."}).messages[0] == {"role": "system", "content": "Count."}
    plain = example(row, chat_template=False)
    assert plain.completion == "3"
    assert plain.prompt.startswith("Below is an instruction that describes a task, paired with an input")
    assert plain.prompt.endswith("### Instruction:\nAdd.\n\n### Input:\n1 2\n\n### Response:\n")
    without = example({**row, "input": None}, chat_template=False)
    assert without.prompt.endswith("appropriately completes the request.\n\n### Instruction:\nAdd.\n\n### Response:\n")


def test_sharegpt() -> None:
    turns = [
        {"from": "system", "value": "s"},
        {"from": "human", "value": "u"},
        {"from": "function_call", "value": '{"name": "f", "arguments": {"x": 1}}'},
        {"from": "observation", "value": "o"},
        {"from": "gpt", "value": "a"},
    ]
    found = example({"conversations": turns, "tools": '[{"name": "f"}]'})
    assert [message["role"] for message in found.messages] == ["system", "user", "assistant", "tool", "assistant"]
    assert found.messages[2]["tool_calls"][0]["function"] == {"name": "f", "arguments": {"x": 1}}
    assert found.tools == [{"name": "f"}]
    found = example({"conversations": turns[1:2], "system": "s"})
    assert found.messages == [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]


def test_messages_lose_the_nulls_of_tables_and_arguments_become_objects() -> None:
    call = {"type": "function", "id": None, "function": {"name": "f", "arguments": '{"x": 1}', "other": None}}
    messages = [
        {**U, "tool_calls": None, "name": None},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "1", "tool_calls": []},
    ]
    found = example({"messages": messages, "tools": [{"name": "f", "parameters": {"y": None}}]})
    assert found.messages == [
        U,
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}],
        },
        {"role": "tool", "content": "1"},
    ]
    assert found.tools == [{"name": "f", "parameters": {}}]
    assert example({"messages": [U], "tools": ""}).tools is None
    parts = [{"type": "text", "text": "a"}]
    assert example({"messages": [{"role": "user", "content": parts}]}).messages[0]["content"] == parts


@pytest.mark.parametrize(
    ("value", "shape", "message"),
    [
        ({"Text": "a"}, "text", 'should be an object with a "text" key'),
        ({"text": 5}, "text", '"text" should be a string, got int'),
        ({"text": "\ud800"}, "text", '"text" holds half of a surrogate pair'),
        ({"prompt": "a"}, "prompt_completion", 'should be an object with a "completion" key'),
        ({"prompt": "a", "completion": ""}, "prompt_completion", '"completion" is empty'),
        ({"prompt": 1, "completion": "a"}, "prompt_completion", '"prompt" should be a string, got int'),
        ({"prompt": "a", "completion": [A]}, "prompt_completion", '"prompt" should be a list of messages'),
        ({"instruction": "a", "output": ""}, "alpaca", '"output" is empty'),
        ({"instruction": "a", "output": "b", "input": 3}, "alpaca", '"input" should be a string, got int'),
        ({"conversations": []}, "sharegpt", '"conversations" should be a list of turns'),
        ({"conversations": [{"from": "gpt"}]}, "sharegpt", 'turn 1 of "conversations" should have "from" and "value"'),
        ({"conversations": [{"from": "bot", "value": "a"}]}, "sharegpt", 'is from "bot"; known are system, human'),
        (
            {"conversations": [{"from": "function_call", "value": "f(x)"}]},
            "sharegpt",
            "turn 1's function_call should be JSON with a name and arguments",
        ),
        ({"messages": []}, "messages", '"messages" should be a list of messages'),
        ({"messages": ["hi"]}, "messages", 'message 1 of "messages" should be an object with a "role" string'),
        (
            {"messages": [U, {"role": "assistant", "content": 4}]},
            "messages",
            'message 2 .*"content" should be a string',
        ),
        ({"messages": [{**A, "tool_calls": ["f"]}]}, "messages", '"tool_calls" should be a list of objects'),
        ({"messages": [{**A, "tool_calls": [{"id": 1}]}]}, "messages", 'a tool call should have a "name"'),
        ({"messages": [U], "tools": "f"}, "messages", '"tools" should be a list of objects, or that as JSON'),
        ({"messages": [U], "tools": ["f"]}, "messages", '"tools" should be a list of objects, or that as JSON'),
        ({"messages": [{**A, "content": "\ud800"}]}, "messages", "a string holds half of a surrogate pair"),
    ],
)
def test_mistakes(value: dict[str, Any], shape: str, message: str) -> None:
    with pytest.raises(BadValueError, match=message):
        example(value, shape)


def test_strings_and_their_size() -> None:
    found = example({"messages": [{"role": "user", "content": "ö"}, A], "tools": [{"name": "f"}]})
    assert strings_of(found) == ["user", "ö", "assistant", "yo", "f"]
    assert example_bytes(found) == 18
