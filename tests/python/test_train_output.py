"""The run directory and the progress line."""

import io
import json
import os
from pathlib import Path

import pytest

pytest.importorskip("pydantic")
from megatrain.train.config import OutputSettings, TrainSettings
from megatrain.train.errors import UserError
from megatrain.train.loop import Interval, StepRecord
from megatrain.train.output import RunDirectory
from megatrain.train.progress import open_progress

SETTINGS = TrainSettings.model_validate({"model": {"type": "qwen3"}, "data": "x", "steps": 3})


def _open(directory: Path, **keys: object) -> tuple[RunDirectory, Path]:
    run = RunDirectory(OutputSettings(directory=str(directory), **keys))  # type: ignore[arg-type]
    return run, run.open(SETTINGS)


def test_a_run_never_writes_into_what_is_there(tmp_path: Path) -> None:
    wanted = tmp_path / "runs" / "a"
    assert [_open(wanted)[1].name for _ in range(3)] == ["a", "a-2", "a-3"]
    (tmp_path / "empty").mkdir()
    assert _open(tmp_path / "empty")[1].name == "empty"
    (tmp_path / "file").write_text("")
    assert _open(tmp_path / "file")[1].name == "file-2"
    with pytest.raises(UserError, match="holds something already"):
        RunDirectory(OutputSettings(directory=str(wanted), if_exists="error"))


def test_nothing_is_written_before_open(tmp_path: Path) -> None:
    run = RunDirectory(OutputSettings(directory=str(tmp_path / "runs" / "a")))
    assert run.path is None
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_be_written_is_refused_early(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="is not a directory"):
        RunDirectory(OutputSettings(directory=str(tmp_path / "file" / "run")))
    if os.geteuid() != 0:  # root may write anywhere
        (tmp_path / "locked").mkdir(mode=0o500)
        with pytest.raises(UserError, match="no permission"):
            RunDirectory(OutputSettings(directory=str(tmp_path / "locked" / "run")))


def test_metrics_are_json_whatever_the_numbers(tmp_path: Path) -> None:
    run, path = _open(tmp_path / "a")
    run.log({"step": 1, "loss": 0.5})
    run.log({"step": 2, "loss": float("nan")})
    lines = (path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line, parse_constant=pytest.fail) for line in lines] == [
        {"step": 1, "loss": 0.5},
        {"step": 2, "loss": None},
    ]


def test_a_model_is_there_whole_or_not_at_all(tmp_path: Path) -> None:
    run, path = _open(tmp_path / "a")

    def fail(directory: Path) -> None:
        directory.mkdir()
        (directory / "half").write_text("x")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run.save_model(fail)
    assert sorted(entry.name for entry in path.iterdir()) == ["config.yaml"]

    def write(directory: Path) -> None:
        directory.mkdir()
        (directory / "whole").write_text("x")

    assert run.save_model(write) == path / "model"
    assert sorted(entry.name for entry in path.iterdir()) == ["config.yaml", "model"]


INTERVAL = Interval(
    records=[
        StepRecord(step=1, loss=4.0, grad_norm=9.0, lr=1e-3, targets=30, skipped=False),
        StepRecord(step=2, loss=2.0, grad_norm=1.5, lr=2e-3, targets=10, skipped=True),
    ],
    tokens=4000,
    seconds=2.0,
    wait_copy_seconds=0.5,
    wait_update_seconds=0.02,
)


def test_a_plain_line_says_everything() -> None:
    stream = io.StringIO()
    with open_progress(4, stream) as progress:
        progress.show(INTERVAL)
    line = stream.getvalue()
    assert line.count("\n") == 1
    for part in (
        "step 2/4",
        "loss 3.5000",
        "norm 1.500",
        "lr 2.00e-03",
        "2,000 tokens/s",
        "waiting for copies 25.0%, updates 1.0%",
        "skipped 1 (not finite)",
    ):
        assert part in line


def test_a_terminal_gets_a_bar() -> None:
    ours, theirs = os.openpty()
    with os.fdopen(theirs, "w") as stream, open_progress(4, stream) as progress:
        progress.show(INTERVAL)
    shown = os.read(ours, 1 << 16).decode()
    os.close(ours)
    assert "2/4" in shown
    assert "\x1b[" in shown
