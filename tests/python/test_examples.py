"""Every example is a configuration that the schema takes, and says how it is run."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

pytest.importorskip("pydantic")
from megatrain.cli import main
from megatrain.train.config_file import load_settings

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.yaml"))


def test_there_are_those_that_the_pages_name() -> None:
    names = {path.stem for path in EXAMPLES}
    assert {"quickstart", "chats", "full-7b", "lora", "pretrain", "long-documents"} <= names


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_the_schema_takes_it(path: Path) -> None:
    settings = load_settings(str(path), [])
    assert settings.output.directory == f"runs/{path.stem}"
    assert f"megatrain train examples/{path.name}" in path.read_text()


PLANNED = re.compile(
    r"with an? (?P<gpu>[\w ]+?) and (?P<given>\d+) GiB of host memory: (?P<seconds>[\d.]+) s a step of "
    r"(?P<tokens>[\d,]+) tokens, (?P<host>\d+) GiB of host memory and (?P<device>\d+) GiB of the GPU's"
)
QWEN = dict(
    model_type="qwen2", hidden_size=3584, intermediate_size=18944, num_hidden_layers=28, num_attention_heads=28,
    num_key_value_heads=4, vocab_size=152064, tie_word_embeddings=False, max_position_embeddings=32768,
)  # fmt: skip
"""Of Qwen2.5-7B, as published."""


@pytest.mark.parametrize("path", [p for p in EXAMPLES if p.stem != "quickstart"], ids=lambda path: path.stem)
def test_the_planner_says_what_the_example_says(path: Path, tmp_path: Path) -> None:
    """Within 15 % of the time and 5 % of the memory, since the planner learns from what is measured."""
    comment = " ".join(line.removeprefix("#").strip() for line in path.read_text().splitlines() if line.startswith("#"))
    told = list(PLANNED.finditer(comment))
    assert told and "Planned, not measured" in comment
    if path.stem == "lora":
        pytest.importorskip("peft")
    (tmp_path / "qwen").mkdir()
    (tmp_path / "qwen" / "config.json").write_text(json.dumps(QWEN))
    model = [] if path.stem == "pretrain" else ["--set", f"model={tmp_path / 'qwen'}"]
    for found in told:
        machine = ["--gpu", found["gpu"], "--host-memory", f"{found['given']}GiB"]
        assert main(["plan", str(path), *model, *machine, "--json", str(tmp_path / "plan.json")]) == 0
        plan = json.loads((tmp_path / "plan.json").read_text())
        batch, predicted = plan["batch"], plan["predicted"]
        tokens = batch["micro_batches"] * batch["rows"] * batch["length"]
        assert tokens == int(found["tokens"].replace(",", ""))
        assert predicted["seconds"] == pytest.approx(float(found["seconds"]), rel=0.15)
        for side in ("host", "device"):
            assert predicted[f"{side}_bytes"] / 2**30 == pytest.approx(int(found[side]), rel=0.05, abs=0.6), side


PAGE = Path(__file__).parents[2] / "docs" / "troubleshooting.md"
MESSAGES = [line[5:-1] for line in PAGE.read_text().splitlines() if line.startswith("### ")]


def test_troubleshooting_quotes_what_the_code_says() -> None:
    """But for torch's own message."""
    root = Path(__file__).parents[2]
    files = [*(root / "python" / "megatrain").rglob("*.py"), *(root / "csrc").rglob("*.cpp")]
    # Messages that are written in several pieces are looked for as they are put together.
    source = re.sub(r'"\s*\n\s*f?"', "", "\n".join(file.read_text() for file in files))
    assert len(MESSAGES) > 25
    for message in MESSAGES:
        if message != "CUDA out of memory":
            for part in message.split("..."):
                assert part in source, message
