"""`megatrain report` as a user calls it: what the page holds, that it needs nothing else, and a look with a browser."""

from __future__ import annotations

import base64
import io
import json
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("pydantic")
pytest.importorskip("matplotlib")
from matplotlib import image
from test_train_plan import CONFIG

from megatrain.charts import RunFiles
from megatrain.charts.comparison import comparison_rows
from megatrain.charts.run_files import Span
from megatrain.charts.timeline import _busy, draw_timeline
from megatrain.cli import main
from megatrain.train.records import AchievedFile

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One run with a plan, one without."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "run.yaml").write_text(CONFIG)
    (folder / "text.txt").write_text("some words, again and again. " * 100)
    for name, hardware in (("planned", "H200"), ("streamed", "auto")):
        keys = [f"data={folder / 'text.txt'}", f"output.directory={folder / name}", f"hardware={hardware}"]
        assert main(["train", str(folder / "run.yaml"), *(part for key in keys for part in ("--set", key))]) == 0
    return folder


class _Page(HTMLParser):
    """Texts, and every address and tag of a page."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.text: list[str] = []
        self.tags: set[str] = set()
        self.addresses: list[str] = []
        self.images: dict[str, str] = {}
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        own = {name: value or "" for name, value in attrs}
        self.tags.add(tag)
        self.addresses += [own[name] for name in ("src", "href", "srcset", "data", "action") if name in own]
        if tag == "img":
            self.images[own["id"]] = own["src"]

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def _decoded(address: str) -> Any:
    kind, data = address.split(",", 1)
    assert kind == "data:image/png;base64"
    return base64.b64decode(data, validate=True)


def test_the_page_holds_everything(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(runs / "planned")]) == 0
    folder = runs / "planned" / "report"
    assert capsys.readouterr().out == f"{folder / 'report.html'}\n"
    page = _Page(folder / "report.html")
    assert page.addresses and all(address.startswith("data:image/png;base64,") for address in page.addresses)
    assert not page.tags & {"script", "link", "iframe", "object"}
    source = (folder / "report.html").read_text(encoding="utf-8")
    for reference in ("http:", "https:", "url(", "@import"):
        assert reference not in source
    assert list(page.images) == ["step", "timeline", "memory", "curves"]
    for name, address in page.images.items():
        data = _decoded(address)
        assert (folder / f"{name}.png").read_bytes() == data
        pixels = image.imread(io.BytesIO(data), format="png")
        assert pixels.shape[1] == 1760
        colours = (pixels[::4, ::4, :3] * 255).astype(np.uint32) @ np.array([1, 256, 65536], dtype=np.uint32)
        assert len(np.unique(colours)) > 20
    text = " ".join(page.text)
    values = json.loads((runs / "planned" / "achieved.json").read_text())
    for part in (
        "Qwen3ForCausalLM", "2 x 2 x 16 = 64 tokens a step", "planned for H200", "bound by", "4 steps, loss",
        "Means of 3 steps", f"{values['tokens_per_second']:,.0f}", "Order of work: micro-batch-major",
        "everything, on the device", "Next best placements",
    ):  # fmt: skip
        assert part in text, part


def test_a_run_without_a_plan_is_drawn_too(runs: Path, tmp_path: Path) -> None:
    assert main(["report", str(runs / "streamed"), "--output", str(tmp_path / "out")]) == 0
    assert not (runs / "streamed" / "report").exists()
    page = _Page(tmp_path / "out" / "report.html")
    assert list(page.images) == ["step", "timeline", "curves"]
    text = " ".join(page.text)
    assert "Nothing was planned: on the host backend" in text
    assert "There is no plan to take memory apart by." in text
    assert "blocks 0 to 2" in text and "stream from the host" in text


def test_a_run_that_ended_early_says_what_it_lacks(runs: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    shutil.copy(runs / "planned" / "plan.json", tmp_path / "run")
    assert main(["report", str(tmp_path / "run")]) == 0
    page = _Page(tmp_path / "run" / "report" / "report.html")
    assert list(page.images) == ["memory"]
    text = " ".join(page.text)
    for part in ("ended before its first step", "did not come far enough", "No step was logged."):
        assert part in text


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        (None, "", "holds neither metrics.jsonl nor plan.json"),
        ("metrics.jsonl", '{"step": 1}\nnot json\n', "metrics.jsonl:2: "),
        ("plan.json", "{}", "plan.json: "),
        ("trace.json", '{"traceEvents": [{"ph": "X"}]}', "trace.json: is not a trace of megatrain's"),
    ],
    ids=["nothing", "metrics", "plan", "trace"],
)
def test_what_is_no_run_is_refused(
    file: str | None, content: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if file is not None:
        (tmp_path / "metrics.jsonl").write_text("")
        (tmp_path / file).write_text(content)
    assert main(["report", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_a_file_in_the_place_of_the_report_is_refused(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = runs / "taken"
    file.write_text("")
    run = next(path.parent for path in runs.rglob("metrics.jsonl"))
    assert main(["report", str(run), "--output", str(file)]) == 2
    error = capsys.readouterr().err
    assert f"--output {file}: {file} is not a directory" in error and error.count("\n") == 1


def test_a_missing_directory_and_a_missing_extra(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["report", str(tmp_path / "absent")]) == 2
    assert "absent: no such directory" in capsys.readouterr().err
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "matplotlib" else name)
    assert main(["report", str(tmp_path)]) == 2
    assert 'matplotlib not installed; run: pip install "megatrain[report]"' in capsys.readouterr().err


def test_differences_are_of_the_prediction(runs: Path) -> None:
    found = RunFiles.read(runs / "planned")
    assert found.plan is not None and found.plan.plan is not None and found.achieved is not None
    plan = found.plan.plan
    came = found.achieved.model_copy(
        update=dict(seconds=1.1 * plan.predicted.seconds, device_bytes=plan.predicted.device_bytes // 2)
    )
    rows = {what: difference for what, _, _, difference in comparison_rows(plan, came)}
    assert rows["seconds a step"] == "+10.0%"
    assert rows["device memory at its peak"] == "-50.0%"
    assert all(row[1] == row[3] == "–" for row in comparison_rows(None, came))
    assert isinstance(came, AchievedFile)


def test_lanes_hold_their_own_spans() -> None:
    spans = (
        Span("copy_up", "block.0", 1, 0.0, 1.0, 10),
        Span("compute", "block.0", 1, 1.0, 2.0, 0),
        Span("compute", "block.1", 1, 3.0, 2.0, 0),
        Span("update", "block.1", 1, 2.0, 4.0, 10),
        Span("update", "block.0", 1, 4.0, 4.0, 10),
    )
    assert _busy(spans, "update", 10.0) == pytest.approx(0.6)  # together from 2 to 8
    axes = draw_timeline(spans).axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == [
        "copies up\n12%", "compute\n50%", "copies down\n0%", "updates\n75%",
    ]  # fmt: skip
    assert [text.get_text() for text in axes.texts] == ["0", "0", "1", "1", "0"]
    assert axes.get_xlim() == (0, 8)


def test_a_browser_shows_the_page(runs: Path, tmp_path: Path) -> None:
    browser = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if browser is None:
        pytest.skip(f"no browser: none of {', '.join(BROWSERS)} is installed")
    assert main(["report", str(runs / "planned"), "--output", str(tmp_path)]) == 0
    shot = tmp_path / "shot.png"
    command = [
        browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--window-size=1140,2400",
        "--host-resolver-rules=MAP * ~NOTFOUND", f"--user-data-dir={tmp_path / 'profile'}", f"--screenshot={shot}",
        (tmp_path / "report.html").as_uri(),
    ]  # fmt: skip
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    pixels = (image.imread(shot)[..., :3] * 255).round().astype(int)
    assert pixels.shape[:2] == (2400, 1140)

    def rows_with(colour: tuple[int, int, int]) -> int:
        return int((np.abs(pixels - np.array(colour)).max(axis=-1) <= 3).any(axis=1).sum())

    assert rows_with((0x22, 0x88, 0x33)) > 100  # the compute lane, the step's bar, the speed
    assert rows_with((0x44, 0x77, 0xAA)) > 100  # the achieved bar, tiles, the loss
    assert rows_with((0x22, 0x22, 0x22)) > 100  # words
