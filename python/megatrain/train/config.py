"""The schema of a training run: every key, its meaning and its limits."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag, model_validator

from megatrain.rules import SMALLEST_EPS

from .config_data import BatchSettings, DataSettings, Settings, Texts, TokenizerSettings, listed


class ShapeSettings(BaseModel):
    """A new model with random weights. Besides `type`, any key of that type's transformers
    configuration, such as hidden_size; vocab_size is the tokenizer's unless given."""

    model_config = ConfigDict(frozen=True, extra="allow")

    type: str = Field(description="A transformers model type that has a causal language model.")

    def fields(self) -> dict[str, Any]:
        return dict(self.model_extra or {})


class OptimizerSettings(Settings):
    lr: float = Field(default=1e-5, gt=0, description="Peak learning rate.")
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = Field(
        default=(0.9, 0.95), description="AdamW's decay rates of the two moments."
    )
    eps: float = Field(default=1e-8, ge=SMALLEST_EPS, description="AdamW's epsilon.")
    weight_decay: float = Field(default=0.01, ge=0, description="Decoupled weight decay; not of biases and norms.")
    max_grad_norm: float | None = Field(default=1.0, gt=0, description="Global norm to clip to; null for no clipping.")
    skip_idle_experts: bool = Field(
        default=False,
        description="Experts without tokens keep weights, moments and step counts; of models whose experts can be told "
        "apart (docs/models.md). false: they decay and their moments fade, as in torch.",
    )


class LoraSettings(Settings):
    rank: int = Field(default=16, ge=1, description="Of the two matrices.")
    alpha: float = Field(default=32.0, gt=0, description="The adapter's output is multiplied by alpha / rank.")
    dropout: float = Field(default=0.0, ge=0, lt=1, description="Of the adapter's input.")
    targets: Texts = Field(
        default_factory=lambda: ["all-linear"],
        description="Names of linear layers, such as [q_proj, v_proj]; all-linear: all but the output embedding.",
    )


class ScheduleSettings(Settings):
    kind: Literal["cosine", "constant", "linear", "wsd"] = Field(
        default="cosine",
        description=(
            "Shape of the learning rate after warm-up. cosine and linear fall towards min_lr; wsd stays and "
            "falls linearly in the last steps."
        ),
    )
    warmup_steps: int = Field(default=0, ge=0, description="Steps of linear rise from lr / warmup_steps.")
    warmup_share: float | None = Field(
        default=None, ge=0, le=1, description="Steps of rise as a share of all; instead of warmup_steps."
    )
    decay_share: float = Field(default=0.1, ge=0, le=1, description="Share of all steps in which wsd falls.")
    min_lr: float = Field(
        default=0.0, ge=0, description="Where a fall would arrive one step behind the last (not of constant)."
    )

    @model_validator(mode="after")
    def _one_warmup(self) -> "ScheduleSettings":
        if self.warmup_steps and self.warmup_share is not None:
            raise ValueError("warmup_steps and warmup_share are both given; one of them is enough")
        return self


