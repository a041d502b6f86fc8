"""A run as the parts that watch it see it: evaluation, samples, checkpoints hang on to the steps here."""

from dataclasses import dataclass, field
from typing import Any

import megatrain

from .config import TrainSettings
from .function import function
from .output import RunDirectory
from .prepare import Prepared
from .progress import Progress


@dataclass
class Run:
    """Where a run stands. `step` counts finished optimizer steps."""

    model: megatrain.StreamedModel
    settings: TrainSettings
    prepared: Prepared
    directory: RunDirectory
    progress: Progress
    step: int = 0
    stopped: str | None = None
    """Why the run ends before its last step."""
    best_loss: float | None = None
    best_step: int = 0
    worse: int = 0
    """Evaluations in a row without a new best loss."""
    results: dict[str, Any] = field(default_factory=dict)
    """Of the last evaluation, with its step."""
    watched: int = 0
    """The last step after which every hook has been called."""

    @property
    def steps(self) -> int:
        return self.prepared.steps

    def log(self, record: dict[str, Any]) -> None:
        """To metrics.jsonl and to the trackers."""
        self.directory.log(record)

    def state_dict(self) -> dict[str, Any]:
        """All that a run needs, besides its model and optimizer, to go on exactly: plain values. The learning
        rate follows from the step."""
        return {
            "step": self.step,
            "function": function(self.prepared.source.config, self.settings),
            "data": self.prepared.loader.state_dict(),
            "best_loss": self.best_loss,
            "best_step": self.best_step,
            "worse": self.worse,
            "results": self.results,
            "watched": self.watched,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.prepared.loader.load_state_dict(state["data"])
        self.step = state["step"]
        self.best_loss, self.best_step, self.worse = state["best_loss"], state["best_step"], state["worse"]
        self.results, self.watched = state["results"], state["watched"]


class Hook:
    """Override what is needed. Called in the order in which hooks are listed."""

    def before_first_step(self, run: Run) -> None:
        """Of a run that does not go on from a checkpoint."""

    def after_step(self, run: Run) -> None:
        """The step's numbers have been logged. Setting run.stopped ends the run."""

    def new_best(self, run: Run) -> None:
        """An evaluation found the lowest held-out loss so far."""

    def interrupted(self, run: Run) -> None:
        """Ctrl-C or SIGTERM: the model is as after `run.step` steps, and the data's position with it."""

    def ended(self, run: Run) -> None:
        """The last step is done, or the run stopped by itself."""
