"""What a result was measured on."""

from __future__ import annotations

import platform
import subprocess
import time

import torch

import megatrain


def machine(model: megatrain.StreamedModel, commit: str) -> dict[str, object]:
    """Hardware, driver, versions and commit."""
    found: dict[str, object] = dict(
        cpu=megatrain._native.cpu_model(),
        cores=megatrain._native.usable_cores(),
        isa=model._parts.tiles.store.isa,
        update_threads=model._parts.tiles.store.threads,
        python=platform.python_version(),
        torch=torch.__version__,
        megatrain=megatrain.__version__,
        date=time.strftime("%Y-%m-%d"),
    )
    import transformers

    found["transformers"] = transformers.__version__
    if model.device.type == "cuda":
        found["gpu"] = torch.cuda.get_device_name(model.device)
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        found["driver"] = subprocess.run(query, capture_output=True, text=True).stdout.strip().splitlines()[0]
    described = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    found["commit"] = commit or described.stdout.strip() or "unknown"
    return found
