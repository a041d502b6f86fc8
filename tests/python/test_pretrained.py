"""Hugging Face directories in and out."""

from __future__ import annotations

import json
import os
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


def experts(path: Path, shard: str = "30KB") -> Any:
    """Files with a tensor for each expert; the module has them joined."""
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        vocab_size=67, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, head_dim=8,
        num_key_value_heads=2, num_experts=3, num_experts_per_tok=2, moe_intermediate_size=16,
    )  # fmt: skip
    module: Any = transformers.Qwen3MoeForCausalLM(config)
    module.save_pretrained(path, max_shard_size=shard)
    return module


@pytest.mark.parametrize("adapter", [False, True])
def test_experts_go_to_the_tiles_without_the_librarys_loader(
    adapter: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = experts(tmp_path)
    monkeypatch.setattr(transformers.Qwen3MoeForCausalLM, "from_pretrained", None)
    monkeypatch.setattr(pretrained, "LARGE_ELEMENTS", 1 if not adapter else 1 << 12)
    config = pytest.importorskip("peft").LoraConfig(target_modules=["q_proj"]) if adapter else None
    model = stream_from(tmp_path, dtype=torch.float32, adapter=config)
    state = {name.removeprefix("base_model.model."): value for name, value in model.state_dict().items()}
    found = {name.replace(".base_layer", ""): value for name, value in state.items()}
    for name, value in module.state_dict().items():
        assert torch.equal(found[name], value), name
    with torch.no_grad():
        expected = float(module(**text_batch(1)).loss)
    assert model.step(text_batch(1)).loss == pytest.approx(expected, rel=1e-5)


def test_experts_that_are_missing_or_misshapen_are_named(tmp_path: Path) -> None:
    experts(tmp_path, "5GB")
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.1.mlp.experts.2.up_proj.weight"
    save_file({**tensors, name: torch.zeros(5, 32)}, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=rf"{name} has shape \(5, 32\) in .* and \(16, 32\) in the model"):
        stream_from(tmp_path)
    for lacking in (name, "model.layers.1.self_attn.q_proj.weight"):
        save_file({k: v for k, v in tensors.items() if k != lacking}, file, metadata={"format": "pt"})
        with pytest.raises(ValueError, match=rf"lacks 1 tensors that its architecture needs: {lacking}$"):
            stream_from(tmp_path)


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


def test_quantised_weights_are_never_taken_for_their_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By their configuration transformers may know what to do with them; else they are named."""
    saved(tmp_path, "llama")
    weights = load_file(tmp_path / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    weights[name] = weights[name].to(torch.float8_e4m3fn)
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=rf"{name} is torch\.float8_e4m3fn; quantised weights are not trained"):
        stream_from(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    asked: list[Path] = []

    def convert(directory: Path, *_: Any) -> torch.nn.Module:
        asked.append(directory)
        return families.build(BY_NAME["llama"])

    monkeypatch.setattr(pretrained, "_converted_by_transformers", convert)
    stream_from(tmp_path)
    assert asked == [tmp_path]


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


# .bin files


def to_bin(path: Path) -> None:
    """The directory's safetensors as torch's own files, index and all."""
    for file in path.glob("*.safetensors"):
        torch.save(load_file(file), path / f"pytorch_{file.stem}.bin")
        file.unlink()
    index = path / "model.safetensors.index.json"
    if index.exists():
        text = index.read_text().replace("model-", "pytorch_model-").replace(".safetensors", ".bin")
        (path / "pytorch_model.bin.index.json").write_text(text)
        index.unlink()


@pytest.mark.parametrize("shard", ["5GB", "20KB"])
def test_bin_files_are_read(shard: str, tmp_path: Path) -> None:
    module = saved(tmp_path / "in", "llama", shard)
    files = sorted(file.name for file in (tmp_path / "in").glob("*.safetensors"))
    to_bin(tmp_path / "in")
    model = stream_from(tmp_path / "in", dtype=torch.float32)
    state = model.state_dict()
    for key, value in module.state_dict().items():
        assert torch.equal(state[key], value), key
    model.save_pretrained(tmp_path / "out")
    assert sorted(file.name for file in (tmp_path / "out").glob("*.safetensors")) == files


def test_bin_files_of_the_old_format_are_read(tmp_path: Path) -> None:
    module = saved(tmp_path, "llama")
    weights = load_file(tmp_path / "model.safetensors")
    torch.save(weights, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    (tmp_path / "model.safetensors").unlink()
    state = stream_from(tmp_path, dtype=torch.float32).state_dict()
    assert all(torch.equal(state[key], value) for key, value in module.state_dict().items())


class Trap:
    """Unpickled, it makes a directory."""

    def __init__(self, made: Path) -> None:
        self.made = made

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.made),)


@pytest.mark.parametrize("zipped", [True, False])
def test_code_in_a_bin_file_is_refused_and_not_run(zipped: bool, tmp_path: Path) -> None:
    saved(tmp_path, "llama")
    weights: dict[str, Any] = dict(load_file(tmp_path / "model.safetensors"))
    weights["model.norm.weight"] = Trap(tmp_path / "trapped")
    torch.save(weights, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=zipped)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"pytorch_model\.bin holds more than tensors and was not loaded: .*mkdir"):
        stream_from(tmp_path)
    assert not (tmp_path / "trapped").exists()
    torch.load(tmp_path / "pytorch_model.bin", weights_only=False)
    assert (tmp_path / "trapped").exists()  # the trap works


def test_a_bin_file_of_something_else_is_named(tmp_path: Path) -> None:
    saved(tmp_path, "llama")
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"no \*\.safetensors and no pytorch_model\*\.bin"):
        stream_from(tmp_path)
    torch.save([1, 2], tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"pytorch_model\.bin is not a dictionary of tensors"):
        stream_from(tmp_path)


# names, code


def test_unexpected_tensors_are_named_and_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(tmp_path, "llama")
    weights = load_file(tmp_path / "model.safetensors")
    save_file({**weights, "extra.head": torch.zeros(3)}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    monkeypatch.setattr(transformers.LlamaForCausalLM, "from_pretrained", None)
    with pytest.warns(UserWarning, match=r"holds 1 tensors that the architecture has no place for, .*: extra\.head"):
        model = stream_from(tmp_path)
    assert model.evaluate(text_batch(1)).loss > 0


CODE = """
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM
Path(__file__).with_name("ran").touch()
class OwnConfig(LlamaConfig):
    model_type = "own_llama"
class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig
    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        if output.loss is not None:
            output.loss = output.loss * 2
        return output
"""


def test_code_of_a_directory_runs_only_when_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    modules = tmp_path / "cache"
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(modules))
    module = saved(tmp_path / "in", "llama")
    path = tmp_path / "in" / "config.json"
    config = json.loads(path.read_text())
    config["auto_map"] = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
    config["model_type"], config["architectures"] = "own_llama", ["OwnModel"]
    path.write_text(json.dumps(config))
    (tmp_path / "in" / "own.py").write_text(CODE)
    with pytest.raises(ValueError, match=r"brings code of its own \(own\.py\), which is not run unless asked for"):
        stream_from(tmp_path / "in")
    assert not list(tmp_path.rglob("ran"))
    model = stream_from(tmp_path / "in", trust_remote_code=True, dtype=torch.float32)
    assert list(modules.rglob("ran"))
    same = megatrain.StreamedModel(module, device="cpu", dtype=torch.float32)
    assert model.evaluate(text_batch(1)).loss == pytest.approx(2 * same.evaluate(text_batch(1)).loss)
    model.save_pretrained(tmp_path / "out")
    assert (tmp_path / "out" / "own.py").read_text() == CODE
    again = stream_from(tmp_path / "out", trust_remote_code=True, dtype=torch.float32)
    assert again.evaluate(text_batch(1)).loss == model.evaluate(text_batch(1)).loss
