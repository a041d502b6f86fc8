"""Hugging Face's Trainer over a streamed model.

    model = megatrain.StreamedModel.from_pretrained(path)
    StreamedTrainer(model=model, args=TrainingArguments(...), train_dataset=...).train()

Gradients, losses and updates are those of the Trainer with the resident module: accumulation, `num_items_in_batch`,
clipping by `max_grad_norm` and schedulers are the Trainer's own. `StreamedTraining` does the same for its subclasses.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import Trainer, TrainingArguments

from megatrain.full_logits import without_lazy
from megatrain.integrations.arguments import refuse, require_streamed
from megatrain.integrations.module_face import call_through
from megatrain.integrations.trainer_checkpoints import SCHEDULER, WEIGHTS, newest_whole
from megatrain.loss import tokens_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from megatrain.model import StreamedModel


class StreamedTraining:
    """Stands before Trainer, or a class derived from it, among the bases of a class; `model` is then a StreamedModel.

    The optimizer is the model's. Unless it was given parameter groups, learning rate, weight decay, betas and
    epsilon are those of the arguments, as in the Trainer. Checkpoints hold what an exact resume needs.

    ValueError for arguments that cannot be kept: another device than the model's, several processes, fp16,
    torch_compile, bf16_full_eval and fp16_full_eval, other optimizers than the model's, optim_args,
    optim_target_modules, and save_only_model with load_best_model_at_end."""

    def __init__(self, model: StreamedModel, args: TrainingArguments | None = None, **kwargs: Any) -> None:
        require_streamed(model)
        if kwargs.get("optimizers", (None, None))[0] is not None or kwargs.get("optimizer_cls_and_kwargs") is not None:
            raise ValueError("the optimizer is that of the streamed model; pass StreamedModel(optimizer=...)")
        if args is not None:
            refuse(args, model)
        schedule = kwargs.pop("optimizers", (None, None))[1]
        self.streamed = model
        super().__init__(model=model.module, args=args, optimizers=(model.optimizer, schedule), **kwargs)  # type: ignore[call-arg]
        refuse(self.args, model)
        call_through(model)
        self.accelerator.clip_grad_norm_ = self._clip

    if TYPE_CHECKING:
        args: TrainingArguments
        accelerator: Any
        state: Any
        lr_scheduler: Any

    def _clip(self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float = 2) -> float:
        """The Trainer's way to the norm, and with an infinite limit to look at it only."""
        if norm_type != 2:
            raise ValueError(f"norm_type is {norm_type}; the norm of streamed gradients is the 2-norm")
        own = self.streamed.settings.max_grad_norm
        return self.streamed.clip_grad_norm_(max_norm if math.isfinite(max_norm) or own is None else own)

    def create_optimizer(self, model: torch.nn.Module | None = None) -> torch.optim.Optimizer:
        optimizer, args, settings = self.streamed.optimizer, self.args, self.streamed.settings.optimizer
        if settings.params is None:
            given: dict[str, Any] = dict(lr=args.learning_rate, weight_decay=args.weight_decay)
            if settings.rule == "adamw":
                given |= dict(betas=(args.adam_beta1, args.adam_beta2), eps=args.adam_epsilon)
            optimizer.defaults |= given  # some schedules take the learning rate from there
            for group in optimizer.param_groups:
                group |= given if group["decays"] else {**given, "weight_decay": 0.0}
        return optimizer

    def floating_point_ops(self, inputs: Any) -> int:
        """6 a token and parameter; the module itself knows of the blocks' parameters no more."""
        if not isinstance(inputs, Mapping):  # prompts that are yet to be answered
            return 0
        return 6 * tokens_of(inputs) * self.streamed.memory_report().parameters

    def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
        return without_lazy(super().prediction_step(*args, **kwargs), "the evaluation's metrics")  # type: ignore[misc]

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """As the Trainer's; with `resume_from_checkpoint=True` checkpoints that are damaged are passed over, with a
        warning, and one that is named is used or CheckpointError."""
        directory = self.args.output_dir
        if resume_from_checkpoint is True and directory is not None:
            found = newest_whole(Path(directory))
            resume_from_checkpoint = True if found is None else str(found)
        return super().train(resume_from_checkpoint, *args, **kwargs)  # type: ignore[misc]

    # saving

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        state = self.streamed.state_dict(dtype=self.streamed.dtype) if state_dict is None else state_dict
        super()._save(output_dir, state)  # type: ignore[misc]

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        self.streamed.save_checkpoint(Path(output_dir) / WEIGHTS)
        torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / SCHEDULER)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: torch.nn.Module | None = None) -> None:
        """Weights come with the optimizer's state, whose groups the schedule's beginning would overwrite now."""

    def _load_best_model(self) -> None:
        best = self.state.best_model_checkpoint
        if best is not None:
            self.streamed.load_checkpoint(Path(best) / WEIGHTS)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            self.streamed.load_checkpoint(Path(checkpoint) / WEIGHTS)
            self.lr_scheduler.load_state_dict(torch.load(Path(checkpoint) / SCHEDULER, weights_only=True))


class StreamedTrainer(StreamedTraining, Trainer):
    """transformers.Trainer whose `model` is a StreamedModel; see `StreamedTraining`."""
