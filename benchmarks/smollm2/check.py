"""Fine-tunes all of SmolLM2-135M on a CPU by the command line, and checks what a user counts on.

    python benchmarks/smollm2/check.py WORK        after prepare.py WORK

A run of 16 steps, and the same one stopped by Ctrl-C after 8 and resumed. Then: the held-out loss fell; both runs have
the same losses, norms and weights to the last bit; the export is loaded by transformers, has the streamed model's
logits to the bit, in bf16 and in fp32, whose weights are the exact masters, and generates. Ends with status 1 at the
first of these that is not so. WORK needs 12 GB; runs in it that have ended are taken as they are."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import megatrain

STOP = 8
COMMAND = [sys.executable, "-m", "megatrain.cli"]
QUESTION = "Who's there?"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path, metavar="WORK", help="as prepare.py left it")
    work: Path = parser.parse_args().work
    if not (work / "whole" / "model").is_dir():
        train(work, "whole")
    if not (work / "stopped" / "model").is_dir():
        train(work, "stopped", until=STOP)
        train(work, "stopped", "--set", "resume=auto")
    held_out_loss_falls(work)
    resume_is_exact(work)
    exports_load(work)


def train(work: Path, name: str, *more: str, until: int | None = None) -> None:
    """A run in WORK/name; `until`: Ctrl-C once so many steps are in its metrics."""
    settings = dict(model=work / "model", **{"data.path": work / "chats.jsonl", "output.directory": work / name})
    arguments = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    command = [*COMMAND, "train", str(Path(__file__).with_name("run.yaml")), *arguments, *more]
    print(f"\n$ megatrain train run.yaml {' '.join(more)}".rstrip(), flush=True)
    # Ctrl-C is ignored by what a shell runs in the background, and by its children.
    process = subprocess.Popen(command, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
    if until is not None:
        while process.poll() is None and len(steps(work / name)) < until:
            time.sleep(0.5)
        process.send_signal(signal.SIGINT)
    status, expected = process.wait(), 0 if until is None else 130
    require(status == expected, f"status {status}")


def records(run: Path) -> list[dict[str, Any]]:
    file = run / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []


def steps(run: Path) -> dict[int, tuple[float, ...]]:
    """{step: what was measured in it}."""
    found = (record for record in records(run) if "loss" in record)
    return {record["step"]: tuple(record[key] for key in ("loss", "grad_norm", "lr", "targets")) for record in found}


def held_out(run: Path) -> dict[int, float]:
    return {record["step"]: record["eval_loss"] for record in records(run) if "eval_loss" in record}


def held_out_loss_falls(work: Path) -> None:
    losses = held_out(work / "whole")
    told = ", ".join(f"{loss:.4f} after step {step}" for step, loss in losses.items())
    require(list(losses.values()) == sorted(losses.values(), reverse=True), f"held-out loss falls: {told}")


def resume_is_exact(work: Path) -> None:
    whole, stopped = (steps(work / name) for name in ("whole", "stopped"))
    require(whole == stopped, f"{len(whole)} losses, norms and learning rates are equal to the last bit")
    require(held_out(work / "whole") == held_out(work / "stopped"), "held-out losses are equal to the last bit")
    files = sorted(path.name for path in (work / "whole" / "model").glob("*.safetensors"))
    same = all((work / "whole/model" / f).read_bytes() == (work / "stopped/model" / f).read_bytes() for f in files)
    require(same and len(files) == 3, f"weights are equal to the last bit, in the original's {len(files)} files")


def exports_load(work: Path) -> None:
    for word in ("fp32", "bf16"):
        out = work / f"export-{word}"
        shutil.rmtree(out, ignore_errors=True)
        subprocess.run([*COMMAND, "export", str(work / "stopped"), str(out), "--dtype", word], check=True)
    model = megatrain.StreamedModel.from_pretrained(work / "model", device="cpu", compile=False)
    model.load_checkpoint(work / "stopped")
    tokenizer = AutoTokenizer.from_pretrained(work / "export-fp32")
    message = [{"role": "user", "content": QUESTION}]
    ask = dict(add_generation_prompt=True, return_tensors="pt", return_dict=True)
    batch = dict(tokenizer.apply_chat_template(message, **ask))
    expected = logits(model, batch)

    rounded = AutoModelForCausalLM.from_pretrained(work / "export-bf16", dtype="auto")
    same = torch.equal(logits(rounded, batch), expected)
    require(rounded.dtype == torch.bfloat16 and same, "bf16 export: logits are equal to the last bit")
    exact = AutoModelForCausalLM.from_pretrained(work / "export-fp32")
    masters = model.state_dict()
    same = all(torch.equal(value, masters[name]) for name, value in exact.state_dict().items())
    require(exact.dtype == torch.float32 and same, "fp32 export: weights are the masters to the last bit")
    again = megatrain.StreamedModel.from_pretrained(
        work / "export-fp32", device="cpu", dtype=torch.float32, compile=False
    )
    same = torch.equal(logits(again, batch), logits(exact, batch))
    require(same, "fp32 export: logits of transformers and of the model streamed in fp32 are equal to the last bit")
    expected = expected.float()
    off = float((logits(exact, batch) - expected).abs().max() / expected.abs().max())
    require(off < 0.1, f"fp32 logits are within {off:.1%} of the largest of bf16's")
    tied = exact.lm_head.weight is exact.model.embed_tokens.weight
    names = {name for file in (work / "export-fp32").glob("*.safetensors") for name in load_file(file)}
    require(tied and "lm_head.weight" not in names, "tied weights are saved once and loaded tied")

    print(f"\n{QUESTION}")
    for name, module in {"before": AutoModelForCausalLM.from_pretrained(work / "model"), "after": exact}.items():
        written = module.generate(**batch, max_new_tokens=24, do_sample=False)[0, batch["input_ids"].shape[1] :]
        text = tokenizer.decode(written, skip_special_tokens=True)
        require(bool(text.strip()), f"generates {name} training: {text!r}")


def logits(module: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    with torch.no_grad():
        return module.eval()(**batch).logits


def require(holds: bool, what: str) -> None:
    print(f"{'ok' if holds else 'NOT SO'}: {what}", flush=True)
    if not holds:
        raise SystemExit(1)


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main()
