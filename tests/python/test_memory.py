"""No second copy of weights or optimizer state is made where models are loaded, saved and exported."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

MIB = 1 << 20


def test_nothing_is_copied_whole(tmp_path: Path) -> None:
    """33 to 35 million parameters: 66 MB as bf16, state of more than 450 MB. What is allowed is one tensor in fp32, the
    largest of 32 MB, and some change."""
    script = Path(__file__).with_name("memory_use.py")
    done = subprocess.run([sys.executable, str(script), str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = {entry["what"]: entry for entry in map(json.loads, done.stdout.splitlines())}
    assert len(found) == 8
    for entry in found.values():
        weights = 2 * entry["elements"]
        allowed = entry["largest"] + 16 * MIB
        assert entry["state"] > 6 * weights and allowed < 0.8 * weights
    for what in ("load experts", "load large", "load large-bin"):
        entry = found[what]
        assert entry["more"] - entry["state"] < allowed, entry
    for what in ("save", "load", "export"):
        assert found[what]["more"] < allowed, found[what]
    # Steps have activations and gradients of their own.
    assert found["save beside steps"]["more"] - found["steps"]["more"] < allowed, found
