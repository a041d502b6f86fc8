"""Small diffusion transformers, written out here: what their stacks do that language models' do not."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

WIDTH, HEADS, LATENTS = 32, 4, 12


@dataclass
class Output:
    loss: torch.Tensor
    prediction: torch.Tensor


def timestep_features(t: torch.Tensor) -> torch.Tensor:
    """(rows,) in 0..1 to (rows, WIDTH)."""
    frequencies = torch.exp(-torch.arange(WIDTH // 2, device=t.device) / 3)
    angles = 1000 * t[:, None] * frequencies
    return torch.cat([angles.cos(), angles.sin()], -1)


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    q, k, v = (x.unflatten(-1, (HEADS, -1)).transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


class Modulated(nn.Module):
    """One stream's half of a block: shifts, scales and gates of its norms come from the condition."""

    def __init__(self) -> None:
        super().__init__()
        self.modulation = nn.Linear(WIDTH, 6 * WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def before(self, x: torch.Tensor, condition: torch.Tensor) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        parts = list(self.modulation(F.silu(condition))[:, None].chunk(6, -1))
        shift, scale = parts[:2]
        normed = F.layer_norm(x, (WIDTH,)) * (1 + scale) + shift
        return list(self.qkv(normed).chunk(3, -1)), parts[2:]

    def after(self, x: torch.Tensor, attended: torch.Tensor, parts: list[torch.Tensor]) -> torch.Tensor:
        gate, shift, scale, mlp_gate = parts
        x = x + gate * self.out(attended)
        return x + mlp_gate * self.mlp(F.layer_norm(x, (WIDTH,)) * (1 + scale) + shift)


class JointBlock(nn.Module):
    """Image and text, each with its own weights, attend together; both go on."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.text = Modulated(), Modulated()

    def forward(
        self, image: torch.Tensor, text: torch.Tensor, condition: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        (image_qkv, image_parts), (text_qkv, text_parts) = (
            self.image.before(image, condition),
            self.text.before(text, condition),
        )
        joined = attend(*(torch.cat(pair, 1) for pair in zip(image_qkv, text_qkv, strict=True)))
        attended_image, attended_text = joined.split([image.shape[1], text.shape[1]], 1)
        return self.image.after(image, attended_image, image_parts), self.text.after(text, attended_text, text_parts)


class SingleBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stream = Modulated()

    def forward(self, x: torch.Tensor, *, condition: torch.Tensor) -> torch.Tensor:
        qkv, parts = self.stream.before(x, condition)
        return self.stream.after(x, attend(*qkv), parts)


class DiT(nn.Module):
    """Two stacks, joint blocks and single ones with a long skip from each of the first half to its counterpart in the
    second; a condition with a gradient goes into all of them. The loss is that of rectified flow."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Linear(LATENTS, WIDTH)
        self.words = nn.Linear(LATENTS, WIDTH)
        self.time = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH))
        self.joint = nn.ModuleList(JointBlock() for _ in range(2))
        self.single = nn.ModuleList(SingleBlock() for _ in range(4))
        self.skips = nn.ModuleList(nn.Linear(2 * WIDTH, WIDTH) for _ in range(2))
        self.modulation = nn.Linear(WIDTH, 2 * WIDTH)
        self.head = nn.Linear(WIDTH, LATENTS)

    def forward(self, latents: torch.Tensor, words: torch.Tensor, noise: torch.Tensor, t: torch.Tensor) -> Output:
        """latents, noise: (rows, patches, LATENTS); words: (rows, tokens, LATENTS); t: (rows,)."""
        noisy = torch.lerp(latents, noise, t[:, None, None])
        image, text = self.patches(noisy), self.words(words)
        condition = self.time(timestep_features(t)) + text.mean(1)
        for block in self.joint:
            image, text = block(image, text, condition)
        x = torch.cat([image, text], 1)
        kept = []
        for index, block in enumerate(self.single):
            if index >= 2:
                x = self.skips[index - 2](torch.cat([x, kept.pop()], -1))
            x = block(x, condition=condition)
            if index < 2:
                kept.append(x)
        shift, scale = self.modulation(condition)[:, None].chunk(2, -1)
        x = F.layer_norm(x[:, : image.shape[1]], (WIDTH,)) * (1 + scale) + shift
        prediction = self.head(x)
        return Output(F.mse_loss(prediction, noise - latents), prediction)


def dit_batch(seed: int, rows: int = 2, length: int = 9, **_: object) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    latents, noise = (torch.randn(rows, length, LATENTS, generator=generator) for _ in range(2))
    words = torch.randn(rows, 5, LATENTS, generator=generator)
    return dict(latents=latents, words=words, noise=noise, t=torch.rand(rows, generator=generator))
