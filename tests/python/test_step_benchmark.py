"""benchmarks/python/step.py: what its rows ask for and what it writes of them."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatrain import _native
from megatrain.stacks import candidates
from megatrain.units import plan_units

FOLDER = Path(__file__).parents[2] / "benchmarks" / "python"
TINY = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=4, num_attention_heads=2)


@pytest.fixture(scope="module")
def step() -> Iterator[Any]:
    names = [path.stem for path in FOLDER.glob("*.py")]  # some are those of modules of the tests
    others = {name: sys.modules.pop(name) for name in names if name in sys.modules}
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        patch.setenv("PYTORCH_CUDA_ALLOC_CONF", "")  # which it sets when imported
        found = importlib.import_module("step")
        shapes = importlib.import_module("shapes")
    for name in names:
        sys.modules.pop(name, None)
    sys.modules.update(others)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(shapes.SHAPES, "tiny", TINY)
        patch.setitem(shapes.KEY_VALUE_HEADS, "tiny", 1)
        yield found


def test_values_are_read_as_they_are_meant(step: Any) -> None:
    row = step.parse_row("a name clipping=false text=TRUE micro=3 outside=all")
    assert row["name"] == "a name" and row["outside"] == "all" and row["micro"] == 3
    assert row["clipping"] is False and row["text"] is True
    assert row["order"] == "layer-major" and row["resident"] == 0
    planned = step.parse_row("planned cap=24")
    assert planned["planned"] and planned["cap"] == 24 and not set(step.BY_HAND) & set(planned)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("clipping=yes", 'clipping is "yes"; it must be True or False'),
        ("clipping=1", 'clipping is "1"; it must be True or False'),
        ("micro=1e3", 'micro is "1e3"; it must be a whole number'),
        ("resident=", 'resident is ""; it must be a whole number'),
        ("steps=1", "steps is 1; it must be at least 2"),
        ("length=0", "length is 0; it must be at least 1"),
        ("residents=1", "unknown setting residents"),
        ("planned resident=0", "is planned, so resident is not set by hand"),
    ],
)
def test_what_cannot_be_read_is_refused(step: Any, setting: str, message: str) -> None:
    with pytest.raises(SystemExit, match=message):
        step.parse_row(f"row {setting}")


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("outside=model.embed_token", 'did you mean "model.embed_tokens"'),
        ("resident=5", "resident is 5; it must be between 0 and the number of blocks, 4"),
        ("everything=3 selected=2", "selected is 5"),
        ("kept_on=disk", 'kept_on is "disk"'),
        ("order=any", 'order is "any"'),
        ("burst=block", 'burst is "block"'),
        ("planned update_order=last", 'update_order is "last"'),
    ],
)
def test_all_rows_are_checked_before_the_first_runs(step: Any, setting: str, message: str) -> None:
    module = step.meta_model("tiny")
    units = plan_units(module, candidates(module), _native.TileFormat.bf16_split)
    good = step.parse_row("good outside=lm_head+model.embed_tokens resident=4")
    step.check_rows([good, step.parse_row("planned")], units)
    with pytest.raises(SystemExit, match=rf"^row (late|late planned), of a model with 4 blocks: .*{message}"):
        step.check_rows([good, step.parse_row(f"late {setting}")], units)


def test_what_is_written_of_rows(
    step: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("megatrain.kept.SHELF_LEAST_BYTES", 1)
    path = tmp_path / "rows.json"
    sizes = "micro=1 length=16 accumulate=2 steps=2"
    arguments = ["--model", "tiny", "--no-resident", "--threads", "1", "--hardware", "RTX 4090", "--json", str(path)]
    arguments += ["--row", f"by hand {sizes} everything=4 kept_on=host inputs_on=host slots=1"]
    arguments += ["--row", f"planned {sizes}"]
    monkeypatch.setattr(sys, "argv", ["step.py", *arguments])
    step.main()
    by_hand, planned = json.loads(path.read_text())["rows"]
    assert by_hand["placement"]["blocks"][0]["keep"] == "everything" and by_hand["everything"] == 4
    assert planned["placement"] == planned["plan"]["placement"] and not set(step.BY_HAND) & set(planned)
    for row in (by_hand, planned):
        assert row["of_resident"] is None
        assert 0 <= row["streamed"] <= 1
    assert by_hand["host_kept_gib"] > 0 and by_hand["streamed"] > 0
    header, *lines = capsys.readouterr().out.splitlines()[-3:]
    assert [line[: header.index("of res.") + 7].split()[-1] for line in lines] == ["-", "-"]
