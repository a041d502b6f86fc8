"""TRL's trainers over a streamed model. Adapters are added before the model is streamed.

What a trainer compares the model with, its reference, is another StreamedModel or module (DPO), or of a new LoRA
adapter the base that it shares, with the adapter off."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from trl.trainer.dpo_trainer import DPOTrainer
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.sft_trainer import SFTTrainer

from megatrain.integrations.arguments import require_streamed
from megatrain.integrations.module_face import call_through, generate_through
from megatrain.integrations.transformers import StreamedTraining
from megatrain.model import StreamedModel

if TYPE_CHECKING:
    from collections.abc import Iterator


class StreamedSFTTrainer(StreamedTraining, SFTTrainer):
    """trl.SFTTrainer whose `model` is a StreamedModel."""


class StreamedDPOTrainer(StreamedTraining, DPOTrainer):
    """trl.DPOTrainer whose `model` is a StreamedModel. ref_model: a module, or a StreamedModel, of the same weights
    with every parameter frozen for instance; None for a new LoRA adapter.

    ValueError for None with another model, for `peft_config`, for `sync_ref_model`, and for
    `precompute_ref_log_probs`, which hashes all weights."""

    def __init__(self, model: StreamedModel, ref_model: Any = None, args: Any = None, **kwargs: Any) -> None:
        require_streamed(model)
        _refuse_adapter_of(kwargs)
        _refuse_moving_reference(args)
        if args is not None and args.precompute_ref_log_probs:
            raise ValueError("precompute_ref_log_probs is on; a streamed model computes them as it goes")
        if ref_model is None and not _is_new_adapter(model):
            raise ValueError(
                "ref_model is None, and the model is not a base with a new LoRA adapter, which is its own reference; "
                "give a StreamedModel of the same weights with every parameter frozen, for instance"
            )
        reference = ref_model.module if isinstance(ref_model, StreamedModel) else ref_model
        with _no_copy_of_the_adapter(model):
            super().__init__(model=model, ref_model=reference, args=args, **kwargs)
        if isinstance(ref_model, StreamedModel):
            self.streamed_reference = ref_model
            call_through(ref_model)


class StreamedGRPOTrainer(StreamedTraining, GRPOTrainer):
    """trl.GRPOTrainer whose `model` is a StreamedModel, which also samples.

    ValueError for `beta` above 0 with another model than a new LoRA adapter's, for `peft_config`, for `sync_ref_model`,
    and for `use_vllm`, which needs the weights in another engine."""

    def __init__(self, model: StreamedModel, reward_funcs: Any, args: Any = None, **kwargs: Any) -> None:
        require_streamed(model)
        _refuse_adapter_of(kwargs)
        _refuse_moving_reference(args)
        if args is not None and args.use_vllm:
            raise ValueError("use_vllm is on; a streamed model samples by itself")
        if args is not None and args.beta != 0.0 and not _is_new_adapter(model):
            raise ValueError(
                f"beta is {args.beta}, and the model is not a base with a new LoRA adapter, its own reference: "
                "TRL would load one in full; set beta=0.0"
            )
        with _no_copy_of_the_adapter(model):
            super().__init__(model=model, reward_funcs=reward_funcs, args=args, **kwargs)
        generate_through(model)


def _refuse_adapter_of(settings: dict[str, Any]) -> None:
    if settings.get("peft_config") is not None:
        raise ValueError("peft_config is given; add the adapter before the model is streamed, by get_peft_model()")


def _refuse_moving_reference(args: Any) -> None:
    """TRL would mix the reference from the module's parameters, which for blocks are not the weights."""
    if args is not None and args.sync_ref_model:
        raise ValueError("sync_ref_model is on; the reference of a streamed model stays as it is")


def _is_new_adapter(model: StreamedModel) -> bool:
    """Only LoRA is trained, and its second matrices are zero, as they are until an update."""
    learned = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    seconds = [parameter for name, parameter in learned.items() if ".lora_B." in name]
    return (
        bool(seconds)
        and all(".lora_" in name for name in learned)
        and not any(bool(parameter.detach().any()) for parameter in seconds)
    )


@contextmanager
def _no_copy_of_the_adapter(model: StreamedModel) -> Iterator[None]:
    """TRL makes a copy of an adapter that it finds the reference, for it may have been trained before; without a copy
    it takes the base."""
    module: Any = model.module
    if not hasattr(module, "add_adapter"):
        yield
        return
    module.add_adapter = lambda name, config: None
    try:
        yield
    finally:
        del module.add_adapter
