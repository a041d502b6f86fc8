"""Every number format trained on real text, from the same seeds, beside fp32 in plain PyTorch.

    OMP_NUM_THREADS=1 python benchmarks/python/precision.py --json precision.json

A language model of about 400,000 parameters on the sources of Python's standard library, 500 steps. A seed decides
the initial weights and the order of the rows; text, tokenizer and held-out set are the same in all runs. What a format
costs is the mean difference to the fp32 runs of the same rule and seeds, to be held against their spread: the
difference between the highest and the lowest. Runs that are in the JSON already are not made again."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers

import megatrain
from megatrain.data import Loader, in_order
from megatrain.train.config import ScheduleSettings
from megatrain.train.config_file import check
from megatrain.train.prepare import Prepared, prepare
from megatrain.train.schedule import lr_factor

SHAPE = dict(
    hidden_size=96, intermediate_size=256, num_hidden_layers=3, num_attention_heads=3, num_key_value_heads=3,
    head_dim=32, vocab_size=1024, tie_word_embeddings=True, max_position_embeddings=128,
)  # fmt: skip
LENGTH, ROWS = 128, 4
BETAS, WEIGHT_DECAY, MAX_NORM = (0.9, 0.95), 0.1, 1.0
PEAK = {"AdamW": 3e-3, "Lion": 5e-4}
LAST = 50
"""Steps at the end whose mean is the training loss."""


@dataclass(frozen=True)
class Mode:
    rule: str
    weights: str
    moments: str = "fp32"
    settings: Mapping[str, Any] | None = field(default_factory=dict)
    """Of StreamedModel; None for plain PyTorch."""

    @property
    def name(self) -> str:
        return f"{self.rule}, {self.weights}, {self.moments} moments"


@dataclass(frozen=True)
class Result:
    mode: str
    seed: int
    held_out: float
    """Mean nats a token on text that is never trained on."""
    training: float
    seconds: float


def modes() -> list[Mode]:
    found = [Mode("AdamW", "fp32 in plain PyTorch", settings=None)]
    for rule in ("AdamW", "Lion"):
        for weights, settings in {
            "fp32": dict(dtype=torch.float32),
            "bf16 with split master": dict(dtype=torch.bfloat16, master="split"),
            "bf16 without master": dict(dtype=torch.bfloat16, master="none"),
        }.items():
            moments = ("fp32", "bf16", "int8") if rule == "AdamW" else ("fp32",)
            found += [Mode(rule, weights, each, dict(settings, moments=each)) for each in moments]
    return found


REFERENCES = [mode for mode in modes() if mode.settings is None or mode.name == "Lion, fp32, fp32 moments"]
"""What a rule's other modes are compared with: torch has no Lion."""


