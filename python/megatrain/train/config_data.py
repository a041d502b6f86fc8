"""The schema of what is trained on: data, tokenizer, batches."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from megatrain.data.sources import PYTHON_STDLIB


class Settings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


def listed(value: Any) -> Any:
    """One thing stands for a list of one."""
    return value if isinstance(value, list | tuple) else [value]


Texts = Annotated[list[str], BeforeValidator(listed)]
Names = Annotated[list[Annotated[str, Field(min_length=1)]], BeforeValidator(listed), Field(min_length=1)]


class DataSettings(Settings):
    path: Names = Field(
        description=(
            "A file, a directory of files, a pattern such as data/*.jsonl, a Hugging Face dataset (its directory or "
            "id), or a list of these. Read by the ending: .jsonl, .json, .csv, .tsv (these also with .gz), .parquet, "
            f".arrow; anything else is text, a document a file. {PYTHON_STDLIB}: the sources of the running Python's "
            "standard library."
        ),
    )
    format: Literal["auto", "text", "prompt_completion", "alpaca", "sharegpt", "messages"] = Field(
        default="auto",
        description=(
            "What a record is: {text}; {prompt, completion}; {instruction, input, output}; {conversations}; {messages, "
            "tools}. auto: told from the keys of the first record."
        ),
    )
    columns: dict[str, str] = Field(
        default_factory=dict,
        description="Names of keys in the file where they differ, such as {prompt: question, completion: answer}.",
    )
    subset: str | None = Field(default=None, description="Configuration of a dataset of the hub.")
    split: str = Field(default="train", min_length=1, description="Split of a Hugging Face dataset.")
    validation: Texts = Field(
        default_factory=list, description="What to evaluate on, named as in path; instead of held_out."
    )
    validation_split: str | None = Field(
        default=None, description="Split of a Hugging Face dataset in validation; null: as split."
    )
    held_out: float = Field(
        default=0.05,
        ge=0,
        lt=1,
        description=(
            "Share of the bytes that is never trained on but evaluated: whole records drawn by the seed, or the "
            "end of the text where there is only one document. 0: none."
        ),
    )
    max_bytes: int | None = Field(
        default=None,
        ge=1,
        description="Use at most about this many bytes of text: whole records, drawn by the seed.",
    )
    loss: Literal["auto", "assistant", "completion", "all"] = Field(
        default="auto",
        description=(
            "What is learned. assistant: every turn of the assistant; completion: its last turn, or the completion of "
            "a pair; all: every token. auto: assistant for chats, completion for pairs. Texts are learned whole."
        ),
    )
    chat_template: str | None = Field(
        default=None, description="A file with a Jinja chat template to use instead of the tokenizer's own."
    )
    packing: bool = Field(
        default=True,
        description=(
            "Lay several documents into a row of sequence_length; none sees another. false: a document a row, "
            "documents of about one length together, padded."
        ),
    )
    too_long: Literal["auto", "split", "truncate", "skip", "error"] = Field(
        default="auto",
        description=(
            "A document of more than sequence_length tokens is split into several, truncated, skipped, or an error. "
            "auto: split for texts, truncate for others. What was truncated or skipped is counted."
        ),
    )
    on_bad_line: Literal["error", "skip"] = Field(
        default="error",
        description="A record that cannot be used stops the run, or is reported, counted and left out.",
    )
    workers: int = Field(
        default=0, ge=0, description="Processes that tokenize; 0: the run's own. They end before training begins."
    )


class TokenizerSettings(Settings):
    """The tokenizer of a new model; a model directory brings its own."""

    type: Literal["bpe", "bytes"] = Field(
        default="bpe", description="bpe: byte-level BPE of the training text; bytes: one token a byte."
    )
    vocab_size: int = Field(
        default=4096, ge=257, description="Of the BPE: 256 bytes, the document boundary and the merges."
    )


class BatchSettings(Settings):
    micro_batch: int = Field(default=8, ge=1, description="Rows computed at once.")
    accumulate: int = Field(default=1, ge=1, description="Micro-batches in one optimizer step.")
