"""Checkpoints of a run: every so many steps, and where it is interrupted."""

import time
from pathlib import Path
from typing import Any

from megatrain.checkpoints import PendingCheckpoint
from megatrain.checkpoints.directory import has_any, is_checkpoint
from megatrain.data import DataError
from megatrain.errors import CheckpointError

from .config import TrainSettings
from .errors import RunError, UserError, one_line
from .function import difference, function
from .hooks import Hook, Run
from .output import RunDirectory

TOKENIZER = "tokenizer"
MODEL = "model"


class Finished(Exception):
    """resume: auto finds nothing left to do. The message is for the user."""


class Checkpoints(Hook):
    """The last of the hooks: what the others found after the step is saved with it."""

    def __init__(self) -> None:
        self.last: Path | None = None
        self.last_step = 0
        self.pending: tuple[int, PendingCheckpoint] | None = None
        """The step and what is written beside the next ones."""
        self.failure: str | None = None
        """Why an interrupted run could not be saved."""

    def after_step(self, run: Run) -> None:
        if self.pending is not None and self.pending[1].done:
            self._end(run)
        every = run.settings.checkpoint.every
        due = every is not None and (run.step % every == 0 or run.step == run.steps or run.stopped is not None)
        if due and run.step != self.last_step:
            self._end(run)
            run.watched = run.step
            directory = _directory(run)
            try:
                begun = run.model.begin_checkpoint(directory, extra=run.state_dict(), keep=run.settings.checkpoint.keep)
            except OSError as error:
                raise RunError(f"step {run.step}: the checkpoint could not be saved: {error}") from error
            self.pending = run.step, begun

    def interrupted(self, run: Run) -> None:
        try:
            self._end(run)
        except RunError as error:
            self.failure = str(error)
        if run.directory.path is None or run.step in (0, self.last_step):
            return
        began = time.perf_counter()
        try:
            path = run.model.save_checkpoint(_directory(run), extra=run.state_dict(), keep=run.settings.checkpoint.keep)
        except OSError as error:
            self.failure = str(error)
        else:
            seconds = time.perf_counter() - began
            self._saved(run, run.step, path, seconds, seconds)

    def ended(self, run: Run) -> None:
        self._end(run)

    def _end(self, run: Run) -> None:
        """Of the one that is being written, if there is one."""
        if self.pending is None:
            return
        (step, begun), self.pending = self.pending, None
        try:
            path = begun.wait()
        except OSError as error:
            raise RunError(f"step {step}: the checkpoint could not be saved: {error}") from error
        self._saved(run, step, path, begun.seconds, begun.stall_seconds)

    def _saved(self, run: Run, step: int, path: Path, seconds: float, stall: float) -> None:
        self.last, self.last_step, self.failure = path, step, None
        run.log(
            {
                "step": step,
                "checkpoint": path.name,
                "checkpoint_seconds": seconds,
                "checkpoint_stall_seconds": stall,
            }
        )
        run.progress.note(f"step {step}  saved {path} in {seconds:.1f} s, {stall:.1f} s of them training waited")


def _directory(run: Run) -> Path:
    """The run's, with the tokenizer in it, so that a checkpoint can be exported."""
    directory = run.directory.path
    assert directory is not None
    if not (directory / TOKENIZER).exists():
        run.prepared.tokenizer.tokenizer.save_pretrained(str(directory / TOKENIZER))
    return directory


def resume(run: Run, checkpoints: Checkpoints) -> Path | None:
    """Bring model and run to where settings.resume says; None for a new run. UserError for what does not fit,
    Finished where the run in its own directory has ended."""
    source = _source(run.settings, run.directory)
    if source is None:
        return None
    directory, in_place = source
    try:
        state: Any = run.model.load_checkpoint(directory)
        if not isinstance(state, dict) or "data" not in state:
            raise CheckpointError(f"{directory}: the checkpoint is not of a training run")
        changed = difference(state.get("function", {}), function(run.prepared.source.config, run.settings))
        if changed is not None:
            raise CheckpointError(f"{directory}: {changed}; only steps, optimizer and schedule may change")
        run.load_state_dict(state)
    except CheckpointError as error:
        raise UserError(f"resume: {one_line(error)}") from error
    except DataError as error:
        raise UserError(f"resume: {directory}: {one_line(error)}") from error
    given_up = in_place and (directory / MODEL).exists() and _out_of_patience(run)
    if given_up or (run.step >= run.steps and (not in_place or (directory / MODEL).exists())):
        after = f"{directory} is after step {run.step} of {run.steps}"
        if not in_place:
            raise UserError(f"resume: {after}; nothing is left to do")
        why = f", stopped by eval.patience ({run.settings.eval.patience})" if given_up else ""
        raise Finished(f"{after}{why}; it is finished, its model is in {directory / MODEL}")
    if in_place:
        run.directory.go_on_in(directory, run.step)
        checkpoints.last, checkpoints.last_step = directory / f"checkpoint-{run.step}", run.step
    if in_place or run.watched < run.step:
        run.directory.open(run.settings)  # what is made up for is logged
    return directory


def look_ahead(settings: TrainSettings, directory: RunDirectory) -> None:
    """What can be said without the data: UserError where nothing can be gone on from, Finished for a run that left
    its model and no checkpoint."""
    source = _source(settings, directory)
    if source is None:
        return
    path, in_place = source
    if not in_place and not path.is_dir():
        raise UserError(f"resume: {path} has no whole checkpoint; there is no such directory")
    if not is_checkpoint(path) and not has_any(path):
        if (path / MODEL).exists() and in_place:
            raise Finished(
                f"{path} is finished, its model is in {path / MODEL}; without a checkpoint it cannot be extended: name "
                "another output.directory for a new run"
            )
        raise UserError(f"resume: {path} has no whole checkpoint")


def _out_of_patience(run: Run) -> bool:
    patience = run.settings.eval.patience
    return patience is not None and run.worse >= patience


def _source(settings: TrainSettings, directory: RunDirectory) -> tuple[Path, bool] | None:
    if settings.resume == "never":
        return None
    if settings.resume != "auto":
        return Path(settings.resume), False
    last = directory.last()
    if last is not None and (has_any(last) or (last / MODEL).exists()):
        return last, True
    directory.require_new()
    return None
