"""The learning rate over the steps."""

import math

from .config import ScheduleSettings


def lr_factor(settings: ScheduleSettings, step: int, steps: int, peak_lr: float) -> float:
    """The share of the peak learning rate at `step` (counted from 0) of `steps`. Warm-up reaches the
    peak at its last step; the cosine starts there and ends at min_lr with the last step."""
    warmup = settings.warmup_steps
    if step < warmup:
        return (step + 1) / warmup
    if settings.kind == "constant":
        return 1.0
    fallen = min(1.0, (step - warmup + 1) / max(1, steps - warmup))
    floor = settings.min_lr / peak_lr
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * fallen))
