"""The shapes of a record, and what each stands for: a text, a prompt with its completion, or a chat."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .plain_text import FileText, Text
from .records import BadValueError, DataError

SHAPES: dict[str, tuple[str, ...]] = {
    "messages": ("messages",),
    "sharegpt": ("conversations",),
    "prompt_completion": ("prompt", "completion"),
    "alpaca": ("instruction", "output"),
    "text": ("text",),
}
"""Name of each shape, and the keys by which it is recognised."""

_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
}
# As in Stanford Alpaca, for tokenizers without a chat template.
_ALPACA = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Response:\n"
)
_ALPACA_WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. Write a "
    "response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n"
)


@dataclass(frozen=True, slots=True)
class TextExample:
    text: Text


@dataclass(frozen=True, slots=True)
class PairExample:
    prompt: str
    completion: str


@dataclass(frozen=True, slots=True)
class ChatExample:
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    trained_from: int = 0
    """Messages before this one are given, whoever wrote them."""


Example = TextExample | PairExample | ChatExample


def renamed(value: dict[str, Any], columns: Mapping[str, str]) -> dict[str, Any]:
    """`columns` maps our keys to those of the file."""
    if not columns:
        return value
    theirs = set(columns.values())
    kept = {key: entry for key, entry in value.items() if key not in theirs}
    return {**kept, **{ours: value[name] for ours, name in columns.items() if name in value}}


def recognise(value: Mapping[str, Any], where: str) -> str:
    """The name of the shape by the record's keys; DataError if there is none or more than one."""
    found = [name for name, keys in SHAPES.items() if all(value.get(key) is not None for key in keys)]
    keys = ", ".join(value) or "none"
    if not found:
        known = "; ".join(f"{name}: {' and '.join(needed)}" for name, needed in SHAPES.items())
        raise DataError(f"{where}: no known shape has the keys {keys} (known are {known}); data.columns renames keys")
    if len(found) > 1:
        raise DataError(f"{where}: with the keys {keys} it may be {' or '.join(found)}; say which in data.format")
    return found[0]


def to_example(value: Mapping[str, Any], shape: str, *, chat_template: bool) -> Example:
    """Raises BadValueError. `chat_template`: the tokenizer has one, so that an instruction can be a chat."""
    for key in SHAPES[shape]:
        if value.get(key) is None:
            raise BadValueError(f'should be an object with a "{key}" key')
    example = _READ[shape](value, chat_template)
    for text in strings_of(example):
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:
            raise BadValueError(f"{_named(value, text)} holds half of a surrogate pair") from None
    return example


