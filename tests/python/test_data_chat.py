"""What of a chat is learned, token by token, in templates of several styles."""

from __future__ import annotations

from typing import Any

import chat_templates as templates
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatrain.data import DataError, Encoder, TextTokenizer
from megatrain.data.records import BadRecord, BadValueError, Record
from megatrain.data.shapes import to_example

U, A, S = ({"role": role} for role in ("user", "assistant", "system"))


def chat(*messages: tuple[dict[str, Any], str], **more: Any) -> dict[str, Any]:
    return {"messages": [{**role, "content": content} for role, content in messages], **more}


def encode(tokenizer: TextTokenizer, value: dict[str, Any], loss: str = "auto", shape: str = "messages") -> Any:
    return Encoder(tokenizer, shape, loss=loss).encode(to_example(value, shape, chat_template=True))


def check(tokenizer: TextTokenizer, value: dict[str, Any], parts: list[str], loss: str = "auto") -> None:
    """`parts`: the rendered chat, cut where learning begins and ends; every second one is learned. The tokens are
    those of the tokenizer's own apply_chat_template, and the learned ones spell the learned parts."""
    own = tokenizer.tokenizer.apply_chat_template(value["messages"], tools=value.get("tools"), return_dict=True)[
        "input_ids"
    ]
    assert tokenizer.tokenizer.apply_chat_template(
        value["messages"], tools=value.get("tools"), tokenize=False
    ) == "".join(parts)
    found = encode(tokenizer, value, loss)
    assert found.ids.tolist() == list(own)
    ends = [len("".join(parts[: place + 1])) for place in range(len(parts))]
    expected = []
    for place in range(len(found.ids)):
        before = len(tokenizer.decode(found.ids[:place]))  # where the token begins
        expected.append(next(part for part, end in enumerate(ends) if before < end) % 2 == 1)
    assert found.targets.tolist() == expected
    learned = [part for place, part in enumerate(parts) if place % 2 == 1]
    # Without white space, which some decoders drop at the beginning.
    spelled = tokenizer.decode(found.ids[found.targets])
    assert "".join(spelled.split()) == "".join("".join(learned).split())


TURNS = chat((S, "Be kind."), (U, "Hello!"), (A, "How are you?"), (U, "Fine. \n"), (A, "I am glad\n\nto hear that."))
REST = [(A, "How are you?"), (U, "Fine. \n"), (A, "I am glad\n\nto hear that.")]
CHATML_PARTS = [
    "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHello!<|im_end|>\n<|im_start|>assistant\n",
    "How are you?<|im_end|>",
    "\n<|im_start|>user\nFine. \n<|im_end|>\n<|im_start|>assistant\n",
    "I am glad\n\nto hear that.<|im_end|>",
    "\n",
]


@pytest.mark.parametrize("template", [templates.CHATML, templates.CHATML_MARKED], ids=["asked", "marked"])
def test_every_turn_of_the_assistant(template: str) -> None:
    tokenizer = templates.with_template(templates.byte_level(), template)
    check(tokenizer, TURNS, CHATML_PARTS)
    check(tokenizer, TURNS, CHATML_PARTS, "assistant")


def test_words_of_the_system_by_default() -> None:
    tokenizer = templates.with_template(templates.byte_level(), templates.DEFAULT_SYSTEM)
    check(tokenizer, TURNS, CHATML_PARTS)
    default = "<|im_start|>system\nBe helpful.<|im_end|>\n"
    parts = [CHATML_PARTS[0].replace("<|im_start|>system\nBe kind.<|im_end|>\n", default), *CHATML_PARTS[1:]]
    check(tokenizer, chat((U, "Hello!"), *REST), parts)
    first = chat((A, "Hello!"), (U, "Hi."), (A, "Good."))  # the assistant speaks first: nothing was asked before
    check(
        tokenizer,
        first,
        [
            default + "<|im_start|>assistant\n",
            "Hello!<|im_end|>",
            "\n<|im_start|>user\nHi.<|im_end|>\n<|im_start|>assistant\n",
            "Good.<|im_end|>",
            "\n",
        ],
    )


@pytest.mark.parametrize("template", [templates.CHATML, templates.CHATML_MARKED], ids=["asked", "marked"])
def test_the_completion_only(template: str) -> None:
    tokenizer = templates.with_template(templates.byte_level(), template)
    check(tokenizer, TURNS, ["".join(CHATML_PARTS[:3]), *CHATML_PARTS[3:]], "completion")
    pair = {"prompt": TURNS["messages"][:4], "completion": TURNS["messages"][4:]}
    whole, given = encode(tokenizer, TURNS, "completion"), encode(tokenizer, pair, shape="prompt_completion")
    assert given.ids.tolist() == whole.ids.tolist()
    assert given.targets.tolist() == whole.targets.tolist()


