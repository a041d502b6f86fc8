"""Mixtures of experts, which transformers joins when it loads them: exports have the original's tensors again."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from families import text_batch
from family_zoo import EXACT
from safetensors.torch import load_file

import megatrain
from megatrain.cli import main
from megatrain.export.parts import CannotTakeApart, Part, original_parts

INDEX = "model.safetensors.index.json"
SIZES: dict[str, Any] = dict(
    vocab_size=67, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, num_experts_per_tok=2,
)  # fmt: skip
FAMILIES: dict[str, Any] = {
    "mixtral": lambda: transformers.MixtralConfig(**SIZES, num_local_experts=3),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(
        **SIZES, num_experts=3, moe_intermediate_size=16, head_dim=8, tie_word_embeddings=True
    ),
}


def build(name: str) -> Any:
    torch.manual_seed(3)
    return transformers.AutoModelForCausalLM.from_config(FAMILIES[name]())


def stored(directory: Path) -> dict[str, torch.Tensor]:
    return {k: v for file in sorted(directory.glob("*.safetensors")) for k, v in load_file(file).items()}


def logits(module: Any) -> torch.Tensor:
    with torch.no_grad():
        return module.eval()(input_ids=torch.arange(24).view(2, 12)).logits


@pytest.mark.parametrize("name", FAMILIES)
def test_the_originals_names_and_shards_come_back(name: str, tmp_path: Path) -> None:
    """To the bit without a step; after one, of a model and of its checkpoint, transformers has the streamed logits."""
    build(name).save_pretrained(tmp_path / "in", max_shard_size="30KB")
    original = stored(tmp_path / "in")
    assert any(".experts.2." in key for key in original)  # an expert a tensor, as vLLM reads them
    model = megatrain.StreamedModel.from_pretrained(tmp_path / "in", device="cpu", dtype=torch.float32, compile=False)
    model.save_pretrained(tmp_path / "same")
    for file in (tmp_path / "in").glob("*.safetensors"):
        before, after = load_file(file), load_file(tmp_path / "same" / file.name)
        assert before.keys() == after.keys()
        assert all(torch.equal(after[key], value) for key, value in before.items()), file.name
    maps = [json.loads((tmp_path / folder / INDEX).read_text())["weight_map"] for folder in ("in", "same")]
    assert len(set(maps[0].values())) > 2 and maps[0] == maps[1]

    model.step(text_batch(1))
    path = model.save_checkpoint(tmp_path / "run")
    assert main(["export", str(path), str(tmp_path / "out")]) == 0
    assert {k: v.shape for k, v in stored(tmp_path / "out").items()} == {k: v.shape for k, v in original.items()}
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert torch.equal(logits(again), logits(model))
    assert not torch.equal(logits(again), logits(build(name)))


def test_exact_masters_of_experts(tmp_path: Path) -> None:
    """The halves of a master are joined expert by expert; a model that was never a file has the library's names."""
    model = megatrain.StreamedModel(build("mixtral"), device="cpu", compile=False)
    model.step(text_batch(1))
    path = model.save_checkpoint(tmp_path / "run")
    model.save_pretrained(tmp_path / "a", dtype=torch.float32)
    assert main(["export", str(path), str(tmp_path / "b"), "--dtype", "fp32"]) == 0
    names = sorted(file.name for file in (tmp_path / "a").iterdir())
    assert all((tmp_path / "a" / n).read_bytes() == (tmp_path / "b" / n).read_bytes() for n in names)
    masters = model.state_dict()
    saved = stored(tmp_path / "a")
    for expert in range(3):
        prefix = f"model.layers.1.block_sparse_moe.experts.{expert}"
        gate_up = torch.cat([saved[f"{prefix}.w1.weight"], saved[f"{prefix}.w3.weight"]])
        assert torch.equal(gate_up, masters["model.layers.1.mlp.experts.gate_up_proj"][expert])
        assert torch.equal(saved[f"{prefix}.w2.weight"], masters["model.layers.1.mlp.experts.down_proj"][expert])


