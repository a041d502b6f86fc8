"""What README, docs/ and examples/ tell to type is there: commands, settings, pages."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("pydantic")
from megatrain.cli import make_parser
from megatrain.train.config import TrainSettings
from megatrain.train.config_file import load_settings

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "examples").glob("*.yaml"))]
SECTIONS = {name for name, field in TrainSettings.model_fields.items() if hasattr(field.annotation, "model_fields")}

OTHERS = {"schedule.py", "optimizer.step", "optimizer.zero_grad", "optimizer.state_dict"}


def commands(page: Path) -> Iterator[str]:
    """What stands in blocks of code, or of a configuration's first comment; without what it is preceded by."""
    text = page.read_text(encoding="utf-8").replace("\\\n#", "").replace("\\\n", "")
    fenced = False
    for line in text.splitlines():
        fenced ^= line.startswith("```")
        if fenced or line.startswith(("    ", "#   ")):
            last = line.lstrip("# ").partition(" # ")[0].split(" && ")[-1].strip()
            if last.startswith("megatrain ") and not last.startswith("megatrain: "):
                yield last


def test_commands_are_understood(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the settings that they give to an example."""
    monkeypatch.chdir(ROOT)
    found = 0
    for page in PAGES:
        for line in commands(page):
            arguments = make_parser().parse_args(shlex.split(line)[1:])
            found += 1
            if arguments.command == "train" and arguments.config.startswith("examples/"):
                load_settings(arguments.config, arguments.overrides)
    assert found > 20


def test_settings_are_there() -> None:
    """Whatever stands in backquotes as section.key, or begins with it."""
    found = 0
    for page in PAGES:
        for section, key in re.findall(r"`([a-z_]+)\.([a-z_]+)\b", page.read_text(encoding="utf-8")):
            if section in SECTIONS and f"{section}.{key}" not in OTHERS:
                known = TrainSettings.model_fields[section].annotation.model_fields  # type: ignore[union-attr]
                assert key in known, f"{page.name}: {section}.{key}"
                found += 1
    assert found > 40


def test_links_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name}: {target}"