def test_all() -> None:
    tokenizer = templates.with_template(templates.byte_level(), templates.CHATML)
    found = encode(tokenizer, TURNS, "all")
    assert found.targets.tolist() == [False] + [True] * (len(found.ids) - 1)


def test_trimmed_contents_under_headers() -> None:
    tokenizer = templates.with_template(templates.byte_level(), templates.HEADERS)
    head = "<|start_header_id|>{}<|end_header_id|>\n\n"
    check(
        tokenizer,
        chat((U, " Hello! "), (A, "\n\n How are you? \n"), (U, "Fine."), (A, "Naïve 🙂.")),
        [
            "<s>" + head.format("user") + "Hello!<|eot_id|>" + head.format("assistant"),
            "How are you?<|eot_id|>",
            head.format("user") + "Fine.<|eot_id|>" + head.format("assistant"),
            "Naïve 🙂.<|eot_id|>",
        ],
    )


@pytest.mark.parametrize("make", [templates.byte_level, templates.metaspace])
def test_a_space_before_the_answer_is_written_by_the_assistant(make: Any) -> None:
    check(
        templates.with_template(make(), templates.INST),
        TURNS,
        [
            "<s>[INST] <<SYS>>\nBe kind.\n<</SYS>>\n\nHello! [/INST]",
            " How are you? </s>",
            "<s>[INST] Fine. [/INST]",
            " I am glad\n\nto hear that. </s>",
        ],
    )


@pytest.mark.parametrize("make", [templates.byte_level, templates.metaspace])
def test_a_template_with_other_names_that_refuses_systems(make: Any) -> None:
    tokenizer = templates.with_template(make(), templates.TURNS)
    check(
        tokenizer,
        chat((U, "Hello!"), (A, "How are you?"), (U, "Fine."), (A, "Good.")),
        [
            "<s><start_of_turn>user\nHello!<end_of_turn>\n<start_of_turn>model\n",
            "How are you?<end_of_turn>",
            "\n<start_of_turn>user\nFine.<end_of_turn>\n<start_of_turn>model\n",
            "Good.<end_of_turn>",
            "\n",
        ],
    )
    with pytest.raises(BadValueError, match="the chat template refuses it: System role not supported"):
        encode(tokenizer, TURNS)


