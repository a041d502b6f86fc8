"""Which records are trained on, which are held out, and which are left aside; from their sizes alone."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

ASIDE, TRAIN, HELD_OUT = 0, 1, 2


@dataclass(frozen=True)
class Division:
    """roles: uint8 [records]. limits: of some text records only the first so many bytes are used."""

    roles: np.ndarray
    limits: dict[int, int] = field(default_factory=dict)


def divide(
    sizes: np.ndarray,
    *,
    seed: int,
    held_out: float,
    max_bytes: int | None,
    max_held_out_bytes: int | None,
    can_cut: bool = True,
) -> Division:
    """sizes: int64 [records], bytes; records of 0 bytes are left aside. Records are drawn in an order that
    depends on the seed: at most about max_bytes together, of which about the share `held_out` (0 to below 1)
    is held out, at least one record and not all of them; of these, at most about max_held_out_bytes are used. A
    record larger than a limit is cut to it where it comes first and `can_cut`; else it is not used, unless there
    would be none."""
    roles = np.zeros(len(sizes), dtype=np.uint8)
    limits: dict[int, int] = {}
    order = np.random.default_rng(seed).permutation(len(sizes))
    order = order[sizes[order] > 0]
    order = _within(order, sizes, max_bytes, limits, can_cut)
    counted = sizes[order]
    roles[order] = TRAIN
    if held_out > 0 and len(order) > 1:
        count = int(np.searchsorted(np.cumsum(counted), held_out * counted.sum(), side="right"))
        count = min(max(count, 1), len(order) - 1)
        chosen = order[:count]
        roles[chosen] = ASIDE
        roles[_within(chosen, sizes, max_held_out_bytes, limits, can_cut)] = HELD_OUT
    return Division(roles, limits)


def _within(
    order: np.ndarray, sizes: np.ndarray, limit: int | None, limits: dict[int, int], can_cut: bool
) -> np.ndarray:
    """The records of `order` that fit into `limit` bytes together; at least one, which is noted in `limits` if it
    has to be cut."""
    if limit is None or not len(order):
        return order
    first = int(order[0])
    if can_cut and sizes[first] > limit:
        limits[first] = min(limit, limits.get(first, limit))
        return order[:1]
    total, kept = 0, []
    for index in order:
        if total + int(sizes[index]) <= limit:
            kept.append(index)
            total += int(sizes[index])
    return np.array(kept, dtype=order.dtype) if kept else order[:1]
