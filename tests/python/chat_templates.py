"""Small tokenizers, and chat templates in the styles of well-known models."""

from __future__ import annotations

from functools import cache
from typing import Any

from tokenizers import Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from megatrain.data import TextTokenizer

SPECIAL = [
    "<|endoftext|>", "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>",
    "<|eot_id|>", "<start_of_turn>", "<end_of_turn>", "[INST]", "[/INST]",
]  # fmt: skip
CORPUS = [
    "Below is an answer to the question of a user. The weather is nice today, says the assistant.",
    "system user assistant tool model\n\nYou are a helpful assistant. Hello! How are you? I am fine, thank you.",
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call> <think>\n\n</think>\n\n',
]


@cache
def byte_level() -> Any:
    """As of GPT-2, Qwen and Llama 3: words keep the space before them, special tokens cut the text."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS * 4, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>")


@cache
def metaspace() -> Any:
    """As of Llama 2 and Mistral: a space becomes ▁, and one is put before the text."""
    tokenizer = Tokenizer(BPE(byte_fallback=True, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=["<unk>", *SPECIAL, *(f"<0x{i:02X}>" for i in range(256))],
        initial_alphabet=list("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ▁<>[]/.,!?"),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS * 4, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


def with_template(tokenizer: Any, template: str) -> TextTokenizer:
    copy = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend_tokenizer, eos_token=tokenizer.eos_token, bos_token=tokenizer.bos_token
    )
    copy.chat_template = template
    return TextTokenizer(copy, begin=None, end=copy.eos_token_id)


CHATML = """{%- for message in messages -%}
{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif -%}"""

# Qwen 2.5 and SmolLM 2: words of the system where none are given.
DEFAULT_SYSTEM = (
    "{% if messages[0].role != 'system' %}{{ '<|im_start|>system\\nBe helpful.<|im_end|>\\n' }}{% endif %}" + CHATML
)

# The same with marks.
CHATML_MARKED = """{%- for message in messages -%}
{%- if message.role == 'assistant' -%}
{{ '<|im_start|>assistant\n' }}{% generation %}{{ message.content + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}
{%- else -%}
{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif -%}"""

# Llama 3: contents are trimmed.
HEADERS = """{{- '<s>' -}}{%- for message in messages -%}
{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' -}}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif -%}"""

# Llama 2: the system's words stand in the first user message; there is no generation prompt; <s> opens each pair.
INST = """{%- if messages[0]['role'] == 'system' -%}
{%- set said = messages[1:] -%}{%- set system = '<<SYS>>\n' + messages[0]['content'] + '\n<</SYS>>\n\n' -%}
{%- else -%}{%- set said = messages -%}{%- set system = '' -%}{%- endif -%}
{%- for message in said -%}
{%- if message['role'] == 'user' -%}
{{ '<s>[INST] ' + (system if loop.first else '') + message['content'] | trim + ' [/INST]' }}
{%- else -%}{{ ' ' + message['content'] | trim + ' </s>' }}{%- endif -%}
{%- endfor -%}"""

# Gemma: no system, and the assistant is called model.
TURNS = """{{- '<s>' -}}
{%- if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif -%}
{%- for message in messages -%}
{%- set role = 'model' if message['role'] == 'assistant' else message['role'] -%}
{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif -%}"""

# Qwen 3: tools in the system message, calls as JSON, reasoning kept only behind the last question, where an empty
# one is put if there is none; tool answers are users'.
THINKING = """{%- if tools -%}
{{ '<|im_start|>system\n' + (messages[0].content + '\n\n' if messages[0].role == 'system' else '') + '# Tools' }}
{%- for tool in tools %}{{ '\n' + tool | tojson }}{% endfor -%}{{ '<|im_end|>\n' }}
{%- elif messages[0].role == 'system' -%}
{{ '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- endif -%}
{%- set ns = namespace(last=0) -%}
{%- for message in messages %}{% if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor -%}
{%- for message in messages -%}
{%- if message.role == 'user' -%}
{{ '<|im_start|>user\n' + message.content + '<|im_end|>\n' }}
{%- elif message.role == 'assistant' -%}
{%- set content = message.content -%}{%- set reasoning = '' -%}
{%- if '</think>' in content -%}
{%- set reasoning = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') -%}
{%- set content = content.split('</think>')[-1].lstrip('\n') -%}
{%- endif -%}
{%- if loop.index0 > ns.last and (loop.last or reasoning) -%}
{{ '<|im_start|>assistant\n<think>\n' + reasoning.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}
{%- else -%}
{{ '<|im_start|>assistant\n' + content }}
{%- endif -%}
{%- for call in message.tool_calls or [] -%}
{%- set call = call.function or call -%}
{{ ('\n' if content or not loop.first else '') + '<tool_call>\n{"name": "' + call.name + '", "arguments": ' }}
{{- call.arguments | tojson }}{{ '}\n</tool_call>' }}
{%- endfor -%}
{{ '<|im_end|>\n' }}
{%- elif message.role == 'tool' -%}
{{ '<|im_start|>user\n<tool_response>\n' + message.content + '\n</tool_response><|im_end|>\n' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif -%}"""

# Mistral: the system's words stand in the last user message.
SYSTEM_LAST = """{%- set system = messages[0]['content'] + '\n\n' if messages[0]['role'] == 'system' else '' -%}
{{- '<s>' -}}
{%- for message in messages -%}
{%- if message['role'] == 'user' -%}
{%- set rest = messages[loop.index0 + 1:] | selectattr('role', 'equalto', 'user') | list -%}
{{ '[INST] ' + ('' if rest else system) + message['content'] + '[/INST]' }}
{%- elif message['role'] == 'assistant' -%}{{ ' ' + message['content'] + '</s>' }}{%- endif -%}
{%- endfor -%}"""

# gpt-oss: channels, and another token at the end of the last turn.
CHANNELS = """{%- for message in messages -%}
{%- if message.role == 'assistant' -%}
{{ '<|im_start|>assistant<|start_header_id|>final<|end_header_id|>' + message.content }}
{{- '<|eot_id|>' if loop.last and not add_generation_prompt else '<|im_end|>' }}
{%- else -%}
{{ '<|im_start|>' + message.role + '<|end_header_id|>' + message.content + '<|im_end|>' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant' }}{% endif -%}"""

# No end-of-turn token but at the very end.
PLAIN = """{%- for message in messages -%}
{{ '### ' + message['role'] + ':\n' + message['content'] + '\n\n' }}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '### assistant:\n' }}{% else %}{{ '</s>' }}{% endif -%}"""