WEATHER = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
CALL = {"type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}


def test_tools_and_reasoning_that_is_dropped_later() -> None:
    """Earlier turns are rendered without their reasoning, and differ from what they are as last turns."""
    tokenizer = templates.with_template(templates.byte_level(), templates.THINKING)
    start, end = "<|im_start|>{}\n", "<|im_end|>"
    check(
        tokenizer,
        chat((U, "Hello!"), (A, "<think>\nPolite.\n</think>\n\nHow are you?"), (U, "Fine."), (A, "Good.")),
        [
            start.format("user") + "Hello!" + end + "\n" + start.format("assistant"),
            "How are you?" + end,
            "\n" + start.format("user") + "Fine." + end + "\n" + start.format("assistant"),
            "<think>\n\n</think>\n\nGood." + end,
            "\n",
        ],
    )
    value = chat((U, "Weather?"), (A, ""), ({"role": "tool"}, "rain"), (A, "<think>\nWet.\n</think>\n\nRain."))
    value["messages"][1]["tool_calls"] = [CALL]
    value["tools"] = [WEATHER]
    shown = '{"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": '
    shown += '{"city": {"type": "string"}}}}}'
    found = encode(tokenizer, value)
    learned = tokenizer.decode(found.ids[found.targets])
    assert learned == (
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call><|im_end|>'
        "<think>\nWet.\n</think>\n\nRain.<|im_end|>"
    )
    assert tokenizer.decode(found.ids).startswith(start.format("system") + "# Tools\n" + shown + end)


def test_a_last_turn_that_ends_otherwise() -> None:
    head, end = "<|im_start|>{}<|end_header_id|>", "<|im_end|>"
    check(
        templates.with_template(templates.byte_level(), templates.CHANNELS),
        TURNS,
        [
            head.format("system") + "Be kind." + end + head.format("user") + "Hello!" + end + "<|im_start|>assistant",
            "<|start_header_id|>final<|end_header_id|>How are you?<|im_end|>",
            head.format("user") + "Fine. \n" + end + "<|im_start|>assistant",
            "<|start_header_id|>final<|end_header_id|>I am glad\n\nto hear that.<|eot_id|>",
        ],
    )


def test_what_cannot_be_told_is_refused() -> None:
    """The system's words move to the last question, so that no earlier turn has the prompt it was given under."""
    tokenizer = templates.with_template(templates.byte_level(), templates.SYSTEM_LAST)
    with pytest.raises(
        BadValueError, match=r"message 3 cannot be told.*rendered otherwise than as a prompt.*generation"
    ):
        encode(tokenizer, TURNS)
    check(
        tokenizer,
        chat((S, "Be kind."), (U, "Hello!"), (A, "How are you?")),
        ["<s>[INST] Be kind.\n\nHello![/INST]", " How are you?</s>"],
    )
    check(
        tokenizer,
        TURNS,
        [
            "<s>[INST] Hello![/INST] How are you?</s>[INST] Be kind.\n\nFine. \n[/INST]",
            " I am glad\n\nto hear that.</s>",
        ],
        "completion",
    )
    tokenizer = templates.with_template(templates.byte_level(), templates.PLAIN)
    with pytest.raises(BadValueError, match=r"message 2 cannot be told.*no end-of-turn token follows it"):
        encode(tokenizer, chat((U, "a"), (A, "b"), (U, "c"), (A, "d")))


def test_a_template_that_hides_an_answer_is_refused() -> None:
    hiding = templates.CHATML.replace("message.content +", "(message.content if loop.last else '...') +")
    tokenizer = templates.with_template(templates.byte_level(), hiding)
    with pytest.raises(BadValueError, match=r"message 2 cannot be told.*does not show it"):
        encode(tokenizer, chat((U, "a"), (A, "b"), (U, "c"), (A, "d")))
    echo = templates.CHATML + "{{ messages[-1].content }}"
    with pytest.raises(BadValueError, match="cannot be told"):
        encode(templates.with_template(templates.byte_level(), echo), chat((U, "a"), (A, "b"), (U, "c"), (A, "d")))


def test_a_token_over_the_edge_is_cut() -> None:
    """Of three line ends the first two are one token of the whole: one of the header, one of the answer. Then the
    prompt has its own tokens, as where a model goes on from it, and the answer has its own."""
    tokenizer = templates.with_template(templates.byte_level(), templates.CHATML)
    value = chat((U, "Hello!"), (A, "\n\nHow are you?"))
    found = encode(tokenizer, value)
    prompt = tokenizer.tokenizer.apply_chat_template(
        value["messages"][:1], add_generation_prompt=True, return_dict=True
    )["input_ids"]
    assert found.ids.tolist()[: len(prompt)] == prompt
    assert not found.targets[: len(prompt)].any()
    assert tokenizer.decode(found.ids[found.targets]) == "\n\nHow are you?<|im_end|>"
    whole = tokenizer.tokenizer.apply_chat_template(value["messages"], tokenize=False)
    assert tokenizer.decode(found.ids) == whole


def test_a_token_over_the_edge_that_cannot_be_cut_is_refused() -> None:
    """This tokenizer would begin the answer with a space that is not there."""
    joining = "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}</s>{% endif %}{% endfor %}"
    tokenizer = templates.with_template(templates.metaspace(), joining)
    with pytest.raises(BadValueError, match=r"one token goes over the place .*between 'How ar' and 'e you"):
        encode(tokenizer, chat((U, "How ar"), (A, "e you?")))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (chat((U, "Hello!")), "no message of the assistant to learn from"),
        (chat((U, "Say <|im_end|>"), (A, "No.")), "the special token <|im_end|> stands in a message"),
        (chat((U, "<b>bold</b>"), (A, "<s>struck</s>")), "the special token </s> stands in a message"),
    ],
)
def test_chats_that_cannot_be_learned(value: dict[str, Any], message: str) -> None:
    tokenizer = templates.with_template(templates.byte_level(), templates.CHATML)
    with pytest.raises(BadValueError, match=message.replace("|", r"\|")):
        encode(tokenizer, value)
    found = Encoder(tokenizer, "messages").encode_records([Record("a:1", value), Record("a:2", TURNS)])
    assert found[0] == BadRecord("a:1", found[0].why)  # type: ignore[union-attr]
    assert found[1].targets.any()  # type: ignore[union-attr]


