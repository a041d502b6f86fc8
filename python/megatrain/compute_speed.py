"""How fast a device computes, in short measurements: products, attention, passes over its memory."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from megatrain.attention import preferred_attention
from megatrain.planner.work import BACKWARD_PRODUCTS

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True, kw_only=True)
class ComputeSpeed:
    """FLOP/s of a layer's large matrix products, between passes over the device's memory, and of causal attention's
    forward in bf16 (of which the masked half is not counted), and bytes/s of such passes. Products are those of a
    forward and its backward in turns; the speed is the forward's, by the planner's ratio of the two."""

    bf16_flops: float
    fp32_flops: float
    attention_flops: float
    gpu_bandwidth: float


@dataclass(frozen=True, kw_only=True)
class ProbeSizes:
    """The defaults fill any GPU and take 1.1 GiB of its memory. heads, length, head_size: of attention over four
    rows."""

    product: tuple[int, int, int] = (8192, 4096, 14336)
    fp32_product: tuple[int, int, int] = (4096, 4096, 4096)
    heads: int = 32
    length: int = 2048
    head_size: int = 128
    elements: int = 1 << 26
    warm_up_seconds: float = 0.4
    """Of products: a GPU that has been idle is faster at first than it stays."""
    product_seconds: float = 0.4
    other_seconds: float = 0.05


ROWS = 4
PASSES_A_PRODUCT = 3
"""Of memory, about a tenth of the time, as in a step. Products one after another draw so much power that an H200 slows
down further than it does in steps."""
FORWARDS = 1 + 2 / BACKWARD_PRODUCTS
"""Of a layer's forward, its backward included."""


def compute_speed(device: torch.device, sizes: ProbeSizes | None = None) -> ComputeSpeed:
    """Measured in about a second on a GPU that does nothing else. torch's settings (TF32, the choice of attention
    kernels) count as they are. torch.OutOfMemoryError where there is no room."""
    sizes = sizes or ProbeSizes()
    generator = torch.Generator(device).manual_seed(0)

    def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        # Zeros would need less power, and so run faster than weights do.
        return torch.randn(shape, generator=generator, device=device, dtype=dtype)

    source = random(sizes.elements)
    copied = torch.empty_like(source)

    def one_pass() -> None:
        torch.add(source, 1.0, out=copied)

    def passes() -> float:
        """Seconds of one."""
        call = _repeated(one_pass, device)
        call(0.0)
        return call(sizes.other_seconds)

    def products(m: int, k: int, n: int, dtype: torch.dtype, warm_up: float, seconds: float) -> float:
        inputs, weights, gradients = random(m, k, dtype=dtype), random(n, k, dtype=dtype), random(m, n, dtype=dtype)
        # Each has the memory layout that it has in a linear layer.
        triple = (
            (inputs, weights.t(), torch.empty_like(gradients)),
            (gradients, weights, torch.empty_like(inputs)),
            (gradients.t(), inputs, torch.empty_like(weights)),
        )

        def work() -> None:
            for left, right, out in triple:
                torch.mm(left, right, out=out)
                for _ in range(PASSES_A_PRODUCT):
                    one_pass()

        call = _repeated(work, device)
        call(warm_up)
        together = call(seconds)
        # Whatever else went on meanwhile, the products took most of it.
        taken = max(together - len(triple) * PASSES_A_PRODUCT * pass_seconds, together / 2)
        return FORWARDS * 2.0 * m * k * n / taken

    def attention() -> float:
        shape = (ROWS, sizes.heads, sizes.length, sizes.head_size)
        query, key, value = random(*shape), random(*shape), random(*shape)
        attend = torch.nn.functional.scaled_dot_product_attention
        with preferred_attention(device):
            call = _repeated(lambda: attend(query, key, value, is_causal=True), device)
            call(0.0)
            seconds = call(sizes.other_seconds)
        return 2.0 * ROWS * sizes.heads * sizes.length**2 * sizes.head_size / seconds

    with torch.no_grad():
        pass_seconds = passes()
        return ComputeSpeed(
            bf16_flops=products(*sizes.product, torch.bfloat16, sizes.warm_up_seconds, sizes.product_seconds),
            fp32_flops=products(*sizes.fp32_product, torch.float32, 0.0, sizes.other_seconds),
            attention_flops=attention(),
            gpu_bandwidth=2.0 * source.nbytes / pass_seconds,
        )


def _repeated(work: Callable[[], object], device: torch.device) -> Callable[[float], float]:
    """A function that repeats the work for some seconds, once at least, and returns the seconds of one."""

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    def repeat(seconds: float) -> float:
        wait()
        started, done, batch = time.perf_counter(), 0, 1
        while True:
            for _ in range(batch):
                work()
            wait()
            done += batch
            taken = time.perf_counter() - started
            if taken >= seconds:
                return taken / done
            # Half of what is left at once: the device has work queued while the host looks at the clock.
            batch = max(1, int((seconds - taken) / (taken / done) / 2))

    return repeat
