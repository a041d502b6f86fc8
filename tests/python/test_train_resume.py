"""Checkpoints of `megatrain train`, as a user meets them: stop, go on, what is kept, what is refused."""

from __future__ import annotations

import errno
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("pydantic")
from safetensors.torch import load_file
from test_train_run import base, here, records, train  # noqa: F401

import megatrain
from megatrain.checkpoints.directory import PartialCheckpoint

STEPS = ["steps=6", "eval.every=2", "sample={every: 3, tokens: 2}", "schedule={kind: wsd, warmup_steps: 3}"]
TIMES = ("tokens_per_second", "seconds", "wait_copy_seconds", "wait_update_seconds", "checkpoint_seconds")


def _metrics(run: str) -> list[dict[str, Any]]:
    """Without times, checkpoints, and where lines of speed fall."""
    found = [r for key in ("loss", "eval_loss", "sample") for r in records(key, run)]
    return [{k: v for k, v in record.items() if k not in TIMES} for record in found]


def _same_model(first: str, second: str) -> None:
    one, other = (load_file(f"{run}/model/model.safetensors") for run in (first, second))
    assert one.keys() == other.keys()
    for name, values in one.items():
        assert torch.equal(values, other[name]), name


def _stop_at(monkeypatch: pytest.MonkeyPatch, where: str, step: int, signal_number: int = signal.SIGINT) -> None:
    """The signal comes once, in the step, where the first gradients of its backward are there, or in a hook behind
    it."""
    from megatrain.gradients import GradientSink
    from megatrain.train.sample import Samples

    owner, name = {
        "step": (megatrain.StreamedModel, "step"),
        "backward": (GradientSink, "add"),
        "samples": (Samples, "after_step"),
    }[where]
    original = getattr(owner, name)
    came, begun = False, 0

    def stop(self: Any, *arguments: Any) -> Any:
        nonlocal came
        at = {"step": lambda: self.steps + 1, "backward": lambda: begun, "samples": lambda: arguments[0].step}[where]()
        if at == step and not came:
            came = True
            os.kill(os.getpid(), signal_number)
        return original(self, *arguments)

    if where == "backward":
        take_step = megatrain.StreamedModel.step

        def counted(self: Any, micro_batches: Any) -> Any:
            nonlocal begun
            begun += 1
            return take_step(self, micro_batches)

        monkeypatch.setattr(megatrain.StreamedModel, "step", counted)
    monkeypatch.setattr(owner, name, stop)


