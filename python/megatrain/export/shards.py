"""Which file holds which tensor: as the model was loaded, or divided by size."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from huggingface_hub import split_state_dict_into_shards_factory

from megatrain.settings import parse_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping

    from megatrain.export.contents import Contents

SHARD_NAME = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors")
_DEFAULT_SIZE = "5GB"


def divide(contents: Contents, nbytes: Mapping[str, int], max_shard_size: str | None) -> dict[str, str]:
    """{tensor: file}. With `max_shard_size`, such as "5GB", anew; None: in the files that the model came in, else in
    shards of 5 GB. ValueError for a size that is none."""
    if contents.single_file is not None:
        return dict.fromkeys(contents.tensors, contents.single_file)
    if max_shard_size is None and contents.original_files:
        return dict(contents.original_files)
    size = parse_bytes(max_shard_size or _DEFAULT_SIZE, "max_shard_size")
    assert size is not None
    split = split_state_dict_into_shards_factory(
        dict(nbytes),
        get_storage_size=lambda size: size,
        filename_pattern="model{suffix}.safetensors",
        get_storage_id=lambda _: None,
        max_shard_size=size,
    )
    return dict(split.tensor_to_filename)


def safetensors_name(file: str) -> str:
    """pytorch_model-00001-of-00002.bin becomes model-00001-of-00002.safetensors."""
    return re.sub(r"^pytorch_model(.*)\.bin$", r"model\1.safetensors", file)
