"""A Hugging Face directory streamed: the module is built without weights, and the files' tensors go into the tiles one
by one."""

from __future__ import annotations

import re
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode

from megatrain.export.shards import safetensors_name
from megatrain.pretrained_adapter import add_adapter
from megatrain.pretrained_class import code_of, model_class_and_config
from megatrain.pretrained_places import Joined, Names
from megatrain.weight_files import open_shard, weight_files

if TYPE_CHECKING:
    import os
    from collections.abc import Callable

    from torch import nn

    from megatrain.export.parts import Part
    from megatrain.model import StreamedModel

LARGE_ELEMENTS = 1 << 12


@dataclass
class Source:
    """What a model was made from. files: for each tensor the file to save it in again, under the module's first names
    if the files have those. code: of the directory, by file name, where it was run. tensors: what an export writes,
    with a note, once that was found out."""

    files: dict[str, str] = field(default_factory=dict)
    code: dict[str, str] = field(default_factory=dict)
    has_own_names: bool = False
    tensors: tuple[dict[str, Part], str | None] | None = None


class large_on_meta(TorchFunctionMode):
    """Tensors that modules allocate for their weights go to the meta device; buffers, which are computed
    (rotary tables, position ids), stay real."""

    FACTORIES = (torch.empty, torch.randn, torch.rand)  # zeros and ones also make buffers

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in self.FACTORIES and kwargs.get("device") is None:
            size = args[0] if len(args) == 1 and not isinstance(args[0], int) else args
            if torch.Size(size).numel() >= LARGE_ELEMENTS:
                kwargs["device"] = "meta"
        return func(*args, **kwargs)


def stream_pretrained(
    cls: type[StreamedModel], path: str | os.PathLike[str], trust_remote_code: bool, adapter: Any, **kwargs: Any
) -> StreamedModel:
    """`StreamedModel.from_pretrained`."""
    directory = _directory(path)
    files = weight_files(directory)
    model_class, config = model_class_and_config(directory, trust_remote_code)
    with large_on_meta():
        module: nn.Module = model_class(config)
    module.train()
    names = Names(module)
    shapes: dict[str, tuple[int, ...]] = {}
    file_of: dict[str, str] = {}
    for file in files:
        with open_shard(file) as shard:
            for key in shard.names():
                shapes[key], file_of[key] = shard.shape(key), safetensors_name(file.name)
    places = names.places(shapes)
    source = Source(
        files=file_of | {part.name: file_of[key] for key, part in places.of.items() if part and part.shape is None},
        code=code_of(directory, config) if trust_remote_code else {},
        has_own_names=places.own_names,
    )
    if places.lacking:
        raise _lacks(directory, places.lacking)
    computed = all(buffer.device.type != "meta" for buffer in module.buffers())
    quantised = getattr(config, "quantization_config", None) is not None  # values that mean nothing without others
    if not places.whole or not computed or quantised:
        converted = _converted_by_transformers(directory, type(module), trust_remote_code)
        model = cls(converted if adapter is None else add_adapter(converted, adapter)[0], **kwargs)
        model._source = source
        return model
    _warn_of_unexpected(directory, module, [key for key, part in places.of.items() if part is None])
    names.require_fit(places, shapes, directory)
    shape_of = names.shapes
    if adapter is not None:
        module, renamed = add_adapter(module, adapter)
        places = places.renamed(renamed)
        shape_of = {renamed[name]: shape for name, shape in shape_of.items() if name in renamed}
    example = kwargs.pop("example_batch", None)
    model = cls(module, **kwargs)
    model._source = source
    joined = Joined(shape_of, lambda name, values: model.load_state_dict({name: values}, strict=False))
    for file in files:
        with open_shard(file) as shard:
            for key in sorted(shard.names()):
                if (part := places.of[key]) is not None:
                    joined.add(part, shard.tensor(key))
    if example is not None:
        model._passes.check(example)
    return model


def _warn_of_unexpected(directory: Path, module: nn.Module, keys: list[str]) -> None:
    patterns = getattr(module, "_keys_to_ignore_on_load_unexpected", None) or ()
    named = [key for key in keys if not any(re.search(pattern, key) for pattern in patterns)]
    if named:
        warnings.warn(
            f"{directory} holds {len(named)} tensors that the architecture has no place for, left out: {_some(named)}",
            stacklevel=4,
        )


def _lacks(directory: Path, names: list[str]) -> ValueError:
    return ValueError(f"{directory} lacks {len(names)} tensors that its architecture needs: {_some(names)}")


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _converted_by_transformers(directory: Path, model_class: Any, trust_remote_code: bool) -> nn.Module:
    """For files whose tensors are more than parts of the module's (turned ones, quantised ones): the library's own
    loader brings them, and the tiles take the weights over tensor by tensor. Tensors that the files lack would be
    random: they are refused."""
    module, info = model_class.from_pretrained(
        directory, dtype="auto", output_loading_info=True, weights_only=True, trust_remote_code=trust_remote_code
    )
    missing = sorted(info["missing_keys"])
    if missing:
        raise _lacks(directory, missing)
    loaded: nn.Module = module
    _warn_of_unexpected(directory, loaded, sorted(info["unexpected_keys"]))
    return loaded.train()


def _directory(path: str | os.PathLike[str]) -> Path:
    directory = Path(path)
    if directory.is_dir():
        if not (directory / "config.json").is_file():
            raise ValueError(f"{directory} has no config.json; it is not a Hugging Face model directory")
        return directory
    if directory.is_absolute() or str(path).startswith("."):
        raise ValueError(f"{directory} is not a directory")
    from huggingface_hub import snapshot_download

    patterns = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.py"]
    return Path(snapshot_download(str(path), allow_patterns=patterns))