@pytest.mark.parametrize(
    ("where", "step", "number"),
    [
        ("step", 4, signal.SIGINT),
        ("backward", 4, signal.SIGINT),
        ("step", 3, signal.SIGTERM),
        ("samples", 3, signal.SIGINT),
        ("samples", 6, signal.SIGINT),
    ],
)
@pytest.mark.parametrize("precision", ["{dtype: bfloat16, moments: int8}"])
def test_a_stopped_run_goes_on_as_if_it_had_not(
    here: Path,  # noqa: F811
    where: str,
    step: int,
    number: int,
    precision: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = [*STEPS, f"precision={precision}"]
    assert train(*arguments, "output.directory=runs/straight") == 0
    _stop_at(monkeypatch, where, step, number)
    capsys.readouterr()
    assert train(*arguments) == (130 if number == signal.SIGINT else 143)
    shown = capsys.readouterr()
    done = int(shown.err.split("after step ")[1].split()[0])
    word = "interrupted" if number == signal.SIGINT else "terminated"
    assert shown.err == (
        f"megatrain: {word} after step {done} of 6; "
        f"runs/a/checkpoint-{done} is saved, --set resume=auto goes on from it\n"
    )
    assert f"step {done}  saved runs/a/checkpoint-{done} in " in shown.out
    assert train(*arguments, "resume=auto") == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    assert f"going on after step {done} of runs/a\n" in shown.out
    assert [path.name for path in Path("runs").iterdir() if path.name.startswith("a")] == ["a"]
    assert _metrics("runs/a") == _metrics("runs/straight")
    _same_model("runs/a", "runs/straight")


def test_checkpoints_on_the_way(here: Path, capsys: pytest.CaptureFixture[str]) -> None:  # noqa: F811
    """Every two steps, the last two kept; a run that was killed behind the second goes on from it, and one whose
    newest is damaged from the one before; steps made anew are logged once."""
    assert train(*STEPS, "checkpoint={every: 2, keep: 2}") == 0
    assert sorted(path.name for path in Path("runs/a").glob("checkpoint-*")) == ["checkpoint-4", "checkpoint-6"]
    saved = records("checkpoint")
    assert [(r["step"], r["checkpoint"]) for r in saved] == [(s, f"checkpoint-{s}") for s in (2, 4, 6)]
    assert all(record["checkpoint_seconds"] >= record["checkpoint_stall_seconds"] > 0 for record in saved)
    expected = _metrics("runs/a")
    shutil.move("runs/a", "runs/straight")
    assert train(*STEPS, "checkpoint={every: 2, keep: 2}") == 0
    shutil.rmtree("runs/a/model")
    os.truncate("runs/a/checkpoint-6/tile-00001.safetensors", 100)
    with Path("runs/a/metrics.jsonl").open("a") as file:
        file.write('{"step": 7, "lo')  # cut short
    capsys.readouterr()
    assert train(*STEPS, "checkpoint={every: 2, keep: 2}", "resume=auto") == 0
    shown = capsys.readouterr()
    assert shown.err.startswith("megatrain: runs/a/checkpoint-6 is damaged: tile-00001.safetensors has 100 bytes")
    assert shown.err.count("\n") == 1
    assert "going on after step 4 of runs/a\n" in shown.out
    assert _metrics("runs/a") == expected
    _same_model("runs/a", "runs/straight")
    assert sorted(path.name for path in Path("runs/a").glob("checkpoint-*")) == ["checkpoint-4", "checkpoint-6"]


def test_from_a_path_a_new_run_goes_on(here: Path, capsys: pytest.CaptureFixture[str]) -> None:  # noqa: F811
    assert train(*STEPS, "checkpoint.every=2", "checkpoint.keep=9") == 0
    assert train(*STEPS, "resume=runs/a/checkpoint-2") == 0
    _same_model("runs/a", "runs/a-2")
    assert [record["step"] for record in records("loss", "runs/a-2")] == [3, 4, 5, 6]
    # The number of steps may change: here the run is extended.
    assert train(*STEPS, "steps=8", "resume=runs/a") == 0
    assert [record["step"] for record in records("loss", "runs/a-3")] == [7, 8]


def test_a_run_killed_behind_its_last_step_saves_its_model(here: Path) -> None:  # noqa: F811
    assert train(*STEPS, "checkpoint.every=3") == 0
    shutil.copytree("runs/a/model", "before/model")
    shutil.rmtree("runs/a/model")
    assert train(*STEPS, "checkpoint.every=3", "resume=auto") == 0
    _same_model("runs/a", "before")


def test_auto_begins_where_there_is_nothing(here: Path, capsys: pytest.CaptureFixture[str]) -> None:  # noqa: F811
    assert train("steps=1", "resume=auto", "sample.tokens=0") == 0
    shutil.rmtree("runs/a/model")
    assert train("steps=1", "resume=auto", "sample.tokens=0") == 0  # neither checkpoint nor model
    assert sorted(path.name for path in Path("runs").iterdir()) == ["a", "a-2"]
    shutil.rmtree("runs/a-2")
    capsys.readouterr()
    assert train("steps=1", "resume=auto", "output={directory: runs/a, if_exists: error}") == 2
    assert "runs/a: holds something already" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("resume=nowhere", "resume: nowhere has no whole checkpoint"),
        ("resume=base", "resume: base has no whole checkpoint"),
        ("seed=3", "resume: runs/a/checkpoint-4 is not of this model: seed is 0 in the checkpoint and 3 in the model"),
        ("precision.moments=bf16", "moments is fp32 in the checkpoint and bf16 in the model"),
        ("sequence_length=48", "resume: runs/a: the saved position"),
    ],
)
def test_what_does_not_fit_is_refused(
    here: Path,  # noqa: F811
    override: str,
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert train("steps=4", "checkpoint.every=2", "sample.tokens=0") == 0
    before = sorted(str(path) for path in Path("runs").rglob("*"))
    capsys.readouterr()
    assert train("steps=5", "resume=auto", "sample.tokens=0", override) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert sorted(str(path) for path in Path("runs").rglob("*")) == before


def test_a_finished_run_is_told_and_no_mistake(here: Path, capsys: pytest.CaptureFixture[str]) -> None:  # noqa: F811
    assert train("steps=2", "sample.tokens=0") == 0
    assert train("steps=2", "sample.tokens=0", "checkpoint.every=1", "output.directory=runs/b") == 0
    before = sorted(str(path) for path in Path("runs").rglob("*"))
    for run, message in (
        ("a", "runs/a is finished, its model is in runs/a/model; without a checkpoint it cannot be extended"),
        ("b", "runs/b is after step 2 of 2; it is finished, its model is in runs/b/model\n"),
    ):
        capsys.readouterr()
        assert train("steps=2", "sample.tokens=0", "resume=auto", f"output.directory=runs/{run}") == 0
        shown = capsys.readouterr()
        assert message in shown.out
        assert shown.err == ""
    assert sorted(str(path) for path in Path("runs").rglob("*")) == before
    assert train("steps=2", "sample.tokens=0", "resume=runs/b") == 2
    assert "resume: runs/b is after step 2 of 2; nothing is left to do" in capsys.readouterr().err


def test_a_run_out_of_patience_is_finished_until_it_is_given_more(
    here: Path,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = ["steps=9", "sample.tokens=0", "checkpoint.every=9", "eval={every: 1, patience: 1, min_delta: 99}"]
    assert train(*arguments) == 0
    capsys.readouterr()
    assert train(*arguments, "resume=auto") == 0
    out = capsys.readouterr().out
    assert "runs/a is after step 2 of 9, stopped by eval.patience (1); it is finished, its model is in" in out
    assert train(*arguments, "resume=auto", "eval.patience=2") == 0
    assert [record["step"] for record in records("loss")] == [1, 2, 3]


def test_where_to_go_on_from_is_looked_at_before_the_data(here: Path, capsys: pytest.CaptureFixture[str]) -> None:  # noqa: F811
    assert train("data=absent.jsonl", "resume=nowhere") == 2
    assert "resume: nowhere has no whole checkpoint; there is no such directory" in capsys.readouterr().err


SHAPE = (
    "model={type: qwen3, hidden_size: 32, num_hidden_layers: 2, intermediate_size: 48, num_attention_heads: 2, "
    "num_key_value_heads: 1, head_dim: 16}"
)


@pytest.mark.parametrize(
    ("first", "override", "message"),
    [
        (["lora={rank: 4, alpha: 8}"], "lora.alpha=16", "lora.alpha is 8.0 in the checkpoint and 16.0 now"),
        (["lora={rank: 4}"], "lora.dropout=0.5", "lora.dropout is 0.0 in the checkpoint and 0.5 now"),
        (
            [SHAPE, "data=text.txt", "tokenizer.type=bytes"],
            "model.rms_norm_eps=0.1",
            "model.rms_norm_eps is 1e-06 in the checkpoint and 0.1 now",
        ),
        (
            [SHAPE, "data=text.txt", "tokenizer.type=bytes"],
            "model.hidden_act=gelu",
            "model.hidden_act is 'silu' in the checkpoint and 'gelu' now",
        ),
    ],
)
def test_another_function_of_the_same_weights_is_refused(
    here: Path,  # noqa: F811
    first: list[str],
    override: str,
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if first[0].startswith("lora"):
        pytest.importorskip("peft")
    Path("text.txt").write_text("green bottles hanging on the wall\n" * 60)
    assert train(*first, "steps=1", "checkpoint.every=1", "sample.tokens=0") == 0
    capsys.readouterr()
    assert train(*first, "steps=2", "resume=auto", "sample.tokens=0", override) == 2
    error = capsys.readouterr().err
    assert f"resume: runs/a: {message}; only steps, optimizer and schedule may change" in error
    assert error.splitlines()[-1].startswith("megatrain: resume: ")
    assert train(*first, "steps=2", "resume=auto", "sample.tokens=0") == 0


def test_a_full_disk(
    here: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A checkpoint that is due ends the run, the one before stays; an interrupted run says what it could not do."""
    finish = PartialCheckpoint.finish

    def full(self: PartialCheckpoint) -> Path:
        if self._step < 3:
            return finish(self)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "file")

    monkeypatch.setattr(PartialCheckpoint, "finish", full)
    assert train("checkpoint.every=2", "sample.tokens=0") == 1
    assert "step 4: the checkpoint could not be saved: [Errno 28] No space left" in capsys.readouterr().err
    assert [path.name for path in Path("runs/a").glob("checkpoint-*")] == ["checkpoint-2"]
    _stop_at(monkeypatch, "step", 4)
    assert train("checkpoint.every=2", "sample.tokens=0", "output.directory=runs/b") == 130
    error = capsys.readouterr().err
    assert "its checkpoint was not saved ([Errno 28] No space left on device: 'file')" in error
    assert error.endswith("runs/b/checkpoint-2 is the last one\n")
