"""The run directory: config.yaml, metrics.jsonl, and model/ that appears whole or not at all."""

import json
import math
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

from .config import OutputSettings, TrainSettings
from .errors import UserError
from .trackers import Tracker, open_trackers, send


class RunDirectory:
    """Made on the disk by open(), so that a run refused before its first step leaves nothing."""

    def __init__(self, settings: OutputSettings) -> None:
        self.settings_ = settings
        self.path_: Path | None = None
        self.trackers_: list[Tracker] = []
        self.step_ = 0
        wanted = Path(settings.directory)
        if _taken(wanted) and settings.if_exists == "error":
            raise UserError(f"output.directory {wanted}: holds something already; name another, or remove it")
        _check_writable(wanted)

    @property
    def path(self) -> Path | None:
        """None before open()."""
        return self.path_

    def open(self, settings: TrainSettings) -> Path:
        wanted = Path(self.settings_.directory)
        path, number = wanted, 1
        while _taken(path):
            number += 1
            path = wanted.with_name(f"{wanted.name}-{number}")
        path.mkdir(parents=True, exist_ok=True)
        text = yaml.safe_dump(settings.model_dump(mode="json"), sort_keys=False)
        (path / "config.yaml").write_text(text, encoding="utf-8")
        self.path_ = path
        self.trackers_ = open_trackers(settings.report_to, path, settings.project, settings.model_dump(mode="json"))
        return path

    def log(self, record: Mapping[str, Any]) -> None:
        """Add a line to metrics.jsonl, where numbers that are not finite become null, and tell the trackers."""
        assert self.path_ is not None
        values = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}
        with (self.path_ / "metrics.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(values) + "\n")
        self.step_ = int(record.get("step", self.step_))
        send(self.trackers_, self.step_, record)

    def close(self) -> None:
        for tracker in self.trackers_:
            tracker.close()
        self.trackers_ = []

    def save_model(self, write: Callable[[Path], None], name: str = "model") -> Path:
        """`write` fills a directory that is then renamed to `name`, in the place of one that is there; removed if
        it fails."""
        assert self.path_ is not None
        partial, final = self.path_ / f".{name}-{os.getpid()}", self.path_ / name
        before = self.path_ / f".{name}-before"
        try:
            write(partial)
            if final.exists():
                shutil.rmtree(before, ignore_errors=True)  # of a run that was killed here
                final.rename(before)
            partial.rename(final)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
            if final.exists():
                shutil.rmtree(before, ignore_errors=True)
        return final


def _taken(path: Path) -> bool:
    """Something is there that is not an empty directory."""
    if path.is_dir() and not path.is_symlink():
        return any(path.iterdir())
    return path.exists() or path.is_symlink()


def _check_writable(path: Path) -> None:
    """Found out now rather than after hours of training."""
    existing = next(parent for parent in [path.absolute(), *path.absolute().parents] if parent.exists())
    if not existing.is_dir() and existing != path.absolute():
        raise UserError(f"output.directory {path}: {existing} is not a directory")
    folder = existing if existing.is_dir() else existing.parent
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UserError(f"output.directory {path}: no permission to write in {folder}")