def test_a_directory_with_the_modules_names_keeps_them(tmp_path: Path) -> None:
    build("qwen3_moe").save_pretrained(tmp_path / "in", save_original_format=False)
    assert "model.layers.0.mlp.experts.gate_up_proj" in stored(tmp_path / "in")
    model = megatrain.StreamedModel.from_pretrained(tmp_path / "in", device="cpu", compile=False)
    model.save_pretrained(tmp_path / "out")
    assert stored(tmp_path / "out").keys() == stored(tmp_path / "in").keys()
    assert torch.equal(
        logits(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")), logits(model)
    )


def test_what_cannot_be_taken_apart_keeps_the_modules_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And says so."""
    import transformers.core_model_loading as loading

    def joins(_: Any, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"all": torch.cat([value.reshape(-1) for value in state.values()])}

    monkeypatch.setattr(loading, "revert_weight_conversion", joins)
    model = megatrain.StreamedModel(build("mixtral"), device="cpu", compile=False)
    path = model.save_checkpoint(tmp_path / "run")
    with pytest.warns(UserWarning, match="not those of the original: transformers joins or turns tensors to write all"):
        model.save_pretrained(tmp_path / "out")
    assert "model.layers.0.mlp.experts.gate_up_proj" in stored(tmp_path / "out")
    assert main(["export", str(path), str(tmp_path / "again")]) == 0
    assert "tensors have the names of transformers' module" in capsys.readouterr().out
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert torch.equal(logits(again), logits(model))


@pytest.mark.parametrize(
    "family",
    ["deepseek_v3", "glm4_moe", "olmoe", "phimoe", "jamba", "kimi_linear", "granitemoehybrid", "llava", "qwen2_5_vl",
     "gpt_neox", "hrm_text"],
)  # fmt: skip
def test_parts_are_what_transformers_writes(family: str) -> None:
    """To the bit, under the same names; HRM's are joined to be written."""
    from transformers.core_model_loading import revert_weight_conversion

    module: Any = next(row for row in EXACT if row.name == family).make()
    state = {name: parameter.detach() for name, parameter in module.named_parameters()}
    shapes = {name: tuple(value.shape) for name, value in state.items()}
    if family == "hrm_text":
        with pytest.raises(CannotTakeApart, match="joins or turns tensors to write"):
            original_parts(module, shapes)
        return
    written = revert_weight_conversion(module, dict(state))
    assert written.keys() != state.keys()
    parts = original_parts(module, shapes)
    assert parts.keys() == written.keys()
    for name, part in parts.items():
        flat = state[part.name].reshape(-1)[part.first :]
        shape = state[part.name].shape if part.shape is None else part.shape
        assert torch.equal(flat[: math.prod(shape)].view(shape), written[name]), name


@pytest.mark.parametrize(
    ("written", "message"),
    [
        (lambda state: {"a": state["w"][:1]}, "does not write all of w"),
        (lambda state: {"a": state["w"][:1], "b": state["w"]}, "does not write all of w"),
        (lambda state: {"a": state["w"].T}, "joins or turns tensors to write a"),
        (lambda state: {"a": state["v"]}, "KeyError|'v'"),
    ],
)
def test_what_is_no_part_is_found(written: Any, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers.core_model_loading as loading

    module = build("mixtral")
    monkeypatch.setattr(loading, "revert_weight_conversion", lambda _, state: written(state))
    with pytest.raises(CannotTakeApart, match=message):
        original_parts(module, {"w": (2, 3)})
    monkeypatch.setattr(
        loading, "revert_weight_conversion", lambda _, state: {"a": state["w"][1].clone(), "b": state["w"][0]}
    )
    assert original_parts(module, {"w": (2, 3)}) == {"a": Part("w", 3, (3,)), "b": Part("w", 0, (3,))}
    assert original_parts(torch.nn.Linear(2, 2), {"w": (2, 3)}) == {"w": Part("w")}
