"""Which arguments of Hugging Face's Trainer a streamed model can keep."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megatrain.model import StreamedModel

if TYPE_CHECKING:
    from transformers import TrainingArguments

_ADAMW = ("adamw_torch", "adamw_torch_fused", "adamw_torch_xla", "adamw_torch_npu_fused", "paged_adamw_32bit")
_LION = ("lion_32bit", "paged_lion_32bit")
# AdamW's are the arguments' default, so they say nothing about a model with another rule.
_OPTIMIZERS = {"adamw": _ADAMW, "lion": _ADAMW + _LION}
_INSTEAD = {
    "fp16": "use bf16",
    "torch_compile": "use StreamedModel(compile=...)",
    "bf16_full_eval": "it evaluates in its own dtype",
    "fp16_full_eval": "it evaluates in its own dtype",
}


def require_streamed(model: Any) -> None:
    """ValueError unless `model` is a StreamedModel."""
    if not isinstance(model, StreamedModel):
        raise ValueError(f"model is a {type(model).__name__}; it must be a StreamedModel")


def refuse(args: TrainingArguments, model: StreamedModel) -> None:
    """ValueError naming the first argument that cannot be kept."""
    if args.device.type != model.device.type:
        raise ValueError(
            f"the arguments' device is {args.device}, the model's {model.device}; on the host's backend use_cpu=True"
        )
    if args.world_size > 1 or args.n_gpu > 1:
        raise ValueError(
            f"{max(args.world_size, args.n_gpu)} devices; a streamed model has one, set CUDA_VISIBLE_DEVICES to it"
        )
    for name, instead in _INSTEAD.items():
        if getattr(args, name, False):
            raise ValueError(f"{name} is on; a streamed model does not have it, {instead}")
    _refuse_optimizer(args, model.settings.optimizer.rule)
    if args.save_only_model and args.load_best_model_at_end:
        raise ValueError(
            "save_only_model and load_best_model_at_end are on; the best weights come back from a whole checkpoint, "
            "turn save_only_model off"
        )


def _refuse_optimizer(args: TrainingArguments, rule: str) -> None:
    optim = getattr(args.optim, "value", args.optim)
    if optim not in _OPTIMIZERS[rule]:
        raise ValueError(
            f"optim is {optim}, and the streamed model's optimizer {rule}; choose it by StreamedModel(optimizer=...), "
            f"its moments by moments=, and leave optim at {_ADAMW[0]}"
        )
    for name in ("optim_args", "optim_target_modules"):
        value = getattr(args, name, None)
        if value:
            raise ValueError(
                f"{name} is {value!r}; the optimizer is that of the streamed model, set by StreamedModel(optimizer=...)"
            )
