"""docs/models.md says what the tests' tables say."""

from __future__ import annotations

import re
from pathlib import Path

import models_page
from family_zoo import EXACT, MORE


def test_the_page_has_every_family_and_every_refusal() -> None:
    written = models_page.PAGE.read_text(encoding="utf-8")
    versions = re.search(r"^transformers \S+, torch \S+\.$", written, re.MULTILINE)
    assert versions
    experts = re.search(r"^## Experts\n.*?(?=\n\n## )", written, re.MULTILINE | re.DOTALL)
    assert experts
    assert written == models_page.page(lambda test, row: "exact", versions.group(), experts.group())
    if versions.group() == models_page.versions_now() and all(row.exists for row in (*EXACT, *MORE)):
        assert experts.group() == models_page.experts(lambda test, row: "exact")


def test_what_the_page_speaks_of_exists() -> None:
    assert set(models_page.NOTES) <= {row.name for row in EXACT}
    for refusal in models_page.REFUSALS:
        file, _, function = refusal.test.partition("::")
        text = (Path(__file__).parent / file).read_text(encoding="utf-8")
        assert f"def {function}(" in text, refusal.test
