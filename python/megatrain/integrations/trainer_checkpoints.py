"""The Trainer's directories `checkpoint-<step>` around a streamed model's checkpoint: which of them are whole."""

from __future__ import annotations

import json
import re
import zipfile
from pathlib import Path

from megatrain.checkpoints.directory import find, first_whole
from megatrain.errors import CheckpointError

WEIGHTS = "streamed"
SCHEDULER = "scheduler.pt"
_RANDOM_STATES = "rng_state.pth"
_PROGRESS = "trainer_state.json"  # written last
_NAME = re.compile(r"checkpoint-(\d+)")


def newest_whole(directory: Path) -> Path | None:
    """The whole checkpoint of the highest step; None where there is no checkpoint at all. Every byte of the model's
    is checked. One warning names those that are damaged and newer; CheckpointError if none is left."""
    candidates = _candidates(directory)
    return first_whole(candidates, _damage, directory) if candidates else None


def _candidates(directory: Path) -> list[Path]:
    """Of the highest step first."""
    if not directory.is_dir():
        return []
    found = [(int(match[1]), path) for path in directory.iterdir() if (match := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(found, reverse=True) if path.is_dir()]


def _damage(path: Path) -> str | None:
    """What is wrong, naming the file; None for a whole one. Small files first."""
    try:
        json.loads((path / _PROGRESS).read_bytes())
    except FileNotFoundError:
        return f"{_PROGRESS} is missing"
    except (OSError, ValueError):
        return f"{_PROGRESS} cannot be read"
    for name in (SCHEDULER, _RANDOM_STATES):
        if not zipfile.is_zipfile(path / name):
            return f"{name} is missing or torn"
    try:
        find(path / WEIGHTS)
    except CheckpointError as error:
        return str(error)
    return None
