"""AdamW on host memory by megatrain, torch and DeepSpeed: contestants of cpu_adam.py.

torch's and DeepSpeed's work on the memory of megatrain's own fp32 tile, so that nobody has the better place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from megatrain._native import Engine, HostBackend, ParameterUpdate, Section, TileFormat, TileLayout, TileStore

LR, BETAS, EPS, DECAY = 1e-5, (0.9, 0.95), 1e-8, 0.01
CLIP = 0.5  # the coefficient that clipping found
SPLIT, FP32 = TileFormat.bf16_split, TileFormat.fp32


@dataclass(frozen=True)
class Contestant:
    """`run` does it once; `nbytes` a parameter are read and written by it."""

    name: str
    nbytes: int
    run: Callable[[], object]


class Tiles:
    """One tile of `parameters` in each of megatrain's two exact formats, with ordinary values."""

    def __init__(self, parameters: int, threads: int) -> None:
        self.store = TileStore(HostBackend(), threads=threads)
        self.engine = Engine(self.store)
        self.steps = 0
        self._tiles: dict[Any, int] = {}
        for form in (SPLIT, FP32):
            self._tiles[form] = self.store.add(TileLayout(form, [(parameters, True)]))
        self.reset()

    def reset(self) -> None:
        for form, dtype in ((SPLIT, torch.bfloat16), (FP32, torch.float32)):
            generator = torch.Generator().manual_seed(1)
            self.view(form, Section.weights, dtype).normal_(0, 0.02, generator=generator)
            self.view(form, Section.gradients, dtype).normal_(0, 1e-3, generator=generator)
            for section in (Section.exp_avg, Section.exp_avg_sq):
                self.view(form, section, torch.float32).zero_()
        self.view(SPLIT, Section.master_low, torch.int16).zero_()

    def view(self, form: Any, section: Section, dtype: torch.dtype) -> torch.Tensor:
        return torch.frombuffer(self.store.view(self._tiles[form], section), dtype=dtype)

    def update(self, form: Any, coefficient: float = 1.0) -> None:
        self.steps += 1
        update = ParameterUpdate(
            0, lr=LR, beta1=BETAS[0], beta2=BETAS[1], eps=EPS, weight_decay=DECAY, step=self.steps
        )
        self.engine.update(self._tiles[form], [update], coefficient, 0)
        self.engine.wait_updates()


class Peers:
    """Optimizers on the fp32 tile, with the passes that a training step needs around them."""

    def __init__(self, tiles: Tiles) -> None:
        self.parameter = torch.nn.Parameter(tiles.view(FP32, Section.weights, torch.float32))
        self.gradient = tiles.view(FP32, Section.gradients, torch.float32)
        self.parameter.grad = self.gradient
        self.gradient16 = tiles.view(SPLIT, Section.gradients, torch.bfloat16)
        self.weight16 = tiles.view(SPLIT, Section.weights, torch.bfloat16)
        self.moments = {
            "exp_avg": tiles.view(FP32, Section.exp_avg, torch.float32),
            "exp_avg_sq": tiles.view(FP32, Section.exp_avg_sq, torch.float32),
        }

    def torch_fused(self) -> torch.optim.Optimizer:
        optimizer = torch.optim.AdamW([self.parameter], lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY, fused=True)
        optimizer.state[self.parameter] = {"step": torch.tensor(0.0), **self.moments}
        return optimizer

    def deepspeed(self) -> Any:
        """ImportError where it is not installed; compiles on first use."""
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        optimizer = DeepSpeedCPUAdam([self.parameter], lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY)
        optimizer.state[self.parameter] = {"step": 0, **self.moments}
        return optimizer

    def clipped_step(self, optimizer: Any) -> None:
        """What follows the norm, which ZeRO-3 takes on the GPU: 8 + 28 + 6 bytes a parameter."""
        self.gradient.mul_(CLIP)
        optimizer.step()
        with torch.no_grad():
            self.weight16.copy_(self.parameter)

    def whole_step(self, optimizer: Any) -> None:
        """From bf16 gradients to bf16 weights, norm on the host: 6 + 4 more."""
        self.gradient.copy_(self.gradient16)
        float(torch.linalg.vector_norm(self.gradient))
        self.clipped_step(optimizer)
