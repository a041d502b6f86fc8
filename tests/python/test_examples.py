"""Every example is a configuration that the schema takes, and says how it is run."""

from __future__ import annotations

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


def test_the_new_model_can_be_planned(capsys: pytest.CaptureFixture[str]) -> None:
    (path,) = [path for path in EXAMPLES if path.stem == "pretrain"]
    assert main(["plan", str(path), "--gpu", "h200"]) == 0
    assert "new qwen3" in capsys.readouterr().out


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
