"""TensorBoard and Weights & Biases, each imported only where `report_to` names it."""

import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from .errors import UserError

_MODULES = {"tensorboard": "tensorboard", "wandb": "wandb"}


class Tracker(Protocol):
    def log(self, step: int, numbers: Mapping[str, float]) -> None: ...
    def text(self, step: int, name: str, text: str) -> None: ...
    def close(self) -> None: ...


def check_trackers(names: Sequence[str]) -> None:
    """UserError if one is not installed; before any work is done."""
    for name in names:
        try:
            importlib.import_module(_MODULES[name])
        except ImportError:
            raise UserError(f'report_to: {name} is not installed; run: pip install "megatrain[{name}]"') from None


def open_trackers(names: Sequence[str], directory: Path, project: str, settings: Mapping[str, Any]) -> list[Tracker]:
    makers: dict[str, Callable[[Path, str, Mapping[str, Any]], Tracker]] = {
        "tensorboard": _TensorBoard,
        "wandb": _WeightsAndBiases,
    }
    return [makers[name](directory, project, settings) for name in names]


def send(trackers: Sequence[Tracker], step: int, record: Mapping[str, Any]) -> None:
    """The finite numbers of a record, and its text."""
    numbers = {
        name: float(value)
        for name, value in record.items()
        if isinstance(value, int | float) and name not in ("step", "through_step") and math.isfinite(value)
    }
    for tracker in trackers:
        if numbers:
            tracker.log(step, numbers)
        for name, value in record.items():
            if isinstance(value, str):
                tracker.text(step, name, value)


class _TensorBoard:
    def __init__(self, directory: Path, project: str, settings: Mapping[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        make: Any = SummaryWriter  # untyped
        self.writer_ = make(str(directory / "tensorboard"))

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        for name, value in numbers.items():
            self.writer_.add_scalar(name, value, step)

    def text(self, step: int, name: str, text: str) -> None:
        self.writer_.add_text(name, text, step)

    def close(self) -> None:
        self.writer_.close()


class _WeightsAndBiases:
    def __init__(self, directory: Path, project: str, settings: Mapping[str, Any]) -> None:
        wandb: Any = importlib.import_module("wandb")
        self.run_ = wandb.init(project=project, name=directory.name, dir=str(directory), config=dict(settings))

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        self.run_.log(dict(numbers), step=step)

    def text(self, step: int, name: str, text: str) -> None:
        self.run_.log({name: text}, step=step)

    def close(self) -> None:
        self.run_.finish()
