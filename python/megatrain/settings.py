"""Settings of a streamed model: frozen, checked when made."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

import torch

from megatrain._native import CudaBackend, HostBackend, TileFormat, cuda_device_count, cuda_unavailable_reason
from megatrain.placement import Placement
from megatrain.rules import AdamW, Optimizer
from megatrain.transfers import Transfers


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The knobs of StreamedModel; its docstring explains them."""

    optimizer: Optimizer = field(default_factory=AdamW)
    max_grad_norm: float | None = None
    dtype: torch.dtype = torch.bfloat16
    master: str = "split"
    moments: str = "fp32"
    slots: int = 2
    compile: bool | None = None
    skip_nonfinite: bool = True
    host_memory: int | None = None
    device_memory: int | None = None
    seed: int = 0
    threads: int = 0
    isa: str = ""
    staging_bytes: int = 64 << 20
    keep_gradients: bool = False
    self_check: bool = True
    skip_idle_experts: bool = False
    placement: Placement = field(default_factory=Placement)
    transfers: Transfers = field(default_factory=Transfers)

    def __post_init__(self) -> None:
        if self.dtype not in (torch.bfloat16, torch.float32):
            raise ValueError(f"dtype is {self.dtype}; it must be torch.bfloat16 or torch.float32")
        if not -(2**63) <= self.seed < 2**63:
            raise ValueError(f"seed is {self.seed}; it must fit into 64 bits")
        if self.threads < 0:
            raise ValueError(f"threads is {self.threads}; it must be at least 0")
        if self.master not in ("split", "none"):
            raise ValueError(f'master is "{self.master}"; it must be "split" or "none"')
        if self.master == "none" and self.dtype == torch.float32:
            raise ValueError('master is "none" with dtype=torch.float32, whose weights are their own master')
        if self.moments not in ("fp32", "bf16", "int8"):
            raise ValueError(f'moments is "{self.moments}"; it must be "fp32", "bf16" or "int8"')
        if not isinstance(self.slots, int) or self.slots < 1:
            raise ValueError(f"slots is {self.slots}; the ring needs a whole number of at least 1")
        for name, kind in (("placement", Placement), ("transfers", Transfers)):
            if not isinstance(getattr(self, name), kind):
                raise ValueError(f"{name} is {getattr(self, name)!r}; it must be a {kind.__name__}")
        if self.max_grad_norm is not None and not self.max_grad_norm > 0:
            raise ValueError(f"max_grad_norm is {self.max_grad_norm}; it must be above 0, or None for no clipping")

    @property
    def tile_format(self) -> TileFormat:
        bf16 = "bf16_split" if self.master == "split" else "bf16"
        return TileFormat(bf16 if self.dtype == torch.bfloat16 else "fp32", self.moments, self.optimizer.rule)


def chosen_isa(isa: str) -> str:
    """The instruction set asked for: the setting, else the environment's MEGATRAIN_ISA, else "" (fastest)."""
    return isa or os.environ.get("MEGATRAIN_ISA", "")


def resolve_backend(device: str | torch.device | HostBackend | CudaBackend) -> HostBackend | CudaBackend:
    """The backend that `device` names: "auto" is CUDA where there is a device, else the host."""
    if isinstance(device, HostBackend | CudaBackend):
        return device
    if device == "auto":
        return CudaBackend(torch.cuda.current_device()) if cuda_device_count() > 0 else HostBackend()
    wanted = torch.device(device)
    if wanted.type == "cpu":
        return HostBackend()
    if wanted.type != "cuda":
        raise ValueError(f'device is "{device}"; it must be "auto", "cuda", "cuda:N", "cpu" or a backend')
    if cuda_device_count() == 0:
        raise ValueError(f'device is "{device}", but there is no CUDA device: {cuda_unavailable_reason()}')
    return CudaBackend(wanted.index if wanted.index is not None else torch.cuda.current_device())


def parse_bytes(value: int | str | None, name: str) -> int | None:
    """128 << 30, "128GiB" or "80e9" in bytes."""
    if value is None or isinstance(value, int):
        if value is not None and value <= 0:
            raise ValueError(f"{name} is {value}; it must be above 0 bytes")
        return value
    units = {"kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40, "kb": 10**3, "mb": 10**6, "gb": 10**9}
    text = value.strip().lower()
    for unit, factor in units.items():
        if text.endswith(unit):
            text, scale = text[: -len(unit)], factor
            break
    else:
        scale = 1
    try:
        parsed = int(float(text) * scale)
    except (ValueError, OverflowError):
        raise ValueError(f'{name} is "{value}"; write bytes, or a number with KiB, MiB, GiB, KB, MB or GB') from None
    return parse_bytes(parsed, name)
