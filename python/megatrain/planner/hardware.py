"""What a machine can do, in figures: measured (`megatrain.measured_hardware`), or a preset. The planner has its
constants of machines from nowhere else."""

from __future__ import annotations

from dataclasses import dataclass

GIB = 1 << 30
GB = 10**9
TERA = 10**12


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """Bytes, bytes a second, FLOP a second; all sustained over whole steps, not peaks."""

    name: str
    gpu_memory: int
    """As torch reports it, before anything runs."""
    bf16_flops: float
    """Of large matrix products."""
    attention_flops: float
    """Of causal attention's forward in bf16, counting the half that is not masked."""
    fp32_flops: float
    gpu_bandwidth: float
    """Of the device's memory."""
    up: float
    """Copies to the device, nothing else running."""
    down: float
    up_together: float
    """The same while copies run the other way."""
    down_together: float
    up_beside_updates: float
    """The same while all cores update."""
    update: float
    """Bytes that host updates read and write, no copies running."""
    update_beside_copies: float
    """The least that is left of it beside copies both ways."""
    host_memory: int
    """That may be used; a common size of such a machine, not a property of the card."""

    def __post_init__(self) -> None:
        for field, value in vars(self).items():
            if field != "name" and not value > 0:
                raise ValueError(f"{field} of {self.name} is {value}; it must be above 0")


# Shares of the vendors' peaks that an H200 reached over whole steps (measured, one machine): products 0.76 of the
# dense bf16 peak, device memory 0.83. The other cards have not been measured and are given the same shares.
_PRODUCTS = 0.76
_MEMORY = 0.83
_ATTENTION = 0.72
"""Of the speed of products: cuDNN's forward on an H200, 470 to 613 TFLOPS by shape."""


def _pcie5(host_update: float) -> dict[str, float]:
    """Measured on an H200: 55 GB/s each way alone, 50 together, 36 beside updates on all cores."""
    return dict(
        up=55.4 * GB,
        down=55.3 * GB,
        up_together=50 * GB,
        down_together=50 * GB,
        up_beside_updates=36 * GB,
        update=host_update,
        update_beside_copies=0.75 * host_update,
    )


def _pcie4(host_update: float) -> dict[str, float]:
    """Half the bits a second of PCIe 5 (PCI-SIG: 16 and 32 GT/s a lane), with the shares measured there."""
    return dict(
        up=27.7 * GB,
        down=27.6 * GB,
        up_together=25 * GB,
        down_together=25 * GB,
        up_beside_updates=min(18 * GB, 0.33 * host_update),
        update=host_update,
        update_beside_copies=0.6 * host_update,
    )


PRESETS: dict[str, Hardware] = {
    # Measured, the machine with 16 cores and 128 GiB: updates 90 to 117 GB/s by run, beside copies.
    "H200": Hardware(
        name="H200",
        gpu_memory=int(139.8 * GIB),
        bf16_flops=750 * TERA,
        attention_flops=_ATTENTION * 750 * TERA,
        fp32_flops=_PRODUCTS * 67 * TERA,
        gpu_bandwidth=4.0e12,
        host_memory=128 * GIB,
        **_pcie5(113 * GB),
    ),
    # NVIDIA H100 SXM data sheet: 989 TFLOPS dense bf16, 67 fp32, 3.35 TB/s, 80 GB. Host as the H200's.
    "H100": Hardware(
        name="H100",
        gpu_memory=int(79.1 * GIB),
        bf16_flops=_PRODUCTS * 989 * TERA,
        attention_flops=_ATTENTION * _PRODUCTS * 989 * TERA,
        fp32_flops=_PRODUCTS * 67 * TERA,
        gpu_bandwidth=_MEMORY * 3.35e12,
        host_memory=256 * GIB,
        **_pcie5(113 * GB),
    ),
    # NVIDIA A100 80GB SXM data sheet: 312 TFLOPS dense bf16, 19.5 fp32, 2.039 TB/s. Host: eight channels of
    # DDR4-3200, 204.8 GB/s by its specification; half of it is assumed to be reached.
    "A100": Hardware(
        name="A100",
        gpu_memory=int(79.2 * GIB),
        bf16_flops=_PRODUCTS * 312 * TERA,
        attention_flops=_ATTENTION * _PRODUCTS * 312 * TERA,
        fp32_flops=_PRODUCTS * 19.5 * TERA,
        gpu_bandwidth=_MEMORY * 2.039e12,
        host_memory=256 * GIB,
        **_pcie4(100 * GB),
    ),
    # NVIDIA Ada whitepaper: 165.2 TFLOPS dense bf16 with fp32 sums, 82.6 fp32, 1.008 TB/s, 24 GB. Host: a desktop
    # with two channels of DDR5-5600, 89.6 GB/s by its specification; 70 % of it is assumed to be reached.
    "RTX 4090": Hardware(
        name="RTX 4090",
        gpu_memory=int(23.5 * GIB),
        bf16_flops=_PRODUCTS * 165.2 * TERA,
        attention_flops=_ATTENTION * _PRODUCTS * 165.2 * TERA,
        fp32_flops=_PRODUCTS * 82.6 * TERA,
        gpu_bandwidth=_MEMORY * 1.008e12,
        host_memory=64 * GIB,
        **_pcie4(62 * GB),
    ),
    # NVIDIA GA102 whitepaper: 71 TFLOPS dense bf16 with fp32 sums, 35.6 fp32, 0.936 TB/s, 24 GB. Host: two
    # channels of DDR4-3200, 51.2 GB/s by its specification; 70 % of it is assumed to be reached.
    "RTX 3090": Hardware(
        name="RTX 3090",
        gpu_memory=int(23.6 * GIB),
        bf16_flops=_PRODUCTS * 71 * TERA,
        attention_flops=_ATTENTION * _PRODUCTS * 71 * TERA,
        fp32_flops=_PRODUCTS * 35.6 * TERA,
        gpu_bandwidth=_MEMORY * 0.936e12,
        host_memory=64 * GIB,
        **_pcie4(36 * GB),
    ),
    # NVIDIA GH200 data sheet (96 GB): 990 TFLOPS dense bf16, 67 fp32. Schieffer et al., arXiv 2407.07850, measured
    # copies of 375 GB/s up and 297 down, 486 GB/s of host memory and 3.4 TB/s of device memory. Updates are assumed
    # to reach 60 % of the host memory's figure, and copies and updates to share it.
    "GH200": Hardware(
        name="GH200",
        gpu_memory=int(94.5 * GIB),
        bf16_flops=_PRODUCTS * 990 * TERA,
        attention_flops=_ATTENTION * _PRODUCTS * 990 * TERA,
        fp32_flops=_PRODUCTS * 67 * TERA,
        gpu_bandwidth=3.4e12,
        up=375 * GB,
        down=297 * GB,
        up_together=150 * GB,
        down_together=150 * GB,
        up_beside_updates=100 * GB,
        update=290 * GB,
        update_beside_copies=145 * GB,
        host_memory=480 * GB,
    ),
}


def preset(name: str) -> Hardware:
    """By name, whatever its case and spaces; ValueError lists the known ones."""
    for known, hardware in PRESETS.items():
        if _plain(known) == _plain(name) or _plain(known).removeprefix("rtx") == _plain(name):
            return hardware
    raise ValueError(f'"{name}" is no preset; there are presets of {", ".join(PRESETS)}')


def _plain(name: str) -> str:
    return name.lower().replace(" ", "").replace("-", "").replace("_", "")
