"""What a run says and writes of its plan, and of what came of it."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("pydantic")
import megatrain
from megatrain.cli import main
from megatrain.errors import UnsupportedModelError
from megatrain.report import during_step
from megatrain.train.records import AchievedFile, PlanFile

CONFIG = """
model: {type: qwen3, hidden_size: 32, num_hidden_layers: 3, intermediate_size: 48, num_attention_heads: 2,
        num_key_value_heads: 1, head_dim: 16}
tokenizer: {type: bytes}
data: text.txt
sequence_length: 16
batch: {micro_batch: 2, accumulate: 2}
steps: 4
device: cpu
eval: {max_bytes: 100}
sample: {tokens: 0}
output: {directory: runs/a}
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(CONFIG)
    (tmp_path / "text.txt").write_text("some words, again and again. " * 100)
    return tmp_path


def train(*overrides: str) -> int:
    return main(["train", "run.yaml", *(part for override in overrides for part in ("--set", override))])


def test_a_run_writes_its_plan_and_what_came_of_it(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train("hardware=H200", "device_memory=24GiB") == 0
    shown = capsys.readouterr().out
    for part in ("plan:\n  model      Qwen3ForCausalLM", "2 x 2 x 16 = 64 tokens", "H200, 24.0 GiB", "bound by"):
        assert part in shown
    assert shown.index("plan:") < shown.index("step 1/4")
    found = PlanFile.read(Path("runs/a/plan.json"))
    assert found.plan is not None and found.unplanned == ""
    assert found.plan.batch == found.batch
    assert (found.batch.micro_batches, found.batch.rows, found.batch.length) == (2, 2, 16)
    assert found.plan.hardware.gpu_memory == 24 << 30
    assert found.plan.placement == found.placement
    assert sum(found.plan.predicted.device.values()) == found.plan.predicted.device_bytes
    came = AchievedFile.read(Path("runs/a/achieved.json"))
    assert (came.through_step, came.steps) == (4, 3)
    assert came.predicted_seconds == found.plan.predicted.seconds
    assert came.predicted_host_bytes == found.plan.predicted.host_bytes
    assert came.device_bytes is None
    assert came.host_bytes == found.plan.predicted.host["tiles"]
    lines = [json.loads(line) for line in Path("runs/a/metrics.jsonl").read_text().splitlines()]
    seconds = [line["seconds"] for line in lines if line.get("through_step", 0) > 1]
    assert came.seconds == pytest.approx(sum(seconds) / 3)


def _spans(run: str) -> list[dict[str, Any]]:
    events = json.loads(Path(run, "trace.json").read_text())["traceEvents"]
    return [event for event in events if event["ph"] == "X"]


def test_on_a_cpu_a_run_says_why_it_has_no_plan_and_traces_one_step(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train() == 0
    assert "plan: every block streams; on the host backend there is nothing to plan for" in capsys.readouterr().out
    found = PlanFile.read(Path("runs/a/plan.json"))
    assert found.plan is None and found.unplanned.startswith("on the host backend")
    (blocks,) = found.placement.blocks
    assert (blocks.first, blocks.last, blocks.keep, blocks.resident) == (0, 2, "inputs", "none")
    came = AchievedFile.read(Path("runs/a/achieved.json"))
    assert came.predicted_seconds is came.predicted_device_bytes is came.predicted_host_bytes is None
    spans = _spans("runs/a")
    compute = [span for span in spans if span["cat"] == "compute"]
    assert {span["args"]["step"] for span in compute} == {1}
    assert {span["name"] for span in compute} == {f"model.layers.{index}" for index in range(3)}
    assert {span["cat"] for span in spans} >= {"compute", "copy_up", "copy_down"}


def test_a_step_lasts_from_its_first_block_to_the_next_steps() -> None:
    def span(kind: str, step: int, begin: int, end: int) -> Any:
        return SimpleNamespace(kind=kind, step=step, begin_ns=begin, end_ns=end)

    update_before, first, second = span("update", 0, 5, 12), span("compute", 1, 10, 20), span("compute", 1, 20, 30)
    update, ahead, following = span("update", 1, 31, 60), span("copy_up", 2, 38, 39), span("compute", 2, 40, 50)
    spans = [span("compute", 0, 0, 5), update_before, first, second, update, ahead, following]
    assert during_step(spans, 1) == [update_before, first, second, update, ahead]
    assert during_step(spans[:5], 1) == [update_before, first, second, update]
    assert during_step(spans, 3) == []


def test_a_run_of_one_step_accounts_for_that_one(here: Path) -> None:
    assert train("steps=1") == 0
    assert AchievedFile.read(Path("runs/a/achieved.json")).steps == 1
    assert {span["args"]["step"] for span in _spans("runs/a") if span["cat"] == "compute"} == {0}


def test_what_cannot_fit_is_refused_before_anything_is_written(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train("hardware=RTX 4090", "device_memory=1GiB") == 2
    error = capsys.readouterr().err
    assert "of device memory at 2 x 16 tokens a micro-batch" in error and error.count("\n") == 1
    assert not Path("runs").exists()
    assert train("hardware=TPU") == 2
    assert '"TPU" is no preset; there are presets of H200' in capsys.readouterr().err


@pytest.mark.parametrize(
    ("failure", "status", "left"),
    [
        (UnsupportedModelError("not this one"), 2, False),
        (KeyboardInterrupt(), 130, False),
        (MemoryError("too much"), 1, True),
    ],
    ids=["refused", "interrupted", "memory"],
)
def test_the_plan_is_there_before_the_first_step_and_goes_with_a_refusal(
    failure: BaseException, status: int, left: bool, here: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    def fail(*_: object) -> None:
        assert PlanFile.read(Path("runs/a/plan.json")).batch.rows == 2
        raise failure

    monkeypatch.setattr(megatrain.StreamedModel, "step", fail)
    assert train("report_to=tensorboard") == status
    assert Path("runs").exists() is left
    assert not Path("runs/a/tensorboard").exists()
    assert capsys.readouterr().err.count("\n") == 1
