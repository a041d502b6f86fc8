"""What a model computes with its weights: settings that a checkpoint's weights alone do not show."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from .config import TrainSettings

_NO_PART = ("transformers_version", "dtype", "torch_dtype")


def function(config: Any, settings: TrainSettings) -> dict[str, Any]:
    """Plain values by their names, such as model.rms_norm_eps and lora.alpha. `config` is transformers'; where its
    files lie and what they were written by are no part of it."""
    fields = json.loads(config.to_json_string(use_diff=False))
    found = dict(_leaves("model", {k: v for k, v in fields.items() if k not in _NO_PART and not k.startswith("_")}))
    if settings.lora is not None:
        found |= _leaves("lora", settings.lora.model_dump(mode="json", exclude={"targets"}))
    return found


def difference(saved: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """The first, in words. What one of them does not name is left to the weights: another version of transformers
    may know more."""
    for name, value in saved.items():
        if name in now and now[name] != value:
            return f"{name} is {value!r} in the checkpoint and {now[name]!r} now"
    return None


def _leaves(name: str, values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _leaves(f"{name}.{key}", value)
        else:
            yield f"{name}.{key}", value
