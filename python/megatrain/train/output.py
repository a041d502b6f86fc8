"""The run directory: config.yaml, plan.json, metrics.jsonl, and model/ that appears whole or not at all."""

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
from .records import PLAN
from .trackers import Tracker, open_trackers, send


class RunDirectory:
    """Made on the disk by open(), and taken back by discard(), so that a run refused in its first step leaves
    nothing."""

    def __init__(self, settings: OutputSettings, *, resume: bool = False) -> None:
        self.settings_ = settings
        self.path_: Path | None = None
        self.settings_of_run_: TrainSettings | None = None
        self.trackers_: list[Tracker] | None = None
        self.made_: list[Path] = []
        """Directories that open() made, the innermost first."""
        self.logged_ = False
        self.step_ = 0
        self.resumed_: tuple[Path, int] | None = None
        self.saved_model = False
        """model/ is this run's."""
        if not resume:
            self.require_new()
        _check_writable(Path(settings.directory))

    def require_new(self) -> None:
        wanted = Path(self.settings_.directory)
        if _taken(wanted) and self.settings_.if_exists == "error":
            raise UserError(f"output.directory {wanted}: holds something already; name another, or remove it")

    def last(self) -> Path | None:
        """The directory of the last run before this one: of output.directory and its numbered followers."""
        found, wanted, number = None, Path(self.settings_.directory), 1
        path = wanted
        while _taken(path):
            found, number = path, number + 1
            path = wanted.with_name(f"{wanted.name}-{number}")
        return found

    def go_on_in(self, path: Path, step: int) -> None:
        """open() will take this directory, and drop what it says of later steps: they are made again."""
        self.resumed_ = path, step

    @property
    def path(self) -> Path | None:
        """None before open()."""
        return self.path_

    def open(self, settings: TrainSettings) -> Path:
        if self.resumed_ is not None:
            path, step = self.resumed_
            _forget_after(path / "metrics.jsonl", step)
        else:
            wanted = Path(self.settings_.directory)
            path, number = wanted, 1
            while _taken(path):
                number += 1
                path = wanted.with_name(f"{wanted.name}-{number}")
            self.made_ = [each for each in (path, *path.parents) if not each.exists()]
            path.mkdir(parents=True, exist_ok=True)
        text = yaml.safe_dump(settings.model_dump(mode="json"), sort_keys=False)
        (path / "config.yaml").write_text(text, encoding="utf-8")
        self.path_, self.settings_of_run_ = path, settings
        return path

    def discard(self) -> None:
        """Nothing has come of the run: where nothing was logged, what open() made is removed."""
        if self.path_ is None or self.logged_ or self.resumed_ is not None:
            return
        for name in ("config.yaml", PLAN):
            (self.path_ / name).unlink(missing_ok=True)
        for directory in self.made_:
            directory.rmdir()
        self.path_, self.made_ = None, []

    def log(self, record: Mapping[str, Any]) -> None:
        """Add a line to metrics.jsonl, where numbers that are not finite become null, and tell the trackers."""
        assert self.path_ is not None and self.settings_of_run_ is not None
        self.logged_ = True
        settings = self.settings_of_run_
        if self.trackers_ is None:
            self.trackers_ = open_trackers(
                settings.report_to, self.path_, settings.project, settings.model_dump(mode="json")
            )
        values = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}
        with (self.path_ / "metrics.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(values) + "\n")
        self.step_ = max(self.step_, int(record.get("step", 0)))  # a checkpoint's record comes later
        send(self.trackers_, self.step_, record)

    def close(self) -> None:
        for tracker in self.trackers_ or []:
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
            self.saved_model = self.saved_model or name == "model"
        finally:
            shutil.rmtree(partial, ignore_errors=True)
            if final.exists():
                shutil.rmtree(before, ignore_errors=True)
        return final


def _forget_after(metrics: Path, step: int) -> None:
    """Remove what a run that was killed wrote of steps after its last checkpoint; a torn last line with it."""
    if not metrics.exists():
        return
    kept = []
    for line in metrics.read_text(encoding="utf-8").splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if max(record.get("step", 0), record.get("through_step", 0)) <= step:
            kept.append(line + "\n")
    partial = metrics.with_name(".metrics-partial")
    partial.write_text("".join(kept), encoding="utf-8")
    partial.replace(metrics)


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
