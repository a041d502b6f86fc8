"""`save_pretrained` and `megatrain export`: equal logits, exact masters, shards, ties, adapters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import families
import pytest
import torch
import transformers
from families import FAMILIES, text_batch
from safetensors.torch import load_file

import megatrain
from megatrain.cli import main

pytest.importorskip("pydantic")
from test_train_run import base, here, train  # noqa: F401

LLAMA = next(family for family in FAMILIES if family.name == "llama")
INPUTS = {"input_ids": torch.arange(24).view(2, 12)}


def trained(module: Any, **changes: Any) -> megatrain.StreamedModel:
    settings: dict[str, Any] = dict(device="cpu", compile=False, optimizer=megatrain.AdamW(lr=1e-2))
    model = megatrain.StreamedModel(module, **{**settings, **changes})
    for seed in range(2):
        model.step(text_batch(seed))
    return model


def stored(directory: Path) -> dict[str, torch.Tensor]:
    return {k: v for file in sorted(directory.glob("*.safetensors")) for k, v in load_file(file).items()}


def logits(module: Any) -> torch.Tensor:
    with torch.no_grad():
        return module.eval()(**INPUTS).logits


@pytest.mark.parametrize("master", ["split", "none"])
@pytest.mark.parametrize("word", ["bf16", "fp32"])
def test_a_checkpoint_is_exported_as_the_model_is(word: str, master: str, tmp_path: Path) -> None:
    """Without the module: the same files to the byte, and the values of the tiles."""
    model = trained(families.build(LLAMA), master=master)
    path = model.save_checkpoint(tmp_path / "run")
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[word]
    model.save_pretrained(tmp_path / "a", dtype=dtype, max_shard_size="20KB")
    arguments = ["--dtype", word, "--max-shard-size", "20KB"]
    assert main(["export", str(path), str(tmp_path / "b"), *arguments]) == 0
    names = sorted(file.name for file in (tmp_path / "a").iterdir())
    assert len(names) > 5 and "model.safetensors.index.json" in names and "generation_config.json" in names
    for name in names:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes(), name
    state = model.state_dict(dtype=None if word == "fp32" else dtype)
    saved = stored(tmp_path / "b")
    assert saved.keys() == state.keys()
    for name, value in saved.items():
        assert value.dtype == dtype
        assert torch.equal(value, state[name].to(dtype)), name
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "b", dtype="auto")
    assert again.dtype == dtype
    if word == "bf16":
        assert torch.equal(logits(again), logits(model))


def test_exact_masters_hold_more_than_what_is_streamed(tmp_path: Path) -> None:
    model = trained(families.build(LLAMA))
    model.save_pretrained(tmp_path, dtype=torch.float32)
    saved = stored(tmp_path)["model.norm.weight"]
    assert not torch.equal(saved, saved.bfloat16().float())


def test_ties_and_buffers_are_kept(tmp_path: Path) -> None:
    module = families.build(LLAMA, tie_word_embeddings=True)
    module.register_buffer("count", torch.tensor(7))
    model = trained(module)
    model.save_pretrained(tmp_path)
    saved = stored(tmp_path)
    assert "lm_head.weight" not in saved
    assert int(saved["count"]) == 7
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")
    assert again.lm_head.weight is again.model.embed_tokens.weight
    assert torch.equal(logits(again), logits(model))


def test_the_originals_shards_are_kept(tmp_path: Path) -> None:
    families.build(LLAMA).save_pretrained(tmp_path / "in", max_shard_size="30KB")
    model = megatrain.StreamedModel.from_pretrained(tmp_path / "in", device="cpu", compile=False)
    model.step(text_batch(1))
    model.save_pretrained(tmp_path / "out")
    index = "model.safetensors.index.json"
    before, after = (json.loads((tmp_path / folder / index).read_text()) for folder in ("in", "out"))
    assert len(set(after["weight_map"].values())) > 3
    assert after["weight_map"] == before["weight_map"]
    path = model.save_checkpoint(tmp_path / "run")
    assert main(["export", str(path), str(tmp_path / "again")]) == 0
    assert (tmp_path / "again" / index).read_bytes() == (tmp_path / "out" / index).read_bytes()


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_an_adapter_loads_in_peft(kind: str, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(
        r=4, target_modules=["q_proj", "down_proj"], use_dora=kind == "dora", modules_to_save=["lm_head"]
    )
    model = trained(peft.get_peft_model(families.build(LLAMA), config), dtype=torch.float32)
    path = model.save_checkpoint(tmp_path / "run")
    assert main(["export", str(path), str(tmp_path / "out")]) == 0
    model.save_pretrained(tmp_path / "same")
    names = ["adapter_config.json", "adapter_model.safetensors"]
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == names
    for name in names:
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "same" / name).read_bytes()
    again = peft.PeftModel.from_pretrained(families.build(LLAMA), tmp_path / "out")
    assert torch.equal(logits(again), logits(model))
    assert not torch.allclose(logits(again), logits(families.build(LLAMA)))


def test_what_an_adapter_has_no_place_for_is_named(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    module = peft.get_peft_model(families.build(LLAMA), peft.LoraConfig(r=2, target_modules=["q_proj"]))
    module.get_parameter("base_model.model.model.norm.weight").requires_grad_(True)
    model = trained(module)
    with pytest.raises(ValueError, match=r"model\.norm\.weight is trained, but is no part of the adapter"):
        model.save_pretrained(tmp_path / "out")
    path = model.save_checkpoint(tmp_path / "run")  # a run can go on all the same
    assert main(["export", str(path), str(tmp_path / "out")]) == 2
    assert not (tmp_path / "out").exists()


def test_a_run_is_exported_by_its_directory(here: Path, capsys: pytest.CaptureFixture[str]) -> None:  # noqa: F811
    assert train("steps=2", "checkpoint.every=2") == 0
    capsys.readouterr()
    assert main(["export", "runs/a", "out", "--dtype", "fp32"]) == 0
    shown = capsys.readouterr()
    assert shown.out.startswith("exported runs/a/checkpoint-2 to out: ")
    assert "float32 in 1 file\n" in shown.out
    model = transformers.AutoModelForCausalLM.from_pretrained("runs/a/model")
    again = transformers.AutoModelForCausalLM.from_pretrained("out")
    assert torch.equal(logits(again), logits(model))
    for folder in ("out", "runs/a/model"):
        assert transformers.AutoTokenizer.from_pretrained(folder)("a b").input_ids


def test_mistakes_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = megatrain.StreamedModel(families.build(LLAMA), device="cpu", compile=False)
    path = model.save_checkpoint(tmp_path / "run")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("")
    (tmp_path / "done" / "model").mkdir(parents=True)
    out = str(tmp_path / "out")
    for arguments, message in (
        ([str(tmp_path / "nowhere"), out], "nowhere: no such directory"),
        ([str(tmp_path / "done"), out], "holds no checkpoint; "),
        ([str(path), str(tmp_path / "full")], "full: holds something already"),
        ([str(path), str(tmp_path / "full" / "file" / "y")], "file is not a directory"),
        ([str(path), out, "--max-shard-size", "big"], '--max-shard-size is "big"; write bytes'),
        ([str(path), out, "--max-shard-size", "5"], '--max-shard-size is "5"; write a number with its unit'),
        ([str(path), out, "--max-shard-size", "0GB"], "--max-shard-size is 0; it must be above 0 bytes"),
        ([str(path), out, "--max-shard-size", "infGB"], '--max-shard-size is "infGB"; write bytes'),
        ([str(path), out, "--tokenizer", "nowhere"], "--tokenizer nowhere: no such directory"),
        ([str(path), out, "--dtype", "fp8"], "fp8"),
    ):
        assert main(["export", *arguments]) == 2, arguments
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1, error
    with pytest.raises(ValueError, match=r"dtype is torch\.float16"):
        model.save_pretrained(out, dtype=torch.float16)
    (path / "tile-00001.safetensors").unlink()
    assert main(["export", str(path), out]) == 2
    assert "tile-00001.safetensors is missing" in capsys.readouterr().err
    assert not Path(out).exists()


def test_a_lora_run_leaves_an_adapter(here: Path, capsys: pytest.CaptureFixture[str]) -> None:  # noqa: F811
    """Base weights go from the files to the tiles, without values before; the adapter loads around them."""
    peft = pytest.importorskip("peft")
    from megatrain import pretrained

    pretrained_large = pretrained.LARGE_ELEMENTS
    pretrained.LARGE_ELEMENTS = 16
    try:
        assert train("steps=2", "checkpoint.every=2", "lora={rank: 4, targets: all-linear}", "optimizer.lr=0.01") == 0
    finally:
        pretrained.LARGE_ELEMENTS = pretrained_large
    assert main(["export", "runs/a", "out"]) == 0
    weights = load_file("runs/a/model/adapter_model.safetensors")
    assert weights and all(".lora_" in name for name in weights)
    exported = load_file("out/adapter_model.safetensors")
    assert all(torch.equal(exported[name], value) for name, value in weights.items())
    with_adapter = peft.AutoPeftModelForCausalLM.from_pretrained("runs/a/model")
    base_model = transformers.AutoModelForCausalLM.from_pretrained(
        with_adapter.peft_config["default"].base_model_name_or_path
    )
    assert not torch.allclose(logits(with_adapter), logits(base_model))
    with with_adapter.disable_adapter():
        assert torch.equal(logits(with_adapter), logits(base_model))
