"""Which characters of a rendered chat the assistant writes, for templates that do not say so themselves.

The template is asked, not read. The text before a turn is what it renders for the messages before, with a
generation prompt: there the model begins to write. The content's own place is found by rendering the chat with
two stand-ins for it and comparing: where they part is where the content stands, and everything outside must be
as it was. The turn ends behind its end-of-turn token. Whatever of this does not hold exactly is an error."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from .records import BadValueError

Messages = list[dict[str, Any]]
Render = Callable[[Messages, bool], str]
"""Messages, and whether to add the generation prompt."""

_STAND_INS = ("xmegatrainx", "ymegatrainy")


@dataclass(frozen=True, slots=True)
class Span:
    begin: int
    end: int


def assistant_spans(
    render: Render, messages: Messages, text: str, special: Sequence[str], *, only: Collection[int]
) -> dict[int, Span]:
    """The span in `text`, which is the whole chat rendered, of each assistant message whose index is in `only`.
    `special`: the names of special tokens, none of which the messages hold. BadValueError where a span cannot
    be told exactly."""
    ends = re.compile("|".join(map(re.escape, sorted(special, key=len, reverse=True))) or r"(?!)")
    spans: dict[int, Span] = {}
    reached = 0
    for index, message in enumerate(messages):
        if message["role"] != "assistant" or index not in only:
            continue
        content, begin_of_tail = _content(render, messages, index, text)
        begin = _begin(render, messages, index, text, content.begin)
        end = _end(render, messages, index, text, content, begin_of_tail, ends)
        if not reached <= begin <= content.begin <= content.end <= end:
            raise _unclear(index, "its place in the rendered chat is not one stretch")
        spans[index] = Span(begin, end)
        reached = end
    return spans


def _content(render: Render, messages: Messages, index: int, text: str) -> tuple[Span, int]:
    """Where what the message says stands in `text`, and how many characters follow it there."""
    first, second = (render(_with(messages, index, stand_in), False) for stand_in in _STAND_INS)
    if first == second:
        raise _unclear(index, "the template does not show it")
    before = _shared(first, second)
    after = _shared(first[::-1], second[::-1])
    if text[:before] != first[:before] or (after and text[-after:] != first[-after:]):
        raise _unclear(index, "other parts of the rendered chat change with it")
    return Span(before, len(text) - after), after


def _begin(render: Render, messages: Messages, index: int, text: str, content_begin: int) -> int:
    prompt = _try(render, messages[:index], True)
    if prompt is not None and text.startswith(prompt) and len(prompt) <= content_begin:
        return len(prompt)
    # What comes before is rendered otherwise once more follows (reasoning that is dropped, for instance), or nothing
    # comes before. The header that a generation prompt adds is still the place, if it stands right before the content.
    for stop in (index, index + 1):
        prompt, known = _try(render, messages[:stop], True), _try(render, messages[:stop], False)
        if prompt is not None and known is not None and prompt.startswith(known):
            header = prompt[len(known) :]
            if header and text[:content_begin].endswith(header):
                return content_begin
    raise _unclear(index, "the chat up to it is rendered otherwise than as a prompt")


def _end(
    render: Render,
    messages: Messages,
    index: int,
    text: str,
    content: Span,
    after: int,
    ends: re.Pattern[str],
) -> int:
    until = _try(render, messages[: index + 1], False)
    if until is not None and text.startswith(until) and len(until) >= content.end:
        return _behind_last(ends, text, content.end, len(until)) or len(until)
    # With more behind it the turn is rendered otherwise; what follows its content should be the same up to the
    # end-of-turn token.
    if until is not None:
        alone = [_try(render, _with(messages, index, stand_in)[: index + 1], False) for stand_in in _STAND_INS]
        if alone[0] is not None and alone[1] is not None:
            tail_size = _shared(alone[0][::-1], alone[1][::-1])
            tail = until[len(until) - tail_size :]
            shared = _shared(tail, text[content.end :])
            end = _behind_last(ends, text, content.end, content.end + shared)
            if end is not None:
                return end
            # Or each time a special token right behind the content, if not the same one: some templates end the
            # last turn in another way.
            here, there = ends.match(text, content.end), ends.match(tail)
            if here and there and not messages[index].get("tool_calls"):
                return here.end()
    raise _unclear(index, "no end-of-turn token follows it")


def _behind_last(ends: re.Pattern[str], text: str, begin: int, end: int) -> int | None:
    """Behind the last special token of text[begin:end] if only white space follows it there; what the template
    puts between turns is not written by the model."""
    found = [match.end() for match in ends.finditer(text, begin, end)]
    return found[-1] if found and not text[found[-1] : end].strip() else None


def _with(messages: Messages, index: int, stand_in: str) -> Messages:
    message = dict(messages[index])
    if message.get("tool_calls"):
        calls = []
        for call in message["tool_calls"]:
            if "function" in call:
                calls.append({**call, "function": {**call["function"], "name": stand_in}})
            else:
                calls.append({**call, "name": stand_in})
        message["tool_calls"] = calls
    if message["content"] or not message.get("tool_calls"):
        if isinstance(message["content"], list):
            message["content"] = [{"type": "text", "text": stand_in}]
        else:
            # Templates cut reasoning off at this mark and treat it in another way.
            reasoning, mark, _ = message["content"].rpartition("</think>")
            message["content"] = reasoning + mark + stand_in
    return [*messages[:index], message, *messages[index + 1 :]]


def _shared(one: str, other: str) -> int:
    """Characters with which both begin."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _try(render: Render, messages: Messages, prompt: bool) -> str | None:
    try:
        return render(messages, prompt)
    except Exception:  # templates raise what they like for chats that they do not expect
        return None


def _unclear(index: int, why: str) -> BadValueError:
    return BadValueError(
        f"what the assistant writes in message {index + 1} cannot be told from the chat template: {why}; use a "
        "template with {% generation %} marks (data.chat_template), or data.loss: all"
    )
