"""Hugging Face directories in and out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import families
import pytest
import torch
import transformers
from families import FAMILIES, text_batch
from safetensors.torch import load_file, save_file

import megatrain
from megatrain import pretrained

BY_NAME = {family.name: family for family in FAMILIES}


def stream_from(path: Path, **changes: Any) -> megatrain.StreamedModel:
    settings: dict[str, Any] = dict(device=megatrain.HostBackend(max_delay_us=100, seed=1, poison=True))
    return megatrain.StreamedModel.from_pretrained(path, **{**settings, **changes})


def saved(path: Path, name: str = "qwen3", shard: str = "5GB", **changes: Any) -> torch.nn.Module:
    module = families.build(BY_NAME[name], **changes)
    module.save_pretrained(path, max_shard_size=shard)
    return module


@pytest.mark.parametrize("shard", ["5GB", "20KB"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2", "t5"])
def test_loads_trains_and_saves(name: str, dtype: torch.dtype, shard: str, tmp_path: Path) -> None:
    module = saved(tmp_path / "in", name, shard)
    batch = BY_NAME[name].batch(1)
    model = stream_from(tmp_path / "in", dtype=dtype)
    same = megatrain.StreamedModel(module, device="cpu", dtype=dtype)
    for key, value in same.state_dict().items():
        assert torch.equal(model.state_dict()[key], value), key
    for _ in range(2):
        assert model.step(batch).loss == same.step(batch).loss
    model.save_pretrained(tmp_path / "out", max_shard_size=shard)
    again = type(module).from_pretrained(tmp_path / "out", dtype=dtype).eval()
    state = model.state_dict(dtype=dtype)
    for key, parameter in again.named_parameters():
        assert torch.equal(parameter, state[key]), key
    inputs = {k: v for k, v in batch.items() if k != "labels"}
    if name == "t5":
        inputs["decoder_input_ids"] = batch["labels"].clamp(min=0)
    model.eval()
    with torch.no_grad():
        assert torch.equal(model(**inputs).logits, again(**inputs).logits)


@pytest.mark.parametrize("large", [1, 1 << 12])
def test_weights_go_to_the_tiles_without_the_librarys_loader(
    large: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = saved(tmp_path, "llama")
    monkeypatch.setattr(pretrained, "LARGE_ELEMENTS", large)

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("the whole model was loaded at once")

    monkeypatch.setattr(transformers.LlamaForCausalLM, "from_pretrained", refuse)
    same = megatrain.StreamedModel(module, device="cpu")
    assert stream_from(tmp_path).step(text_batch(1)).loss == same.step(text_batch(1)).loss


def test_checkpoint_of_the_base_model_alone_is_refused_by_name(tmp_path: Path) -> None:
    saved(tmp_path, "llama")
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.layers.2.mlp.up_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"lacks 1 tensors .*model\.layers\.2\.mlp\.up_proj\.weight"):
        stream_from(tmp_path)


def test_misshapen_tensor_is_refused_by_name(tmp_path: Path) -> None:
    saved(tmp_path, "llama")
    weights = load_file(tmp_path / "model.safetensors")
    weights["model.norm.weight"] = torch.zeros(5)
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"model\.norm\.weight has shape \(5,\) in .* and \(32,\) in the model"):
        stream_from(tmp_path)


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not a directory"):
        stream_from(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"no config\.json"):
        stream_from(tmp_path)
    saved(tmp_path, "llama", "20KB")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    shard = sorted(set(index["weight_map"].values()))[1]
    (tmp_path / shard).unlink()
    with pytest.raises(ValueError, match=shard):
        stream_from(tmp_path)


def test_a_second_save_leaves_no_stale_shards(tmp_path: Path) -> None:
    model = megatrain.StreamedModel(families.build(BY_NAME["llama"]), device="cpu")
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    model.save_pretrained(tmp_path)
    assert [file.name for file in tmp_path.glob("*.safetensors")] == ["model.safetensors"]
    assert not (tmp_path / "model.safetensors.index.json").exists()


def test_meta_module_with_loaded_weights_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    module = families.build(BY_NAME["llama"])
    monkeypatch.setattr(pretrained, "LARGE_ELEMENTS", 1)
    with pretrained.large_on_meta():
        empty = transformers.LlamaForCausalLM(module.config).train()
    model = megatrain.StreamedModel(empty, device="cpu", dtype=torch.float32)
    with pytest.raises(RuntimeError, match="no values yet"):
        model.step(text_batch(1))
    model.load_state_dict(module.state_dict())
    same = megatrain.StreamedModel(module, device="cpu", dtype=torch.float32)
    assert model.step(text_batch(1)).loss == same.step(text_batch(1)).loss