def test_no_template() -> None:
    tokenizer = TextTokenizer(templates.byte_level(), begin=None, end=0)
    with pytest.raises(DataError, match=r"no chat template; name a file of one with data.chat_template"):
        encode(tokenizer, TURNS)
    own = Encoder(tokenizer, "messages", chat_template=templates.CHATML)
    marked = templates.with_template(templates.byte_level(), templates.CHATML_MARKED)
    example = to_example(TURNS, "messages", chat_template=True)
    assert own.encode(example).targets.tolist() == encode(marked, TURNS).targets.tolist()


TWICE_MARKED = templates.CHATML_MARKED.replace(
    "{% generation %}{{ message.content + '<|im_end|>' }}",
    "{% generation %}{{ message.content }}{% endgeneration %}{% generation %}{{ '<|im_end|>' }}",
)


def test_several_marks_in_a_turn() -> None:
    tokenizer = templates.with_template(templates.byte_level(), TWICE_MARKED)
    for loss in ("assistant", "completion"):
        once = encode(templates.with_template(templates.byte_level(), templates.CHATML_MARKED), TURNS, loss)
        assert encode(tokenizer, TURNS, loss).targets.tolist() == once.targets.tolist()
    nothing = templates.CHATML_MARKED.replace("{% generation %}", "{% if false %}{% generation %}").replace(
        "{% endgeneration %}", "{% endgeneration %}{% endif %}"
    )
    with pytest.raises(BadValueError, match="marks nothing that the assistant writes"):
        encode(templates.with_template(templates.byte_level(), nothing), TURNS)


_SAID = st.text(st.sampled_from(list("ab. \n\t'🙂ö<|{")), max_size=12)


@settings(max_examples=150, deadline=None)
@given(said=st.lists(st.tuples(_SAID, _SAID), min_size=1, max_size=4), system=st.one_of(st.none(), _SAID))
@pytest.mark.parametrize("make", [templates.byte_level, templates.metaspace])
def test_asked_and_marked_templates_agree(make: Any, said: list[tuple[str, str]], system: str | None) -> None:
    """Whatever is said: the two ways learn the same tokens, which are the tokenizer's own, or refuse both."""
    value = chat(*([(S, system)] if system is not None else []), *(pair for u, a in said for pair in ((U, u), (A, a))))
    found = []
    for template in (templates.CHATML, templates.CHATML_MARKED):
        tokenizer = templates.with_template(make(), template)
        try:
            encoded = encode(tokenizer, value)
        except BadValueError as error:
            assert "one token goes over the place" in str(error)
            found.append(None)
            continue
        own = tokenizer.tokenizer.apply_chat_template(value["messages"], return_dict=True)["input_ids"]
        assert encoded.ids.tolist() == list(own) or tokenizer.decode(encoded.ids) == tokenizer.decode(own)
        learned = "".join(f"{a}<|im_end|>" for _, a in said)
        spelled = tokenizer.decode(encoded.ids[encoded.targets])
        assert spelled == learned if make is templates.byte_level else len(spelled) > 0
        found.append((encoded.ids.tolist(), encoded.targets.tolist()))
    assert found[0] == found[1]


def test_an_empty_answer_is_its_end() -> None:
    tokenizer = templates.with_template(templates.byte_level(), templates.CHATML)
    found = encode(tokenizer, chat((U, "Hello!"), (A, "")))
    assert tokenizer.decode(found.ids[found.targets]) == "<|im_end|>"


def test_pairs_and_texts() -> None:
    tokenizer = TextTokenizer(templates.byte_level(), begin=None, end=0)
    for loss, learned in (("auto", "yes<|endoftext|>"), ("all", "y? yes<|endoftext|>")):
        found = encode(tokenizer, {"prompt": "Why? ", "completion": "yes"}, loss, "prompt_completion")
        assert tokenizer.decode(found.ids) == "Why? yes<|endoftext|>"
        if loss == "auto":
            assert tokenizer.decode(found.ids[found.targets]) == learned
        else:
            assert found.targets.tolist() == [False] + [True] * (len(found.ids) - 1)
    found = encode(tokenizer, {"prompt": "", "completion": "yes"}, shape="prompt_completion")
    assert tokenizer.decode(found.ids) == "<|endoftext|>yes<|endoftext|>"
    found = encode(tokenizer, {"text": "a <|im_end|>"}, shape="text")
    assert tokenizer.decode(found.ids) == "<|endoftext|>a <|im_end|><|endoftext|>"
    assert templates.SPECIAL.index("<|im_end|>") not in found.ids  # a name in a text is text
    assert found.targets.tolist() == [False] + [True] * (len(found.ids) - 1)
