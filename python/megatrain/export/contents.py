"""What belongs into an exported directory: plain values, so that a checkpoint can hold them and be exported without
the module."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from megatrain.checkpoint import persistent_buffers

if TYPE_CHECKING:
    from collections.abc import Mapping

    from megatrain.model import StreamedModel


@dataclass(frozen=True, kw_only=True)
class Contents:
    """tensors: for each name in the files the name of the model's parameter or buffer; a tied parameter once, under
    its first name. texts: the other files by name. original_files: for each tensor the file that it was loaded from;
    empty where that is not known of all of them. single_file: its name where there are no shards."""

    tensors: dict[str, str]
    texts: dict[str, str]
    original_files: dict[str, str] = field(default_factory=dict)
    single_file: str | None = None

    def to_plain(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @staticmethod
    def from_plain(values: Mapping[str, Any]) -> Contents:
        return Contents(**values)


def contents_of(model: StreamedModel) -> Contents:
    """ValueError where what was trained has no place in the files."""
    adapter = model._adapter
    if adapter is not None:
        adapter.require_whole(model._parts.units)
        return Contents(
            tensors=adapter.tensors,
            texts={"adapter_config.json": adapter.config_text()},
            single_file="adapter_model.safetensors",
        )
    names = [parameter.name for parameter in model._parts.units.parameters]
    names += [name for name, _, _ in persistent_buffers(model.module, model._parts.blocks)]
    files = {name: model._source.files[name] for name in names if name in model._source.files}
    return Contents(
        tensors={name: name for name in names},
        texts={**_configurations(model.module), **model._source.code},
        original_files=files if len(files) == len(names) else {},
    )


def _configurations(module: Any) -> dict[str, str]:
    texts: dict[str, str] = {}
    config: Any = getattr(module, "config", None)
    if hasattr(config, "to_json_string"):
        before = config.architectures
        config.architectures = [type(module).__name__]
        texts["config.json"] = config.to_json_string()
        config.architectures = before
    generation: Any = getattr(module, "generation_config", None)
    if hasattr(generation, "to_json_string"):
        texts["generation_config.json"] = generation.to_json_string()
    return texts
