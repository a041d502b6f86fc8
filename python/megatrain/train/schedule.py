"""The learning rate over the steps."""

import math

from .config import ScheduleSettings


def lr_factor(settings: ScheduleSettings, step: int, steps: int, peak_lr: float) -> float:
    """The share of the peak learning rate at `step` (counted from 0) of `steps`. Warm-up reaches the
    peak at its last step; every fall begins at the peak in the step behind, and would be at min_lr in the step behind
    the last, so that no step is taken with a rate of 0."""
    warmup = settings.warmup_steps
    if settings.warmup_share is not None:
        warmup = round(settings.warmup_share * steps)
    if step < warmup:
        return (step + 1) / warmup
    if settings.kind == "constant":
        return 1.0
    floor = settings.min_lr / peak_lr
    falls = steps - warmup
    if settings.kind == "wsd":
        falls = min(falls, round(settings.decay_share * steps))
    fallen = (step - (steps - falls)) / max(1, falls)
    fallen = min(1.0, max(0.0, fallen))
    share = 0.5 * (1 + math.cos(math.pi * fallen)) if settings.kind == "cosine" else 1 - fallen
    return floor + (1 - floor) * share