def runs(seeds: int, only: str) -> list[tuple[Mode, int]]:
    """What others are compared with comes first, then a seed of every mode after the other."""
    chosen = [mode for mode in modes() if only in mode.name]
    pairs = [(mode, seed) for seed in range(seeds) for mode in chosen]
    return sorted(pairs, key=lambda pair: pair[0] not in REFERENCES)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", default="", help="modes whose name has this")
    parser.add_argument("--commit", default="", help="of the source; else asked of git")
    parser.add_argument("--json", type=Path)
    parser.add_argument(
        "--apart", type=int, help="only print how fast two fp32 runs of one seed part, in so many steps"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    transformers.logging.set_verbosity_error()
    prepared = prepare_text(arguments.steps)
    machine = describe(arguments.commit, prepared)
    print("\n".join(f"{key}: {value}" for key, value in machine.items()), flush=True)
    if arguments.apart:
        print_apart(prepared, arguments.apart, arguments.steps)
        return
    results: list[Result] = []
    if arguments.json and arguments.json.exists():
        results = [Result(**each) for each in json.loads(arguments.json.read_text(encoding="utf-8"))["results"]]
    done = {(result.mode, result.seed) for result in results}
    for mode, seed in runs(arguments.seeds, arguments.only):
        if (mode.name, seed) in done:
            continue
        results.append(run(mode, seed, prepared, arguments.steps))
        print(line(results[-1]), flush=True)
        if arguments.json:
            found = {**machine, "steps": arguments.steps, "results": [asdict(result) for result in results]}
            arguments.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print("\n" + table(results, arguments.only))


def prepare_text(steps: int) -> Prepared:
    data = dict(path="python-stdlib", max_bytes=4_000_000, held_out=0.05)
    tokenizer = dict(type="bpe", vocab_size=SHAPE["vocab_size"])
    values = dict(
        model=dict(type="qwen3", **SHAPE), data=data, tokenizer=tokenizer, sequence_length=LENGTH, steps=steps,
        batch=dict(micro_batch=ROWS),
    )  # fmt: skip
    return prepare(check(values, "precision.py"))


def describe(commit: str, prepared: Prepared) -> dict[str, object]:
    asked = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    assert prepared.held_out is not None
    return dict(
        cpu=megatrain._native.cpu_model(),
        threads=torch.get_num_threads(),
        torch=torch.__version__,
        transformers=transformers.__version__,
        date=time.strftime("%Y-%m-%d"),
        commit=commit or asked.stdout.strip() or "unknown",
        parameters=sum(parameter.numel() for parameter in fresh(0).parameters()),
        tokens=prepared.rows.pieces.tokens,
        held_out_tokens=prepared.held_out.rows.pieces.tokens,
    )


def fresh(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    make: Any = transformers.AutoModelForCausalLM.from_config
    # With a cache, transformers would let packed documents see each other.
    return make(transformers.Qwen3Config(**SHAPE, use_cache=False), dtype=torch.float32)


def batches_and_rates(
    rule: str, seed: int, prepared: Prepared, steps: int
) -> Iterator[tuple[Mapping[str, Any], float]]:
    loader = Loader(prepared.rows, micro_batch=ROWS, seed=seed)
    schedule = ScheduleSettings(warmup_steps=steps // 10, min_lr=PEAK[rule] / 10)
    for number in range(steps):
        (batch,) = next(loader)
        yield batch, PEAK[rule] * lr_factor(schedule, number, steps, PEAK[rule])


def print_apart(prepared: Prepared, until: int, steps: int) -> None:
    """Losses of plain PyTorch and of streamed fp32 weights, from one seed, and their difference."""
    resident, *others = modes()
    streams = next(mode for mode in others if mode.rule == resident.rule)
    (theirs, _), (ours, _) = plain(resident, 0), streamed(streams, 0)
    for number, (batch, rate) in zip(range(until), batches_and_rates(resident.rule, 0, prepared, steps), strict=False):
        expected, found = theirs(batch, rate), ours(batch, rate)
        if number % 6 == 0:
            print(f"step {number:>3}  {expected:.6f}  {found:.6f}  apart {abs(found - expected):.1e}", flush=True)


def run(mode: Mode, seed: int, prepared: Prepared, steps: int) -> Result:
    started = time.perf_counter()
    step, evaluate = plain(mode, seed) if mode.settings is None else streamed(mode, seed)
    losses = [step(batch, rate) for batch, rate in batches_and_rates(mode.rule, seed, prepared, steps)]
    held_out = weighted_mean(evaluate(batch) for batch in held_out_batches(prepared))
    return Result(mode.name, seed, held_out, statistics.fmean(losses[-LAST:]), time.perf_counter() - started)


Step = Callable[[Mapping[str, Any], float], float]
Evaluate = Callable[[Mapping[str, Any]], tuple[float, float]]
"""Loss and its weight."""


def streamed(mode: Mode, seed: int) -> tuple[Step, Evaluate]:
    rule: Any = getattr(megatrain, mode.rule)
    model = megatrain.StreamedModel(
        fresh(seed),
        optimizer=rule(lr=PEAK[mode.rule], betas=BETAS, weight_decay=WEIGHT_DECAY),
        max_grad_norm=MAX_NORM,
        device="cpu",
        threads=1,
        seed=seed,
        **(mode.settings or {}),
    )
    model.train()

    def step(batch: Mapping[str, Any], lr: float) -> float:
        for group in model.optimizer.param_groups:
            group["lr"] = lr
        return model.step(batch).loss

    def evaluate(batch: Mapping[str, Any]) -> tuple[float, float]:
        report = model.evaluate(batch)
        return report.loss, report.targets

    return step, evaluate


def plain(mode: Mode, seed: int) -> tuple[Step, Evaluate]:
    module = fresh(seed).train()
    decayed = [parameter for parameter in module.parameters() if parameter.dim() > 1]
    others = [parameter for parameter in module.parameters() if parameter.dim() <= 1]
    groups = [dict(params=decayed, weight_decay=WEIGHT_DECAY), dict(params=others, weight_decay=0.0)]
    optimizer = torch.optim.AdamW(groups, betas=BETAS)

    def step(batch: Mapping[str, Any], lr: float) -> float:
        for group in optimizer.param_groups:
            group["lr"] = lr
        loss = module(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    def evaluate(batch: Mapping[str, Any]) -> tuple[float, float]:
        with torch.no_grad():
            return float(module(**batch).loss), float((batch["labels"][:, 1:] != -100).sum())

    return step, evaluate


def held_out_batches(prepared: Prepared) -> Iterator[Mapping[str, Any]]:
    assert prepared.held_out is not None
    return in_order(prepared.held_out.rows, 16)


def weighted_mean(values: Iterator[tuple[float, float]]) -> float:
    pairs = list(values)
    return sum(loss * weight for loss, weight in pairs) / sum(weight for _, weight in pairs)


def line(result: Result) -> str:
    losses = f"held out {result.held_out:.4f}  last {LAST} steps {result.training:.4f}"
    return f"seed {result.seed}  {result.mode:<44} {losses}  {result.seconds:.0f} s"


def table(results: Sequence[Result], only: str = "") -> str:
    rows = [
        f"| mode | held-out loss by seed | to fp32 | training, last {LAST} steps | within the spread |",
        "|---|---|---|---|---|",
    ]
    for mode in modes():
        own = [result for result in results if result.mode == mode.name]
        reference = {
            result.seed: result.held_out
            for each in REFERENCES
            for result in results
            if each.rule == mode.rule and result.mode == each.name
        }
        if only not in mode.name or not own or not reference:
            continue
        spread = max(reference.values()) - min(reference.values())
        off = statistics.fmean(result.held_out - reference[result.seed] for result in own)
        within = f"it is {spread:.4f}" if mode in REFERENCES else "yes" if abs(off) <= spread else "no"
        by_seed = ", ".join(f"{result.held_out:.4f}" for result in own)
        training = statistics.fmean(result.training for result in own)
        rows.append(f"| {mode.name} | {by_seed} | {off:+.4f} | {training:.4f} | {within} |")
    return "\n".join(rows)


if __name__ == "__main__":
    main()
