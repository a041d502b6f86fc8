"""Build the streamed model that the settings ask for: a new one from a shape, or a directory's."""

import importlib.util
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import megatrain
from megatrain import _native
from megatrain.data import TextTokenizer

from .config import ShapeSettings, TrainSettings
from .errors import UserError, one_line, suggest


@dataclass(frozen=True)
class ModelSource:
    """A checked description of the model; nothing large has been allocated yet."""

    config: PretrainedConfig
    directory: Path | None

    def check(self, tokenizer: TextTokenizer, sequence_length: int) -> None:
        """Refuse a tokenizer or a row that the model has no place for."""
        vocabulary = int(self.config.get_text_config().vocab_size)
        if tokenizer.size > vocabulary:
            raise UserError(f"model: vocab_size is {vocabulary}, but the tokenizer has {tokenizer.size} tokens")
        positions = getattr(self.config.get_text_config(), "max_position_embeddings", None)
        if positions is not None and sequence_length > positions:
            raise UserError(f"sequence_length is {sequence_length}, but the model has {positions} positions")


def open_directory(path: str, weights: bool = True, trust_remote_code: bool = False) -> ModelSource:
    """Check a Hugging Face model directory without reading its weights; with `weights` they must be there. Its own
    code runs only with `trust_remote_code`."""
    directory = Path(path)
    if not directory.is_dir():
        raise UserError(f"model {path}: no such directory")
    file = directory / "config.json"
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"model {path}: holds no config.json, so it is no Hugging Face model directory") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{file}: {one_line(error)}") from None
    if not isinstance(values, dict) or not isinstance(values.get("model_type"), str):
        raise UserError(f"{file}: names no model_type")
    if weights and not [*directory.glob("*.safetensors"), *directory.glob("pytorch_model*.bin")]:
        raise UserError(f"model {path}: holds no .safetensors and no pytorch_model.bin weights")
    if values.get("auto_map") and trust_remote_code:
        return ModelSource(AutoConfig.from_pretrained(path, trust_remote_code=True), directory)
    if values.get("auto_map") and values["model_type"] not in CONFIG_MAPPING:
        raise UserError(f"model {path}: brings code of its own; trust_remote_code: true runs it, after a look at it")
    return ModelSource(_make_config(values["model_type"], lambda cls: cls.from_dict(values), str(file)), directory)


def describe_shape(shape: ShapeSettings, vocabulary: int, end: int | None) -> ModelSource:
    """The transformers configuration of a new model over a tokenizer's vocabulary, in which `end` ends a text."""
    fields = {
        "vocab_size": vocabulary,
        "eos_token_id": end,
        "bos_token_id": None,
        **shape.fields(),
    }

    def build(config_class: type[PretrainedConfig]) -> PretrainedConfig:
        known = {*config_class().to_dict(), *getattr(config_class, "attribute_map", {})} - {"model_type"}
        for name in fields:
            if name not in known:
                raise UserError(f"unknown key 'model.{name}' of model type {shape.type}{suggest(name, known)}")
        return config_class(**fields)

    return ModelSource(_make_config(shape.type, build, "model"), None)


def _make_config(
    model_type: str, build: Callable[[type[PretrainedConfig]], PretrainedConfig], source: str
) -> PretrainedConfig:
    if model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES or model_type not in CONFIG_MAPPING:
        hint = suggest(model_type, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
        raise UserError(f"{source}: unknown model type '{model_type}'{hint}; it should be a causal language model")
    try:
        return build(CONFIG_MAPPING[model_type])
    except UserError:
        raise
    except Exception as error:  # every configuration class has its own checks
        raise UserError(f"{source}: {one_line(error)}") from None


def stream(source: ModelSource, settings: TrainSettings) -> megatrain.StreamedModel:
    """The model in host memory, ready to train."""
    arguments: dict[str, Any] = dict(
        optimizer=megatrain.AdamW(
            lr=settings.optimizer.lr,
            betas=settings.optimizer.betas,
            eps=settings.optimizer.eps,
            weight_decay=settings.optimizer.weight_decay,
        ),
        max_grad_norm=settings.optimizer.max_grad_norm,
        skip_idle_experts=settings.optimizer.skip_idle_experts,
        dtype=resolve_dtype(settings),
        master=settings.precision.master,
        moments=settings.precision.moments,
        device=settings.device,
        compile=None if settings.compile == "auto" else settings.compile,
        slots=settings.slots,
        hardware=None if settings.hardware == "auto" else settings.hardware,
        device_memory=settings.device_memory,
        host_memory=settings.host_memory,
        seed=settings.seed,
    )
    try:
        if source.directory is not None:
            return megatrain.StreamedModel.from_pretrained(
                str(source.directory),
                trust_remote_code=settings.trust_remote_code,
                adapter=lora_config(settings),
                **arguments,
            )
        torch.manual_seed(settings.seed)
        make: Any = AutoModelForCausalLM.from_config  # untyped
        module = make(source.config, dtype=torch.float32)
        return megatrain.StreamedModel(module, **arguments)
    except (ValueError, TypeError, ZeroDivisionError, OSError, SafetensorError) as error:
        where = "model" if source.directory is None else f"model {source.directory}"
        raise UserError(f"{where}: {one_line(error)}") from error


def lora_config(settings: TrainSettings) -> Any:
    """A LoraConfig of PEFT, whose initial values the seed decides; None for full training."""
    lora = settings.lora
    if lora is None:
        return None
    if importlib.util.find_spec("peft") is None:
        raise UserError("lora: peft is not installed; run: pip install peft")
    from peft import LoraConfig

    torch.manual_seed(settings.seed)
    targets = lora.targets[0] if lora.targets == ["all-linear"] else lora.targets
    return LoraConfig(
        task_type="CAUSAL_LM",
        r=lora.rank,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]
        lora_dropout=lora.dropout,
        target_modules=targets,
        base_model_name_or_path=str(settings.model),
    )


def resolve_dtype(settings: TrainSettings) -> torch.dtype:
    """auto is fp32 on a CPU, since many CPUs have no fast bf16 products."""
    if settings.precision.dtype == "auto":
        on_gpu = settings.device.startswith("cuda") or (settings.device == "auto" and _native.cuda_device_count() > 0)
        return torch.bfloat16 if on_gpu else torch.float32
    return torch.bfloat16 if settings.precision.dtype == "bfloat16" else torch.float32
