"""What belongs into an exported directory: plain values, so that a checkpoint can hold them and be exported without
the module."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from megatrain.checkpoint import persistent_buffers
from megatrain.export.parts import CannotTakeApart, Part, original_parts

if TYPE_CHECKING:
    from collections.abc import Mapping

    from megatrain.model import StreamedModel


@dataclass(frozen=True, kw_only=True)
class Contents:
    """tensors: for each name in the files what of the model's parameters and buffers it is; a tied parameter once,
    under its first name. texts: the other files by name. original_files: for each tensor the file that it was loaded
    from; empty where that is not known of all of them. single_file: its name where there are no shards. note: what
    somebody who reads the files should know."""

    tensors: dict[str, Part]
    texts: dict[str, str]
    original_files: dict[str, str] = field(default_factory=dict)
    single_file: str | None = None
    note: str | None = None

    def to_plain(self) -> dict[str, Any]:
        return {**asdict(self), "tensors": {name: part.to_plain() for name, part in self.tensors.items()}}

    @staticmethod
    def from_plain(values: Mapping[str, Any]) -> Contents:
        tensors = {name: Part.from_plain(value) for name, value in values["tensors"].items()}
        return Contents(**{**values, "tensors": tensors})


def contents_of(model: StreamedModel) -> Contents:
    """ValueError where what was trained has no place in the files."""
    adapter = model._adapter
    if adapter is not None:
        adapter.require_whole(model._parts.units)
        return Contents(
            tensors={name: Part(own) for name, own in adapter.tensors.items()},
            texts={"adapter_config.json": adapter.config_text()},
            single_file="adapter_model.safetensors",
        )
    tensors, note = _tensors(model)
    files = {name: model._source.files[name] for name in tensors if name in model._source.files}
    return Contents(
        tensors=tensors,
        texts={**_configurations(model.module), **model._source.code},
        original_files=files if len(files) == len(tensors) else {},
        note=note,
    )


def _tensors(model: StreamedModel) -> tuple[dict[str, Part], str | None]:
    """Under the module's names if it was loaded from files that have them, else as transformers would save it."""
    shapes = {parameter.name: tuple(parameter.shape) for parameter in model._parts.units.parameters}
    for name, owner, inner in persistent_buffers(model.module, model._parts.blocks):
        shapes[name] = tuple(owner._buffers[inner].shape)  # type: ignore[union-attr]
    own = {name: Part(name) for name in shapes}
    source = model._source
    if source.has_own_names:
        return own, None
    if source.tensors is None:
        try:
            source.tensors = original_parts(model.module, shapes), None
        except CannotTakeApart as error:
            source.tensors = own, f"tensors have the names of transformers' module, not those of the original: {error}"
    return source.tensors


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
