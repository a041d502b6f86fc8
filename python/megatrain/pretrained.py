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
    names = _Names(module)
    shapes: dict[str, tuple[int, ...]] = {}
    file_of: dict[str, str] = {}
    for file in files:
        with open_shard(file) as shard:
            for key in shard.names():
                shapes[key], file_of[key] = shard.shape(key), safetensors_name(file.name)
    own = {key: names.own(key) for key in shapes}
    code = code_of(directory, config) if trust_remote_code else {}
    saved_in = {name: file_of[key] for key, name in own.items() if name is not None}
    computed = all(buffer.device.type != "meta" for buffer in module.buffers())
    own_names = names.all_reached(set(own.values()))
    if not own_names or not computed:
        converted = _converted_by_transformers(directory, type(module), trust_remote_code)
        model = cls(converted if adapter is None else add_adapter(converted, adapter)[0], **kwargs)
        model._source = Source({**names.with_ties(saved_in), **file_of}, code, own_names)
        return model
    _warn_of_unexpected(directory, module, [key for key, name in own.items() if name is None])
    state = module.state_dict()
    for key, name in own.items():
        if name is not None and shapes[key] != tuple(state[name].shape):
            raise ValueError(
                f"{key} has shape {shapes[key]} in {directory} and {tuple(state[name].shape)} in the model"
            )
    del state
    if adapter is not None:
        module, renamed = add_adapter(module, adapter)
        own = {key: renamed[names.first(name)] if name is not None else None for key, name in own.items()}
    example = kwargs.pop("example_batch", None)
    model = cls(module, **kwargs)
    model._source = Source(names.with_ties(saved_in), code, has_own_names=True)
    for file in files:
        with open_shard(file) as shard:
            for key in shard.names():
                if (name := own[key]) is not None:
                    model.load_state_dict({name: shard.tensor(key)}, strict=False)
    if example is not None:
        model._passes.check(example)
    return model


class _Names:
    """Of the module's parameters and persistent buffers, before it is taken over."""

    def __init__(self, module: nn.Module) -> None:
        self._names = set(module.state_dict().keys())
        self._prefix = f"{module.base_model_prefix}." if hasattr(module, "base_model_prefix") else ""
        by_id: dict[int, list[str]] = {}
        for name, parameter in module.named_parameters(remove_duplicate=False):
            by_id.setdefault(id(parameter), []).append(name)
        self._tied = {name: group for group in by_id.values() for name in group if len(group) > 1}

    def own(self, key: str) -> str | None:
        """The module's name for a key of a file, which may be that of the base model alone, or with it."""
        for name in (key, self._prefix + key, key.removeprefix(self._prefix)):
            if name in self._names:
                return name
        return None

    def first(self, name: str) -> str:
        """Of a tied parameter's names."""
        return self._tied.get(name, [name])[0]

    def all_reached(self, reached: set[str | None]) -> bool:
        return all(any(tied in reached for tied in self._tied.get(name, [name])) for name in self._names)

    def with_ties(self, files: dict[str, str]) -> dict[str, str]:
        """A tied parameter is saved under its first name, whichever the file had."""
        more = {tied: file for name, file in files.items() for tied in self._tied.get(name, []) if tied not in files}
        return {**files, **more}


def _warn_of_unexpected(directory: Path, module: nn.Module, keys: list[str]) -> None:
    patterns = getattr(module, "_keys_to_ignore_on_load_unexpected", None) or ()
    named = [key for key in keys if not any(re.search(pattern, key) for pattern in patterns)]
    if named:
        warnings.warn(
            f"{directory} holds {len(named)} tensors that the architecture has no place for, left out: {_some(named)}",
            stacklevel=4,
        )


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _converted_by_transformers(directory: Path, model_class: Any, trust_remote_code: bool) -> nn.Module:
    """For checkpoints whose names the library converts while loading (fused experts, renamed prefixes): its
    own loader brings them, and the tiles take the weights over tensor by tensor. Tensors that the checkpoint
    lacks would be random: they are refused."""
    module, info = model_class.from_pretrained(
        directory, dtype="auto", output_loading_info=True, weights_only=True, trust_remote_code=trust_remote_code
    )
    missing = sorted(info["missing_keys"])
    if missing:
        raise ValueError(f"{directory} lacks {len(missing)} tensors that its architecture needs: {_some(missing)}")
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