class PrecisionSettings(Settings):
    dtype: Literal["auto", "bfloat16", "float32"] = Field(
        default="auto",
        description=(
            "Of the streamed weights. bfloat16 keeps an exact fp32 master. auto: bfloat16 on a GPU, float32 on a CPU."
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
    every: int | None = Field(default=None, ge=1, description="Steps between evaluations; null: only at the end.")
    at_start: bool = Field(default=False, description="Evaluate before the first step, too.")
    max_bytes: int | None = Field(
        default=200_000, ge=1, description="Evaluate on at most about as many bytes; null: on all."
    )
    context: int = Field(
        default=0,
        ge=0,
        description=(
            "Tokens of a row that only give context, having been targets of the row before. 0: the "
            "first target of a row sees one token."
        ),
    )
    patience: int | None = Field(
        default=None,
        ge=1,
        description="Stop after so many evaluations in a row without a new best loss; null: never. Needs every.",
    )
    min_delta: float = Field(default=0.0, ge=0, description="By how much a loss must be below the best to be new best.")
    keep_best: bool = Field(
        default=False, description="Save the weights of each new best evaluation in best/. Needs every."
    )
    beat_bigram: bool = Field(
        default=False,
        description="Compare with a byte bigram model of the same text; exit with status 1 unless it is beaten.",
    )


class SampleSettings(Settings):
    prompt: Texts = Field(
        default_factory=lambda: [""],
        description="Text to go on from, or what a user says where the data are chats; one, or a list.",
    )
    every: int | None = Field(default=None, ge=1, description="Steps between samples; null: only at the end.")
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
    log_every: int = Field(
        default=1, ge=1, description="Steps between two lines on the screen; metrics.jsonl has every step."
    )


class CheckpointSettings(Settings):
    every: int | None = Field(
        default=None,
        ge=1,
        description="Steps between checkpoints; the last step has one, too. null: only where the run is interrupted.",
    )
    keep: int = Field(default=2, ge=1, description="Whole checkpoints to keep; older ones are removed.")


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
    steps: int | None = Field(default=None, ge=1, description="Optimizer steps; or give epochs.")
    epochs: float | None = Field(default=None, gt=0, description="Passes over the data; or give steps.")
    optimizer: OptimizerSettings = Field(default_factory=OptimizerSettings, description="AdamW.")
    schedule: ScheduleSettings = Field(
        default_factory=ScheduleSettings, description="The learning rate over the steps."
    )
    precision: PrecisionSettings = Field(default_factory=PrecisionSettings, description="Number formats.")
    device: str = Field(default="auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$", description="auto, cpu, cuda, cuda:1.")
    compile: bool | Literal["auto"] = Field(
        default="auto", description="torch.compile the blocks: true, false, or auto, which does on a GPU."
    )
    trust_remote_code: bool = Field(
        default=False, description="Run the Python files that a model directory brings. Look at them first."
    )
    lora: LoraSettings | None = Field(
        default=None,
        description=(
            "Freeze the model and train a LoRA adapter, saved in PEFT's format; {} for the defaults, null for full "
            "training. Needs peft."
        ),
    )
    slots: int = Field(
        default=2, ge=2, description="Device buffers, each of the largest layer, that weights stream through."
    )
    hardware: str = Field(
        default="auto",
        min_length=1,
        description=(
            "Whose figures the plan is made with: auto measures this machine (on a CPU nothing is planned), a "
            "preset's name (H200, H100, A100, RTX 4090, RTX 3090, GH200) stands for another, on a CPU too."
        ),
    )
    device_memory: int | str | None = Field(
        default=None, description="Of the GPU that may be used, such as 24GiB; null: what is free."
    )
    host_memory: int | str | None = Field(
        default=None, description="Of the host that may be used, such as 100GiB; null: what is free."
    )
    seed: int = Field(
        default=0, ge=0, lt=2**63, description="Of the weights, the split, the order of rows and the sample."
    )
    eval: EvalSettings = Field(default_factory=EvalSettings, description="Measurements on what is not trained on.")
    sample: SampleSettings = Field(default_factory=SampleSettings, description="Texts drawn from the model and shown.")
    checkpoint: CheckpointSettings = Field(
        default_factory=CheckpointSettings,
        description=(
            "checkpoint-<step>/ in the run's directory: all that the run needs to go on exactly. Saved on Ctrl-C and "
            "SIGTERM, too."
        ),
    )
    resume: str = Field(
        default="never",
        min_length=1,
        description=(
            "never: a new run. auto: go on from the newest whole checkpoint of the last run in output.directory (or "
            "its numbered followers), in its place; a new run where there is none; nothing where it is "
            "finished. Else the path of a checkpoint, or of a directory of them: a new directory goes on from there."
        ),
    )
    output: OutputSettings = Field(default_factory=OutputSettings, description="What is kept.")
    report_to: Annotated[list[Literal["tensorboard", "wandb"]], BeforeValidator(listed)] = Field(
        default_factory=list,
        description="Also log to TensorBoard (in tensorboard/ of the run's directory), Weights & Biases, or both.",
    )
    project: str = Field(default="megatrain", min_length=1, description="Project of Weights & Biases.")

    @model_validator(mode="before")
    @classmethod
    def _short_forms(cls, values: Any) -> Any:
        if isinstance(values, dict) and isinstance(values.get("data"), str | list):
            return {**values, "data": {"path": values["data"]}}
        return values

    @model_validator(mode="after")
    def _agreement(self) -> "TrainSettings":
        for wrong, message in self._disagreements():
            if wrong:
                raise ValueError(message)
        return self

    def _disagreements(self) -> Iterator[tuple[bool, str]]:
        yield (
            self.lora is not None and not isinstance(self.model, str),
            "lora is given, but model is the shape of a new model; an adapter needs a trained one",
        )
        yield self.steps is None and self.epochs is None, "one of the keys 'steps' and 'epochs' is missing"
        yield self.steps is not None and self.epochs is not None, "steps and epochs are both given; one is enough"
        yield (
            self.schedule.min_lr > self.optimizer.lr,
            f"schedule.min_lr ({self.schedule.min_lr:g}) is above optimizer.lr ({self.optimizer.lr:g})",
        )
        yield (
            self.eval.context >= self.sequence_length,
            f"eval.context ({self.eval.context}) should be below sequence_length ({self.sequence_length})",
        )
        evaluates = self.data.held_out > 0 or bool(self.data.validation)
        for name in ("every", "at_start", "beat_bigram"):
            wanted = getattr(self.eval, name)
            yield (
                bool(wanted) and not evaluates,
                f"eval.{name} is {wanted}, but data.held_out is 0 and there is no data.validation",
            )
        for name in ("patience", "keep_best"):
            wanted = getattr(self.eval, name)
            yield bool(wanted) and self.eval.every is None, f"eval.{name} is {wanted}, but eval.every is not set"