def strings_of(value: Any) -> list[str]:
    """Every string that an example (or a message) holds, keys excepted."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, TextExample):
        return strings_of(value.text)
    if isinstance(value, PairExample):
        return [value.prompt, value.completion]
    if isinstance(value, ChatExample):
        return strings_of(value.messages) + strings_of(value.tools)
    if isinstance(value, Mapping):
        return [text for entry in value.values() for text in strings_of(entry)]
    if isinstance(value, list):
        return [text for entry in value for text in strings_of(entry)]
    return []


def example_bytes(example: Example) -> int:
    if isinstance(example, TextExample) and isinstance(example.text, FileText):
        return example.text.end - example.text.begin
    return sum(len(text.encode("utf-8")) for text in strings_of(example))


def _text(value: Mapping[str, Any], _: bool) -> Example:
    text = value["text"]
    return TextExample(text if isinstance(text, FileText) else _string(value, "text"))


def _prompt_completion(value: Mapping[str, Any], _: bool) -> Example:
    if isinstance(value["prompt"], list) or isinstance(value["completion"], list):
        prompt, completion = _messages(value, "prompt"), _messages(value, "completion")
        return ChatExample(prompt + completion, _tools(value), len(prompt))
    completion_text = _string(value, "completion")
    if not completion_text:
        raise BadValueError('"completion" is empty')
    return PairExample(_string(value, "prompt"), completion_text)


def _alpaca(value: Mapping[str, Any], chat_template: bool) -> Example:
    instruction, output = _string(value, "instruction"), _string(value, "output")
    given = _string(value, "input") if value.get("input") else ""
    system = _string(value, "system") if value.get("system") else ""
    if not output:
        raise BadValueError('"output" is empty')
    if not chat_template:
        form = _ALPACA_WITH_INPUT if given else _ALPACA
        head = f"{system}\n\n" if system else ""
        return PairExample(head + form.format(instruction=instruction, input=given), output)
    asked = f"{instruction}\n\n{given}" if given else instruction
    messages = [{"role": "system", "content": system}] if system else []
    return ChatExample([*messages, {"role": "user", "content": asked}, {"role": "assistant", "content": output}])


def _sharegpt(value: Mapping[str, Any], _: bool) -> Example:
    turns = value["conversations"]
    if not isinstance(turns, list) or not turns:
        raise BadValueError('"conversations" should be a list of turns')
    messages: list[dict[str, Any]] = []
    if value.get("system"):
        messages.append({"role": "system", "content": _string(value, "system")})
    for number, turn in enumerate(turns, start=1):
        said_by = turn.get("from") if isinstance(turn, dict) else None
        text = turn.get("value") if isinstance(turn, dict) else None
        if not isinstance(said_by, str) or not isinstance(text, str):
            raise BadValueError(f'turn {number} of "conversations" should have "from" and "value" strings')
        if said_by == "function_call":
            messages.append({"role": "assistant", "content": "", "tool_calls": [_called(text, number)]})
        elif said_by in _ROLES:
            messages.append({"role": _ROLES[said_by], "content": text})
        else:
            raise BadValueError(f'turn {number} of "conversations" is from "{said_by}"; known are {", ".join(_ROLES)}')
    return ChatExample(messages, _tools(value))


def _called(text: str, number: int) -> dict[str, Any]:
    try:
        call = json.loads(text)
        return {"type": "function", "function": {"name": call["name"], "arguments": call["arguments"]}}
    except (ValueError, KeyError, TypeError):
        raise BadValueError(f"turn {number}'s function_call should be JSON with a name and arguments") from None


def _chat(value: Mapping[str, Any], _: bool) -> Example:
    return ChatExample(_messages(value, "messages"), _tools(value))


_READ = {
    "text": _text,
    "prompt_completion": _prompt_completion,
    "alpaca": _alpaca,
    "sharegpt": _sharegpt,
    "messages": _chat,
}


def _messages(value: Mapping[str, Any], key: str) -> list[dict[str, Any]]:
    given = value[key]
    if not isinstance(given, list) or not given:
        raise BadValueError(f'"{key}" should be a list of messages')
    return [_message(entry, f'message {number} of "{key}"') for number, entry in enumerate(given, start=1)]


def _message(entry: Any, name: str) -> dict[str, Any]:
    if not isinstance(entry, dict) or not isinstance(entry.get("role"), str):
        raise BadValueError(f'{name} should be an object with a "role" string')
    # Tables fill the keys that a message lacks with null.
    message: dict[str, Any] = _without_nulls(entry)
    content = message.setdefault("content", "")
    parts = isinstance(content, list) and all(isinstance(part, dict) for part in content)
    if not isinstance(content, str) and not parts:
        raise BadValueError(f'{name}: "content" should be a string, got {type(content).__name__}')
    calls = message.get("tool_calls")
    if not calls:
        message.pop("tool_calls", None)
    elif not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise BadValueError(f'{name}: "tool_calls" should be a list of objects')
    else:
        for call in calls:
            function = call.get("function", call)
            if not isinstance(function, dict) or not isinstance(function.get("name"), str):
                raise BadValueError(f'{name}: a tool call should have a "name"')
            function["arguments"] = _arguments(function.get("arguments"))
    return message


def _arguments(value: Any) -> Any:
    """APIs hand arguments over as a string of JSON; templates want the object."""
    if isinstance(value, str):
        try:
            parsed = json.loads(value)
        except ValueError:
            return value
        return parsed if isinstance(parsed, dict) else value
    return {} if value is None else value


def _tools(value: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    tools = value.get("tools")
    if isinstance(tools, str):
        try:
            tools = json.loads(tools) if tools.strip() else None
        except ValueError:
            raise BadValueError('"tools" should be a list of objects, or that as JSON') from None
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise BadValueError('"tools" should be a list of objects, or that as JSON')
    cleaned: list[dict[str, Any]] = _without_nulls(tools)
    return cleaned


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(entry) for key, entry in value.items() if entry is not None}
    if isinstance(value, list):
        return [_without_nulls(entry) for entry in value]
    return value


def _string(value: Mapping[str, Any], key: str) -> str:
    text = value.get(key)
    if not isinstance(text, str):
        raise BadValueError(f'"{key}" should be a string, got {type(text).__name__}')
    return text


def _named(value: Mapping[str, Any], text: str) -> str:
    return next((f'"{key}"' for key, entry in value.items() if entry == text), "a string")
