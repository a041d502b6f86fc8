"""A Hugging Face directory streamed: the module is built without weights, and the safetensors' tensors go
into the tiles one by one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterator

    from torch import nn

    from megatrain.model import StreamedModel

LARGE_ELEMENTS = 1 << 12


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


def stream_pretrained(cls: type[StreamedModel], path: str | os.PathLike[str], **kwargs: Any) -> StreamedModel:
    directory = _directory(path)
    files = _safetensors(directory)
    module = _empty_module(directory)
    names = set(module.state_dict().keys())
    keys = {key for _, key in _tensors(files)}
    prefix = f"{module.base_model_prefix}." if hasattr(module, "base_model_prefix") else ""

    def own_name(key: str) -> str | None:
        for name in (key, prefix + key, key.removeprefix(prefix)):
            if name in names:
                return name
        return None

    reached = {own_name(key) for key in keys} - {None}
    tied = _tied_groups(module)
    complete = all(name in reached or (tied.get(name, set()) & reached) for name in names)
    computed = all(buffer.device.type != "meta" for buffer in module.buffers())
    if not complete or not computed or any(own_name(key) is None for key in keys):
        return cls(_converted_by_transformers(directory, type(module)), **kwargs)
    example = kwargs.pop("example_batch", None)
    model = cls(module, **kwargs)
    from safetensors import safe_open

    for file in files:
        with safe_open(file, framework="pt") as shard:
            for key in shard.keys():
                name = own_name(key)
                assert name is not None
                model.load_state_dict({name: shard.get_tensor(key)}, strict=False)
    if example is not None:
        model._check(example)
    return model


def _converted_by_transformers(directory: Path, model_class: Any) -> nn.Module:
    """For checkpoints whose names the library converts while loading (fused experts, renamed prefixes): its
    own loader brings them, and the tiles take the weights over tensor by tensor. Tensors that the checkpoint
    lacks would be random: they are refused."""
    module, info = model_class.from_pretrained(directory, dtype="auto", output_loading_info=True)
    missing = sorted(info["missing_keys"])
    if missing:
        raise ValueError(
            f"{directory} lacks {len(missing)} tensors that its architecture needs, the first {missing[0]}"
        )
    loaded: nn.Module = module
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

    return Path(snapshot_download(str(path), allow_patterns=["*.json", "*.safetensors", "*.model", "*.txt"]))


def _safetensors(directory: Path) -> list[Path]:
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        wanted = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        missing = [name for name in wanted if not (directory / name).is_file()]
        if missing:
            raise ValueError(f"{directory} lacks {missing[0]}, which its index names")
        return [directory / name for name in wanted]
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise ValueError(f"{directory} has no *.safetensors; other weight files are not read")
    return files


def _tensors(files: list[Path]) -> Iterator[tuple[Path, str]]:
    from safetensors import safe_open

    for file in files:
        with safe_open(file, framework="pt") as shard:
            for key in shard.keys():
                yield file, key


def _empty_module(directory: Path) -> nn.Module:
    """The module of config.json's architecture with its large parameters on the meta device."""
    import transformers

    config = transformers.AutoConfig.from_pretrained(directory)
    architecture = (getattr(config, "architectures", None) or [None])[0]
    model_class: Any = getattr(transformers, architecture, None) if architecture else None
    if model_class is None:
        model_class = transformers.AutoModelForCausalLM._model_mapping.get(type(config), None)
    if model_class is None:
        raise ValueError(
            f'{directory}/config.json names the architecture "{architecture}", which transformers '
            f"{transformers.__version__} does not have"
        )
    with large_on_meta():
        module: nn.Module = model_class(config)
    return module.train()


def _tied_groups(module: nn.Module) -> dict[str, set[str]]:
    """For each name of a tied parameter, all of its names."""
    by_id: dict[int, set[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        by_id.setdefault(id(parameter), set()).add(name)
    return {name: group for group in by_id.values() for name in group if len(group) > 1}
