"""A chat to token ids, and which of them the assistant writes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from .records import BadValueError, DataError
from .shapes import ChatExample, strings_of
from .spans import Messages, Span, assistant_spans
from .text_tokenizer import TextTokenizer

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


class ChatEncoder:
    """`template`: Jinja source to use instead of the tokenizer's own."""

    def __init__(self, tokenizer: TextTokenizer, template: str | None = None) -> None:
        self._tokenizer = tokenizer.tokenizer
        self._template: str | None = template or getattr(self._tokenizer, "chat_template", None)
        if isinstance(self._template, dict):
            self._template = self._template.get("default")
        added = getattr(self._tokenizer, "added_tokens_decoder", {}).values()
        names = {str(token) for token in added if getattr(token, "special", False)}
        self._special = sorted(names | set(self._tokenizer.all_special_tokens))

    @property
    def has_template(self) -> bool:
        return self._template is not None

    def encode(self, example: ChatExample, *, loss: str) -> tuple[list[int], list[bool]]:
        """Ids as of tokenizer.apply_chat_template, and whether each is a target. loss: "assistant", every turn
        of the assistant from example.trained_from on; "completion", the last one; "all", every token."""
        if self._template is None:
            raise DataError("the tokenizer has no chat template; name a file of one with data.chat_template")
        for text in strings_of(example):
            for name in self._special:
                if name in text:
                    raise BadValueError(f"the special token {name} stands in a message, and would be read as one")
        try:
            if loss == "all":
                ids = self._tokenize(self._render(example.messages, example.tools))
                return ids, [True] * len(ids)
            if not any(message["role"] == "assistant" for message in example.messages[example.trained_from :]):
                raise BadValueError("no message of the assistant to learn from")
            if _GENERATION.search(self._template):
                return self._by_marks(example, loss)
            return self._by_spans(example, loss)
        except (BadValueError, DataError):
            raise
        except Exception as error:  # the template's own refusals, of many kinds
            raise BadValueError(f"the chat template refuses it: {error}") from None

    def _render(self, messages: Messages, tools: Any, prompt: bool = False) -> str:
        text: str = self._tokenizer.apply_chat_template(
            messages, tools=tools, chat_template=self._template, add_generation_prompt=prompt, tokenize=False
        )
        return text

    def _tokenize(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer(text, add_special_tokens=False, verbose=False).input_ids
        return ids

    def _by_marks(self, example: ChatExample, loss: str) -> tuple[list[int], list[bool]]:
        """The template says itself, by {% generation %}, what the assistant writes."""
        from transformers.utils.chat_template_utils import render_jinja_template

        render: Any = render_jinja_template
        texts, marks = render(
            conversations=[example.messages],
            tools=example.tools,
            chat_template=self._template,
            return_assistant_tokens_mask=True,
            **self._tokenizer.special_tokens_map,
        )
        text: str = texts[0]
        spans = [Span(begin, end) for begin, end in marks[0] if end > begin]
        turns = [number for number, message in enumerate(example.messages) if message["role"] == "assistant"]
        first = turns[-1] if loss == "completion" else example.trained_from
        if len(spans) == len(turns):
            spans = [span for span, number in zip(spans, turns, strict=True) if number >= first]
        elif first > turns[0]:
            # Several marks in a turn: those behind the prompt for the first turn that is learned.
            given = self._render(example.messages[:first], example.tools, prompt=True)
            if not text.startswith(given):
                raise BadValueError(
                    f"the chat template marks {len(spans)} places in {len(turns)} turns of the assistant"
                )
            spans = [span for span in spans if span.begin >= len(given)]
        if not spans:
            raise BadValueError("the chat template marks nothing that the assistant writes")
        return self._targets(text, spans)

    def _by_spans(self, example: ChatExample, loss: str) -> tuple[list[int], list[bool]]:
        def render(messages: Messages, prompt: bool) -> str:
            return self._render(messages, example.tools, prompt)

        text = render(example.messages, False)
        if loss == "completion":
            last = max(n for n, message in enumerate(example.messages) if message["role"] == "assistant")
            spans = assistant_spans(render, example.messages, text, self._special, only=[last])
        else:
            wanted = range(example.trained_from, len(example.messages))
            spans = assistant_spans(render, example.messages, text, self._special, only=wanted)
        return self._targets(text, list(spans.values()))

    def _targets(self, text: str, spans: Sequence[Span]) -> tuple[list[int], list[bool]]:
        """Token by token. Where the chat cut at the spans' ends has the tokens of the chat in one piece, which is
        the rule, or where the cuts fall between tokens, these are taken. Where one token would go over a cut, the
        parts' own tokens are, as when a model goes on from a prompt; they must spell the parts."""
        ids = self._tokenize(text)
        cuts = [0, *(place for span in spans for place in (span.begin, span.end)), len(text)]
        parts = [text[begin:end] for begin, end in pairwise(cuts)]
        pieces = [self._tokenize(part) if part else [] for part in parts]
        joined = [token for piece in pieces for token in piece]
        if joined != ids:
            # White space before a cut may be other tokens when nothing follows it, and some tokenizers begin a text
            # in a way of their own; then the place of each cut among the tokens is looked for.
            places = [0, *(self._place(ids, text, cut) for cut in cuts[1:-1]), len(ids)]
            if all(place is not None for place in places):
                pieces = [ids[begin:end] for begin, end in pairwise(places)]
                joined = ids
            elif self._decode(joined) != text or [self._decode(piece) for piece in pieces] != parts:
                at = cuts[places.index(None)]
                raise BadValueError(
                    f"one token goes over the place where the assistant's turn begins or ends, between "
                    f"{text[max(0, at - 8) : at]!r} and {text[at : at + 8]!r}; white space there is the usual cause"
                )
        return joined, [place % 2 == 1 for place, piece in enumerate(pieces) for _ in piece]

    def _place(self, ids: list[int], text: str, cut: int) -> int | None:
        """How many of the ids spell text[:cut]; None if a token goes over the cut."""
        before = self._tokenize(text[:cut])
        if ids[: len(before)] == before:
            return len(before)
        low, high = 0, len(ids)
        while low < high:
            middle = (low + high) // 2
            if len(self._decode(ids[:middle])) < cut:
                low = middle + 1
            else:
                high = middle
        fits = self._decode(ids[:low]) == text[:cut] and self._decode(ids[low:]) == text[cut:]
        return low if fits else None

    def _decode(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text
