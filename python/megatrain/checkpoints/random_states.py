"""The states of torch's, numpy's and Python's global generators as plain values."""

from __future__ import annotations

import base64
import random
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from megatrain.rng import RngState

if TYPE_CHECKING:
    from collections.abc import Mapping


def capture(device: torch.device) -> dict[str, Any]:
    of_torch = RngState.capture(device)
    version, words, gauss = random.getstate()
    of_numpy: Any = np.random.get_state(legacy=False)
    numpy_state = {**of_numpy, "state": {**of_numpy["state"], "key": of_numpy["state"]["key"].tolist()}}
    return {
        "torch": _text(of_torch.host),
        "device": None if of_torch.device is None else _text(of_torch.device),
        "python": [version, list(words), gauss],
        "numpy": numpy_state,
    }


def restore(states: Mapping[str, Any], device: torch.device) -> None:
    """The device's generator stays as it is where the checkpoint is of a run without one."""
    on_device = _tensor(states["device"]) if states["device"] is not None and device.type == "cuda" else None
    RngState(_tensor(states["torch"]), on_device).restore(device)
    version, words, gauss = states["python"]
    random.setstate((version, tuple(words), gauss))
    of_numpy = states["numpy"]
    key = np.array(of_numpy["state"]["key"], dtype=np.uint32)
    np.random.set_state({**of_numpy, "state": {**of_numpy["state"], "key": key}})


def _text(state: torch.Tensor) -> str:
    return base64.b64encode(bytes(state.numpy())).decode()


def _tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
