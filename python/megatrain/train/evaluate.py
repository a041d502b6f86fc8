"""Loss on data that are not trained on: every so many steps and at the end; the best, and when to stop."""

import math
from collections.abc import Sequence
from typing import Any

import megatrain
from megatrain.data import in_order

from .hooks import Hook, Run
from .prepare import HeldOut


def evaluate(model: megatrain.StreamedModel, held_out: HeldOut, micro_batch: int) -> dict[str, Any]:
    """eval_loss, mean nats over the targets; perplexity; for texts bits_per_byte: all nats of the documents'
    tokens and boundaries over their UTF-8 bytes, comparable between tokenizers, since every byte is paid for
    once."""
    nats, targets = 0.0, 0.0
    for batch in in_order(held_out.rows, micro_batch):
        report = model.evaluate(batch)
        nats += report.loss * report.targets
        targets += report.targets
    loss = nats / targets
    found: dict[str, Any] = {
        "eval_loss": loss,
        "perplexity": math.exp(min(loss, 700.0)),
        "eval_targets": int(targets),
    }
    if held_out.nbytes is not None:
        found["bits_per_byte"] = nats / math.log(2) / held_out.nbytes
    return found


def described(results: dict[str, Any]) -> str:
    line = f"loss {results['eval_loss']:.4f}, perplexity {results['perplexity']:.2f}"
    if "bits_per_byte" in results:
        line += f", {results['bits_per_byte']:.3f} bits per byte"
    return line


class Evaluation(Hook):
    """`others` hear of a new best."""

    def __init__(self, others: Sequence[Hook] = ()) -> None:
        self._others = others

    def before_first_step(self, run: Run) -> None:
        if run.settings.eval.at_start:
            self._evaluate(run)

    def after_step(self, run: Run) -> None:
        every = run.settings.eval.every
        if every is not None and run.step % every == 0 and run.results.get("step") != run.step:
            self._evaluate(run)

    def ended(self, run: Run) -> None:
        if run.results.get("step") != run.step:
            self._evaluate(run, quiet=True)  # the last line of the run says it

    def _evaluate(self, run: Run, *, quiet: bool = False) -> None:
        held_out = run.prepared.held_out
        if held_out is None:
            return
        settings = run.settings.eval
        results = {"step": run.step, **evaluate(run.model, held_out, run.settings.batch.micro_batch)}
        loss = results["eval_loss"]
        best = math.isfinite(loss) and (run.best_loss is None or loss < run.best_loss - settings.min_delta)
        run.results = results
        if best:
            run.best_loss, run.best_step, run.worse = loss, run.step, 0
        else:
            run.worse += 1
        run.log({**results, "best": best})
        if not quiet:
            run.progress.note(f"step {run.step}  held out: {described(results)}" + ("  (best)" if best else ""))
        if best:
            for hook in self._others:
                hook.new_best(run)
        if settings.patience is not None and run.worse >= settings.patience and run.step < run.steps:
            run.stopped = (
                f"the held-out loss was not below that of step {run.best_step} ({run.best_loss:.4f}) "
                f"in {run.worse} evaluations"
                if run.best_loss is not None
                else f"{run.worse} evaluations gave no finite loss"
            )
