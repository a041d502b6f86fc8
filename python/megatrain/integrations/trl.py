"""TRL's trainers over a streamed model."""

from __future__ import annotations

from trl.trainer.sft_trainer import SFTTrainer

from megatrain.integrations.transformers import StreamedTraining


class StreamedSFTTrainer(StreamedTraining, SFTTrainer):
    """trl.SFTTrainer whose `model` is a StreamedModel; adapters are added before the model is streamed."""
