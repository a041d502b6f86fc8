"""How much memory loading, saving and exporting take beyond the state: one JSON line each. In a process of its own.

    python tests/python/memory_use.py DIRECTORY        an empty directory

What is counted is anonymous memory, of which files that are mapped are no part, as sampled while the work goes on."""

from __future__ import annotations

import gc
import json
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file

import megatrain


def anonymous() -> int:
    """Bytes of this process, shared memory with them."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return sum(int(lines[name].split()[0]) for name in ("RssAnon", "RssShmem")) * 1024


class Peak:
    """In `with`: `more` is how far anonymous memory rose above what it was."""

    def __enter__(self) -> Peak:
        gc.collect()
        self.more = 0
        self._before = anonymous()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._end.wait(0.001):
            self.more = max(self.more, anonymous() - self._before)

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()


def config(layers: int, vocabulary: int) -> Any:
    return transformers.LlamaConfig(
        hidden_size=512, intermediate_size=1024, num_hidden_layers=layers, vocab_size=vocabulary,
        num_attention_heads=8, num_key_value_heads=8, tie_word_embeddings=True,
    )  # fmt: skip


def write_experts(path: Path, layers: int) -> None:
    """fp32 safetensors in several shards, an expert a tensor."""
    settings = config(layers, 64).to_dict() | dict(model_type="mixtral", num_local_experts=4, num_experts_per_tok=2)
    module: Any = transformers.MixtralForCausalLM(transformers.MixtralConfig(**settings))
    module.save_pretrained(path, max_shard_size="30MB")


def write_directory(path: Path, layers: int, vocabulary: int) -> None:
    """fp32 safetensors in several shards; in path-bin the same in bf16, as .bin."""
    torch.manual_seed(0)
    module: Any = transformers.LlamaForCausalLM(config(layers, vocabulary))
    module.save_pretrained(path, max_shard_size="30MB")
    pickled = path.with_name(f"{path.name}-bin")
    pickled.mkdir()
    (pickled / "config.json").write_bytes((path / "config.json").read_bytes())
    for file in path.glob("*.safetensors"):
        tensors = {name: value.bfloat16() for name, value in load_file(file).items()}
        torch.save(tensors, pickled / f"pytorch_{file.stem}.bin")


def stream(path: Path, dtype: torch.dtype) -> megatrain.StreamedModel:
    return megatrain.StreamedModel.from_pretrained(path, device="cpu", dtype=dtype, compile=False, self_check=False)


def report(what: str, peak: Peak, model: megatrain.StreamedModel) -> None:
    elements = [parameter.numel for parameter in model._parts.units.parameters]
    state = model._parts.tiles.store.nbytes
    values = dict(what=what, more=peak.more, state=state, elements=sum(elements), largest=max(elements) * 4)
    print(json.dumps(values), flush=True)


def step(model: megatrain.StreamedModel) -> None:
    ids = torch.zeros(1, 4, dtype=torch.long)
    model.step(dict(input_ids=ids, labels=ids))


def main() -> None:
    root = Path(sys.argv[1])
    write_directory(root / "small", 2, 64)
    write_directory(root / "large", 12, 16384)
    write_experts(root / "small-experts", 2)
    write_experts(root / "experts", 5)
    for warm in ("small", "small-bin", "small-experts"):  # what is imported and set up once
        model = stream(root / warm, torch.bfloat16)
        step(model)
        model.save_checkpoint(root / "warm")
        model.load_checkpoint(root / "warm")
        model.save_pretrained(root / "warm-export")
        model.close()
    for name, dtype in (("experts", torch.float32), ("large", torch.float32), ("large-bin", torch.bfloat16)):
        with Peak() as peak:
            model = stream(root / name, dtype)
        report(f"load {name}", peak, model)
        if name == "large-bin":
            run(model, root)
        model.close()
        del model
        gc.collect()


def run(model: megatrain.StreamedModel, root: Path) -> None:
    step(model)
    model.synchronize()

    def steps() -> None:
        step(model)
        step(model)
        model.synchronize()

    def beside_steps() -> None:
        pending = model.begin_checkpoint(root / "run", keep=1)
        steps()
        pending.wait()

    def export() -> None:
        model.save_pretrained(root / "export", dtype=torch.float32)

    work: dict[str, Callable[[], object]] = {
        "steps": steps,
        "save": lambda: model.save_checkpoint(root / "run"),
        "save beside steps": beside_steps,
        "load": lambda: model.load_checkpoint(root / "run"),
        "export": export,
    }
    for what, act in work.items():
        with Peak() as peak:
            act()
        report(what, peak, model)


if __name__ == "__main__":
    main()
