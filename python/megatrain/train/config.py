"""The schema of a training run: every key, its meaning and its limits."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, model_validator

PYTHON_STDLIB = "python-stdlib"


class Settings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class ShapeSettings(BaseModel):
    """A new model with random weights. Besides `type`, any key of that type's transformers
    configuration, such as hidden_size; vocab_size is the tokenizer's unless given."""

    model_config = ConfigDict(frozen=True, extra="allow")

    type: str = Field(description="A transformers model type that has a causal language model.")

    def fields(self) -> dict[str, Any]:
        return dict(self.model_extra or {})


class DataSettings(Settings):
    path: str = Field(
        min_length=1,
        description=(
            'A text file (one document), a .jsonl file of {"text": ...} lines (a document each), or '
            f"{PYTHON_STDLIB}: the sources of the running Python's standard library."
        ),
    )
    max_bytes: int | None = Field(
        default=None,
        ge=1,
        description="Use at most about this many bytes of text: whole documents, drawn by the seed.",
    )
    held_out: float = Field(
        default=0.05,
        gt=0,
        lt=1,
        description=(
            "Share of the bytes that is never trained on: whole documents drawn by the seed, or the "
            "end of the text where there is only one document."
        ),
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


class OptimizerSettings(Settings):
    lr: float = Field(default=1e-5, gt=0, description="Peak learning rate.")
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = Field(
        default=(0.9, 0.95), description="AdamW's decay rates of the two moments."
    )
    eps: float = Field(default=1e-8, gt=0, description="AdamW's epsilon.")
    weight_decay: float = Field(default=0.01, ge=0, description="Decoupled weight decay.")
    max_grad_norm: float | None = Field(
        default=1.0, gt=0, description="Global norm to clip to; null for no clipping."
    )


class ScheduleSettings(Settings):
    kind: Literal["cosine", "constant"] = Field(
        default="cosine", description="Shape of the learning rate after warm-up."
    )
    warmup_steps: int = Field(default=0, ge=0, description="Steps of linear rise from lr / warmup_steps.")
    min_lr: float = Field(default=0.0, ge=0, description="Learning rate of the last step (cosine only).")


class PrecisionSettings(Settings):
    dtype: Literal["auto", "bfloat16", "float32"] = Field(
        default="auto",
        description=(
            "Of the streamed weights. bfloat16 keeps an exact fp32 master. "
            "auto: bfloat16 on a GPU, float32 on a CPU."
        ),
    )
    master: Literal["split", "none"] = Field(
        default="split",
        description="With bfloat16 weights. none: no fp32 master, weights are rounded stochastically.",
    )
    moments: Literal["fp32", "bf16", "int8"] = Field(
        default="fp32", description="How Adam's moments are kept. bf16 and int8 are rounded stochastically."
    )


class EvalSettings(Settings):
    max_bytes: int = Field(default=200_000, ge=1, description="Evaluate on at most about as many bytes.")
    context: int = Field(
        default=0,
        ge=0,
        description=(
            "Tokens of a row that only give context, having been targets of the row before. 0: the "
            "first target of a row sees one token."
        ),
    )
    beat_bigram: bool = Field(
        default=False, description="Exit with status 1 unless the model beats the byte bigram model."
    )


class SampleSettings(Settings):
    prompt: str = Field(default="", description="Text to go on from.")
    tokens: int = Field(default=64, ge=0, description="Tokens to add; 0 for no sample.")
    temperature: float = Field(default=0.8, ge=0, description="0 takes the likeliest token each time.")


class OutputSettings(Settings):
    directory: str = Field(
        default="runs/train",
        min_length=1,
        description="Of the run: config.yaml, metrics.jsonl and, at the end, the model in model/.",
    )
    if_exists: Literal["number", "error"] = Field(
        default="number",
        description=(
            "A run never writes into a directory that holds something. number: it takes the first free "
            "name of directory, directory-2, directory-3, ...; error: it stops."
        ),
    )
    log_every: int = Field(default=10, ge=1, description="Steps between two progress lines.")


def _path_or_shape(value: Any) -> str:
    return "shape" if isinstance(value, dict | ShapeSettings) else "path"


class TrainSettings(Settings):
    model: Annotated[
        Annotated[str, Tag("path"), Field(min_length=1)] | Annotated[ShapeSettings, Tag("shape")],
        Discriminator(_path_or_shape),
    ] = Field(description="A Hugging Face model directory to go on training, or the shape of a new model.")
    data: DataSettings = Field(description="What to train on; a string stands for its path.")
    tokenizer: TokenizerSettings = Field(
        default_factory=TokenizerSettings, description="Of a new model; a model directory has its own."
    )
    sequence_length: int = Field(default=1024, ge=2, description="Tokens in a row.")
    batch: BatchSettings = Field(default_factory=BatchSettings, description="Rows in a step.")
    steps: int = Field(ge=1, description="Optimizer steps.")
    optimizer: OptimizerSettings = Field(default_factory=OptimizerSettings, description="AdamW.")
    schedule: ScheduleSettings = Field(
        default_factory=ScheduleSettings, description="The learning rate over the steps."
    )
    precision: PrecisionSettings = Field(default_factory=PrecisionSettings, description="Number formats.")
    device: str = Field(
        default="auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$", description="auto, cpu, cuda, cuda:1."
    )
    compile: bool | Literal["auto"] = Field(
        default="auto", description="torch.compile the blocks: true, false, or auto, which does on a GPU."
    )
    slots: int = Field(
        default=2, ge=2, description="Device buffers, each of the largest layer, that weights stream through."
    )
    seed: int = Field(
        default=0, ge=0, lt=2**63, description="Of the weights, the split, the order of rows and the sample."
    )
    eval: EvalSettings = Field(default_factory=EvalSettings, description="The held-out measurement.")
    sample: SampleSettings = Field(default_factory=SampleSettings, description="The text shown at the end.")
    output: OutputSettings = Field(default_factory=OutputSettings, description="What is kept.")

    @model_validator(mode="before")
    @classmethod
    def _short_forms(cls, values: Any) -> Any:
        if isinstance(values, dict) and isinstance(values.get("data"), str):
            return {**values, "data": {"path": values["data"]}}
        return values

    @model_validator(mode="after")
    def _agreement(self) -> "TrainSettings":
        if self.schedule.min_lr > self.optimizer.lr:
            raise ValueError(
                f"schedule.min_lr ({self.schedule.min_lr:g}) is above optimizer.lr ({self.optimizer.lr:g})"
            )
        if self.eval.context >= self.sequence_length:
            raise ValueError(
                f"eval.context ({self.eval.context}) should be below sequence_length ({self.sequence_length})"
            )
        return self
